"""Compute the gradients of both terms in one pass over the logits, if the task loss is their cross-entropy.

`cross_entropy_of` detects this from the task loss's graph, and `fused_sum` adds its gradient to the soft term's. Any
other task loss keeps its own gradient. If a trainer fuses the student's head into the loss (TRL), the student returns
log-probabilities of the labels instead of logits. Then `FusedHead` records the backbone's output, and the model's own
forward computes the logits from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from eff_kernels._triton.launch import compiles_for, is_plain
from eff_kernels.distillation import DIVERGENCES as FUSED
from eff_kernels.distillation import arithmetic_dtype, kd_rows, kd_rows_
from torch import Tensor, nn

from shared_core.distillation.chunked_autograd import check_first_backward, graph_is_kept, multiplied
from shared_core.distillation.forward_capture import FOR_THE_LOSS, Forward, named_inputs, trains
from shared_core.distillation.losses.divergences import DIVERGENCES, without_ends
from shared_core.distillation.losses.softened_pair import check_fraction, check_mask, check_temperature, counted_rows
from shared_core.modules.calls import RunHook, remove_hooks

_SAME_ROWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "ToCopyBackward0")
_MEAN, _SUM = 1, 2


@dataclass(frozen=True)
class TaskLoss:
    """A task loss, and how it is mixed with the soft term.

    ``ratio(weight, count)`` is a row's cross-entropy weight in the mixture divided by its divergence weight. `weight`
    is the cross-entropy's weight in the task loss, `count` the number of rows with a soft term.
    """

    loss: Tensor
    ratio: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class HardTerm:
    """The cross-entropy that one pass adds to the soft term."""

    labels: Tensor
    """int64, one per row of the logits; -1 if a row has no label."""
    ratio: float
    """A row's cross-entropy weight divided by its divergence weight."""
    count: int
    """Number of rows with a soft term, which include all rows with a label."""


