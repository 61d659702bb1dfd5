"""Activation checkpointing: which activations are kept, and which are computed again in backward."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.activation_checkpointing.config import POLICIES as POLICIES
    from shared_core.activation_checkpointing.config import CheckpointingConfig as CheckpointingConfig
    from shared_core.activation_checkpointing.model_blocks import find_blocks as find_blocks
    from shared_core.activation_checkpointing.policies import apply_policy as apply_policy
    from shared_core.activation_checkpointing.profiler import measure_peak as measure_peak
    from shared_core.activation_checkpointing.segments import Handle as Handle
    from shared_core.activation_checkpointing.segments import apply_segments as apply_segments
    from shared_core.activation_checkpointing.technique import ActivationCheckpointing as ActivationCheckpointing

export_lazily(__name__)
