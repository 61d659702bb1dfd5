"""The three products of a layer as operators of torch: a compiled graph calls them as they stand.

Forward and backward of a layer count products and remember magnitudes, which a compiled graph would do once, when it
is traced. An operator is opaque to the compiler, so what it does besides its result happens on every call. Operators
take no objects, so a layer is named by a number, and that in a tensor: a plain number would be a constant of the
graph, and blocks of one shape, compiled one by one, would each need a graph of their own.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from shared_core.errors import TrainingError
from shared_core.fp8.arithmetic import Arithmetic, Operand, tokens_last
from shared_core.fp8.scaling import NonFiniteWatch

PRODUCTS = ("forward", "grad_input", "grad_weight")
_LAYERS: weakref.WeakValueDictionary[int, LayerFp8] = weakref.WeakValueDictionary()
_HANDLES = itertools.count()
# products count on the host, which a replayed CUDA graph would not do
_TAGS = (torch.Tag.cudagraph_unsafe,)


class LayerFp8:
    """What a layer needs beside its weight: its recipe, a number that names it, counts of its products.

    Args:
        arithmetic: What the recipe does to operands.
        watch: Says whether steps are being observed; None without a session.
    """

    def __init__(self, arithmetic: Arithmetic, watch: NonFiniteWatch | None = None) -> None:
        self.arithmetic, self.watch = arithmetic, watch
        self.scaled: Counter[str] = Counter()
        self.emulated: Counter[str] = Counter()
        self._register()

    def _register(self) -> None:
        number = next(_HANDLES)
        self.handle = torch.tensor(number, device="cpu")  # on the CPU, where reading it waits for nothing
        _LAYERS[number] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the attributes of the layer that was copied or pickled, under a number of its own."""
        self.__dict__.update(state)
        self._register()

    def multiply(self, product: str, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        """Return ``a @ b.t()`` in `dtype` and count it; what is not observed is not remembered."""
        value, is_scaled_mm = self.arithmetic.multiply(self._observed(a), self._observed(b), dtype)
        (self.scaled if is_scaled_mm else self.emulated)[product] += 1
        return value

    def both_layouts(self, operand: Operand) -> tuple[Operand, Operand]:
        """Return a matrix and its transpose as operands of two products; see `Arithmetic`."""
        return self.arithmetic.both_layouts(self._observed(operand))

    def _observed(self, operand: Operand) -> Operand:
        return operand._replace(record=operand.record and self.watch is not None and self.watch.observing)


def _layer(handle: Tensor) -> LayerFp8:
    layer = _LAYERS.get(int(handle))
    if layer is None:
        raise TrainingError(
            "fp8: the layer of this graph must still multiply in FP8; run backward before it is changed"
        )
    return layer


@torch.library.custom_op("efftrain::fp8_linear", mutates_args=(), tags=_TAGS)
def fp8_linear(x: Tensor, weight: Tensor, handle: Tensor, record: bool) -> Tensor:
    """Return ``x wᵀ`` of the layer with this number, in the type of x.

    Args:
        x: (tokens, in_features).
        weight: (out_features, in_features).
        handle: Names the layer: int64, no axes, on the CPU.
        record: Whether this forward is one of training.
    """
    if x.shape[0] == 0:
        return x.new_empty(0, weight.shape[0])
    a, b = Operand(x, "input", record), Operand(weight, "weight", record)
    return _layer(handle).multiply("forward", a, b, x.dtype)


@torch.library.custom_op("efftrain::fp8_grad_input", mutates_args=(), tags=_TAGS)
def fp8_grad_input(gradient: Tensor, weight: Tensor, handle: Tensor, record: bool) -> Tensor:
    """Return ``g w``, the gradient of the input, in the type of g: (tokens, out_features)."""
    if gradient.shape[0] == 0:
        return gradient.new_empty(0, weight.shape[1])
    a, b = Operand(gradient, "gradient", record), Operand(weight.t(), "weight", False)
    return _layer(handle).multiply("grad_input", a, b, gradient.dtype)


@torch.library.custom_op("efftrain::fp8_grad_weight", mutates_args=(), tags=_TAGS)
def fp8_grad_weight(gradient: Tensor, x: Tensor, handle: Tensor, record: bool, dtype: torch.dtype) -> Tensor:
    """Return ``gᵀ x``, the gradient of the weight, in `dtype`."""
    if gradient.shape[0] == 0:
        return gradient.new_zeros(gradient.shape[1], x.shape[1], dtype=dtype)
    a, b = Operand(tokens_last(gradient), "gradient", record), Operand(tokens_last(x), "input", False)
    return _layer(handle).multiply("grad_weight", a, b, dtype)


@torch.library.custom_op("efftrain::fp8_grads", mutates_args=(), tags=_TAGS)
def fp8_grads(gradient: Tensor, x: Tensor, weight: Tensor, handle: Tensor, record: bool) -> tuple[Tensor, Tensor]:
    """Return `fp8_grad_input` and `fp8_grad_weight` in the weight's type, the gradient cast for both at once."""
    if gradient.shape[0] == 0:
        return gradient.new_empty(0, weight.shape[1]), weight.new_zeros(weight.shape)
    layer = _layer(handle)
    a, b = layer.both_layouts(Operand(gradient, "gradient", record))
    grad_input = layer.multiply("grad_input", a, Operand(weight.t(), "weight", False), gradient.dtype)
    return grad_input, layer.multiply("grad_weight", b, Operand(tokens_last(x), "input", False), weight.dtype)


@fp8_linear.register_fake
def _(x: Tensor, weight: Tensor, handle: Tensor, record: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@fp8_grad_input.register_fake
def _(gradient: Tensor, weight: Tensor, handle: Tensor, record: bool) -> Tensor:
    return gradient.new_empty(gradient.shape[0], weight.shape[1])


@fp8_grad_weight.register_fake
def _(gradient: Tensor, x: Tensor, handle: Tensor, record: bool, dtype: torch.dtype) -> Tensor:
    return gradient.new_empty(gradient.shape[1], x.shape[1], dtype=dtype)


@fp8_grads.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor, handle: Tensor, record: bool) -> tuple[Tensor, Tensor]:
    return gradient.new_empty(gradient.shape[0], weight.shape[1]), weight.new_empty(weight.shape)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
    x, weight, handle, ctx.record = inputs
    ctx.save_for_backward(x, weight, handle)
    # an eager graph may outlive the model it came from; while a graph is traced there is no number to read
    ctx.layer = _LAYERS.get(int(handle)) if type(handle) is Tensor else None


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, handle = ctx.saved_tensors
    if ctx.needs_input_grad[0] and ctx.needs_input_grad[1]:
        return *fp8_grads(gradient, x, weight, handle, ctx.record), None, None
    grad_input = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_input = fp8_grad_input(gradient, weight, handle, ctx.record)
    if ctx.needs_input_grad[1]:
        grad_weight = fp8_grad_weight(gradient, x, handle, ctx.record, weight.dtype)
    return grad_input, grad_weight, None, None


fp8_linear.register_autograd(_backward, setup_context=_setup_context)
