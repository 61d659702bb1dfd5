"""Layers whose three matrix products run in FP8, and the selection of a model's layers.

A stock layer becomes one by changing its class, and back. Its weight does not change. For the recipes that torchao has,
its float8 training can replace our layers. Only this file of FP8 imports torchao.

The products are torch operators. Forward and backward of a layer count products and record magnitudes, which a
compiled graph would do only once, when it is traced. An operator is opaque to the compiler, so its side effects happen
on every call. Operators take no objects, so a layer is identified by a number in a tensor: a plain number would be
a constant of the graph, and equal blocks that are compiled one by one would each need their own graph.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from eff_kernels._triton.launch import is_plain
from eff_kernels.fp8 import Scaled
from torch import Tensor, nn

from shared_core.errors import CompatibilityError, ConfigError, MatchError, MissingExtraError, TrainingError
from shared_core.fp8 import native as probe
from shared_core.fp8.arithmetic import Arithmetic, CastArithmetic, Operand, ScaledArithmetic, cast_for, tokens_last
from shared_core.fp8.config import Fp8Config
from shared_core.fp8.expert_layers import Fp8Experts, expert_matrices, why_no_experts
from shared_core.fp8.recipes import SharedExponentBank, cast_16bit
from shared_core.fp8.scaling import AmaxBank, NonFiniteWatch, outer_major
from shared_core.modules.attention import OpenAttention, project
from shared_core.modules.like_stock import stock_kind, taking_look_alikes, why_not_float, why_not_stock
from shared_core.modules.made_classes import derived
from shared_core.modules.matching import (
    StackedExperts,
    change_class,
    chosen_modules,
    conv1d_of,
    frozen_helpers,
    is_transformers_conv1d,
    own_class,
    read_past_forward,
)
from shared_core.modules.own_forward import fast_paths_off
from shared_core.modules.weight_views import left_alone, weights_of

PRODUCTS = ("forward", "grad_input", "grad_weight")
_LAYERS: weakref.WeakValueDictionary[int, LayerFp8] = weakref.WeakValueDictionary()
_HANDLES = itertools.count()
# products count on the host, which a replayed CUDA graph would not do
_TAGS = (torch.Tag.cudagraph_unsafe,)


class LayerFp8:
    """State of a layer besides its weight: its recipe, its number, and counts of its products."""

    def __init__(self, arithmetic: Arithmetic, watch: NonFiniteWatch | None = None) -> None:
        self.arithmetic, self.watch = arithmetic, watch
        self.parameter: weakref.ref[Tensor] | None = None
        self.kept: KeptWeight | None = None
        self.scaled: Counter[str] = Counter()
        self.emulated: Counter[str] = Counter()
        self._register()

    def _register(self) -> None:
        number = next(_HANDLES)
        self.handle = torch.tensor(number, device="cpu")  # on the CPU, where reading does not wait
        _LAYERS[number] = self

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes except those that depend on this layer's weight."""
        return self.__dict__ | {"parameter": None, "kept": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the attributes of a copied or pickled layer, with a new number."""
        self.__dict__.update(state)
        self._register()

    def multiply(self, product: str, a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """Return ``a @ b.t() + bias`` in `dtype` and count it. Magnitudes are recorded only while observing."""
        fast = product == "forward"
        value, is_scaled_mm = self.arithmetic.multiply(self._observed(a), self._observed(b), dtype, fast, bias)
        (self.scaled if is_scaled_mm else self.emulated)[product] += 1
        return value

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None, training: bool) -> Tensor:
        """Return ``x wᵀ + b``, multiplied in FP8."""
        kind = input.device.type
        if torch.is_autocast_enabled(kind) and input.dtype != torch.float64:
            input = input.to(torch.get_autocast_dtype(kind))
        # a forward without gradients is an evaluation, a calibration, or will be recomputed with them
        record = training and torch.is_grad_enabled()
        saved_block = self.arithmetic.saved_block if torch.is_grad_enabled() and weight.requires_grad else ()
        x = input.reshape(-1, weight.shape[1])
        bias = None if bias is None else bias.to(x.dtype)
        # torch's scaled matmul adds a bias only to 16-bit results
        within = bias if x.dtype.itemsize == 2 else None
        if _runs_at_once(x, weight):
            y: Tensor = _AtOnce.apply(x, weight, within, self, record, saved_block)  # type: ignore[no-untyped-call]
        else:
            y = fp8_linear(x, weight, within, self.handle, record, list(saved_block))[0]
        if bias is not None and within is None:
            y = y + bias
        return y.view(*input.shape[:-1], weight.shape[0])

    def forward_product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, record: bool, saved_block: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the operator `fp8_linear`."""
        if x.shape[0] == 0:
            return x.new_empty(0, weight.shape[0]), *_empty_codes(x, saved_block)
        a, b = Operand(x, "input", record), Operand(weight, "weight", record)
        a, turned, b = self.forward_operands(a, b, bool(saved_block))
        y = self.multiply("forward", a, b, x.dtype, bias)
        if not saved_block or turned.scaled is None:
            return y, *_empty_codes(x, [])
        codes, scale, block = turned.scaled
        # the same strides on every device, which a compiled graph relies on
        return y, codes.view(torch.uint8), outer_major(scale) if block == (1, 128) else scale

    def grad_input(self, gradient: Tensor, weight: Tensor, record: bool) -> Tensor:
        """Compute the operator `fp8_grad_input`."""
        if gradient.shape[0] == 0:
            return gradient.new_empty(0, weight.shape[1])
        a, b = Operand(gradient, "gradient", record), self._weight_turned(weight)
        return self.multiply("grad_input", a, b, gradient.dtype)

    def grad_weight(
        self, gradient: Tensor, x: Tensor, scale: Tensor | None, record: bool, dtype: torch.dtype
    ) -> Tensor:
        """Compute the operator `fp8_grad_weight`."""
        if gradient.shape[0] == 0:
            return gradient.new_zeros(gradient.shape[1], _in_features(x, scale), dtype=dtype)
        a, b = Operand(tokens_last(gradient), "gradient", record), self._input_turned(x, scale)
        return self.multiply("grad_weight", a, b, dtype)

    def grads(
        self, gradient: Tensor, x: Tensor, scale: Tensor | None, weight: Tensor, record: bool
    ) -> tuple[Tensor, Tensor]:
        """Compute the operator `fp8_grads`."""
        if gradient.shape[0] == 0:
            return gradient.new_empty(0, weight.shape[1]), weight.new_zeros(weight.shape)
        ((a, b),) = self.layouts(Operand(gradient, "gradient", record), both=[True])
        grad_input = self.multiply("grad_input", a, self._weight_turned(weight), gradient.dtype)
        return grad_input, self.multiply("grad_weight", b, self._input_turned(x, scale), weight.dtype)

    def _weight_turned(self, weight: Tensor) -> Operand:
        kept = self.kept_weight(weight, record=False)
        return kept.turned if kept is not None else Operand(weight.t(), "weight", False)

    def _input_turned(self, x: Tensor, scale: Tensor | None) -> Operand:
        if scale is None:
            return Operand(tokens_last(x), "input", False)
        high, wide = self.arithmetic.saved_block
        return Operand(x, "input", False, Scaled(x.view(torch.float8_e4m3fn), scale, (high, wide)))

    def layouts(self, *operands: Operand, both: Sequence[bool]) -> list[tuple[Operand, Operand]]:
        """Return matrices and their transposes as operands of two products; see `Arithmetic`."""
        return self.arithmetic.layouts([self._observed(operand) for operand in operands], both)

    def keep_codes_of(self, weight: Tensor) -> None:
        """Cache the codes of this parameter until it or the watch's `casts` changes, or until `forget_codes`.

        Sharded parameters are not cached: their gathered values change unnoticed, and the codes would be of all shards.
        """
        self.parameter = weakref.ref(weight) if is_plain(weight) and self.arithmetic.saved_block else None

    def forget_codes(self) -> None:
        """Release the codes' memory now, and cast the weight again in the next product."""
        self.kept = None

    def forward_operands(self, x: Operand, weight: Operand, turn: bool) -> tuple[Operand, Operand, Operand]:
        """Return the operands of the forward product: input, its transpose if `turn`, and weight."""
        if (kept := self.kept_weight(weight.matrix, weight.record)) is not None:
            ((a, turned),) = self.layouts(x, both=[turn])
            return a, turned, kept.plain
        self.kept, parameter = None, self._kept_parameter(weight.matrix)
        (a, turned), (b, other) = self.layouts(x, weight, both=[turn, parameter is not None])
        if parameter is not None:
            record = self._observed(weight).record
            self.kept = KeptWeight(weight.matrix.detach(), self._version_of(parameter), record, b, other)
        return a, turned, b

    def kept_weight(self, weight: Tensor, record: bool) -> KeptWeight | None:
        """Return the cached codes of a weight if it has not changed and needs no recording now."""
        kept, parameter = self.kept, self._kept_parameter(weight)
        if kept is None or parameter is None or kept.version != self._version_of(parameter) or record > kept.recorded:
            return None
        before, now = kept.weight, weight
        same = before.data_ptr() == now.data_ptr() and before.dtype == now.dtype and before.shape == now.shape
        return kept if same and before.stride() == now.stride() else None

    def _kept_parameter(self, weight: Tensor) -> Tensor | None:
        # while a session evaluates, weights may be swapped unnoticed
        if self.parameter is None or self.watch is None or not self.watch.observing:
            return None
        parameter = self.parameter()
        if parameter is None or parameter.is_inference() or parameter.data_ptr() != weight.data_ptr():
            return None
        return parameter

    def _version_of(self, parameter: Tensor) -> tuple[int, int]:
        return parameter._version, self.watch.casts if self.watch is not None else 0

    def _observed(self, operand: Operand) -> Operand:
        unobserved = operand.record and (self.watch is None or not self.watch.observing)
        return operand._replace(record=False) if unobserved else operand


class KeptWeight(NamedTuple):
    """The codes of a weight and of its transpose."""

    weight: Tensor
    """Keeps the memory alive, so that no other weight can use its address."""
    version: tuple[int, int]
    """Versions of the parameter and of the watch's `casts`."""
    recorded: bool
    plain: Operand
    turned: Operand


def _layer(handle: Tensor) -> LayerFp8:
    layer = _LAYERS.get(int(handle))
    if layer is None:
        raise TrainingError(
            "fp8", "the layer of this graph no longer multiplies in FP8", "run backward before you change the layer"
        )
    return layer


@torch.library.custom_op("efftrain::fp8_linear", mutates_args=(), tags=_TAGS)
def fp8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, record: bool, saved_block: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``x wᵀ + b`` for the layer with this number, in the type of x, and the codes of xᵀ with their scale.

    Args:
        x: (tokens, in_features).
        weight: (out_features, in_features).
        bias: (out_features,) in the 16-bit type of x, or None.
        handle: Number of the layer: int64 scalar on the CPU.
        record: True in a training forward.
        saved_block: The block of the codes of xᵀ, bytes of shape (in_features, tokens padded with zeros to a multiple
            of 16). Empty: no codes and no scale.
    """
    return _layer(handle).forward_product(x, weight, bias, record, saved_block)


def _empty_codes(x: Tensor, saved_block: Sequence[int]) -> tuple[Tensor, Tensor]:
    (tokens, columns), scale = x.shape, [0]
    if saved_block:
        high, wide = saved_block
        scale = [-(-columns // high) if high else 1, -(-tokens // wide) if wide else 1]
    codes = x.new_empty([columns, tokens + -tokens % 16] if saved_block else [0], dtype=torch.uint8)
    if saved_block == [1, 128]:
        return codes, x.new_empty(scale[::-1], dtype=torch.float32).t()
    if saved_block == [1, 32]:
        return codes, x.new_empty(512 * -(-scale[0] // 128) * -(-scale[1] // 4), dtype=torch.uint8)
    return codes, x.new_empty(scale, dtype=torch.float32)


@torch.library.custom_op("efftrain::fp8_grad_input", mutates_args=(), tags=_TAGS)
def fp8_grad_input(gradient: Tensor, weight: Tensor, handle: Tensor, record: bool) -> Tensor:
    """Return ``g w``, the gradient of the input, in the type of g: (tokens, out_features)."""
    return _layer(handle).grad_input(gradient, weight, record)


@torch.library.custom_op("efftrain::fp8_grad_weight", mutates_args=(), tags=_TAGS)
def fp8_grad_weight(
    gradient: Tensor, x: Tensor, scale: Tensor | None, handle: Tensor, record: bool, dtype: torch.dtype
) -> Tensor:
    """Return ``gᵀ x``, the gradient of the weight, in `dtype`.

    Args:
        gradient: (tokens, out_features).
        x: (tokens, in_features), or with a scale the codes of its transpose, see `fp8_linear`.
        scale: Scale of the codes, or None.
        handle: As in `fp8_linear`.
        record: As in `fp8_linear`.
        dtype: Type of the result.
    """
    return _layer(handle).grad_weight(gradient, x, scale, record, dtype)


@torch.library.custom_op("efftrain::fp8_grads", mutates_args=(), tags=_TAGS)
def fp8_grads(
    gradient: Tensor, x: Tensor, scale: Tensor | None, weight: Tensor, handle: Tensor, record: bool
) -> tuple[Tensor, Tensor]:
    """Return `fp8_grad_input` and `fp8_grad_weight` in the weight's type, with one cast of the gradient for both."""
    return _layer(handle).grads(gradient, x, scale, weight, record)


def _in_features(x: Tensor, scale: Tensor | None) -> int:
    return x.shape[1 if scale is None else 0]


@fp8_linear.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, record: bool, saved_block: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape[0], weight.shape[0]), *_empty_codes(x, saved_block)


