"""Alias of `hf_eff`: the same module, not a copy."""

import sys

import hf_eff

sys.modules[__name__] = hf_eff
