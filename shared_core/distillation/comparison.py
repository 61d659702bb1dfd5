"""Where the soft targets of a batch come from, and how far the student's outputs are from them."""

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
from shared_core.engine.technique import Context
from shared_core.errors import ConfigError, TrainingError


@dataclass(frozen=True)
class StudentBatch:
    """One forward of the student, its inputs by name, the labels of its loss, and the temperature of this step."""

    student: nn.Module
    forward: Forward
    inputs: dict[str, Any]
    labels: Any
    causal: bool
    temperature: float
    unlabelled: Tensor | None = None
    """Which examples are unlabelled, where that is told; all of their positions count."""
    task_share: Callable[[Tensor], float] | None = None
    """The share of the summed cross-entropy in a mixture with the summed divergence, by the number of positions;
    0 where the task loss is no such sum. None: the task loss has its own gradient."""
    task: TaskLoss | None = None
    """The task loss, where one pass may compute its gradient with that of the soft term."""

    def parts(self, outputs: Outputs, *, of_classes: bool) -> tuple[Tensor, ...]:
        """Return what is compared of the student's or a teacher's outputs, a row for each term of the loss."""
        if outputs.kind == SPANS:
            return over_positions(outputs, self.inputs.get("attention_mask"), of_classes=of_classes)[0]
        return outputs.parts

    def mask(self, outputs: Outputs, *, of_classes: bool) -> Tensor | None:
        """Return which rows of `parts` count, True = it does; None for all of them."""
        if outputs.kind == SPANS:
            return over_positions(outputs, self.inputs.get("attention_mask"), of_classes=of_classes)[1]
        return None if outputs.kind == EMBEDDINGS else self.counted(outputs.parts[0], of_classes=of_classes)

    def counted(self, logits: Tensor, *, of_classes: bool) -> Tensor | None:
        """Return which rows of the logits count, True = it does; None for all of them."""
        if not of_classes and isinstance(self.labels, Tensor) and self.labels.is_floating_point():
            return None  # regression, multi-label: no -100
        mask = self.inputs.get("attention_mask")
        return counted_positions(logits, self.labels, mask, causal=self.causal, unlabelled=self.unlabelled)


@dataclass(frozen=True)
class Compared:
    """The sum of the divergence, the number of positions it is a mean over, and which add to it (None: all)."""

    total: Tensor
    count: Tensor
    mask: Tensor | None
    with_task: bool = False
    """True if the gradient of the total is that of the task loss, too."""


class Comparison:
    """Compares the student's logits with those of teachers that are asked in every micro-batch."""

    trains_others: ClassVar[bool] = False
    """True if `compare` needs gradients though the soft term of the student has no weight."""

    def __init__(self, config: DistillConfig, teachers: Teachers, told: Mapping[str, Any]) -> None:
        self.config, self.teachers, self.told = config, teachers, dict(told)
        self.figures: dict[str, Tensor] = {}
        """What is logged of the latest micro-batch beside the student's figures, as its loss is scaled."""

    def compare(self, batch: StudentBatch) -> Compared:
        """Return how far the student is from its teachers: the mean over its parts, where outputs have several."""
        # A contrastive loss has several forwards a batch; their embeddings are joined along examples, in their order.
        forwards = [*batch.forward.earlier, batch.forward]
        mine = _joined([find_outputs(forward.output, self.config.logits, "student") for forward in forwards])
        divergence = self._divergence(mine)
        of_classes = is_of_classes(divergence)
        # After the student: the teachers' activations then do not add to the peak of its forward.
        theirs = self._targets(batch, mine, of_classes=of_classes)
        mask = batch.mask(mine, of_classes=of_classes)
        parts, *targets = (batch.parts(each, of_classes=of_classes) for each in (mine, *theirs))
        # One term for each part (start and end logits); each has the same mask.
        compared = [
            self._compare(divergence, part, target, mask, batch, alone=len(parts) == 1)
            for part, *target in zip(parts, *targets, strict=True)
        ]
        if len(compared) == 1:
            return compared[0]
        return Compared(torch.stack([each.total for each in compared]).mean(), compared[0].count, mask)

    def _divergence(self, outputs: Outputs) -> str:
        """Return how outputs of this kind are compared, and tell it where the options do not."""
        config = self.config
        divergence = divergence_of(outputs.kind, config.divergence, outputs.parts[0].shape[-1])
        if config.confidence and not is_of_classes(divergence):
            rule = f"confidence must be 0 for {outputs.kind}, no classes, got {config.confidence}"
            raise ConfigError("distill", rule)
        if outputs.kind != LOGITS:
            self.told |= {"outputs": outputs.kind, "divergence": divergence}
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
            # a trainer counts positions before the teacher is asked, so unsure ones take part in the mean with 0
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
            # Classes that are cut away have a cross-entropy. On a GPU the host would wait in every micro-batch.
            same = logits.is_cpu and logits.shape == whole.shape
            hard = hard_term(batch.task, cross_entropy_of(batch.task.loss, logits), mask) if same else None
        total, count = difference(config, divergence, logits, target, mask, temperature, softened=softened, hard=hard)
        return Compared(total, count if candidates is None else candidates, mask, with_task=hard is not None)

    def _targets(self, batch: StudentBatch, mine: Outputs, *, of_classes: bool) -> list[Outputs]:
        """Return what each teacher says to the same inputs."""
        self.teachers.follow(batch.student)
        asked = [self.teachers.ask(batch.student, forward) for forward in (*batch.forward.earlier, batch.forward)]
        answers = zip(*asked, strict=True)
        name, vocab_size = self.config.logits, self.config.vocab_size
        theirs = [_joined([find_outputs(output, name, "teacher") for output in outputs]) for outputs in answers]
        for other in theirs:
            check_outputs(mine, other, of_classes=of_classes, vocab_size=vocab_size)
        return theirs

    def begin(self, context: Context) -> None:
        """The optimizers exist, and their saved state has been loaded."""

    def join(self, mixed: Tensor, task_loss: Tensor, alpha: float, count: Tensor, context: Context) -> Tensor:
        """Return the student's loss with what else this batch trains."""
        return mixed

    def _cut(self, logits: Tensor) -> Tensor:
        """Return the classes that count."""
        size = self.config.vocab_size
        return logits if size in (None, logits.shape[-1]) else logits[..., :size]

    def activate(self, active: bool) -> None:
        """Do from now on what the next forward needs, or no longer."""

    def detach(self) -> None:
        """Leave the models as they were."""


