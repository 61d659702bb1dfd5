"""Alias of `lightning_eff`: the same module, not a copy."""

import sys

import lightning_eff

sys.modules[__name__] = lightning_eff
