"""Affine quantization without checks, for hot paths: scales, codes, fake quantization and its gradient.

Nothing here reads a value on the host, so nothing waits for the device. Scales divide: ``code = x / scale``. On CUDA
the operations are custom ops without a gradient. The functions that call them define it.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, TypeVar

import torch
from torch import Tensor

from eff_kernels._triton.launch import directly, on_eager_cuda

_Function = TypeVar("_Function", bound=type[torch.autograd.Function])


def with_signature(function: _Function) -> _Function:
    """Store an autograd function's signature, which torch otherwise inspects in every call with a `setup_context`."""
    forward: Any = function.forward
    forward.__signature__ = inspect.signature(forward)
    return function


def grid_on_triton(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, noise: Tensor | None = None, grad: Tensor | None = None
) -> bool:
    """Return True if `round_to_grid` supports these, or with `grad` `grid_gradients`, which has no gradient itself.

    Example:
        >>> grid_on_triton(torch.zeros(2), torch.tensor(1.0), None)
        False
    """
    return (
        on_eager_cuda(x, scale, zero_point, noise, grad)
        and (grad is None or not torch.is_grad_enabled())
        and scale.dtype == torch.float32
        and _grid(x, scale) != (0, 0)
        and (zero_point is None or zero_point.shape in (scale.shape, ()))
    )


def _grid(x: Tensor, scale: Tensor) -> tuple[int, int]:
    """Return rows and columns of `x` with one scale per row; (0, 0) if there is no such view for the kernels."""
    # One scale: any view works, so use one long row.
    if scale.numel() == 1 and scale.dim() <= x.dim():
        return 1, x.numel()
    axes = [dim for dim, size in enumerate(scale.shape) if size != 1]
    # One axis with scales: rows are all axes up to it, columns those after it.
    if scale.dim() != x.dim() or len(axes) != 1 or scale.shape[axes[0]] != x.shape[axes[0]]:
        return 0, 0
    columns = math.prod(x.shape[axes[0] + 1 :])
    rows = x.numel() // columns
    # counted in 32 bits
    return (rows, columns) if rows < 2**31 else (0, 0)


def _dense(x: Tensor, scale: Tensor) -> Tensor:
    """Return `x` without gaps in memory, in any order for a single scale."""
    lies_dense = scale.numel() == 1 and x.is_contiguous(memory_format=torch.channels_last)
    return x if lies_dense else x.contiguous()


def _like(values: Tensor, x: Tensor) -> Tensor:
    """Return `values` in the memory layout of `x`."""
    return values if values.stride() == x.stride() else torch.empty_like(x, dtype=values.dtype).copy_(values)


