"""The options of distillation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from shared_core.config import TechniqueConfig, option
from shared_core.positions import Position


@dataclass(frozen=True, kw_only=True)
class DistillConfig(TechniqueConfig):
    """Options of distillation: ``--distill_*`` as flags, ``distill:`` in a recipe.

    Example:
        >>> DistillConfig(teacher="runs/teacher", temperature="4").temperature
        4.0
    """

    key: ClassVar[str] = "distill"
    switch: ClassVar[str] = "teacher"

    teacher: Any = option(flag_type=str, help="folder or Hub name of the teacher; from Python also the module itself")
    temperature: float = option(2.0, above=0, help="T: softens both distributions; the soft term is multiplied by T²")
    alpha: float = option(0.5, low=0, high=1, help="weight of the task loss; the soft term gets 1 - alpha")
    begin: Position = option(
        0.0, help="first step with the soft term: a step, a fraction of the run, or epochs ('2ep')"
    )
    end: Position = option(1.0, help="first step without it; 1.0: never")
    student: str | None = option(None, help="submodule whose forward is distilled; none: the model itself")
    logits: str = option("logits", help="key or attribute of the logits in what forward returns")
    causal: bool | None = option(
        None,
        help="whether position i predicts token i + 1, as in causal LMs; none: told by the model's class",
    )

    def validate(self) -> None:
        """Check that the teacher is a name or a module."""
        if isinstance(self.teacher, Path):
            object.__setattr__(self, "teacher", str(self.teacher))
        if not isinstance(self.teacher, nn.Module) and not (isinstance(self.teacher, str) and self.teacher.strip()):
            raise self._error("teacher", "must be a folder, a Hub name, or a module")