def hard_term(task: TaskLoss, found: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> HardTerm | None:
    """Return the task loss as a cross-entropy term, from the result of `cross_entropy_of`.

    None if rows without a soft term (outside `mask`) have labels. Waits for the device once.
    """
    if found is None:
        return None
    labels, weight = found
    counted = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask.flatten().to(labels.device)
    count, stray = counted.sum(), ((labels >= 0) & ~counted).sum()
    ratio, rows, strays = torch.stack([task.ratio(weight, count).double(), count.double(), stray.double()]).tolist()
    return HardTerm(labels, ratio, int(rows)) if 0 < ratio < float("inf") and not strays else None


def cross_entropy_of(loss: Tensor, logits: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the labels (-1: none) and each row's factor if a loss is only a cross-entropy of these logits, else None.

    Example:
        >>> logits = torch.zeros(3, 4, requires_grad=True) * 1
        >>> loss = torch.nn.functional.cross_entropy(logits, torch.tensor([1, -100, 2])) * 3
        >>> cross_entropy_of(loss, logits)
        (tensor([ 1, -1,  2]), tensor(1.5000))
        >>> cross_entropy_of(loss + logits.sum(), logits)
    """
    node, weight = without_factors(loss)
    if (
        node is None
        or logits.grad_fn is None
        or node.name() != "NllLossBackward0"
        or node._saved_weight is not None
        or node._saved_reduction not in (_MEAN, _SUM)
    ):
        return None
    if not _is_log_softmax(node.next_functions[0][0], logits):
        return None
    if node._saved_reduction == _MEAN:
        weight = weight / node._saved_total_weight
    labels = node._saved_target
    if weight.numel() != 1 or labels.dim() != 1 or len(labels) * logits.shape[-1] != logits.numel():
        return None
    # ignore_index is saved as an unsigned number.
    ignored = (node._saved_ignore_index + 2**63) % 2**64 - 2**63
    return labels.masked_fill(labels == ignored, -1), weight.reshape(())


def without_factors(loss: Tensor) -> tuple[Any, Tensor]:
    """Return the graph node behind a loss's constant factors (None if others use its gradient), and their product."""
    node: Any = None if loss._backward_hooks or loss.retains_grad else loss.grad_fn
    weight = torch.ones((), device=loss.device)
    while node is not None and node.name() in ("MulBackward0", "DivBackward0"):
        (inner, _), *others = node.next_functions
        if inner is None or any(other is not None for other, _ in others):
            return None, weight
        factor = node._saved_other.to(loss.device)
        weight, node = weight * factor if node.name() == "MulBackward0" else weight / factor, inner
    return node, weight


def _is_log_softmax(node: Any, logits: Tensor) -> bool:
    """Return True if a node is the log_softmax of these logits over the last of two dimensions, rows in order."""
    if node is None or node.name() != "LogSoftmaxBackward0" or node._saved_dim not in (1, -1, 2**64 - 1):
        return False
    node, output = node.next_functions[0]
    while node is not None and node is not logits.grad_fn and node.name() in _SAME_ROWS:
        node, output = node.next_functions[0]
    return node is logits.grad_fn and output == logits.output_nr


_LOG_PROBS = "log_probs"


class FusedHead:
    """Detaches the log-probabilities that a student returns, so that one pass can compute both terms' gradients.

    The trainer computes its loss from a leaf with the same values. `take` computes the gradient for this leaf. Then
    either the soft term's backward sends it through the head with its own gradient, or `Task.rejoined` sends it as
    usual.
    """

    def __init__(self, student: nn.Module) -> None:
        self.active = False
        self._student, self._model = student, _base(student)
        self._kept: Any = None
        self._cuts: list[tuple[Tensor, Tensor]] = []
        backbone = cast(nn.Module, self._model.base_model)
        self._handles = [
            backbone.register_forward_hook(RunHook(self._keep), prepend=True),
            student.register_forward_hook(RunHook(self._cut)),
        ]

    def _keep(self, backbone: nn.Module, args: Any, output: Any) -> None:
        if self.active and trains(backbone):
            self._kept = output

    def _cut(self, student: nn.Module, args: Any, output: Any) -> Any:
        log_probs = output.get(_LOG_PROBS) if isinstance(output, Mapping) else None
        if not (self.active and trains(student) and isinstance(log_probs, Tensor)):
            return None
        leaf = log_probs.detach().requires_grad_()
        self._cuts.append((leaf, log_probs))
        return type(output)(**{**output, _LOG_PROBS: leaf})  # type: ignore[call-arg]

    def take(self, task_loss: Tensor) -> Task:
        """Return the task loss with its gradients for the log-probabilities since the last call, and forget these."""
        cuts, self._cuts = self._cuts, []
        leaves = [leaf for leaf, _ in cuts]
        grads: Any = [None] * len(cuts)
        if cuts and task_loss.requires_grad:
            grads = torch.autograd.grad(task_loss, leaves, retain_graph=True, allow_unused=True)
        return Task(
            task_loss, [(whole, grad) for (_, whole), grad in zip(cuts, grads, strict=True) if grad is not None]
        )

    def with_logits(self, forward: Forward) -> Forward:
        """Return the forward with the logits that the student's own forward computes from the backbone's output."""
        kept, self._kept = self._kept, None
        if _LOG_PROBS not in forward.output:
            return forward
        backbone, given = cast(nn.Module, self._model.base_model), named_inputs(self._student, forward)
        before = vars(backbone).get("forward")
        backbone.forward = lambda *args, **kwargs: kept  # type: ignore[method-assign]
        try:
            output = self._model.forward(**{name: value for name, value in given.items() if name not in FOR_THE_LOSS})
        finally:
            del backbone.forward
            if before is not None:
                backbone.forward = before
        self._kept = None
        return replace(forward, output=output)

    def forget(self) -> None:
        """Release the last batch."""
        self._kept, self._cuts = None, []

    def detach(self) -> None:
        """Remove the hooks."""
        self.active = False
        self.forget()
        remove_hooks(self._handles)


@dataclass(frozen=True)
class Task:
    """A task loss computed from detached leaves, and the original log-probabilities with their gradients."""

    loss: Tensor
    parts: list[tuple[Tensor, Tensor]]

    @property
    def weight(self) -> float:
        """The common factor of all positions' cross-entropies in the loss; 0 if factors differ or are not positive."""
        if len(self.parts) != 1 or not self.parts[0][1].numel():
            return 0.0
        low, high = (float(end) for end in self.parts[0][1].aminmax())
        return -low if low == high < 0 else 0.0

    def rejoined(self) -> Tensor:
        """Return the loss with its gradient connected to the original log-probabilities."""
        loss = self.loss
        for log_probs, grad in self.parts:
            loss = routed(loss, log_probs, grad)
        return loss


def routed(value: Tensor, other: Tensor, weight: Tensor | float) -> Tensor:
    """Return `value`, with its gradient also passed to `other`, times `weight`."""
    result: Tensor = _Routed.apply(value, other, weight)  # type: ignore[no-untyped-call]
    return result


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, other: Tensor, weight: Tensor | float) -> Tensor:
        ctx.weight = weight
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], grads[0] * ctx.weight, None


def with_own_forward(copy: nn.Module) -> nn.Module:
    """Return a copied model with its class's forward, since a fused forward would run the original model."""
    vars(_base(copy)).pop("forward", None)
    return copy


def _base(model: nn.Module) -> nn.Module:
    base: nn.Module = cast(Any, getattr(model, "get_base_model", lambda: model))()
    return base


SMALLEST = 1 << 19
"""Below this number of logits, whole-tensor operations are faster than a few rows at a time (torch 2.13, CPU). Kernels
that process all rows at once have no minimum."""


