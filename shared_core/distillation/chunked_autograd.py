"""Gradients of the distillation loss for hidden states and head, computed in forward over chunks of rows.

A chunk's logits are overwritten by the next chunk, so backward would have to compute them again with both heads. The
loss is a scalar, so forward can compute its gradient up to one factor: the gradient that reaches the loss. Backward
multiplies by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from eff_kernels.distillation import arithmetic_dtype, kd_rows_, scratch_rows
from torch import Tensor

from shared_core.errors import TrainingError

# Products of this many rows run near full speed; larger chunks only cost memory. A GPU needs larger chunks.
_CPU_BUDGET, _DEVICE_BUDGET = 64 << 20, 512 << 20
# On a GPU the teacher's logits of a chunk are computed in this many parts. This leaves room for larger student chunks,
# which matter more: each one reads and writes the accumulated gradient of the head.
_TEACHER_PARTS = 2
# float16 cannot represent numbers below 6e-8, and one class of 128k may have less. So gradients are scaled up before
# they are rounded.
_FLOAT16_LIFT = 1024.0


@dataclass(frozen=True)
class Head:
    """Weight ``(classes, features)`` and bias of a head, and the dtype of its product."""

    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    classes: int
    softcap: float

    @property
    def used(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the classes that count, in the product's dtype."""
        weight, bias = self.weight.detach()[: self.classes], self.bias
        return weight.to(self.dtype), None if bias is None else bias.detach()[: self.classes].to(self.dtype)


@dataclass(frozen=True)
class Terms:
    """Which terms are computed per row, and the weights of both losses."""

    temperature: float
    factor: float
    """T², or 1."""
    soft_weight: float
    hard_weight: float
    divergence: str
    beta: float


