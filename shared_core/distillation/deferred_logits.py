"""Distillation of language models without ever computing all logits at once (`distill.chunked`).

Instead of logits, a head returns a tensor without memory. It remembers the head, its input, and later operations.
Between head and loss, models and trainers cast logits, slice and reshape rows (transformers: ``logits.float()``, then
``view(-1, classes)`` before `cross_entropy`), scale and cap them (Cohere, Gemma). A subclass of `Tensor` sees each of
these calls through ``__torch_function__``, so no model's code needs to be replaced.
"""

from __future__ import annotations

import copyreg
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_core.distillation.chunked_autograd import product_dtype, rows_in_budget
from shared_core.distillation.chunked_loss import (
    CrossEntropyTerms,
    checked_head,
    chunked_cross_entropy_rows,
    chunked_kd_sum,
)
from shared_core.distillation.comparison import Compared, Comparison, StudentBatch
from shared_core.distillation.config import DistillConfig
from shared_core.distillation.forward_capture import trains
from shared_core.distillation.outputs import LOGITS, Outputs, find_logits
from shared_core.distillation.task_gradient import hard_term, routed, without_factors
from shared_core.distillation.teachers import Teachers
from shared_core.distillation.unlabeled import IGNORED
from shared_core.errors import ConfigError, TrainingError

# Calls that only read metadata, which a wrapper subclass has. All of these are matched by ``func.__name__``.
_TOLD = ("__get__", "size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "__len__", "__hash__",
         "is_contiguous", "get_device")  # fmt: skip
# Casts and copies. `detach` is among them: it cuts the graph at the head's input.
_AS_THEY_ARE = ("contiguous", "clone", "float", "double", "half", "bfloat16", "to", "type", "detach")
# Reshapes may move rows but must keep the last dimension, the classes.
_SHAPES = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze")
_TASK = "efftrain: a cross-entropy's logits, rows and labels"
_TIMES, _OVER, _PLUS = ("mul", "multiply", "imul"), ("div", "divide", "true_divide", "itruediv"), ("add", "iadd")


@dataclass(frozen=True)
class Made:
    """How the logits follow from the head's input ``h``: ``factor (h Wᵀ) + bias``, optionally ``outer tanh(...)``."""

    hidden: Tensor
    """``(..., features)``."""
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    """Factor of the product."""
    rows: Tensor | None = None
    """Row numbers of `hidden`, int64 in the logits' shape without classes; None for all rows in order."""
    factor: float = 1.0
    outer: float | None = None

    def times(self, number: float) -> Made:
        """Return the logits times a number."""
        if self.outer is not None:
            return replace(self, outer=self.outer * number)
        return replace(self, factor=self.factor * number, bias=None if self.bias is None else self.bias * number)

    def plus(self, vector: Tensor) -> Made:
        """Return the logits plus one number per class."""
        vector = vector.reshape(-1)
        return replace(self, bias=vector if self.bias is None else self.bias + vector)

    def operands(self) -> tuple[Tensor, tuple[Tensor, Tensor | None], float | None]:
        """Return the input, head and soft-cap ``c`` of ``c tanh((h Wᵀ + b) / c)`` that give these logits."""
        # outer tanh(f h Wᵀ + b) = c tanh((f c h Wᵀ + c b) / c) with c = outer.
        outer = 1.0 if self.outer is None else self.outer
        factor, bias = self.factor * outer, self.bias
        # 1/c times c is not exactly 1. Without the tolerance h would be copied and rounded needlessly.
        hidden = self.hidden if math.isclose(factor, 1.0, rel_tol=1e-9) else self.hidden * factor
        if self.rows is not None:
            # Rows are gathered only here: repeated indexing is merged into one int64 index.
            hidden = hidden.reshape(-1, hidden.shape[-1])[self.rows]
        return hidden, (self.weight, bias if bias is None or outer == 1.0 else bias * outer), self.outer


