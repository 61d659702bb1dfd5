"""Get the soft targets of a batch and compare the student's outputs with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from shared_core.distillation.config import DistillConfig
from shared_core.distillation.forward_capture import Forward, counted_positions
from shared_core.distillation.losses.divergences import kd_topk_sum, mean_logits, mean_teacher
from shared_core.distillation.losses.features import hidden_cosine_sum
from shared_core.distillation.outputs import (
    EMBEDDINGS,
    LOGITS,
    SPANS,
    Outputs,
    check_outputs,
    check_sizes,
    divergence_of,
    find_logits,
    find_outputs,
    is_of_classes,
    kind_ahead,
    num_classes,
    over_positions,
)
from shared_core.distillation.task_gradient import (
    HardTerm,
    TaskLoss,
    cross_entropy_of,
    fits_fused_sum,
    hard_term,
    soft_sum,
)
from shared_core.distillation.teacher_cache import TeacherCache
from shared_core.distillation.teachers import Teachers
from shared_core.engine.saving.state_file import rng_restored
from shared_core.engine.technique import Context
from shared_core.errors import ConfigError, TrainingError, require
from shared_core.files.user_code import function, names_function


@dataclass(frozen=True)
class StudentBatch:
    """One student forward: its inputs by name, the labels of its loss, and the temperature of this step."""

    student: nn.Module
    forward: Forward
    inputs: dict[str, Any]
    labels: Any
    causal: bool
    temperature: float
    unlabeled: Tensor | None = None
    """``(B,)`` bool, True for unlabeled examples, all of whose positions count; None if unknown."""
    task_share: Callable[[Tensor], float] | None = None
    """Returns, for a number of positions, the weight of the summed cross-entropy next to the summed divergence; 0 if
    the task loss is not such a sum. None: the task loss has its own gradient."""
    task: TaskLoss | None = None
    """The task loss, if one pass may compute its gradient together with the soft term's."""

    def parts(self, outputs: Outputs, *, of_classes: bool) -> tuple[Tensor, ...]:
        """Return the parts of a model's outputs that are compared, one row per term of the loss."""
        if outputs.kind == SPANS:
            return over_positions(outputs, self.inputs.get("attention_mask"), of_classes=of_classes)[0]
        return outputs.parts

    def mask(self, outputs: Outputs, *, of_classes: bool) -> Tensor | None:
        """Return a bool mask of the rows of `parts` that count, None if all do."""
        if outputs.kind == SPANS:
            return over_positions(outputs, self.inputs.get("attention_mask"), of_classes=of_classes)[1]
        return None if outputs.kind == EMBEDDINGS else self.counted(outputs.parts[0], of_classes=of_classes)

    def counted(self, logits: Tensor, *, of_classes: bool) -> Tensor | None:
        """Return a bool mask of the logits' rows that count, None if all do."""
        if not of_classes and isinstance(self.labels, Tensor) and self.labels.is_floating_point():
            return None  # regression, multi-label: no -100
        mask = self.inputs.get("attention_mask")
        return counted_positions(logits, self.labels, mask, causal=self.causal, unlabeled=self.unlabeled)


@dataclass(frozen=True)
class Compared:
    """The summed divergence, the number of positions to average over, and a mask of these positions (None: all)."""

    total: Tensor
    count: Tensor
    mask: Tensor | None
    with_task: bool = False
    """True if the total's gradient includes the task loss's."""


