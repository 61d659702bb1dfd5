"""Gradient compression as a callback of the Hugging Face Trainer."""

from __future__ import annotations

from typing import ClassVar

from hf_eff._technique_callback import TechniqueCallback


class GradientCompression(TechniqueCallback):
    """Has the processes of DDP send each other gradients in 16 bits or as products of low rank.

    Args:
        options: Those of `shared_core.gradient_compression.CommConfig`.

    Example:
        ``Trainer(..., callbacks=[GradientCompression(hook="bf16")])``
    """

    key: ClassVar[str] = "comm"