class DeferredLogits(Tensor):
    """A head's output instead of logits: it has their shape ``(..., classes)``, dtype and device, but no values.

    It remembers casts, reshapes, row indexing, scalars, class biases and soft-caps. Cross-entropy is computed in chunks
    of rows. Anything else raises, because it would need the values.
    """

    made: Made
    budget: int | None
    """Bytes of logits that may exist at a time; see `rows_in_budget`."""
    channels_first: bool
    """True if the classes are in dimension 1."""

    @staticmethod
    def __new__(
        cls,
        made: Made,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        budget: int | None = None,
        channels_first: bool = False,
    ) -> DeferredLogits:
        """Create the tensor without allocating memory."""
        # A wrapper subclass has sizes, strides and a device, but no storage.
        logits: DeferredLogits = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=dtype, device=made.hidden.device
        )
        logits.made, logits.budget, logits.channels_first = made, budget, channels_first
        return logits

    def __repr__(self) -> str:  # type: ignore[override]
        """Return shape and dtype; there are no values to show."""
        return f"DeferredLogits({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Record operations that need no values; raise for others."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        if name in _TOLD:
            # Without this guard the call would recurse into this function.
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        # ``scalar_tensor * logits``: the deferred operand goes first.
        if name in _TIMES and len(args) == 2 and not isinstance(args[0], cls):
            args = args[::-1]
        logits = args[0] if args else kwargs.get("input")
        if not isinstance(logits, cls):
            _needs_numbers(name)
        if func is F.cross_entropy:
            return logits._cross_entropy(*args[1:], **{key: item for key, item in kwargs.items() if key != "input"})
        # ``__imul__`` becomes ``imul``, ``mul_`` ``mul``, ``__getitem__`` ``getitem``.
        plain = name.strip("_")
        made = logits._followed(plain, args[1:]) if not kwargs else None
        if made is not None:
            if name == f"{plain}_" or plain.startswith("i"):  # in place
                logits.made = made
                return logits
            return logits._like(made)
        if plain in _AS_THEY_ARE:
            # torch tells which dtype `to(...)` gives. The cast itself is skipped: softmaxes are float32 anyway.
            dtype = func(torch.empty(0, dtype=logits.dtype, device=logits.device), *args[1:], **kwargs).dtype
            hidden = logits.made.hidden
            return logits._like(replace(logits.made, hidden=hidden.detach() if plain == "detach" else hidden), dtype)
        if plain in _SHAPES and not logits.channels_first:
            # The meta device infers shapes, including -1, without allocating.
            like = func(torch.empty(logits.shape, dtype=logits.dtype, device="meta"), *args[1:], **kwargs)
            if like.shape[-1:] == logits.shape[-1:] and like.dtype == logits.dtype:
                return logits._like(logits.made, shape=tuple(like.shape))
        if plain in ("transpose", "swapaxes", "permute", "movedim") and not logits.channels_first:
            # Each dimension gets a unique size (2, 3, ...), so the result's shape shows the permutation.
            sizes = tuple(range(2, 2 + logits.ndim))
            to = tuple(func(torch.empty(sizes, device="meta"), *args[1:], **kwargs).shape)
            # Only (N, ..., C) to (N, C, ...) is supported, which `cross_entropy` needs above two dimensions.
            if to == (sizes[0], sizes[-1], *sizes[1:-1]):
                shape = logits.shape[0], logits.shape[-1], *logits.shape[1:-1]
                return cls(logits.made, shape, logits.dtype, logits.budget, True)
        if plain == "getitem" and not logits.channels_first:
            return logits._chosen(args[1])
        return _needs_numbers(name)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raise: there are no values."""
        _needs_numbers(str(func))

    def _like(
        self, made: Made, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None
    ) -> DeferredLogits:
        if shape is not None and made.rows is not None:
            # The row index has the logits' shape without classes, so reshape it in the same way.
            made = replace(made, rows=made.rows.reshape(shape[:-1]))
        return DeferredLogits(made, shape or tuple(self.shape), dtype or self.dtype, self.budget, self.channels_first)

    def _followed(self, name: str, args: tuple[Any, ...]) -> Made | None:
        """Return the logits' formula after arithmetic, None if the operation is not supported."""
        made = self.made
        # tanh of logits divided by c: the inner half of the cap. `times` later adds c as `outer`.
        if name == "tanh" and made.outer is None:
            return replace(made, outer=1.0)
        if name not in (*_TIMES, *_OVER, *_PLUS) or len(args) != 1:
            return None
        (other,) = args
        # A sum is supported if it is a bias: one number per class, before the cap.
        if name in _PLUS:
            fits = isinstance(other, Tensor) and other.numel() == other.shape[-1:].numel() == self.shape[-1]
            return made.plus(other) if fits and made.outer is None and not self.channels_first else None
        # A learned scale (requires_grad) is not supported: these logits cannot give its gradient.
        if isinstance(other, Tensor) and other.numel() == 1 and not other.requires_grad:
            other = float(other)
        if not isinstance(other, int | float):
            return None
        return made.times(other if name in _TIMES else 1.0 / other)

    def _chosen(self, index: Any) -> DeferredLogits:
        lead = tuple(self.shape[:-1])
        parts = list(index) if isinstance(index, tuple) else [index]
        # Dimensions that the index consumes: a bool mask its own number, None and `...` none, all others one.
        used = sum(part.ndim if isinstance(part, Tensor) and part.dtype == torch.bool else 1
                   for part in parts if part is not None and part is not Ellipsis)  # fmt: skip
        from_the_end = parts[-1] is not Ellipsis and any(part is Ellipsis for part in parts)
        # An index that reaches the last dimension must take all classes (``[..., :]``).
        if used > len(lead) or from_the_end:
            if not (isinstance(parts[-1], slice) and parts[-1] == slice(None)):
                _needs_numbers("indexing of classes")
            parts.pop()
        rows = self.made.rows
        if rows is None:
            # The index is applied to row numbers in the logits' shape, so torch's own indexing rules apply.
            rows = torch.arange(math.prod(lead), device=self.made.hidden.device).reshape(lead)
        rows = rows[tuple(parts)]
        return self._like(replace(self.made, rows=rows), shape=(*rows.shape, self.shape[-1]))

    def _cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        lead = tuple(self.shape[:1] + self.shape[2:]) if self.channels_first else tuple(self.shape[:-1])
        # Targets that are probabilities would need all classes of a row.
        if target.is_floating_point() or (len(lead) > 1 and not self.channels_first) or tuple(target.shape) != lead:
            rule = f"class indices, one per row of the logits {lead}, got {target.dtype} {tuple(target.shape)}"
            remedy = "flatten both to (rows, classes) and (rows,)"
            raise ConfigError("distill", f"with chunked, cross_entropy's target must be {rule}", remedy)
        if size_average is not None or reduce is not None:
            _needs_numbers("cross_entropy with size_average or reduce instead of reduction")
        hidden, head, softcap = self.made.operands()
        checked = checked_head("student", hidden, head, softcap)
        target = target.reshape(-1).to(hidden.device)
        # Ignored rows are dropped before the product: they cost nothing, and NaN in them cannot reach a sum.
        kept = (target != ignore_index).nonzero().squeeze(-1)
        rows, target = hidden.reshape(-1, hidden.shape[-1])[kept], target[kept]
        limit = rows_in_budget(checked.classes, checked.dtype, hidden.device, self.budget)
        losses = chunked_cross_entropy_rows(rows, checked, target, CrossEntropyTerms(weight, label_smoothing), limit)
        if losses.grad_fn is not None and weight is None and not label_smoothing and not self.channels_first:
            cast(Any, losses.grad_fn).metadata[_TASK] = self.made, kept, target
        if reduction == "none":
            # torch's "none" gives ignored rows a loss of 0.
            return losses.new_zeros(math.prod(lead)).index_put((kept,), losses).reshape(lead)
        total = losses.sum()
        if reduction == "sum":
            return total
        # 0 / 0 = NaN if every target is ignored, like torch's mean.
        return total / (len(target) if weight is None else weight[target].sum())


