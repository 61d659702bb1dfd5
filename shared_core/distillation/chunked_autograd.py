"""Gradients of distillation by hidden states and head, computed in forward over chunks of rows.

The logits of a chunk exist only until the next chunk's take their place, so backward, which comes later, would have to
multiply by both heads once more. The loss is a scalar: its gradient is known in forward but for one factor, the
gradient that reaches it, with which backward multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from eff_kernels.distillation import arithmetic_dtype, kd_rows_, scratch_rows
from torch import Tensor

from shared_core.errors import TrainingError

# Products of so many rows are near full speed, and larger chunks only cost memory; a GPU's are fuller of work.
_CPU_BUDGET, _DEVICE_BUDGET = 64 << 20, 512 << 20
# On a GPU the teacher's logits of a chunk are made in so many parts. The student's chunk is the larger then: each
# chunk's product reads and writes the sum of the head's gradient.
_TEACHER_PARTS = 2
# float16 keeps numbers down to 6e-8, which a class of 128k has less than: gradients are lifted before they are rounded
_FLOAT16_LIFT = 1024.0


@dataclass(frozen=True)
class Head:
    """The weight ``(classes, features)`` and bias of a head, and the type of its product."""

    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    classes: int
    softcap: float

    @property
    def used(self) -> tuple[Tensor, Tensor | None]:
        """The rows of the classes that count, in the type of the product."""
        weight, bias = self.weight.detach()[: self.classes], self.bias
        return weight.to(self.dtype), None if bias is None else bias.detach()[: self.classes].to(self.dtype)


@dataclass(frozen=True)
class Terms:
    """The terms that are computed of each row, and the weights of both losses."""

    temperature: float
    factor: float
    """T², or 1."""
    soft_weight: float
    hard_weight: float
    divergence: str
    beta: float


def rows_in_budget(classes: int, dtype: torch.dtype, device: torch.device, budget: int | None = None) -> int:
    """Return how many rows of two logit buffers fit into a budget in bytes (64 MiB on CPU, else 512), 8 at least."""
    if budget is None:
        budget = _CPU_BUDGET if device.type == "cpu" else _DEVICE_BUDGET
    return max(8, budget // (2 * classes * dtype.itemsize))


def product_dtype(input: Tensor, weight: Tensor) -> torch.dtype:
    """Return the type that `F.linear` multiplies in: under autocast its own, which leaves float64 alone."""
    kind = input.device.type
    # The dtype that `F.linear` would choose: autocast leaves float64 alone.
    if torch.is_autocast_enabled(kind) and torch.float64 not in (weight.dtype, input.dtype):
        return torch.get_autocast_dtype(kind)
    return weight.dtype


class ChunkedDistillation(torch.autograd.Function):
    """Sum of both losses over rows; its gradients exist when forward returns, and backward multiplies them."""

    @staticmethod
    def forward(
        ctx: Any, student_hidden: Tensor, weight: Tensor, bias: Tensor | None, terms: Terms, *arguments: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weighted total and, without gradients, the sums of the soft and of the hard loss."""
        # The head's dtype follows autocast already (`checked_head`). Autocast on top would cast operands once more.
        with torch.autocast(student_hidden.device.type, enabled=False):
            soft, hard, grads = _chunks(student_hidden.detach(), terms, *arguments, needs=ctx.needs_input_grad[:3])
        # Not in save_for_backward: backward writes over them, which the version check forbids.
        ctx.grads = grads
        ctx.dtypes = [None if value is None else value.dtype for value in (student_hidden, weight, bias)]
        ctx.mark_non_differentiable(soft, hard)
        return terms.soft_weight * soft + terms.hard_weight * hard, soft, hard

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return forward's gradients times the total's, in place of them where nothing else will ask for them."""
        grads, scale = ctx.grads, grad_outputs[0]
        check_first_backward("chunked_kd_loss", grads)
        # With retain_graph the gradients must survive for the next backward; else they are freed and scaled in place.
        kept = graph_is_kept()
        if not kept:
            ctx.grads = None
        pairs = zip(grads, ctx.dtypes, strict=True)
        return (*(None if grad is None else multiplied(grad, scale, dtype, kept) for grad, dtype in pairs), *[None] * 7)


def check_first_backward(where: str, kept: object) -> None:
    """Refuse what gradients that were computed in forward cannot give."""
    # With create_graph the results would have to carry a graph back to the inputs, and forward kept none.
    if torch.is_grad_enabled():
        rule = "gradients must be first ones, got a backward with create_graph"
        raise TrainingError(where, rule, "they are computed in forward, so take second ones of kd_loss")
    if kept is None:
        raise TrainingError(where, "backward must run once, got a second one", "the first needs retain_graph=True")


def multiplied(grad: Tensor, scale: Tensor, dtype: torch.dtype, kept: bool) -> Tensor:
    """Return a gradient times the scale of a loss, in `dtype`; in place unless it is `kept`."""
    # in float32, where the scale of a loss cannot overflow; in place, for a head's gradient can be the largest tensor
    # float32 gradients are not copied by `to`, so that `mul_` writes over the ones of forward. Half ones are copied.
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    if grad.is_cuda and dtype != wide.dtype:
        # one pass over the largest gradient in place of two; a CPU would make a whole product first
        return torch.mul(wide, scale, out=torch.empty_like(wide, dtype=dtype))
    return (wide * scale if kept else wide.mul_(scale)).to(dtype)


def graph_is_kept() -> bool:
    """Return True if the backward under way keeps its graph for another one."""
    # private, and asked by torch's own compiled backward for the same reason (torch 2.11 to 2.13); without it, copies
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return asked is None or bool(asked())


def _chunks(
    hidden: Tensor,
    terms: Terms,
    teacher_hidden: Tensor,
    student: Head,
    teacher: Head,
    labels: Tensor | None,
    rows: Tensor | None,
    chunk_rows: int,
    *,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """Return the sums of the soft and of the hard loss, and the total's gradients by hidden, weight and bias."""
    count = hidden.shape[0] if rows is None else rows.numel()
    dtype, classes, device = student.dtype, student.classes, hidden.device
    # both buffers and the scratch beside them weigh what two chunks do
    scratch = scratch_rows(chunk_rows, classes, dtype, terms.temperature, device, teacher.dtype)
    size, part = chunk_sizes(count, 2 * chunk_rows - scratch, _TEACHER_PARTS if hidden.is_cuda else 1)
    (weight, bias), (teacher_weight, teacher_bias) = student.used, teacher.used
    # a logit is -inf where its bias is
    ruled_out = bias is not None or teacher_bias is not None
    # By the soft logits the gradient is T (p - q): at T > 1 it is lifted less, or T * 1024 would near float16's
    # 65,504.
    lift = _FLOAT16_LIFT / max(1.0, terms.temperature) if dtype == torch.float16 else 1.0
    # `kd_rows_` always multiplies by T²; this takes it out again where scale_by_temperature is off.
    soft_factor = terms.factor / terms.temperature**2

    # (size, classes) and (part, classes), made once: the allocator would else hold two generations of them between
    # chunks.
    logits = torch.empty(size, classes, dtype=dtype, device=device)
    teacher_logits = torch.empty(part, classes, dtype=teacher.dtype, device=device)
    # One loss a row, summed once at the end: a running float32 sum over many chunks would lose digits.
    losses = torch.zeros(2, count, dtype=arithmetic_dtype(dtype, terms.temperature), device=device)
    gradients = HeadGradients(hidden, student, needs, dtype, several=count > size)
    for first in range(0, count, size):
        here = slice(first, min(first + size, count))
        index = here if rows is None else rows[here]
        inputs, n = hidden[index].to(dtype), here.stop - first
        product(inputs, weight, bias, logits[:n])
        for start in range(first, here.stop, part):
            there = slice(start, min(start + part, here.stop))
            some = there if rows is None else rows[there]
            ours, theirs = logits[start - first : there.stop - first], teacher_logits[: there.stop - start]
            # `rows` lies on the student's device; a teacher on another one is indexed there, so that only its rows
            # cross.
            some_there = some if isinstance(some, slice) else some.to(teacher_hidden.device)
            product(teacher_hidden[some_there].to(teacher.dtype), teacher_weight, teacher_bias, theirs)
            # the losses of rows, T² KL and CE; over the logits z it writes the total's gradient, which is
            # soft_weight T (softmax(z/T) - softmax(t/T)) + hard_weight (softmax(z) - onehot) for the forward KL
            losses[0, there], losses[1, there] = kd_rows_(
                ours, theirs, None if labels is None or not terms.hard_weight else labels[some], terms.temperature,
                terms.soft_weight * soft_factor * lift, terms.hard_weight * lift, terms.divergence, terms.beta,
                student.softcap, teacher.softcap, ruled_out,
            )  # fmt: skip
        # logits[:n] holds ∂total/∂z times `lift` now; the products divide it out before they are rounded.
        gradients.add(index, logits[:n], inputs, weight, 1 / lift)
    # Both buffers are free before the sums and casts of the gradients take memory.
    del logits, teacher_logits
    soft, hard = losses.sum(-1)
    out = arithmetic_dtype(dtype, 1.0)
    return (soft * soft_factor).to(out), hard.to(out), gradients.values()