def _qparams(scale: Tensor, zero_point: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return scale.contiguous(), None if zero_point is None else zero_point.expand(scale.shape).contiguous()


@torch.library.custom_op("eff_kernels::round_to_grid", mutates_args=())
def round_to_grid(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    noise: Tensor | None,
    qmin: int,
    qmax: int,
    smallest: float = 0.0,
) -> Tensor:
    """Return ``s·(clamp(ne(x/s) + z, qmin, qmax) − z)`` in the type of `x`, at 2 reads or writes per element.

    Args:
        x: Any shape with elements; float32, bfloat16 or float16.
        scale: One element, or shaped like `x` with size above 1 along one axis only; float32.
        zero_point: Shape of `scale` or (), rounded and clamped to the codes; None: 0.
        noise: As in `eff_kernels.quantization.affine.round_codes`, of the shape of `x`, float32.
        qmin: Smallest code, of at most 17 bits.
        qmax: Largest code, likewise.
        smallest: A smaller scale counts as this one.
    """
    from eff_kernels._triton.quantization import grid_forward_triton

    x = _dense(x, scale)
    noise = None if noise is None else _like(noise, x)
    operands = x, *_qparams(scale, zero_point), noise, _grid(x, scale)
    # Triton launches on the current device, which may differ from that of the values
    with torch.cuda.device(x.get_device()):
        return grid_forward_triton(*operands, qmin, qmax, smallest)


@round_to_grid.register_fake
def _(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    noise: Tensor | None,
    qmin: int,
    qmax: int,
    smallest: float = 0.0,
) -> Tensor:
    return torch.empty_like(_dense(x, scale))


@torch.library.custom_op("eff_kernels::grid_gradients", mutates_args=())
def grid_gradients(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    noise: Tensor | None,
    qmin: int,
    qmax: int,
    rounded_gate: bool = False,
    kind: str = "fixed",
    grad_scale: float = 1.0,
    smallest: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of `x` and the sums for the learned parameters, at 3 reads or writes per element.

    Args:
        grad: Gradient of the result, with the shape and type of `x`.
        x: As in `round_to_grid`, like the other operands.
        scale: For ``"pact"`` its α.
        zero_point: For ``"pact"`` None, for ``"range"`` given.
        noise: Used if the gate depends on the rounded code.
        qmin: Smallest code.
        qmax: Largest code.
        rounded_gate: Gate on the rounded code.
        kind: ``"fixed"``: no sums; ``"lsq"``: scale, and zero point if there is one; ``"range"``: maximum and minimum;
            ``"pact"``: α.
        grad_scale: Factor on the sums.
        smallest: A smaller scale, or α, counts as this one.

    Returns:
        A tensor like `x`, and (sums, scales) in float32, summed in a fixed order.
    """
    from eff_kernels._triton.quantization import grid_backward_triton

    x = _dense(x, scale)
    noise = None if noise is None else _like(noise, x)
    operands = x, _like(grad, x), *_qparams(scale, zero_point), noise, _grid(x, scale)
    with torch.cuda.device(x.get_device()):
        return grid_backward_triton(*operands, qmin, qmax, smallest, rounded_gate, kind, grad_scale)


@grid_gradients.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    noise: Tensor | None,
    qmin: int,
    qmax: int,
    rounded_gate: bool = False,
    kind: str = "fixed",
    grad_scale: float = 1.0,
    smallest: float = 0.0,
) -> tuple[Tensor, Tensor]:
    sums = 0 if kind == "fixed" else 1 if zero_point is None else 2
    return torch.empty_like(_dense(x, scale)), x.new_empty((sums, scale.numel()), dtype=torch.float32)


@torch.library.custom_op("eff_kernels::round_rows", mutates_args=())
def round_rows(x: Tensor, noise: Tensor | None, columns: int, qmin: int, qmax: int, symmetric: bool) -> Tensor:
    """Return `x` fake-quantized with a range per `columns` neighbors, at 2 reads or writes for up to 16384 of them.

    Args:
        x: Any shape with elements; float32, bfloat16 or float16.
        noise: As in `round_to_grid`.
        columns: Divides the number of elements.
        qmin: Smallest code.
        qmax: Largest code.
        symmetric: Scale of `eff_kernels.quantization.affine.scale_of_largest` and zero point 0, else `affine_qparams`.
    """
    from eff_kernels._triton.quantization import rows_forward_triton

    x = x.contiguous()
    noise = None if noise is None else noise.contiguous()
    with torch.cuda.device(x.get_device()):
        return rows_forward_triton(x, noise, columns, qmin, qmax, symmetric)


@round_rows.register_fake
def _(x: Tensor, noise: Tensor | None, columns: int, qmin: int, qmax: int, symmetric: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which quantization is computed: float64 for float64, float32 for the rest.

    Args:
        dtype: Floating.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def symmetric_scale(weight: Tensor, axis: int | None, qmax: int) -> Tensor:
    """Return ``max|w| / qmax``, 1 for zeros, never so small that ``max|w| / scale`` exceeds `qmax`.

    Args:
        weight: Any shape and floating type.
        axis: One scale per channel along this axis; None: one scale.
        qmax: Largest code, at least 1.

    Returns:
        Scales of shape (channels,), or () without an axis, in `compute_dtype`. NaN for channels with NaN.

    Example:
        >>> symmetric_scale(torch.tensor([[2.54, -1.0], [0.0, 0.0]]), 0, 127)
        tensor([0.0200, 1.0000])
    """
    if axis is None:
        low, high = torch.aminmax(weight)
    else:
        # two reductions, because aminmax along a dimension is not vectorized on CPU (torch 2.13: 18 times slower)
        dims = [dim for dim in range(weight.dim()) if dim != axis % weight.dim()]
        low, high = (weight.amin(dims), weight.amax(dims)) if dims else (weight, weight)
    return scale_of_largest(torch.maximum(high, -low).to(compute_dtype(weight.dtype)), qmax)


def scale_of_largest(amax: Tensor, qmax: int) -> Tensor:
    """Return ``amax / qmax``, 1 where that is 0, never so small that ``amax / scale`` exceeds `qmax`; any shape.

    Args:
        amax: Largest magnitudes, not negative; floating.
        qmax: Largest code, above 0.

    Example:
        >>> scale_of_largest(torch.tensor([2.54, 0.0]), 127)
        tensor([0.0200, 1.0000])
    """
    # divide by a tensor: for a number CUDA multiplies by 1/qmax, which differs from the CPU by an ulp
    scale = amax / amax.new_full((), qmax)
    # a quotient rounded down would push the largest weight an ulp outside, and the gate would remove its
    # gradient
    scale = torch.where(amax / scale > qmax, torch.nextafter(scale, scale.new_full((), math.inf)), scale)
    # All zeros: scale 0 becomes 1, without a branch that would make a GPU wait.
    return scale + (amax == 0)


def affine_qparams(minimum: Tensor, maximum: Tensor, qmin: int | Tensor, qmax: int | Tensor) -> tuple[Tensor, Tensor]:
    """Return (scale, zero point) for the range widened to contain 0.

    ``s = (max - min) / (qmax - qmin)``, 1 for an empty range; ``z = clamp(ne(qmin - min/s), qmin, qmax)``.

    Args:
        minimum: Smallest values, any shape.
        maximum: Largest values, the same shape.
        qmin: Smallest code, or a float64 tensor with one per range.
        qmax: Largest code, above `qmin`; likewise.

    Returns:
        The scale in `compute_dtype` of the inputs, the zero point in int32.

    Example:
        >>> affine_qparams(torch.tensor(-1.0), torch.tensor(1.55), -128, 127)
        (tensor(0.0100), tensor(-28, dtype=torch.int32))
    """
    dtype = compute_dtype(minimum.dtype)
    # the span of a float32 range can overflow float32
    wide = dtype if minimum.device.type == "mps" else torch.float64
    low = minimum.to(wide).clamp(max=0)
    high = maximum.to(wide).clamp(min=0)
    scale = ((high - low) / (qmax - qmin)).to(dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes: tuple[Any, Any] = (qmin, qmax)  # torch's annotations do not allow a mixture of numbers and tensors
    # qmin - low/s is rarely an integer. After rounding, 0 is exactly a code, which padding and ReLU need.
    zero_point = torch.round(qmin - low / scale.to(wide)).clamp(*codes)
    # An infinite or NaN range makes the quotient NaN, which is undefined as an integer.
    return scale, zero_point.nan_to_num(0.0).to(torch.int32)


def round_codes(values: Tensor, noise: Tensor | None = None) -> Tensor:
    """Return `values`, which may change, rounded: halves to even, or stochastically, ``floor(v) + [u < v - floor(v)]``.

    Args:
        values: float32 or float64, any shape.
        noise: u, uniform in [0, 1), of the shape of `values`; None rounds to nearest.

    Example:
        >>> round_codes(torch.tensor([2.5, 2.25, -0.25]), torch.tensor([0.4, 0.4, 0.4]))
        tensor([3., 2., 0.])
    """
    if noise is None:
        return values.round_()
    low = values.floor()
    # floor(v + u) would round v + u first, which is biased for large v
    return low + (noise < values - low)


def quantize(x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int, noise: Tensor | None = None) -> Tensor:
    """Return ``clamp(ne(x/s) + z, qmin, qmax) - z``: integers in `compute_dtype`, NaN for NaN.

    Args:
        x: Any shape and floating type.
        scale: Broadcasts with `x`, in ``compute_dtype(x.dtype)``.
        zero_point: Broadcasts with `x`, whole numbers of any type.
        qmin: Smallest code.
        qmax: Largest code.
        noise: As in `round_codes`.

    Example:
        >>> quantize(torch.tensor([0.5, 1.2, 9.0]), torch.tensor(1.0), torch.tensor(2), -8, 7)
        tensor([0., 1., 5.])
    """
    # Widened first, because bfloat16 divided by a float32 scalar tensor is bfloat16. Divide by a
    # tensor like ONNX: for a number CUDA multiplies by 1/s, which changes ties.
    codes = round_codes(x.to(compute_dtype(x.dtype)) / scale, noise)
    # clamp with two tensor bounds is not vectorized on CPU (torch 2.13: 7 times slower than with one)
    # Clamped to [qmin - z, qmax - z], which is clamp(codes + z) - z without adding z to every element and back.
    codes.clamp_min_((qmin - zero_point).to(codes.dtype))
    return codes.clamp_max_((qmax - zero_point).to(codes.dtype))


def values_of(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``codes · scale`` in a type, in the memory of the codes if that helps.

    Args:
        codes: Floating; may be overwritten.
        scale: Broadcasts to the shape of the codes.
        dtype: Floating.

    Example:
        >>> values_of(torch.tensor([3.0, -1.0]), torch.tensor(0.5), torch.float32)
        tensor([ 1.5000, -0.5000])
    """
    # inductor manages memory itself
    return in_type(codes * scale if torch.compiler.is_compiling() else codes.mul_(scale), dtype)


def in_type(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``values.to(dtype)`` as a new tensor, which is safe to return from an autograd.Function.

    Under torch.compile (2.11, not 2.13) a function whose last operation returns its input, in place or by `Tensor.to`,
    has a gradient of zero.

    Args:
        values: Any shape, floating.
        dtype: Floating.
    """
    return values if values.dtype == dtype else values.to(dtype)


def _outside(bound: int, up: bool, dtype: torch.dtype) -> float:
    # A subnormal step could be flushed to 0, which would close the gate at a code of 0.
    if bound == 0:
        step = 2.0**-126
    else:
        mantissa, exponent = math.frexp(bound)
        step = 2.0 ** (exponent - (53 if dtype == torch.float64 else 24))
        # below a power of two floats are twice as dense
        if mantissa == (-0.5 if up else 0.5):
            step /= 2
    return bound + step if up else bound - step


@torch.library.custom_op("eff_kernels::pass_between", mutates_args=())
def _pass_between(grad: Tensor, codes: Tensor, low: float, high: float) -> Tensor:
    passed: Tensor = torch.ops.aten.hardtanh_backward(grad, codes, low, high)
    return passed


@_pass_between.register_fake
def _(grad: Tensor, codes: Tensor, low: float, high: float) -> Tensor:
    return torch.empty_like(grad)


def pass_inside(grad: Tensor, codes: Tensor, qmin: int, qmax: int) -> Tensor:
    """Return `grad` where ``qmin <= codes <= qmax`` and zero elsewhere (either for NaN). Both have one type.

    Args:
        grad: Any shape, floating.
        codes: Not yet clamped; the same shape and dtype.
        qmin: Smallest code.
        qmax: Largest code.

    Example:
        >>> pass_inside(torch.ones(3), torch.tensor([-8.0, 7.0, 7.1]), -8, 7)
        tensor([1., 1., 0.])
    """
    # One fused pass, while a mask takes four. It is open strictly between its bounds, so use the next numbers. For NaN
    # it is open on CUDA and closed in whole vectors on CPU (torch 2.13).
    low, high = _outside(qmin, False, codes.dtype), _outside(qmax, True, codes.dtype)
    if torch.compiler.is_compiling() and grad.device.type == "cpu":
        # inductor would store the gate as bools, which takes twenty times as long on CPU (torch 2.13)
        inside: Tensor = _pass_between(grad, codes, low, high)
        return inside
    passed: Tensor = torch.ops.aten.hardtanh_backward(grad, codes, low, high)
    return passed


@with_signature
class _FakeQuantize(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int, rounded_gate: bool, noise: Tensor | None
    ) -> Tensor:
        if grid_on_triton(x, scale, zero_point, noise):
            y: Tensor = directly(round_to_grid)(x, scale, zero_point, noise, qmin, qmax)
            return y
        return values_of(quantize(x, scale, zero_point, qmin, qmax, noise), scale, x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        # The noise is kept only if the gate depends on rounded codes.
        x, scale, zero_point, *ctx.rest, noise = inputs
        ctx.save_for_backward(x, scale, zero_point, noise if ctx.rest[2] else None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, zero_point, noise = ctx.saved_tensors
        qmin, qmax, rounded_gate = ctx.rest
        if grid_on_triton(x, scale, zero_point, noise, grads[0]):
            grad, _ = directly(grid_gradients)(grads[0], x, scale, zero_point, noise, qmin, qmax, rounded_gate)
            return grad, None, None, None, None, None, None
        # Recomputed from x, because float32 codes would take twice the memory of a half-precision activation.
        codes = x.to(compute_dtype(x.dtype)) / scale
        codes = (round_codes(codes, noise) if rounded_gate else codes) + zero_point
        grad = pass_inside(grads[0].to(codes.dtype), codes, qmin, qmax)
        return grad.to(x.dtype), None, None, None, None, None, None


def fake_quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    qmin: int,
    qmax: int,
    rounded_gate: bool = False,
    noise: Tensor | None = None,
) -> Tensor:
    """Return ``s * (clamp(ne(x/s) + z, qmin, qmax) - z)`` in the type of `x`.

    The gradient passes where ``qmin <= x/s + z <= qmax`` and is zero elsewhere. Scale and zero point get
    no gradient.

    Args:
        x: Any shape and floating type.
        scale: Broadcasts with `x`, positive, in ``compute_dtype(x.dtype)``.
        zero_point: Broadcasts with `x`, whole numbers between `qmin` and `qmax`.
        qmin: Smallest code.
        qmax: Largest code.
        rounded_gate: Gate on the rounded code instead, as torch's own ops do.
        noise: As in `round_codes`.

    Example:
        >>> fake_quantize(torch.tensor([0.26, 9.0]), torch.tensor(0.5), torch.tensor(0), -8, 7)
        tensor([0.5000, 3.5000])
    """
    y: Tensor = _FakeQuantize.apply(x, scale, zero_point, qmin, qmax, rounded_gate, noise)  # type: ignore[no-untyped-call]
    return y


@with_signature
class _FakeQuantizeSymmetric(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, axis: int, qmax: int) -> Tensor:
        if on_eager_cuda(weight) and axis % weight.dim() == 0:
            y: Tensor = directly(round_rows)(weight, None, weight.numel() // weight.shape[0], -qmax, qmax, True)
            return y
        scale = along(symmetric_scale(weight, axis, qmax), weight.dim(), axis)
        # No clamp, because with `symmetric_scale` no code exceeds qmax.
        return values_of((weight.to(scale.dtype) / scale).round_(), scale, weight.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None


def fake_quantize_symmetric(weight: Tensor, axis: int, qmax: int) -> Tensor:
    """Return `weight` fake-quantized per channel with the scale of its largest magnitude.

    Equal to `fake_quantize` with `symmetric_scale` and zero point 0. No weight lies outside this range, so
    nothing is clamped and the gradient passes everywhere.

    Args:
        weight: Any shape and floating type.
        axis: The axis of the channels.
        qmax: Largest code; the smallest is ``-qmax``.

    Example:
        >>> fake_quantize_symmetric(torch.tensor([[3.0, 1.4]]), 0, 3)
        tensor([[3., 1.]])
    """
    y: Tensor = _FakeQuantizeSymmetric.apply(weight, axis, qmax)  # type: ignore[no-untyped-call]
    return y


def along(values: Tensor, dims: int, axis: int) -> Tensor:
    """Return per-channel `values` shaped to broadcast along `axis` of a tensor with `dims` dimensions.

    Args:
        values: 1-d.
        dims: Number of dimensions of the tensor.
        axis: Axis of the channels; negative counts from the end.
    """
    return values.reshape([-1 if dim == axis % dims else 1 for dim in range(dims)])
