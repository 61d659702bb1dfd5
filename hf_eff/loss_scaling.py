"""LossScaling as a callback of the Hugging Face Trainer."""

from __future__ import annotations

from typing import ClassVar

from hf_eff._technique_callback import TechniqueCallback


class LossScaling(TechniqueCallback):
    """Scales the loss in place of the trainer's own scaler.

    Args:
        options: Those of `shared_core.loss_scaling.LossScaleConfig`.

    Example:
        ``Trainer(..., callbacks=[LossScaling(kind="dynamic")])``
    """

    key: ClassVar[str] = "loss_scale"
