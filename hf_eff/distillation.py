"""Distillation as a callback of the Hugging Face Trainer."""

from __future__ import annotations

from typing import ClassVar

from hf_eff._technique_callback import TechniqueCallback


class Distillation(TechniqueCallback):
    """Trains towards a teacher, given as a folder, a Hub name or a model.

    Args:
        options: Those of `shared_core.distillation.DistillConfig`.

    Example:
        ``Trainer(..., callbacks=[Distillation(teacher="runs/teacher", temperature=2.0)])``
    """

    key: ClassVar[str] = "distill"
