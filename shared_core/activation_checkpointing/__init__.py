"""Activation checkpointing: which activations are kept, and which are computed again in backward."""

from shared_core.activation_checkpointing.segments import Handle as Handle
from shared_core.activation_checkpointing.segments import apply_segments as apply_segments
from shared_core.activation_checkpointing.segments import find_blocks as find_blocks