class Comparison:
    """Compares the student's logits with those of teachers that run on every micro-batch."""

    trains_others: ClassVar[bool] = False
    """True if `compare` needs gradients even when the student's soft term has weight 0."""

    def __init__(self, config: DistillConfig, teachers: Teachers, report: Mapping[str, Any]) -> None:
        self.config, self.teachers, self.report = config, teachers, dict(report)
        self.figures: dict[str, Tensor] = {}
        """Further figures of the latest micro-batch for the log, scaled like its loss."""

    def compare(self, batch: StudentBatch) -> Compared:
        """Return the divergence from the teachers, averaged over the outputs' parts."""
        # A contrastive loss has several forwards per batch. Their embeddings are concatenated along examples, in order.
        forwards = [*batch.forward.earlier, batch.forward]
        mine = _joined([find_outputs(forward.output, self.config.logits, "student") for forward in forwards])
        divergence = self._divergence(mine)
        of_classes = is_of_classes(divergence)
        # The teachers run after the student, so that their activations do not add to the peak of its forward.
        theirs = self._targets(batch, mine, of_classes=of_classes)
        mask = batch.mask(mine, of_classes=of_classes)
        parts, *targets = (batch.parts(each, of_classes=of_classes) for each in (mine, *theirs))
        # One term per part (start and end logits), all with the same mask.
        compared = [
            self._compare(divergence, part, target, mask, batch, alone=len(parts) == 1)
            for part, *target in zip(parts, *targets, strict=True)
        ]
        if len(compared) == 1:
            return compared[0]
        return Compared(torch.stack([each.total for each in compared]).mean(), compared[0].count, mask)

    def _divergence(self, outputs: Outputs) -> str:
        """Return the divergence for outputs of this kind, and report it if it differs from the option."""
        config = self.config
        divergence = divergence_of(outputs.kind, config.divergence, outputs.parts[0].shape[-1])
        if config.confidence and not is_of_classes(divergence):
            rule = f"confidence must be 0 for {outputs.kind}, which have no classes, got {config.confidence}"
            raise ConfigError("distill", rule)
        if outputs.kind != LOGITS:
            self.report |= {"outputs": outputs.kind, "divergence": divergence}
        return divergence

    def _compare(
        self,
        divergence: str,
        whole: Tensor,
        targets: list[Tensor],
        mask: Tensor | None,
        batch: StudentBatch,
        *,
        alone: bool,
    ) -> Compared:
        config, weights, temperature = self.config, self.teachers.weights, batch.temperature
        logits, targets, candidates = self._cut(whole), [self._cut(target) for target in targets], None
        if config.confidence:
            # Trainers count positions before the teacher runs, so uncertain positions stay in the mean with value 0.
            candidates = torch.tensor(logits.shape[:-1].numel(), device=logits.device) if mask is None else mask.sum()
            sure = mean_teacher(targets, weights, 1.0).amax(-1).exp() >= config.confidence
            sure = sure.to(logits.device)
            mask = sure if mask is None else mask & sure
        # Several teachers: probabilities are averaged, not logits, except where outputs are numbers.
        softened = len(targets) > 1 and divergence not in ("logit_mse", "cosine")
        if softened:
            target = mean_teacher(targets, weights, temperature, multi_label=divergence == "bernoulli_kl")
        else:
            target = mean_logits(targets, weights) if len(targets) > 1 else targets[0]
        hard = None
        if batch.task is not None and alone and candidates is None and fits_fused_sum(divergence, logits, target):
            # With vocab_size the task loss still covers all classes. On a GPU the host would wait per micro-batch.
            same = logits.is_cpu and logits.shape == whole.shape
            hard = hard_term(batch.task, cross_entropy_of(batch.task.loss, logits), mask) if same else None
        total, count = difference(config, divergence, logits, target, mask, temperature, softened=softened, hard=hard)
        return Compared(total, count if candidates is None else candidates, mask, with_task=hard is not None)

    def _targets(self, batch: StudentBatch, mine: Outputs, *, of_classes: bool) -> list[Outputs]:
        """Return each teacher's outputs for the same inputs."""
        self.teachers.follow(batch.student)
        asked = [self.teachers.ask(batch.student, forward) for forward in (*batch.forward.earlier, batch.forward)]
        answers = zip(*asked, strict=True)
        name, vocab_size = self.config.logits, self.config.vocab_size
        theirs = [_joined([find_outputs(output, name, "teacher") for output in outputs]) for outputs in answers]
        for other in theirs:
            check_outputs(mine, other, of_classes=of_classes, vocab_size=vocab_size)
        return theirs

    def begin(self, context: Context) -> None:
        """Called once the optimizers exist and their saved state is loaded."""

    def join(self, mixed: Tensor, task_loss: Tensor, alpha: float, count: Tensor, context: Context) -> Tensor:
        """Return the student's loss, joined with the losses of other models that this batch trains."""
        return mixed

    def _cut(self, logits: Tensor) -> Tensor:
        """Return the first `vocab_size` classes, or all."""
        size = self.config.vocab_size
        return logits if size in (None, logits.shape[-1]) else logits[..., :size]

    def activate(self, active: bool) -> None:
        """Switch on or off what the next forwards need."""

    def detach(self) -> None:
        """Restore the models."""