class CachedComparison(Comparison):
    """Compares the student's logits with what a teacher said once, read from a store."""

    def __init__(self, config: DistillConfig, student: nn.Module) -> None:
        folder = config.cache or ""
        self._cache = TeacherCache.open(folder)
        if (kind := kind_ahead(student, config.logits, "student")) in (SPANS, EMBEDDINGS):
            rule = f"teacher must not be cached for {kind}, as a cache holds classes"
            raise ConfigError("distill", rule, "give the model")
        ours = num_classes(student)
        if config.vocab_size is not None and ours is not None:
            check_sizes(ours, config.vocab_size, config.vocab_size)
        self._cache.check(temperature=config.temperature, vocabulary=config.vocab_size or ours)
        manifest = self._cache.manifest
        told = {
            "teacher": f"cached in {folder}",
            "teacher_fingerprint": manifest.fingerprints.get("teacher"),
            "discarded_mass": manifest.tail_mass_mean,
        }
        super().__init__(config, Teachers([]), told)

    def compare(self, batch: StudentBatch) -> Compared:
        """Return how far the student is from what the store holds for these inputs."""
        config = self.config
        logits = find_logits(batch.forward.output, config.logits, "student")
        # The mask of the loss, at which all positions must be in the store; the store itself may hold more.
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
    """Return the sum of a divergence over the rows that count, and their number.

    The teacher's are ``(..., classes)`` as the student's, or embeddings; log-probabilities at this T if `softened`.
    """
    if divergence == "cosine":
        return hidden_cosine_sum(student, teacher, mask=mask)
    options: dict[str, Any] = {"beta": config.beta} if divergence == "jsd" else {}
    options |= {"temperature": temperature, "mask": mask, "scale_by_temperature": config.scale_by_temperature}
    return soft_sum(divergence, student, teacher, softened=softened, hard=hard, **options)


def mix(task_loss: Tensor, soft: Tensor, alpha: float) -> Tensor:
    """Return ``alpha * task + (1 - alpha) * soft``; a term of weight 0 is not read, as 0 * inf would be NaN.

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
    """Return what a loss of 1 is in this micro-batch: a trainer may divide by the positions of its whole window."""
    # normalise(1 * count, count): 1 where the trainer takes means, count / window's positions where it divides sums.
    return context.normalise(count.to(torch.float32), count)


def _joined(outputs: list[Outputs]) -> Outputs:
    """Return the embeddings of several forwards as those of one."""
    if len(outputs) == 1:
        return outputs[0]
    widths = {each.parts[0].shape[-1]: None for each in outputs}
    if len(widths) > 1:
        raise TrainingError(
            "distill",
            f"all embeddings of a loss must have one width, got {', '.join(map(str, widths))}",
            "take the inner loss alone: one that cuts embeddings (sentence-transformers' MatryoshkaLoss, "
            "Matryoshka2dLoss) runs the student once for each width",
        )
    parts = zip(*(each.parts for each in outputs), strict=True)
    return Outputs(outputs[0].kind, tuple(torch.cat(part) for part in parts))


def load_named(teacher: Any, student: nn.Module, context: Context, *, trust_remote_code: bool) -> nn.Module:
    """Return the module itself, or the one that the services find under a name."""
    if isinstance(teacher, str):
        if teacher.startswith("<"):  # what a saved recipe holds in place of a module
            rule = f"teacher must be given again, got {teacher!r} from a saved recipe"
            raise ConfigError("distill", rule, "pass the module")
        return context.services.load_teacher(teacher, student, trust_remote_code=trust_remote_code)
    return cast("nn.Module", teacher)
