"""Activation checkpointing as a callback of the Hugging Face Trainer."""

from __future__ import annotations

from typing import ClassVar

from hf_eff._technique_callback import TechniqueCallback


class ActivationCheckpointing(TechniqueCallback):
    """Recomputes activations in backward in place of keeping them; gradients stay the same to the bit.

    Args:
        options: Those of `shared_core.activation_checkpointing.CheckpointingConfig`.

    Example:
        ``Trainer(..., callbacks=[ActivationCheckpointing(policy="block")])``
    """

    key: ClassVar[str] = "checkpointing"
