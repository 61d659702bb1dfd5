"""Fake quantization with scales computed from the values, without checks: groups, tokens, and FP8.

No value lies outside its range by more than half a step (from rounding a zero point), so the gradient
passes everywhere and needs no saved tensors. Nothing here reads a value on the host.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from eff_kernels._triton.launch import directly, on_eager_cuda
from eff_kernels.fp8 import block_scale
from eff_kernels.parts import by_parts
from eff_kernels.quantization.affine import (
    affine_qparams,
    compute_dtype,
    round_codes,
    round_rows,
    scale_of_largest,
    values_of,
    with_signature,
)
from eff_kernels.rounding import nearest_float


def code_range(bits: int, symmetric: bool) -> tuple[int, int]:
    """Return the smallest and largest code: ±(2^(b−1) − 1) if symmetric, else −2^(b−1) and 2^(b−1) − 1.

    Args:
        bits: At least 2.
        symmetric: True if the zero point is 0.

    Example:
        >>> code_range(4, True), code_range(4, False)
        ((-7, 7), (-8, 7))
    """
    largest = 2 ** (bits - 1) - 1
    return (-largest if symmetric else -largest - 1), largest


def group_qparams(x: Tensor, group_size: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Return (scale, zero point) per group of consecutive values along the last axis.

    Args:
        x: (..., K) of any floating type.
        group_size: Divides K.
        bits: Width of a code.
        symmetric: ``max|x|`` on the largest code and zero point 0, else the range widened to contain 0.

    Returns:
        Both (..., K / group_size): `compute_dtype` and int32. A group with a non-finite value has a non-finite scale.

    Example:
        >>> group_qparams(torch.tensor([[7.0, 1.0, 0.0, 1.5]]), 2, 4, False)
        (tensor([[0.4667, 0.1000]]), tensor([[-8, -8]], dtype=torch.int32))
    """
    # widened first (exact), because bfloat16 reductions of short rows take ten times as long on CPU; two reductions,
    # because aminmax along a dimension is not vectorized there (torch 2.13: 18 times slower)
    groups = _groups(x, group_size).to(compute_dtype(x.dtype))
    low, high = groups.amin(-1), groups.amax(-1)
    qmin, qmax = code_range(bits, symmetric)
    if not symmetric:
        return affine_qparams(low, high, qmin, qmax)
    scale = scale_of_largest(torch.maximum(high, -low), qmax)
    return scale, torch.zeros_like(scale, dtype=torch.int32)


def group_codes(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, group_size: int, bits: int, noise: Tensor | None = None
) -> Tensor:
    """Return the codes of `x`, integers in `compute_dtype`, as (..., K / group_size, group_size).

    Args:
        x: (..., K) of any floating type.
        scale: (..., K / group_size) in ``compute_dtype(x.dtype)``.
        zero_point: (..., K / group_size); None: 0 with symmetric codes, which need no clamp.
        group_size: Divides K.
        bits: Width of a code.
        noise: As in `round_codes`, of the shape of `x`.

    Example:
        >>> group_codes(torch.tensor([[7.0, 1.6]]), torch.tensor([[1.0]]), None, 2, 4)
        tensor([[[7., 2.]]])
    """
    codes = _groups(x, group_size).to(scale.dtype) / scale.unsqueeze(-1)
    codes = round_codes(codes, None if noise is None else _groups(noise, group_size))
    # A symmetric scale comes from the largest magnitude, so its codes never exceed the range.
    return codes if zero_point is None else (codes + zero_point.unsqueeze(-1)).clamp(*code_range(bits, False))


@with_signature
class _FakeQuantizeGroups(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, group_size: int, bits: int, symmetric: bool, noise: Tensor | None) -> Tensor:
        if on_eager_cuda(x, noise):
            y: Tensor = directly(round_rows)(x, noise, group_size, *code_range(bits, symmetric), symmetric)
            return y
        scale, zero_point = group_qparams(x, group_size, bits, symmetric)
        codes = group_codes(x, scale, None if symmetric else zero_point, group_size, bits, noise)
        if not symmetric:
            codes.sub_(zero_point.unsqueeze(-1))
        return values_of(codes, scale.unsqueeze(-1), x.dtype).flatten(-2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # The scale comes from x itself, so nothing is clipped and the gradient passes everywhere.
        return grads[0], None, None, None, None


def fake_quantize_groups(
    x: Tensor, group_size: int, bits: int, symmetric: bool = False, noise: Tensor | None = None
) -> Tensor:
    """Return `x` fake-quantized in groups along the last axis, each with its own range; gradient 1.

    Args:
        x: (..., K) of any floating type.
        group_size: Divides K. K itself gives one scale per row or token.
        bits: Width of a code, from 2.
        symmetric: As in `group_qparams`.
        noise: As in `round_codes`, of the shape of `x`.

    Example:
        >>> fake_quantize_groups(torch.tensor([[7.0, 1.4, 0.7, 0.06]]), 2, 4, symmetric=True)
        tensor([[7.0000, 1.0000, 0.7000, 0.1000]])
    """
    y: Tensor = _FakeQuantizeGroups.apply(x, group_size, bits, symmetric, noise)  # type: ignore[no-untyped-call]
    return y


_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@with_signature
class _FakeQuantizeFp8(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype, axis: int | None) -> Tensor:
        if dtype in _FP8 and on_eager_cuda(x):
            from eff_kernels._triton.fp8 import fake_quantize_triton

            if axis is None:
                matrix = x.contiguous().view(-1, x.shape[-1] if x.dim() else 1)
                return fake_quantize_triton(matrix, dtype, by_row=False).view(x.shape)
            rows = x.movedim(axis, 0).contiguous()
            y = fake_quantize_triton(rows.view(rows.shape[0], -1), dtype, by_row=True)
            return y.view(rows.shape).movedim(0, axis)
        if axis == 0:
            return by_parts(lambda rows: _round_fp8(rows, _fp8_scale(rows, dtype, 0), dtype), x)
        scale = _fp8_scale(x, dtype, axis)
        if axis is None:
            return by_parts(lambda rows: _round_fp8(rows, scale, dtype), x)
        return _round_fp8(x, scale, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None


def _fp8_scale(x: Tensor, dtype: torch.dtype, axis: int | None) -> Tensor:
    dims = [dim for dim in range(x.dim()) if axis is None or dim != axis % x.dim()]
    amax = x.abs().amax(dims, keepdim=True).float() if dims else x.abs().float()
    return block_scale(amax, dtype, "exact")


def _round_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    # torch converts FP8 to float32 on a CPU in five times as long
    format = torch.finfo(dtype)
    codes = nearest_float(x.float() / scale, format.max, format.smallest_normal, round(-math.log2(format.eps)))
    return values_of(codes, scale, x.dtype)


def fake_quantize_fp8(x: Tensor, dtype: torch.dtype, axis: int | None = None) -> Tensor:
    """Return `x` rounded to FP8 with a scale that maps the largest magnitude to the largest value; gradient 1.

    Args:
        x: Any shape and floating type, not empty; computed in float32.
        dtype: An FP8 type.
        axis: One scale per channel along this axis; None: one scale.

    Returns:
        A tensor of the type of `x`, NaN where a value with the same scale is not finite.

    Example:
        >>> fake_quantize_fp8(torch.tensor([448.0, 17.0, 1.0]), torch.float8_e4m3fn)
        tensor([448.,  16.,   1.])
    """
    y: Tensor = _FakeQuantizeFp8.apply(x, dtype, axis)  # type: ignore[no-untyped-call]
    return y


def _groups(x: Tensor, group_size: int) -> Tensor:
    return x.reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size)