class HeadGradients:
    """Gradients by the input, weight and bias of ``z = h Wᵀ + b``, from those by z, chunk by chunk.

    By h it is ``∂z W``, by W the sum of ``∂zᵀ h`` over chunks, by b that of ``∂z`` over rows; `needs` tells which.
    """

    def __init__(
        self, hidden: Tensor, head: Head, needs: tuple[bool, bool, bool], dtype: torch.dtype, *, several: bool
    ) -> None:
        # Zeros: a row that does not count is never written, and its gradient must be 0.
        self._hidden = torch.zeros_like(hidden, dtype=dtype) if needs[0] else None
        self._weight = WeightGradient(head.weight, head.classes, several) if needs[1] else None
        self._bias, self._classes = None, head.classes
        # A sum over all rows: in half precision it would stop growing once addends are below its last bit.
        if needs[2] and head.bias is not None:
            self._bias = torch.zeros_like(head.bias, dtype=torch.promote_types(head.bias.dtype, torch.float32))

    def add(self, rows: Any, grad: Tensor, inputs: Tensor, weight: Tensor, scale: float = 1.0) -> None:
        """Take in ``scale`` times the gradient by the logits of some rows, whose inputs these are."""
        if self._hidden is not None:
            self._hidden[rows] = scaled_product(grad, weight, scale).to(self._hidden.dtype)
        if self._weight is not None:
            self._weight.add(grad, inputs, scale)
        if self._bias is not None:
            self._bias[: self._classes].add_(grad.sum(0, dtype=self._bias.dtype), alpha=scale)

    def values(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return all three, None where one is not needed."""
        return self._hidden, None if self._weight is None else self._weight.value(), self._bias


def even_rows(count: int, most: int) -> int:
    """Return the rows of chunks of nearly one size: a short last one would take nearly as long as a full one."""
    chunks = max(1, -(-count // most))
    return max(1, -(-count // chunks))


def chunk_sizes(count: int, budget: int, parts: int) -> tuple[int, int]:
    """Return how many rows of the student's and of the teacher's logits fit into a budget of rows."""
    # of eight rows each of any length begins where a vector of eight numbers does
    most = (budget - 8) * parts // (parts + 1)
    if parts == 1 or count <= budget // 2 or most < 8 * parts:
        size = even_rows(count, max(1, budget // 2))
        return size, size
    size = even_rows(count, most)
    return size, -(-size // (8 * parts)) * 8


def product(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Put ``rows weightᵀ + bias`` into `out`."""
    if rows.device != out.device:
        out.copy_(F.linear(rows, weight, bias))
    elif bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


def scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return ``scale * left right``."""
    # scaled before it is rounded to float16, where a lifted product could overflow
    return left @ right if scale == 1.0 else torch.addmm(left.new_zeros(1), left, right, beta=0, alpha=scale)


def adds_wider(factor: Tensor, total: Tensor) -> bool:
    """Return True if a product of half factors can be added to a float32 sum in its GEMM: cuBLAS alone does it."""
    half = factor.dtype in (torch.float16, torch.bfloat16) and total.dtype == torch.float32
    # torch before 2.11 may refuse the sum: it had to have the factors' type
    return half and factor.is_cuda and torch.version.hip is None and torch.__version__ >= "2.11"


class WeightGradient:
    """Sums the weight's gradient over chunks, in float32 where the weight's type would lose small addends."""

    def __init__(self, weight: Tensor, classes: int, several: bool) -> None:
        self._classes = classes
        # One chunk is one product, which the GEMM sums in float32 by itself; only further addends need a wider sum.
        dtype = torch.promote_types(weight.dtype, torch.float32) if several else weight.dtype
        self._sum = torch.empty_like(weight, dtype=dtype)
        # Classes that vocab_size leaves out get no gradient; `empty_like` may hold NaN there.
        self._sum[classes:] = 0
        self._begun = False

    def add(self, grad: Tensor, inputs: Tensor, scale: float) -> None:
        """Add ``scale * gradᵀ inputs``."""
        total = self._sum[: self._classes]
        # Same dtype: the GEMM adds in place (beta 1), with no temporary of the weight's size.
        # beta 0 ignores what is there
        factors = {"beta": float(self._begun), "alpha": scale}
        if grad.dtype == total.dtype:
            total.addmm_(grad.t(), inputs, **factors)
        elif adds_wider(grad, total):
            torch.addmm(total, grad.t(), inputs, out_dtype=total.dtype, out=total, **factors)
        elif self._begun:
            total.add_(scaled_product(grad.t(), inputs, scale))
        else:
            total.copy_(scaled_product(grad.t(), inputs, scale))
        self._begun = True

    def value(self) -> Tensor:
        """Return the sum; zeros if nothing was added."""
        return self._sum if self._begun else self._sum.zero_()