def cross_entropy_of(loss: Tensor, logits: DeferredLogits) -> tuple[Tensor, Tensor] | None:
    """Return what `task_gradient.cross_entropy_of` returns, for logits that are not computed."""
    node, weight = without_factors(loss)
    if node is None or node.name() != "SumBackward0" or (said := node.next_functions[0][0].metadata.get(_TASK)) is None:
        return None
    (made, kept, target), whole = said, logits.made
    same = all(getattr(made, name) is getattr(whole, name) for name in ("hidden", "weight", "bias"))
    if not same or whole.rows is not None or (made.factor, made.outer) != (whole.factor, whole.outer):
        return None
    labels = target.new_full((logits.shape[:-1].numel(),), -1)
    labels[kept if made.rows is None else made.rows.flatten()[kept]] = target
    # A row that was indexed twice has two terms.
    twice = made.rows is not None and int((labels >= 0).sum()) != len(target)
    return None if twice else (labels, weight)


def _needs_numbers(what: str) -> NoReturn:
    raise TrainingError(
        "distill",
        f"{what} needs logits, which training with distill.chunked does not compute",
        "compute metrics in evaluation, use torch's cross_entropy, or switch distill.chunked off",
    )


class DeferringLinear(nn.Linear):
    """`torch.nn.Linear` that skips its product when `when` returns True. Copies and pickles are plain `nn.Linear`."""

    when: Literal["never", "training", "always"]
    budget: int | None

    def forward(self, input: Tensor) -> Tensor:
        """Return logits or `DeferredLogits`."""
        # Dynamo cannot trace a wrapper subclass that refuses dispatch, and evaluation needs real logits.
        if torch.compiler.is_compiling() or self.when == "never" or (self.when == "training" and not trains(self)):
            return super().forward(input)
        dtype = product_dtype(input, self.weight)
        made = Made(input, self.weight, self.bias, dtype)
        return DeferredLogits(made, (*input.shape[:-1], self.out_features), dtype, self.budget)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return a plain `nn.Linear`: a copy (an average, a saved model) is not distilled."""
        state = {name: value for name, value in vars(self).items() if name not in ("when", "budget")}
        return copyreg._reconstructor, (nn.Linear, object, None), state  # type: ignore[attr-defined]


def make_deferring(model: nn.Module, whose: str, budget: int | None) -> DeferringLinear:
    """Make a model's output head able to defer its logits, and return it. Parameters and their names do not change."""
    # A wrapper (PEFT, encoder-decoder) and the model inside both return the same head, so count by identity.
    asked = [part.get_output_embeddings for part in model.modules() if hasattr(part, "get_output_embeddings")]
    heads = [*{id(head): head for head in (cast("Any", ask)() for ask in asked) if head is not None}.values()]
    for rule, remedy in _not_deferrable(model, whose, heads):
        raise ConfigError("distill", rule, remedy)
    (head,) = heads
    # Only the class changes: the module object, its parameters, their names and all references stay the same.
    head.__class__ = DeferringLinear
    deferring = cast("DeferringLinear", head)
    deferring.when, deferring.budget = "never", budget
    return deferring


