"""The comparison of language models whose logits never exist whole: `distill.chunked`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_core.distillation.chunked.autograd import rows_in_budget
from shared_core.distillation.chunked.deferred_logits import (
    DeferredLogits,
    cross_entropy_of,
    make_deferring,
    make_stock,
)
from shared_core.distillation.chunked.loss import chunked_kd_sum
from shared_core.distillation.comparison import Compared, Comparison, StudentBatch
from shared_core.distillation.config import DistillConfig
from shared_core.distillation.fused_head import routed
from shared_core.distillation.outputs import LOGITS, Outputs, find_logits
from shared_core.distillation.task_gradient import hard_term
from shared_core.distillation.teachers import Teachers
from shared_core.distillation.unlabelled import IGNORED
from shared_core.errors import TrainingError


class ChunkedComparison(Comparison):
    """Compares by the inputs of both heads; the task's cross-entropy is computed in chunks as well.

    In a training step the student's head is multiplied once for the value of the task loss, and once for the gradient
    of both terms, which exists from then until backward. A task loss that is more than the cross-entropy of these
    logits has a gradient, and a product, of its own. No more logits exist than the budget.
    """

    def __init__(self, config: DistillConfig, teachers: Teachers, told: Mapping[str, Any], student: nn.Module) -> None:
        super().__init__(config, teachers, told)
        self._budget = None if config.budget_mib is None else int(config.budget_mib * 2**20)
        self._student = make_deferring(student, "student", self._budget)
        try:
            self._teacher = make_deferring(teachers.modules[0], "teacher", self._budget)
        except Exception:
            # The teacher's head was swapped second: the student's must not stay swapped when that is refused.
            make_stock(self._student)
            raise

    def activate(self, active: bool) -> None:
        """Let the student's head leave its product out in training forwards, or compute it again."""
        self._student.when = "training" if active else "never"

    def compare(self, batch: StudentBatch) -> Compared:
        """Return how far the student is from its teacher."""
        config = self.config
        logits = _deferred(find_logits(batch.forward.output, config.logits, "student"), "student")
        mask = batch.counted(logits, of_classes=True)
        # The teacher runs without gradients in eval mode, where "training" would never be met: always, for this call
        # alone.
        self._teacher.when = "always"
        try:
            (answer,) = self._targets(batch, Outputs(LOGITS, (logits,)), of_classes=True)
        finally:
            self._teacher.when = "never"
        target = _deferred(answer.parts[0], "teacher")
        ours, theirs = _operands(logits), _operands(target)
        # `rows_in_budget` counts two buffers of one dtype; student and teacher may differ under autocast.
        wider = max(logits.made.dtype, target.made.dtype, key=lambda dtype: dtype.itemsize)
        rows = rows_in_budget(logits.shape[-1], wider, ours[0].device, self._budget)
        share, labels = self._task(batch, logits, mask)
        if labels is not None and mask is None:
            mask = torch.ones_like(labels, dtype=torch.bool)  # None would be the labelled rows
        # Two heads of one tokenizer may be padded differently: vocab_size cuts both to the classes that they share.
        sums = chunked_kd_sum(
            *ours[:2], *theirs[:2], softcap=(ours[2], theirs[2]), temperature=batch.temperature, mask=mask,
            divergence=config.divergence, beta=config.beta, scale_by_temperature=config.scale_by_temperature,
            vocab_size=config.vocab_size, chunk_rows=rows, alpha=share, labels=labels,
        )  # fmt: skip
        self.told |= {
            "logits": f"of at most {2 * rows} positions at a time, student's and teacher's together, never of all",
            "chunk_rows": rows,
            "logits_mib": round(2 * rows * logits.shape[-1] * wider.itemsize / 2**20, 1),
        }
        if not share:
            return Compared(sums.total, sums.rows, mask)
        return Compared(routed(sums.soft, sums.total, 1 / (1 - share)), sums.rows, mask, with_task=True)

    def _task(self, batch: StudentBatch, logits: DeferredLogits, mask: Tensor | None) -> tuple[float, Tensor | None]:
        """Return the share of the task's cross-entropy in one pass for both terms and its labels; 0 for one each."""
        if self.config.vocab_size not in (None, logits.shape[-1]):
            return 0.0, None
        if batch.task is not None:
            found = hard_term(batch.task, cross_entropy_of(batch.task.loss, logits), mask)
            if found is None:
                return 0.0, None
            labels = found.labels.masked_fill(found.labels < 0, IGNORED).view(logits.shape[:-1])
            return found.ratio / (1 + found.ratio), labels
        if batch.task_share is None or mask is None or not batch.causal or batch.unlabelled is not None:
            return 0.0, None
        labels = F.pad(batch.labels[:, 1:], (0, 1), value=IGNORED)
        if ((labels != IGNORED) & ~mask.to(labels.device)).any():
            return 0.0, None  # rows that the task loss alone counts (padding on the left) are in no pass for both
        share = batch.task_share(mask.sum())
        return share, labels if share else None

    def detach(self) -> None:
        """Give both heads their class back."""
        make_stock(self._student)
        make_stock(self._teacher)


def _deferred(logits: Tensor, whose: str) -> DeferredLogits:
    if isinstance(logits, DeferredLogits) and not logits.channels_first:
        return logits
    raise TrainingError(
        "distill",
        f"with chunked the {whose}'s output must be what its head returns, in a forward that is not compiled, got "
        f"{type(logits).__name__} of shape {tuple(logits.shape)}",
        "switch torch.compile off, or distill.chunked",
    )


def _operands(logits: DeferredLogits) -> tuple[Tensor, tuple[Tensor, Tensor | None], float | None]:
    hidden, head, softcap = logits.made.operands()
    # Chosen rows lose the leading dimensions; labels and mask have them, so they are given back.
    return hidden.reshape(*logits.shape[:-1], hidden.shape[-1]), head, softcap
