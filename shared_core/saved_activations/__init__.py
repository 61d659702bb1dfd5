"""Saved activations: what autograd keeps for backward, packed smaller or kept on the host."""

from shared_core.saved_activations.config import ActivationsConfig as ActivationsConfig
from shared_core.saved_activations.technique import CompressedActivations as CompressedActivations