def _not_deferrable(model: nn.Module, whose: str, heads: list[Any]) -> Iterator[tuple[str, str]]:
    if len(heads) != 1:
        yield (
            f"chunked needs one output head from the {whose}'s get_output_embeddings(), got {len(heads)} from "
            f"{type(model).__name__}",
            "define this method to return the nn.Linear that computes the logits",
        )
    # Hooks and replaced forwards (adapters, Accelerate) would see deferred logits, or be skipped by the new class.
    changed = "forward" in vars(heads[0]) or heads[0]._forward_hooks or heads[0]._forward_pre_hooks
    if type(heads[0]) is not nn.Linear or changed:
        yield (
            f"chunked needs the {whose}'s output head to be a plain nn.Linear, got {type(heads[0]).__name__}"
            f"{' with hooks or a replaced forward' if changed else ''}",
            "exclude the head from adapters, quantization and device maps, or switch chunked off",
        )
    if any(getattr(part, "_compiled_call_impl", None) or hasattr(part, "_orig_mod") for part in model.modules()):
        yield f"chunked must run in eager mode, got a compiled {whose}", "do not use torch.compile"


def make_stock(head: DeferringLinear) -> None:
    """Restore a head's class."""
    if type(head) is DeferringLinear:
        head.__class__ = nn.Linear  # type: ignore[assignment]
        del head.when, head.budget


