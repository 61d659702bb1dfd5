"""The options of distillation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from eff_kernels.distillation import DIVERGENCES as CHUNKED_DIVERGENCES
from torch import nn

from shared_core.config import TechniqueConfig, option
from shared_core.positions import Position

EMA = "ema"
"""The teacher that is the student's own moving average."""
CACHE = "cache:"
"""Before the folder of a cached teacher."""


@dataclass(frozen=True, kw_only=True)
class DistillConfig(TechniqueConfig):
    """Options of distillation: ``--distill_*`` as flags, ``distill:`` in a recipe.

    Example:
        >>> DistillConfig(teacher="runs/teacher", temperature="4").temperature
        4.0
        >>> DistillConfig(teacher="runs/a, runs/b").teachers
        ('runs/a', 'runs/b')
    """

    key: ClassVar[str] = "distill"
    switch: ClassVar[str] = "teacher"

    teacher: Any = option(
        flag_type=str,
        help="folder or Hub name of the teacher, or several with commas; ema: the student's own moving average; "
        "cache:FOLDER: what eff cache-teacher wrote; from Python also modules",
    )
    teacher_weights: tuple[float, ...] = option((), help="how much each of several teachers counts; none: equally")
    ema_decay: float = option(0.999, low=0, below=1, help="of teacher ema: what is kept of the average at each step")
    divergence: Literal[
        "forward_kl", "reverse_kl", "jsd", "soft_cross_entropy", "hard_label", "logit_mse", "bernoulli_kl"
    ] = option("forward_kl", help="how the student's outputs are compared with the teacher's")
    beta: float = option(0.5, low=0, high=1, help="of divergence jsd: 0 is the forward KL, 1 the reverse")
    temperature: float = option(2.0, above=0, help="T: softens both distributions; the soft term is multiplied by T²")
    temperature_end: float | None = option(None, above=0, help="T at end, reached evenly from begin; none: it stays")
    scale_by_temperature: bool = option(True, help="multiply the soft term by T²")
    alpha: float = option(0.5, low=0, high=1, help="weight of the task loss; the soft term gets 1 - alpha")
    alpha_end: float | None = option(
        None, low=0, high=1, help="alpha at end, reached evenly from begin; none: it stays"
    )
    confidence: float = option(
        0.0, low=0, below=1, help="only positions where the teacher's largest probability is at least this count"
    )
    vocab_size: int | None = option(
        None, low=1, help="classes that count, the first ones, of heads padded to different sizes over one tokenizer"
    )
    chunked: bool = option(
        False, help="compute the loss of a language model from head inputs in chunks: no logits of all positions exist"
    )
    budget_mib: float | None = option(
        None, above=0, help="of chunked: MiB of logits that may exist at a time; none: 64 on CPU, 512 elsewhere"
    )
    begin: Position = option(
        0.0, help="first step with the soft term: a step, a fraction of the run, or epochs ('2ep')"
    )
    end: Position = option(1.0, help="first step without it; 1.0: never")
    hidden: tuple[str, ...] = option(
        (), help="student=teacher pairs of submodules (names, globs) to bring together, such as layer.1=layer.3"
    )
    hidden_loss: Literal["mse", "cosine", "rkd", "similarity_preserving", "cka"] = option(
        "mse", help="of hidden pairs: mse or cosine of features, or their relations within a micro-batch"
    )
    hidden_weight: float = option(1.0, above=0, help="weight of the hidden term, beside the mixed loss")
    student: str | None = option(None, help="submodule whose forward is distilled; none: the model itself")
    logits: str = option("logits", help="key or attribute of the logits in what forward returns")
    causal: bool | None = option(
        None,
        help="whether position i predicts token i + 1, as in causal LMs; none: told by the model's class",
    )

    def validate(self) -> None:
        """Check that teachers are names or modules, and that options that belong together are given together."""
        if isinstance(self.teacher, Path):
            object.__setattr__(self, "teacher", str(self.teacher))
        for teacher in self.teachers or (None,):
            if not isinstance(teacher, nn.Module) and not (isinstance(teacher, str) and teacher.strip()):
                raise self._error("teacher", "must be a folder, a Hub name, a module, or several of them")
        if EMA in self.teachers and len(self.teachers) > 1:
            raise self._error("teacher", "must be ema alone, or others")
        weights = self.teacher_weights
        if weights and (len(weights) != len(self.teachers) or not all(weight > 0 for weight in weights)):
            raise self._error("teacher_weights", f"must be a number above 0 for each of {len(self.teachers)} teachers")
        self._validate_cache()
        self._validate_chunked()
        several = len(self.teachers) > 1
        if self.confidence and not self.of_classes:
            raise self._error("confidence", f"must be 0 with divergence {self.divergence}")
        for pair in self.hidden:
            if pair.count("=") != 1 or not all(side.strip() for side in pair.split("=")):
                raise self._error("hidden", "must hold student=teacher pairs of module names")
        if self.hidden and (several or self.teacher == EMA):
            raise self._error("hidden", "must be empty with several teachers or teacher ema")

    def _validate_cache(self) -> None:
        if not any(isinstance(teacher, str) and teacher.startswith(CACHE) for teacher in self.teachers):
            return
        if self.cache is None:
            raise self._error("teacher", "must be one cached teacher alone, or others")
        if self.divergence not in ("forward_kl", "reverse_kl", "jsd", "soft_cross_entropy"):
            raise self._error("divergence", "must compare probabilities with a cached teacher")
        if self.divergence == "jsd" and self.beta != 0.5:
            raise self._error("beta", "must be 0.5 with a cached teacher")
        if self.temperature_end is not None or self.confidence or self.hidden:
            raise self._error(
                "teacher", "allows no temperature_end, confidence or hidden where it is cached: the store holds its "
                "probabilities at one temperature"
            )  # fmt: skip

    def _validate_chunked(self) -> None:
        if not self.chunked:
            if self.budget_mib is not None:
                raise self._error("budget_mib", "must be none without chunked")
            return
        if len(self.teachers) > 1 or self.cache is not None:
            raise self._error("teacher", "must be one model with chunked, whose head is multiplied chunk by chunk")
        if self.divergence not in CHUNKED_DIVERGENCES:
            raise self._error("divergence", f"must be one of {', '.join(CHUNKED_DIVERGENCES)} with chunked")
        if self.confidence:
            raise self._error("confidence", "must be 0 with chunked, which knows no teacher's probabilities beforehand")

    @property
    def cache(self) -> str | None:
        """Folder of the cached teacher, None where there is none."""
        alone = self.teachers[0] if len(self.teachers) == 1 else None
        return alone.removeprefix(CACHE) if isinstance(alone, str) and alone.startswith(CACHE) else None

    @property
    def teachers(self) -> tuple[Any, ...]:
        """Every teacher: names, or modules."""
        if isinstance(self.teacher, str):
            return tuple(name.strip() for name in self.teacher.split(",") if name.strip())
        return tuple(self.teacher) if isinstance(self.teacher, list | tuple) else (self.teacher,)

    @property
    def of_classes(self) -> bool:
        """Whether the outputs are one distribution over classes, not independent labels or numbers."""
        return self.divergence not in ("logit_mse", "bernoulli_kl")

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """`hidden` as names: of the student's module, of the teacher's."""
        split = [pair.split("=") for pair in self.hidden]
        return [(student.strip(), teacher.strip()) for student, teacher in split]