def fits_fused_sum(divergence: str, student: Tensor, teacher: Tensor) -> bool:
    """Return True if `fused_sum` computes this divergence of these logits, and faster than autograd would."""
    return (
        divergence in FUSED
        and (student.numel() >= SMALLEST or (student.is_cuda and compiles_for(student.device)))
        and torch.is_grad_enabled()
        # The fused gradient only supports a plain backward. Tensor subclasses, compiled graphs and functorch need
        # autograd's own operations.
        and student.requires_grad
        and is_plain(student)
        and is_plain(teacher)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def soft_sum(
    divergence: str,
    student: Tensor,
    teacher: Tensor,
    *,
    temperature: float,
    softened: bool = False,
    hard: HardTerm | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return the result of the function in `DIVERGENCES`, using `fused_sum` if possible."""
    options["temperature"] = temperature
    if fits_fused_sum(divergence, student, teacher):
        # The fused kernel divides both sides by T. Log-probabilities times T are logits whose softmax at T gives them.
        return fused_sum(divergence, student, teacher * temperature if softened else teacher, hard=hard, **options)
    if softened:
        return DIVERGENCES[divergence](student, teacher_log_probs=teacher, **options)
    return DIVERGENCES[divergence](student, teacher, **options)


def fused_sum(
    divergence: str,
    student: Tensor,
    teacher: Tensor,
    *,
    temperature: float = 2.0,
    mask: Tensor | None = None,
    scale_by_temperature: bool = True,
    beta: float = 0.5,
    hard: HardTerm | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the result of the function in `DIVERGENCES` for two logits. Second derivatives are not supported.

    The gradient is computed with the sum, in float32 or wider, because fp16 would lose small values before loss scaling
    can help. The gradient of `hard`, a cross-entropy, is added, times its ratio.

    Example:
        >>> student, teacher = torch.zeros(3, 2, requires_grad=True), torch.tensor([[2.0, 0.0]] * 3)
        >>> total, count = fused_sum("forward_kl", student, teacher, temperature=1.0)
        >>> total.backward()
        >>> round(total.item(), 4), count.item(), student.grad[0]
        (0.9834, 3, tensor([-0.3808,  0.3808]))
    """
    check_temperature(divergence, temperature)
    check_fraction(divergence, "beta", beta)
    divergence = without_ends(divergence, beta)
    check_mask(divergence, mask, tuple(student.shape[:-1]))
    # The mask is applied below by index, since boolean indexing here would copy both sides first.
    rows, targets, count = counted_rows(divergence, student.detach(), teacher, None)
    labels, ratio = (None, 0.0) if hard is None else (hard.labels, hard.ratio)
    places = None
    if mask is not None:  # computed once: on a GPU the host waits for it, unless the count is known
        flat = mask.to(student.device).flatten()
        places = (flat.nonzero() if hard is None else torch.nonzero_static(flat, size=hard.count)).squeeze(1)
        count = torch.full_like(count, len(places))
    # The kernel always multiplies by T². Without scaling, dividing by T² removes it.
    factor = 1.0 if scale_by_temperature else temperature**-2
    rows, targets = (side.reshape(-1, student.shape[-1]) for side in (rows, targets))
    terms = labels, temperature, factor, ratio, divergence, beta
    # `student` carries the graph, `rows` its detached values.
    total: Tensor = _FusedSum.apply(student, rows, targets, places, terms)  # type: ignore[no-untyped-call]
    return total, count


class _FusedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        rows: Tensor,
        targets: Tensor,
        places: Tensor | None,
        terms: tuple[Tensor | None, float, float, float, str, float],
    ) -> Tensor:
        labels, temperature, factor, *_ = terms
        with torch.autocast(student.device.type, enabled=False):
            if places is None:
                soft, _, gradient = kd_rows(rows, targets, *terms)
            else:
                # The indexed rows are a copy and can be overwritten with the gradient.
                gradient = rows.index_select(0, places).to(arithmetic_dtype(student.dtype, temperature))
                labels = None if labels is None else labels.index_select(0, places)
                soft, _ = kd_rows_(gradient, targets.index_select(0, places), labels, *terms[1:])
        ctx.gradient, ctx.places, ctx.shape, ctx.dtype = gradient, places, student.shape, student.dtype
        total: Tensor = soft.sum() * factor
        return total.to(arithmetic_dtype(student.dtype, 1.0))

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        check_first_backward("distill", ctx.gradient)
        kept = graph_is_kept()
        gradient = multiplied(ctx.gradient, scale, ctx.dtype, kept)
        if not kept:
            ctx.gradient = None
        if ctx.places is not None:
            # The compact gradient is scattered to the rows that count; other rows get 0.
            whole = gradient.new_zeros(ctx.shape).view(-1, ctx.shape[-1])
            gradient = whole.index_copy_(0, ctx.places, gradient)
        return gradient.view(ctx.shape), *[None] * 4