class ChunkedComparison(Comparison):
    """Compares models using the inputs of their heads, and computes the task's cross-entropy in chunks too.

    A training step multiplies with the student's head once for the value of the task loss and once for the gradient of
    both terms, which is then kept until backward. A task loss that is more than the cross-entropy of these logits needs
    its own gradient and product. The logits in memory never exceed the budget.
    """

    def __init__(
        self, config: DistillConfig, teachers: Teachers, report: Mapping[str, Any], student: nn.Module
    ) -> None:
        super().__init__(config, teachers, report)
        self._budget = None if config.budget_mib is None else int(config.budget_mib * 2**20)
        self._student = make_deferring(student, "student", self._budget)
        try:
            self._teacher = make_deferring(teachers.modules[0], "teacher", self._budget)
        except Exception:
            # If the teacher's head is refused, the student's head must be restored.
            make_stock(self._student)
            raise

    def activate(self, active: bool) -> None:
        """Switch whether the student's head skips its product in training forwards."""
        self._student.when = "training" if active else "never"

    def compare(self, batch: StudentBatch) -> Compared:
        """Return the divergence from the teacher."""
        config = self.config
        logits = _deferred(find_logits(batch.forward.output, config.logits, "student"), "student")
        mask = batch.counted(logits, of_classes=True)
        # The teacher runs in eval mode, so its head cannot check for training mode.
        self._teacher.when = "always"
        try:
            (answer,) = self._targets(batch, Outputs(LOGITS, (logits,)), of_classes=True)
        finally:
            self._teacher.when = "never"
        target = _deferred(answer.parts[0], "teacher")
        ours, theirs = _operands(logits), _operands(target)
        # `rows_in_budget` assumes two buffers of one dtype, but student and teacher may differ under autocast.
        wider = max(logits.made.dtype, target.made.dtype, key=lambda dtype: dtype.itemsize)
        rows = rows_in_budget(logits.shape[-1], wider, ours[0].device, self._budget)
        share, labels = self._task(batch, logits, mask)
        if labels is not None and mask is None:
            mask = torch.ones_like(labels, dtype=torch.bool)  # None would mean the labeled rows
        # Heads over one tokenizer may be padded differently: vocab_size cuts both to the shared classes.
        sums = chunked_kd_sum(
            *ours[:2], *theirs[:2], softcap=(ours[2], theirs[2]), temperature=batch.temperature, mask=mask,
            divergence=config.divergence, beta=config.beta, scale_by_temperature=config.scale_by_temperature,
            vocab_size=config.vocab_size, chunk_rows=rows, alpha=share, labels=labels,
        )  # fmt: skip
        self.report |= {
            "logits": f"of at most {2 * rows} positions at a time, student's and teacher's together, never of all",
            "chunk_rows": rows,
            "logits_mib": round(2 * rows * logits.shape[-1] * wider.itemsize / 2**20, 1),
        }
        if not share:
            return Compared(sums.total, sums.rows, mask)
        return Compared(routed(sums.soft, sums.total, 1 / (1 - share)), sums.rows, mask, with_task=True)

    def _task(self, batch: StudentBatch, logits: DeferredLogits, mask: Tensor | None) -> tuple[float, Tensor | None]:
        """Return the cross-entropy's weight in one pass for both terms, and its labels; 0 if each needs its own."""
        if self.config.vocab_size not in (None, logits.shape[-1]):
            return 0.0, None
        if batch.task is not None:
            found = hard_term(batch.task, cross_entropy_of(batch.task.loss, logits), mask)
            if found is None:
                return 0.0, None
            labels = found.labels.masked_fill(found.labels < 0, IGNORED).view(logits.shape[:-1])
            return found.ratio / (1 + found.ratio), labels
        if batch.task_share is None or mask is None or not batch.causal or batch.unlabeled is not None:
            return 0.0, None
        labels = F.pad(batch.labels[:, 1:], (0, 1), value=IGNORED)
        if ((labels != IGNORED) & ~mask.to(labels.device)).any():
            return 0.0, None  # only the task loss counts some rows (padding on the left)
        share = batch.task_share(mask.sum())
        return share, labels if share else None

    def detach(self) -> None:
        """Restore the class of both heads."""
        make_stock(self._student)
        make_stock(self._teacher)


def _deferred(logits: Tensor, whose: str) -> DeferredLogits:
    if isinstance(logits, DeferredLogits) and not logits.channels_first:
        return logits
    raise TrainingError(
        "distill",
        f"with chunked the {whose} must return its head's output unchanged and must not be compiled, got "
        f"{type(logits).__name__} of shape {tuple(logits.shape)}",
        "switch off torch.compile or distill.chunked",
    )


def _operands(logits: DeferredLogits) -> tuple[Tensor, tuple[Tensor, Tensor | None], float | None]:
    hidden, head, softcap = logits.made.operands()
    # Indexed rows lose their leading dimensions, but labels and mask have them, so they are restored.
    return hidden.reshape(*logits.shape[:-1], hidden.shape[-1]), head, softcap