class CachedComparison(Comparison):
    """Compares the student's logits with cached teacher outputs."""

    def __init__(self, config: DistillConfig, student: nn.Module) -> None:
        folder = config.cache or ""
        self._cache = TeacherCache.open(folder)
        if (kind := kind_ahead(student, config.logits, "student")) in (SPANS, EMBEDDINGS):
            rule = f"teacher must not be cached for {kind}, because a cache stores classes only"
            raise ConfigError("distill", rule, "pass the teacher model itself")
        ours = num_classes(student)
        if config.vocab_size is not None and ours is not None:
            check_sizes(ours, config.vocab_size, config.vocab_size)
        self._cache.check(temperature=config.temperature, vocabulary=config.vocab_size or ours)
        manifest = self._cache.manifest
        report = {
            "teacher": f"cached in {folder}",
            "teacher_fingerprint": manifest.fingerprints.get("teacher"),
            "discarded_mass": manifest.tail_mass_mean,
        }
        super().__init__(config, Teachers([]), report)

    def compare(self, batch: StudentBatch) -> Compared:
        """Return the divergence from the cached outputs for these inputs."""
        config = self.config
        logits = find_logits(batch.forward.output, config.logits, "student")
        # All positions in the loss's mask must be in the cache. The cache may hold more.
        mask = batch.counted(logits, of_classes=True)
        logits = self._cut(logits)
        found = self._cache.lookup(batch.inputs)
        total, count = kd_topk_sum(
            logits, found.indices, found.log_probs, temperature=config.temperature, mask=found.counted(mask),
            tail_mass=found.tail_mass, divergence=cast("Any", config.divergence),
            scale_by_temperature=config.scale_by_temperature,
        )  # fmt: skip
        return Compared(total, count, mask)


def difference(
    config: DistillConfig,
    divergence: str,
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    temperature: float,
    *,
    softened: bool = False,
    hard: HardTerm | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the divergence summed over the rows that count, and the number of these rows.

    Both are ``(..., classes)`` or embeddings. If `softened`, the teacher's are log-probabilities at this temperature.
    """
    if divergence == "cosine":
        return hidden_cosine_sum(student, teacher, mask=mask)
    options: dict[str, Any] = {"beta": config.beta} if divergence == "jsd" else {}
    options |= {"temperature": temperature, "mask": mask, "scale_by_temperature": config.scale_by_temperature}
    return soft_sum(divergence, student, teacher, softened=softened, hard=hard, **options)


def mix(task_loss: Tensor, soft: Tensor, alpha: float) -> Tensor:
    """Return ``alpha * task + (1 - alpha) * soft``. A term of weight 0 is skipped, since 0 * inf is NaN.

    Example:
        >>> task, soft = torch.tensor(1.0), torch.tensor(torch.inf)
        >>> mix(task, task + 1, 0.5).item(), mix(task, soft, 1).item()
        (1.5, 1.0)
    """
    if alpha == 1:
        return task_loss
    soft = soft.to(task_loss.device)
    return soft if alpha == 0 else alpha * task_loss + (1 - alpha) * soft


def share_of(count: Tensor, context: Context) -> Tensor:
    """Return the micro-batch's weight in its window: 1, or less if the trainer divides by the window's positions."""
    # normalize(1 * count, count) is 1 if the trainer takes means, and count / positions of the window otherwise.
    return context.normalize(count.to(torch.float32), count)


def _joined(outputs: list[Outputs]) -> Outputs:
    """Return the embeddings of several forwards as one batch."""
    if len(outputs) == 1:
        return outputs[0]
    widths = {each.parts[0].shape[-1]: None for each in outputs}
    if len(widths) > 1:
        raise TrainingError(
            "distill",
            f"all embeddings of a loss must have the same width, got {', '.join(map(str, widths))}",
            "use the inner loss alone: a loss that truncates embeddings (sentence-transformers' MatryoshkaLoss, "
            "Matryoshka2dLoss) runs the student once per width",
        )
    parts = zip(*(each.parts for each in outputs), strict=True)
    return Outputs(outputs[0].kind, tuple(torch.cat(part) for part in parts))


def load_named(teacher: Any, student: nn.Module, context: Context, *, trust_remote_code: bool) -> nn.Module:
    """Return the module itself, load the one with this name, or call the function with this name."""
    if not isinstance(teacher, str):
        return cast("nn.Module", teacher)
    if teacher.startswith("<"):  # a saved recipe's placeholder for a module
        rule = f"teacher must be passed again, got {teacher!r}: a saved recipe cannot store a module"
        raise ConfigError("distill", rule, "pass the module")
    with rng_restored():  # building a model draws weights, and the run must not depend on where the teacher came from
        if not names_function(teacher):
            return context.services.load_teacher(teacher, student, trust_remote_code=trust_remote_code)
        built = function(teacher, "distill: teacher")()
    built = built[0] if isinstance(built, tuple) and built else built  # with example inputs, as other commands take it
    rule = f"teacher {teacher} must return a model, got {type(built).__name__}"
    require(isinstance(built, nn.Module), "distill", rule)
    return cast("nn.Module", built)
