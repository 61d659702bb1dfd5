"""MX and NVFP4 values in Triton: one sweep of a tensor, and one before it for NVFP4's scale of the tensor itself."""

from __future__ import annotations

import torch
from torch import Tensor

from eff_kernels._triton.encoding import device_of, has_native_fp8
from eff_kernels._triton.fp8 import measure_amax
from eff_kernels._triton.launch import cdiv, grid_of_tiles, has_triton, next_power_of_2, remembering

if has_triton():
    import triton
    import triton.language as tl

    from eff_kernels._triton.encoding import inverse_of_power, magnitude, narrowed, saturated

# mantissa bits, bias, largest value and its exponent
_ELEMENTS = {"fp4_e2m1": (1, 1, 6.0, 2), "fp8_e4m3": (3, 7, 448.0, 8), "fp8_e5m2": (2, 15, 57344.0, 15)}
_TILE, _WIDEST, _WARPS = 4096, 512, 4


def _mx_values(
    x: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    group: tl.constexpr,
    mantissa: tl.constexpr,
    bias: tl.constexpr,
    largest: tl.constexpr,
    emax: tl.constexpr,
    native: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
) -> None:
    column = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    i = tl.program_id(0) * height + tl.arange(0, height)[:, None]
    j = column * width + tl.arange(0, width)[None, :]
    at, inside = i.to(tl.int64) * columns + j, (i < rows) & (j < columns)
    tile = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    # (height, blocks, group): the maximum of a block is a reduction of the last dim, in registers.
    blocks = tl.reshape(tile, (height, width // group, group))
    amax = tl.max(magnitude(blocks), 2, keep_dims=True)
    # Shared exponent ⌊log2 amax⌋ - emax (OCP MX 1.0); a subnormal amax counts as 2^-126.
    exponent = tl.minimum(tl.maximum(tl.maximum(amax >> 23, 1) - 127 - emax, -126), 127)
    scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    scale = tl.where(amax >= 0x7F800000, float("nan"), scale)
    # products with a power of two are exact: no other rounding
    values = saturated(blocks * inverse_of_power(scale), mantissa, bias, largest) * scale
    tl.store(y + at, narrowed(tl.reshape(values, (height, width)), y.dtype.element_ty, native), mask=inside)


def _nvfp4_values(
    x: tl.tensor,
    y: tl.tensor,
    given: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    of_amax: tl.constexpr,
    binary: tl.constexpr,
    native: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
) -> None:
    tensor_scale = tl.load(given + tl.zeros((1, 1, 1), tl.int32))
    if of_amax:
        # amax / (448 · 6): the block scales, e4m3, then end at 448 and the elements, e2m1, at 6.
        tensor_scale = tl.div_rn(tensor_scale, tl.full((1, 1, 1), 2688.0, tl.float32))
    finite = magnitude(tensor_scale) < 0x7F800000
    tensor_scale = tl.maximum(tensor_scale, 2.0**-121)
    if of_amax and binary:
        # a mantissa carries into the exponent, and is gone
        bits = (tensor_scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        tensor_scale = bits.to(tl.float32, bitcast=True)
    tensor_scale = tl.where(finite, tensor_scale, float("nan"))
    column = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    i = tl.program_id(0) * height + tl.arange(0, height)[:, None]
    j = column * width + tl.arange(0, width)[None, :]
    at, inside = i.to(tl.int64) * columns + j, (i < rows) & (j < columns)
    tile = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    blocks = tl.reshape(tile, (height, width // 16, 16))
    bits = tl.max(magnitude(blocks), 2, keep_dims=True)
    amax = tl.where(bits < 0x7F800000, bits.to(tl.float32, bitcast=True), float("nan"))
    # the roundings of `nvfp4_round_to`: two divisions, a reciprocal of two, products
    relative = tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32))
    relative = tl.div_rn(relative, tl.zeros_like(amax) + tensor_scale)
    # 2^-6 is e4m3's smallest normal number: smaller scales would have fewer bits.
    scale = saturated(tl.where(relative < 2.0**-6, 2.0**-6, relative), 3, 7, 448.0)
    inverse = tl.div_rn(tl.full(tensor_scale.shape, 1.0, tl.float32), tensor_scale)
    inverse = tl.div_rn(tl.zeros_like(scale) + inverse, scale)
    values = saturated(blocks * inverse, 1, 1, 6.0) * (tensor_scale * scale)
    tl.store(y + at, narrowed(tl.reshape(values, (height, width)), y.dtype.element_ty, native), mask=inside)


if has_triton():
    mx_values = remembering(triton.jit(_mx_values))
    nvfp4_values = remembering(triton.jit(_nvfp4_values))


def mx_round_triton(x: Tensor, element: str, group_size: int) -> Tensor:
    """Return what `eff_kernels.block_formats.mx_round` does; the arguments are the same."""
    x = x.contiguous()
    y = torch.empty_like(x)
    rows, columns, height, width, grid = _tiles(x, group_size)
    mantissa, bias, largest, emax = _ELEMENTS[element]
    with device_of(x):
        mx_values[grid](
            x, y, rows, columns, group=group_size, mantissa=mantissa, bias=bias, largest=largest, emax=emax,
            native=has_native_fp8(x), height=height, width=width, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def nvfp4_round_triton(x: Tensor, per_tensor_scale: Tensor | None, dtype: torch.dtype, binary: bool = False) -> Tensor:
    """Return what `eff_kernels.block_formats.nvfp4_round` does; the arguments are the same."""
    x = x.contiguous()
    y = torch.empty_like(x, dtype=dtype)
    rows, columns, height, width, grid = _tiles(x, 16)
    given = measure_amax(x.view(rows, columns)) if per_tensor_scale is None else per_tensor_scale.float()
    with device_of(x):
        nvfp4_values[grid](
            x, y, given, rows, columns, of_amax=per_tensor_scale is None, binary=binary, native=has_native_fp8(x),
            height=height, width=width, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def _tiles(x: Tensor, group_size: int) -> tuple[int, int, int, int, tuple[int, int, int]]:
    columns = x.shape[-1]
    rows = x.numel() // columns
    width = max(group_size, min(_WIDEST, next_power_of_2(columns)))
    height = max(1, min(next_power_of_2(rows), _TILE // width))
    return rows, columns, height, width, grid_of_tiles(cdiv(rows, height), cdiv(columns, width))
