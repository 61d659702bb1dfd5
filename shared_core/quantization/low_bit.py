"""Fake quantization to ternary, binary, FP8 and block formats, with straight-through gradients."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from eff_kernels.parts import by_parts
from eff_kernels.quantization import group as group_kernels
from eff_kernels.quantization import low_bit as low_bit_kernels
from eff_kernels.quantization.affine import compute_dtype, values_of
from torch import Tensor, nn

from shared_core.errors import ConfigError
from shared_core.numerics.block_formats import BEYOND, Element, mx_round_to, nvfp4_round_to
from shared_core.numerics.rounding import round_to
from shared_core.quantization.affine import check_axis, check_choice, check_floats
from shared_core.quantization.schemes import HALF


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, element: Element | None) -> Tensor:
        if element is None:
            return nvfp4_round_to(x, per_tensor_scale=None, dtype=x.dtype, binary=True)
        return mx_round_to(x, element)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def mx_fake_quantize(x: Tensor, element: Element) -> Tensor:
    """Return `x` rounded to MXFP4 or MXFP8 in blocks of 32 along the last axis, see `mx_round_to`; gradient 1.

    Args:
        x: Any floating type.
        element: ``fp4_e2m1`` for MXFP4, ``fp8_e4m3`` for MXFP8.

    Source: Rouhani et al. 2023, arXiv:2310.10537.

    Example:
        >>> mx_fake_quantize(torch.tensor([1.0, 0.3, 7.0, -0.1]), "fp4_e2m1").tolist()
        [1.0, 0.5, 6.0, -0.0]
    """
    return _StraightThrough.apply(x, element)  # type: ignore[no-untyped-call, no-any-return]


def nvfp4_fake_quantize(x: Tensor) -> Tensor:
    """Return `x` rounded to NVFP4 in blocks of 16 along the last axis, scaled by its own amax; gradient 1.

    The tensor scale is a power of two (see `nvfp4_binary_scale`), so that engines which share one scale among matrices,
    or fix it for inputs, compute with the same values.

    Source: NVIDIA 2025, arXiv:2509.25149.

    Example:
        >>> nvfp4_fake_quantize(torch.tensor([6.0, 1.25])).tolist()
        [6.0, 1.0]
    """
    return _StraightThrough.apply(x, None)  # type: ignore[no-untyped-call, no-any-return]


HALF_DTYPES = dict(zip(HALF, (torch.float16, torch.bfloat16), strict=True))
"""Format of 16 bits → its dtype."""


class _ToHalf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, format: str) -> Tensor:
        ctx.save_for_backward(beyond_half(x, format))
        return by_parts(lambda part: round_to(part, format).to(x.dtype), x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].masked_fill(ctx.saved_tensors[0], 0), None


def half_fake_quantize(x: Tensor, format: Literal["fp16", "bf16"]) -> Tensor:
    """Return `x` rounded to a float format of 16 bits. Values beyond its largest saturate and get no gradient.

    Example:
        >>> half_fake_quantize(torch.tensor([0.1, 1e5, 1e-9]), "fp16").tolist()
        [0.0999755859375, 65504.0, 0.0]
    """
    return _ToHalf.apply(x, format)  # type: ignore[no-untyped-call, no-any-return]


def beyond_half(x: Tensor, format: str) -> Tensor:
    """Return where the magnitude of `x` is above the largest value of a format of 16 bits."""
    return x.abs() > torch.finfo(HALF_DTYPES[format]).max


_HEIGHT = 128  # rows of a block
E4M3_MAX, _E4M3_STEP = 448.0, 32.0  # and the step below it


def to_blocks(rows: Tensor, width: int) -> Tensor:
    """Return a matrix as one row per block of 128 rows and `width` columns, padded with rows of zeros.

    Example:
        >>> to_blocks(torch.ones(200, 6), 3).shape
        torch.Size([4, 384])
    """
    rows = F.pad(rows, (0, 0, 0, -len(rows) % _HEIGHT))
    return rows.view(-1, _HEIGHT, rows.shape[1] // width, width).transpose(1, 2).reshape(-1, _HEIGHT * width)


def from_blocks(blocks: Tensor, shape: tuple[int, ...], width: int) -> Tensor:
    """Return the matrix of this shape from the blocks of `to_blocks`.

    Example:
        >>> rows = torch.arange(12.0).view(2, 6)
        >>> torch.equal(from_blocks(to_blocks(rows, 3), (2, 6), 3), rows)
        True
    """
    rows = blocks.view(-1, shape[1] // width, _HEIGHT, width).transpose(1, 2).reshape(-1, shape[1])
    return rows[: shape[0]]


class _ToRange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, largest: Tensor) -> Tensor:
        scale = fp8_scale(largest)
        # compare with the largest value itself: 448 · scale may be rounded
        ctx.save_for_backward(x.abs() <= largest)
        codes = (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return (codes.float() * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.saved_tensors[0], None


def fp8_scale(largest: Tensor) -> Tensor:
    """Return the scale that puts the largest magnitude of a range on the largest value of e4m3.

    Example:
        >>> fp8_scale(torch.tensor(896.0))
        tensor(2.)
    """
    return largest.float().clamp(min=2.0**-126 * E4M3_MAX) / E4M3_MAX


def fp8_limits(largest: Tensor) -> Tensor:
    """Return the two values between which the codes of a range round, beyond half a step of its largest value.

    Example:
        >>> fp8_limits(torch.tensor(448.0))
        tensor([-464.,  464.])
    """
    limit = fp8_scale(largest) * (E4M3_MAX + _E4M3_STEP / 2)
    return torch.stack([-limit, limit])


def fp8_fake_quantize_in_range(x: Tensor, largest: Tensor) -> Tensor:
    """Return `x` rounded to e4m3 with the scale of a range. Values outside saturate and get no gradient.

    Source: Micikevicius et al. 2022, arXiv:2209.05433.

    Example:
        >>> fp8_fake_quantize_in_range(torch.tensor([17.0, 500.0]), torch.tensor(448.0))
        tensor([ 16., 448.])
    """
    return _ToRange.apply(x, largest)  # type: ignore[no-untyped-call, no-any-return]


class _ByScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, element: Element) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.beyond = BEYOND[element]
        codes = round_to(x.to(scale.dtype) / scale, element)
        return values_of(codes, scale, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        x, scale = ctx.saved_tensors
        return grads[0] * ((x.to(scale.dtype) / scale).abs() < ctx.beyond), None, None


def fake_quantize_by_scale(x: Tensor, scale: Tensor, element: Element) -> Tensor:
    """Return ``s·round(x/s)``, rounded to a small float format with a given scale. Values outside saturate.

    The gradient passes straight through. It is 0 from half a step beyond the largest value on.

    Args:
        x: Any shape and floating type.
        scale: Broadcasts with `x`, float32, or float64 for float64.
        element: ``fp4_e2m1`` or ``fp8_e4m3``.

    Example:
        >>> fake_quantize_by_scale(torch.tensor([1.1, 7.0, 16.0]), torch.tensor(2.0), "fp4_e2m1").tolist()
        [1.0, 8.0, 12.0]
    """
    return _ByScale.apply(x, scale, element)  # type: ignore[no-untyped-call, no-any-return]


_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def fp8_fake_quantize(
    x: Tensor, format: Literal["fp8_e4m3", "fp8_e5m2"] = "fp8_e4m3", axis: int | None = None
) -> Tensor:
    """Return `x` rounded to FP8 with a scale that maps the largest magnitude to the largest value of the format.

    ``s = max(max|x|, 2⁻¹²⁶·M)/M`` with M the format's largest value, ``x̂ = s·cast(x/s)``, halves to even. No value lies
    outside, so the gradient passes everywhere. All values that share a scale with a
    non-finite value become NaN, because saturation would hide an overflow.

    Args:
        x: Any shape and floating type, with elements; computed in float32.
        format: ``"fp8_e4m3"`` for weights and activations, ``"fp8_e5m2"`` for gradients.
        axis: One scale for each channel along this axis; None: one for all.

    Source: Micikevicius et al. 2022, arXiv:2209.05433.

    Example:
        >>> fp8_fake_quantize(torch.tensor([448.0, 17.0, 1.0]))
        tensor([448.,  16.,   1.])
    """
    where = "fp8_fake_quantize"
    check_floats(where, x, elements=True)
    check_axis(where, x.dim(), axis)
    check_choice(where, "format", format, (*_DTYPES,))
    return group_kernels.fake_quantize_fp8(x, _DTYPES[format], axis)


def ternarize(weight: Tensor, axis: int | None = 0, *, threshold: float = 0.7) -> Tensor:
    """Return `weight` rounded to −α, 0 and α.

    ``Δ = 0.7·E|w|``; ``ŵ = α·sign(w)`` where ``|w| > Δ`` and 0 elsewhere; α is the mean of the remaining
    ``|w|``, which minimizes ``‖w − ŵ‖`` for that Δ. The gradient passes straight through. A channel of zeros stays
    zero. A channel with a non-finite value becomes NaN.

    Args:
        weight: Any shape and floating type, with elements.
        axis: Δ and α for each channel along this axis; None: for the whole tensor.
        threshold: Δ over the mean magnitude, in [0, 1).

    Source: Li and Liu 2016, arXiv:1605.04711.

    Example:
        >>> ternarize(torch.tensor([[1.0, -3.0, 0.2]]))
        tensor([[ 2., -2.,  0.]])
    """
    check_floats("ternarize", weight, "weight", elements=True)
    check_axis("ternarize", weight.dim(), axis)
    if not 0 <= threshold < 1:
        raise ConfigError(
            "ternarize", f"threshold must be in [0, 1), got {threshold}", "from 1 on all weights may become 0"
        )
    return low_bit_kernels.ternarize(weight, axis, float(threshold))


def binarize(weight: Tensor, axis: int | None = 0) -> Tensor:
    """Return `weight` rounded to −α and α, ``ŵ = α·sign(w)`` with ``sign(0) = +1`` and ``α = E|w|``.

    The gradient treats α as a constant. It passes straight through where ``|w| <= 1`` and is zero elsewhere, so weights
    must stay in [−1, 1]: training clips them after each step, as the source does. A channel with a NaN becomes NaN.

    Args:
        weight: Any shape and floating type, with elements.
        axis: One α for each channel along this axis; None: for the whole tensor.

    Source: Rastegari et al. 2016, arXiv:1603.05279; the gate: Courbariaux et al. 2016, arXiv:1602.02830.

    Example:
        >>> binarize(torch.tensor([[0.5, -1.0, 0.0]]))
        tensor([[ 0.5000, -0.5000,  0.5000]])
    """
    check_floats("binarize", weight, "weight", elements=True)
    check_axis("binarize", weight.dim(), axis)
    return low_bit_kernels.binarize(weight, axis, True)


def binarize_activation(x: Tensor) -> Tensor:
    """Return the signs of `x`, −1 and +1, with ``sign(0) = +1``; the gradient passes where ``|x| <= 1``.

    NaN stays NaN.

    Args:
        x: Any shape and floating type.

    Raises:
        ConfigError: If `x` is no floating-point tensor.

    Source: Courbariaux et al. 2016, arXiv:1602.02830.

    Example:
        >>> binarize_activation(torch.tensor([-0.3, 0.0, 2.0]))
        tensor([-1.,  1.,  1.])
    """
    check_floats("binarize_activation", x)
    return low_bit_kernels.binarize(x, None, False)


def mean_magnitude(x: Tensor, axis: int) -> Tensor:
    """Return the mean of ``|x|`` along an axis, which stays as 1, without a gradient: the scale of binary inputs.

    Example:
        >>> mean_magnitude(torch.tensor([[1.0, -3.0]]), -1)
        tensor([[2.]])
    """
    return x.detach().abs().mean(axis, keepdim=True, dtype=compute_dtype(x.dtype)).to(x.dtype)


def box_means(layer: nn.Module, x: Tensor) -> Tensor:
    """Return XNOR-Net's scales K of a convolution's output, the mean of ``|x|`` over each window of the kernel.

    ``K = A * k`` with A the mean of ``|x|`` over the channels, and k a kernel of the layer's size, stride, padding and
    dilation whose values are 1 / size. So zeros of the padding count. With groups, each has its own A and K. There is
    no gradient.

    Args:
        layer: The convolution, not transposed.
        x: Its input.

    Returns:
        The output's shape with 1 channel, or with all of them if there are groups.

    Source: Rastegari et al. 2016, arXiv:1603.05279, section 3.2.

    Example:
        >>> box_means(nn.Conv1d(2, 4, 2), torch.tensor([[[1.0, -2.0, 0.0], [3.0, 0.0, 4.0]]]))
        tensor([[[1.5000, 1.5000]]])
    """
    conv: Any = layer
    axis = x.dim() - 1 - len(conv.kernel_size)
    means = mean_magnitude(torch.unflatten(x, axis, (conv.groups, -1)), axis + 1).squeeze(axis + 1)
    box = means.new_full((conv.groups, 1, *conv.kernel_size), 1 / math.prod(conv.kernel_size))
    found: Tensor = conv._conv_forward(means, box, None)
    return found if conv.groups == 1 else found.repeat_interleave(conv.out_channels // conv.groups, axis)