@fp8_grad_input.register_fake
def _(gradient: Tensor, weight: Tensor, handle: Tensor, record: bool) -> Tensor:
    return gradient.new_empty(gradient.shape[0], weight.shape[1])


@fp8_grad_weight.register_fake
def _(gradient: Tensor, x: Tensor, scale: Tensor | None, handle: Tensor, record: bool, dtype: torch.dtype) -> Tensor:
    return gradient.new_empty(gradient.shape[1], _in_features(x, scale), dtype=dtype)


@fp8_grads.register_fake
def _(
    gradient: Tensor, x: Tensor, scale: Tensor | None, weight: Tensor, handle: Tensor, record: bool
) -> tuple[Tensor, Tensor]:
    return gradient.new_empty(gradient.shape[0], weight.shape[1]), weight.new_empty(weight.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, _, handle, ctx.record, saved_block = inputs
    _, codes, scale = output
    ctx.mark_non_differentiable(codes, scale)
    ctx.set_materialize_grads(False)
    saved: tuple[Tensor | None, Tensor | None] = (None, None)
    if ctx.needs_input_grad[1]:
        saved = (codes, scale) if saved_block else (x, None)
    ctx.save_for_backward(*saved, weight, handle)
    # an eager graph may outlive its model; while tracing there is no number to read
    ctx.layer = _LAYERS.get(int(handle)) if type(handle) is Tensor else None


def _backward(ctx: Any, gradient: Tensor, *unused: None) -> tuple[Tensor | None, ...]:
    x, scale, weight, handle = ctx.saved_tensors
    grad_bias = gradient.sum(0) if ctx.needs_input_grad[2] else None
    if ctx.needs_input_grad[0] and ctx.needs_input_grad[1]:
        return *fp8_grads(gradient, x, scale, weight, handle, ctx.record), grad_bias, None, None, None
    grad_input = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_input = fp8_grad_input(gradient, weight, handle, ctx.record)
    if ctx.needs_input_grad[1]:
        grad_weight = fp8_grad_weight(gradient, x, scale, handle, ctx.record, weight.dtype)
    return grad_input, grad_weight, grad_bias, None, None, None


fp8_linear.register_autograd(_backward, setup_context=_setup_context)


def _runs_at_once(*tensors: Tensor) -> bool:
    """Return True if no tracing or other dispatch needs to see an operator."""
    return (
        all(map(is_plain, tensors))
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
    )


class _AtOnce(torch.autograd.Function):
    """`fp8_linear` and its gradients without torch's operator dispatch, which takes as long as our own code."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: LayerFp8,
        record: bool,
        saved_block: Sequence[int],
    ) -> Any:
        y, codes, scale = layer.forward_product(x, weight, bias, record, saved_block)
        ctx.layer, ctx.record = layer, record
        saved = ((codes, scale) if saved_block else (x, None)) if ctx.needs_input_grad[1] else (None, None)
        ctx.save_for_backward(*saved, weight)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, weight = ctx.saved_tensors
        of_input, of_weight, of_bias, *_ = ctx.needs_input_grad
        grad_input = grad_weight = None
        if of_input and of_weight:
            grad_input, grad_weight = ctx.layer.grads(gradient, x, scale, weight, ctx.record)
        elif of_input:
            grad_input = ctx.layer.grad_input(gradient, weight, ctx.record)
        elif of_weight:
            grad_weight = ctx.layer.grad_weight(gradient, x, scale, ctx.record, weight.dtype)
        return grad_input, grad_weight, gradient.sum(0) if of_bias else None, None, None, None


class Fp8Layer(nn.Module):
    """A layer whose forward product and both backward products multiply FP8 values.

    ``y = (X̂·Ŵᵀ)·(s_x·s_w) + b`` with ``X̂ = cast(clamp(x/s_x))``, accumulated in float32. dX and dW likewise. The
    weight is an ordinary parameter. The output has the type of the input or of autocast.
    """

    fp8: LayerFp8
    weight: Tensor
    bias: Any

    def forward(self, input: Tensor) -> Tensor:
        """Return ``x wᵀ + b``, multiplied in FP8."""
        return self.fp8.linear(input, self._rows_of_outputs(), self.bias, self.training)

    def _rows_of_outputs(self) -> Tensor:
        return self.weight


class Fp8Linear(Fp8Layer, nn.Linear):
    """`torch.nn.Linear` whose forward product and both backward products multiply FP8 values."""


class _Transposed(Fp8Layer):
    def _rows_of_outputs(self) -> Tensor:
        return self.weight.t()


class Fp8Attention(OpenAttention, Fp8Layer):  # type: ignore[misc]
    """`torch.nn.MultiheadAttention` whose projections multiply FP8 values, with one history of magnitudes.

    The output projection is a layer of its own.
    """

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return the projected query, key and value."""

        def product(x: Tensor, name: str, rows: slice, bias: Tensor | None) -> Tensor:
            return self.fp8.linear(x, getattr(self, name)[rows], bias, self.training)

        return project(self, (query, key, value), product)


@functools.cache
def _fp8_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the FP8 version of a class such as transformers' Conv1D, without importing it."""
    if kind is nn.Linear:
        return Fp8Linear
    bases = {nn.Linear: Fp8Linear, nn.MultiheadAttention: Fp8Attention}
    base = next((ours for stock, ours in bases.items() if issubclass(kind, stock)), _Transposed)
    return derived("Fp8", base, kind, _again)


def _again(kind: type[nn.Module], _: type) -> type[nn.Module]:
    return _fp8_class(kind)  # type: ignore[arg-type]


def matrices_of(module: Any) -> list[Tensor]:
    """Return the weights of one of these layers, or an expert's matrix. Separate projections of attention are three."""
    return [*weights_of(module).values()] if isinstance(module, nn.MultiheadAttention) else [module.weight]


def weight_of(module: Any) -> Tensor:
    """Return the first weight of one of these layers, or an expert's matrix."""
    return matrices_of(module)[0]


def features_of(module: nn.Module, weight: Tensor) -> tuple[int, int]:
    """Return ``in_features`` and ``out_features``. The weight of transformers' Conv1D is (in, out)."""
    first, second = weight.shape
    return (first, second) if is_transformers_conv1d(module) else (second, first)


def swap(module: nn.Module, layer: LayerFp8) -> None:
    """Make a stock layer multiply in FP8. Its parameters and keys stay as they are."""
    stock = own_class(module)
    module.fp8 = layer  # type: ignore[assignment]
    change_class(module, stock, _fp8_class(stock))  # type: ignore[arg-type]


def restore(module: Any) -> None:
    """Restore a layer's stock class. Stock layers stay as they are."""
    if not isinstance(module, nn.Module):
        module.restore()
    elif isinstance(module, Fp8Layer):
        ours = own_class(module)
        change_class(module, ours, ours.__bases__[-1])
        del module.fp8


# attributes that `Float8Linear.from_float` adds to a layer
_ADDED = ("scaling_type_input", "scaling_type_weight", "scaling_type_grad_output", "config", "linear_mm_config")


def swap_to_torchao(module: nn.Linear, config: Fp8Config) -> None:
    """Turn a stock layer into torchao's `Float8Linear` in place. Module, parameters and keys stay.

    Products run on torch's scaled matmul if it agrees with the emulation, else torchao emulates them.
    """
    layer_class, _ = _torchao(config, module.weight.device)
    follow_device(module, config)
    change_class(module, nn.Linear, layer_class)


def follow_device(module: nn.Module, config: Fp8Config) -> None:
    """Update how a layer multiplies for its current device, because trainers move a model after its conversion."""
    layer_class, settings = _torchao(config, weight_of(module).device)
    donor = layer_class.from_float(module, settings)
    vars(module).update({name: vars(donor)[name] for name in _ADDED})


def is_torchao_linear(module: nn.Module) -> bool:
    """Return True if a layer is torchao's, without importing torchao."""
    float8 = sys.modules.get("torchao.float8.float8_linear")
    return float8 is not None and isinstance(module, float8.Float8Linear)


def restore_from_torchao(module: nn.Module) -> None:
    """Undo `swap_to_torchao`. Stock layers stay as they are."""
    if is_torchao_linear(module):
        change_class(module, sys.modules["torchao.float8.float8_linear"].Float8Linear, nn.Linear)
        for name in _ADDED:
            vars(module).pop(name, None)


def _torchao(config: Fp8Config, device: torch.device) -> tuple[Any, Any]:
    try:
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear
    except ImportError as error:
        raise MissingExtraError("fp8: backend=torchao", "torchao", "torchao") from error
    settings = Float8LinearConfig.from_recipe_name(config.recipe)
    reason = probe.why_not_native(config.recipe, config.gradient_dtype, device)
    changes: dict[str, Any] = {"emulate": reason is not None}
    if config.gradient_dtype != settings.cast_config_grad_output.target_dtype:
        gradient = dataclasses.replace(settings.cast_config_grad_output, target_dtype=config.gradient_dtype)
        changes |= {"cast_config_grad_output": gradient, "cast_config_grad_output_for_grad_weight": gradient}
    # the weight's gradient contracts tokens, and tensor cores need multiples of 16; emulation needs no padding
    changes["pad_inner_dim"] = not changes["emulate"]
    return Float8Linear, dataclasses.replace(settings, **changes)


Bank = AmaxBank | SharedExponentBank


@dataclass
class Selection:
    """Layers by name that change to the recipe's format or to 16 bit (`hfp8`), and those left out with reasons."""

    narrow: dict[str, Any] = field(default_factory=dict)
    sixteen_bit: dict[str, nn.Module] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


@taking_look_alikes
def convert_to_fp8(model: nn.Module, config: Fp8Config) -> nn.Module:
    """Make the linear layers of a model multiply in FP8, in place, and return it; for loops without a session.

    Args:
        model: Any model with `nn.Linear` layers, `nn.MultiheadAttention`, or transformers' `Conv1D`, GPT-2's linear
            layer.
        config: The options. `delayed`, `int16` and `hfp8` are not supported, because they need the optimizer steps that
            a session counts.

    Raises:
        ConfigError: If the recipe is not supported.
        MatchError: If no layer is left, or a pattern matches nothing.
        CompatibilityError: If a layer named in ``include`` cannot multiply in FP8.

    Source: Micikevicius et al. 2022, arXiv:2209.05433.

    Example:
        >>> net = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 2))
        >>> [type(layer).__name__ for layer in convert_to_fp8(net, Fp8Config(recipe="tensorwise"))]
        ['Linear', 'Fp8Linear', 'Linear']
    """
    if config.has_session_state:
        raise ConfigError(
            "convert_to_fp8",
            f"recipe {config.recipe!r} needs a history of steps",
            "use a Session, which counts steps",
        )
    for index, module in enumerate(select_layers(model, config).narrow.values()):
        convert_layer(module, config, index=index)
    fast_paths_off(model, (Fp8Layer, Fp8Experts))
    return model


def convert_layer(
    module: Any,
    config: Fp8Config,
    *,
    index: int,
    bank: Bank | None = None,
    watch: NonFiniteWatch | None = None,
    sixteen_bit: bool = False,
) -> LayerFp8 | None:
    """Change one layer in place and return its FP8 state; None with torchao."""
    if config.backend == "torchao" and isinstance(module, nn.Linear):
        swap_to_torchao(module, config)
        return None
    arithmetic: Arithmetic
    if sixteen_bit:
        arithmetic = CastArithmetic(cast_16bit, watch)
    elif config.has_scales:
        arithmetic = ScaledArithmetic(config, bank if isinstance(bank, AmaxBank) else None, index, watch)
    else:
        arithmetic = CastArithmetic(cast_for(config.recipe, index, bank), watch if bank is None else None)
    layer = LayerFp8(arithmetic, watch)
    if isinstance(module, nn.Module):
        swap(module, layer)
    else:
        module.swap(layer)
    return layer


_UNABLE: dict[type[nn.Module], str] = {
    nn.modules.conv._ConvNd: "torch has no FP8 convolution",
    nn.RNNBase: "torch has no FP8 kernel for recurrent layers",
    nn.RNNCellBase: "torch has no FP8 kernel for recurrent layers",
}
"""Class → why its layers stay in high precision."""


def select_layers(model: nn.Module, config: Fp8Config) -> Selection:
    """Return which layers to swap, and why a matched layer stays in high precision.

    A layer that ``include`` names in full, or by ``first`` or ``last``, must support FP8. For all others, the model's
    first and last linear layers are left out, and sizes that tensor cores cannot multiply. With `hfp8` the first and
    last layer run in 16 bit, and with `s2fp8` no layer is left out, as in the papers.
    """
    if any(isinstance(module, Fp8Layer | Fp8Experts) or is_torchao_linear(module) for module in model.modules()):
        raise CompatibilityError("fp8", "the model already has FP8 layers", "detach or finish the earlier run first")
    kinds: tuple[type[nn.Module], ...] = (nn.Linear, nn.MultiheadAttention, *conv1d_of(model))
    matched = chosen_modules(config, model, (*kinds, StackedExperts), where="fp8")
    helpers = {} if config.include else frozen_helpers(model)
    able = [module for module in model.modules() if isinstance(module, kinds) and id(module) not in helpers]
    ends, readers = {"first": able[0], "last": able[-1]}, read_past_forward(model)
    found, every = Selection(left_out=left_alone(model, _UNABLE)), config.recipe == "s2fp8"
    for match in matched:
        name, module, stack = match.names[-1], match.module, match.parameter
        named = not {*match.names}.isdisjoint(config.include) or any(
            module is ends.get(pattern) for pattern in config.include
        )
        place = next((place for place, end in ends.items() if end is module), None)
        torchao = config.backend == "torchao"
        reason = why_no_experts(module, stack, torchao) if stack else _why_no_linear(name, module, config)
        reason = reason or helpers.get(id(module))
        if reason is None and not stack:
            if place and not named and config.recipe == "hfp8":
                found.sixteen_bit[name] = module
                continue
            reason = None if every else _why_odd_size(module)
        if reason is None and id(module) in readers:
            reason = f"{readers[id(module)]}, which bypasses FP8 products"
        if named and reason is not None:
            raise CompatibilityError(
                "fp8", f"include must name only layers that can multiply in FP8, not {name}: {reason}"
            )
        if reason is None and place and not (named or every):
            reason = f"the model's {place} linear layer; name it in include to use FP8"
        if reason is None:
            found.narrow |= expert_matrices(match.name, module, stack) if stack else {name: module}
        else:
            found.left_out[name] = reason
    if not found.narrow:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(found.left_out.items())[:3])
        raise MatchError("fp8", "must match at least one layer that can multiply in FP8", reasons)
    return found


def _why_no_linear(name: str, module: nn.Module, config: Fp8Config) -> str | None:
    if any(part.startswith("lora_") for part in name.split(".")):
        return "a LoRA adapter, which is small and trains in high precision"
    if stock_kind(own_class(module)) is None:
        return why_not_stock(module)
    if config.backend == "torchao" and own_class(module) is not nn.Linear:
        return "torchao supports only nn.Linear; leave backend out"
    return why_not_float(matrices_of(module))


def _why_odd_size(module: nn.Module) -> str | None:
    for weight in matrices_of(module):
        for side, size in zip(("in_features", "out_features"), features_of(module, weight), strict=True):
            if size % 16:
                return f"{side} must be a multiple of 16 for FP8 tensor cores, got {size}"
    return None