def rows_in_budget(classes: int, dtype: torch.dtype, device: torch.device, budget: int | None = None) -> int:
    """Return how many rows of two logit buffers fit into a budget in bytes (default 64 MiB on CPU, else 512 MiB).

    At least 8.
    """
    if budget is None:
        budget = _CPU_BUDGET if device.type == "cpu" else _DEVICE_BUDGET
    return max(8, budget // (2 * classes * dtype.itemsize))


def product_dtype(input: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype in which `F.linear` multiplies."""
    kind = input.device.type
    # Autocast does not change float64.
    if torch.is_autocast_enabled(kind) and torch.float64 not in (weight.dtype, input.dtype):
        return torch.get_autocast_dtype(kind)
    return weight.dtype


class ChunkedDistillation(torch.autograd.Function):
    """Sum of both losses over rows. Forward computes the gradients, backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any, student_hidden: Tensor, weight: Tensor, bias: Tensor | None, terms: Terms, *arguments: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weighted total, and the sums of the soft and the hard loss without gradients."""
        # The head's dtype already follows autocast (`checked_head`). Autocast here would cast the operands again.
        with torch.autocast(student_hidden.device.type, enabled=False):
            soft, hard, grads = _chunks(student_hidden.detach(), terms, *arguments, needs=ctx.needs_input_grad[:3])
        # Not in save_for_backward: backward overwrites them, which its version check forbids.
        ctx.grads = grads
        ctx.dtypes = [None if value is None else value.dtype for value in (student_hidden, weight, bias)]
        ctx.mark_non_differentiable(soft, hard)
        return terms.soft_weight * soft + terms.hard_weight * hard, soft, hard

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Return forward's gradients times the total's gradient, in place if they are not needed again."""
        grads, scale = ctx.grads, grad_outputs[0]
        check_first_backward("chunked_kd_loss", grads)
        # With retain_graph the gradients must survive for the next backward. Otherwise they are scaled in place.
        kept = graph_is_kept()
        if not kept:
            ctx.grads = None
        pairs = zip(grads, ctx.dtypes, strict=True)
        return (*(None if grad is None else multiplied(grad, scale, dtype, kept) for grad, dtype in pairs), *[None] * 7)


def check_first_backward(where: str, kept: object) -> None:
    """Raise for a second backward, or for second derivatives: gradients computed in forward cannot give them."""
    # With create_graph the results would need a graph back to the inputs, and forward kept none.
    if torch.is_grad_enabled():
        rule = "create_graph must be off: gradients are computed in forward, without a graph for second derivatives"
        raise TrainingError(where, rule, "use kd_loss for second derivatives")
    if kept is None:
        raise TrainingError(where, "backward must run only once", "pass retain_graph=True to the first backward")


def multiplied(grad: Tensor, scale: Tensor, dtype: torch.dtype, kept: bool) -> Tensor:
    """Return a gradient times a loss's scale, in `dtype`; in place unless it is `kept`."""
    # Multiplied in float32, where a loss scale cannot overflow, and in place, since a head's gradient can be the
    # largest tensor: `to` does not copy float32 gradients, so `mul_` overwrites forward's. Half ones are copied.
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    if grad.is_cuda and dtype != wide.dtype:
        # One pass over the largest gradient instead of two. A CPU would first compute the whole product.
        return torch.mul(wide, scale, out=torch.empty_like(wide, dtype=dtype))
    return (wide * scale if kept else wide.mul_(scale)).to(dtype)


def graph_is_kept() -> bool:
    """Return True if the current backward keeps its graph (retain_graph)."""
    # A private function that torch's own compiled backward uses for this (torch 2.11 to 2.13). Without it we copy.
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
    """Return the sums of the soft and the hard loss, and the total's gradients for hidden, weight and bias."""
    count = hidden.shape[0] if rows is None else rows.numel()
    dtype, classes, device = student.dtype, student.classes, hidden.device
    # Both buffers and their scratch memory take as much as two chunks.
    scratch = scratch_rows(chunk_rows, classes, dtype, terms.temperature, device, teacher.dtype)
    size, part = chunk_sizes(count, 2 * chunk_rows - scratch, _TEACHER_PARTS if hidden.is_cuda else 1)
    (weight, bias), (teacher_weight, teacher_bias) = student.used, teacher.used
    # A logit is -inf where its bias is.
    ruled_out = bias is not None or teacher_bias is not None
    # The gradient for the soft logits is T (p - q). At T > 1 it is scaled up less, or T * 1024 would come close to
    # float16's maximum of 65,504.
    lift = _FLOAT16_LIFT / max(1.0, terms.temperature) if dtype == torch.float16 else 1.0
    # `kd_rows_` always multiplies by T². Without scale_by_temperature this divides it out again.
    soft_factor = terms.factor / terms.temperature**2

    # (size, classes) and (part, classes), allocated once. Otherwise the allocator would hold two of each between
    # chunks.
    logits = torch.empty(size, classes, dtype=dtype, device=device)
    teacher_logits = torch.empty(part, classes, dtype=teacher.dtype, device=device)
    # One loss per row, summed at the end: a running float32 sum over many chunks would lose precision.
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
            # `rows` is on the student's device. A teacher on another device is indexed there, so that only these rows
            # are transferred.
            some_there = some if isinstance(some, slice) else some.to(teacher_hidden.device)
            product(teacher_hidden[some_there].to(teacher.dtype), teacher_weight, teacher_bias, theirs)
            # Returns the rows' losses, T² KL and CE, and overwrites the logits z with the total's gradient,
            # soft_weight T (softmax(z/T) - softmax(t/T)) + hard_weight (softmax(z) - onehot) for the forward KL
            losses[0, there], losses[1, there] = kd_rows_(
                ours, theirs, None if labels is None or not terms.hard_weight else labels[some], terms.temperature,
                terms.soft_weight * soft_factor * lift, terms.hard_weight * lift, terms.divergence, terms.beta,
                student.softcap, teacher.softcap, ruled_out,
            )  # fmt: skip
        # logits[:n] now holds ∂total/∂z times `lift`. The products divide `lift` out before rounding.
        gradients.add(index, logits[:n], inputs, weight, 1 / lift)
    # Free both buffers before summing and casting the gradients.
    del logits, teacher_logits
    soft, hard = losses.sum(-1)
    out = arithmetic_dtype(dtype, 1.0)
    return (soft * soft_factor).to(out), hard.to(out), gradients.values()


class HeadGradients:
    """Gradients for input, weight and bias of ``z = h Wᵀ + b``, computed chunk by chunk from the gradient ``∂z``.

    For h it is ``∂z W``, for W the sum of ``∂zᵀ h`` over chunks, for b the sum of ``∂z`` over rows. `needs` selects
    which are computed.
    """

    def __init__(
        self, hidden: Tensor, head: Head, needs: tuple[bool, bool, bool], dtype: torch.dtype, *, several: bool
    ) -> None:
        # Zeros, because rows that do not count are never written and their gradient is 0.
        self._hidden = torch.zeros_like(hidden, dtype=dtype) if needs[0] else None
        self._weight = WeightGradient(head.weight, head.classes, several) if needs[1] else None
        self._bias, self._classes = None, head.classes
        # Summed over all rows: in half precision the sum would stop growing once addends are below its last bit.
        if needs[2] and head.bias is not None:
            self._bias = torch.zeros_like(head.bias, dtype=torch.promote_types(head.bias.dtype, torch.float32))

    def add(self, rows: Any, grad: Tensor, inputs: Tensor, weight: Tensor, scale: float = 1.0) -> None:
        """Add ``scale`` times the logits' gradient `grad` for some rows with these inputs."""
        if self._hidden is not None:
            self._hidden[rows] = scaled_product(grad, weight, scale).to(self._hidden.dtype)
        if self._weight is not None:
            self._weight.add(grad, inputs, scale)
        if self._bias is not None:
            self._bias[: self._classes].add_(grad.sum(0, dtype=self._bias.dtype), alpha=scale)

    def values(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the three gradients, None for those not needed."""
        return self._hidden, None if self._weight is None else self._weight.value(), self._bias


def even_rows(count: int, most: int) -> int:
    """Return rows per chunk, nearly equal for all: a short last chunk would take almost as long as a full one."""
    chunks = max(1, -(-count // most))
    return max(1, -(-count // chunks))


def chunk_sizes(count: int, budget: int, parts: int) -> tuple[int, int]:
    """Return how many rows of the student's and of the teacher's logits fit into a budget of rows."""
    # Multiples of eight, so that parts of any row length start at an aligned vector of eight numbers.
    most = (budget - 8) * parts // (parts + 1)
    if parts == 1 or count <= budget // 2 or most < 8 * parts:
        size = even_rows(count, max(1, budget // 2))
        return size, size
    size = even_rows(count, most)
    return size, -(-size // (8 * parts)) * 8


def product(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write ``rows weightᵀ + bias`` to `out`."""
    if rows.device != out.device:
        out.copy_(F.linear(rows, weight, bias))
    elif bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


def scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return ``scale * left right``."""
    # Scaled before rounding to float16, where the scaled-up product could overflow.
    return left @ right if scale == 1.0 else torch.addmm(left.new_zeros(1), left, right, beta=0, alpha=scale)


def adds_wider(factor: Tensor, total: Tensor) -> bool:
    """Return True if a GEMM of half factors can add to a float32 sum. Only cuBLAS supports this."""
    half = factor.dtype in (torch.float16, torch.bfloat16) and total.dtype == torch.float32
    # Before torch 2.11 the sum had to have the factors' dtype.
    return half and factor.is_cuda and torch.version.hip is None and torch.__version__ >= "2.11"


class WeightGradient:
    """Sums the weight's gradient over chunks, in float32 if the weight's dtype would lose small addends."""

    def __init__(self, weight: Tensor, classes: int, several: bool) -> None:
        self._classes = classes
        # The GEMM already sums one chunk in float32; only several chunks need a wider sum.
        dtype = torch.promote_types(weight.dtype, torch.float32) if several else weight.dtype
        self._sum = torch.empty_like(weight, dtype=dtype)
        # Classes beyond vocab_size get no gradient, and `empty_like` may hold NaN there.
        self._sum[classes:] = 0
        self._begun = False

    def add(self, grad: Tensor, inputs: Tensor, scale: float) -> None:
        """Add ``scale * gradᵀ inputs``."""
        total = self._sum[: self._classes]
        # Same dtype: the GEMM adds in place (beta 1) without a temporary of the weight's size.
        # beta 0 ignores the previous content
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
