"""`eff_kernels.fp8.quantize` in Triton: amax, scale and codes in as few sweeps as the blocks allow.

One sweep for blocks and for rows that fit in registers, and for a scale of past steps; two for a scale of the whole
tensor and for long rows. Matrices are read where they lie, transposed ones too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from eff_kernels._triton.encoding import device_of, has_native_fp8
from eff_kernels._triton.launch import has_triton

if has_triton():
    import triton
    import triton.language as tl

    from eff_kernels._triton.encoding import divided, fp8_code, magnitude, scale_of

_WARPS = 8
_IN_REGISTERS = 16384
_MULTIPLE = 16


def _loaded(
    x: tl.tensor,
    i: tl.tensor,
    j: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
) -> tl.tensor:
    inside = (i < rows) & (j < columns)
    return tl.load(x + i.to(tl.int64) * row_stride + j.to(tl.int64) * column_stride, mask=inside, other=0.0).to(
        tl.float32
    )


def _tensor_codes(
    x: tl.tensor,
    amax: tl.tensor,
    past: tl.tensor,
    scale: tl.tensor,
    codes: tl.tensor,
    turned: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    turned_width: tl.tensor,
    measure: tl.constexpr,
    cast: tl.constexpr,
    delayed: tl.constexpr,
    both: tl.constexpr,
    mantissa: tl.constexpr,
    rounding: tl.constexpr,
    native: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
) -> None:
    i = tl.program_id(0) * height + tl.arange(0, height)[:, None]
    j = tl.program_id(1) * width + tl.arange(0, width)[None, :]
    due = tl.full((), 1, tl.int32) > 0
    if cast:
        if delayed:
            source = tl.load(past).to(tl.int32, bitcast=True)
            if not measure:
                # the sweep before has done it, unless there was no past or something is not finite
                found = tl.load(amax)
                due = (source <= 0) | (found >= 0x7F800000)
                source = tl.where(due, found, source)
        else:
            source = tl.load(amax)
        s = scale_of(source, mantissa, rounding)
        if not measure:
            tl.store(scale, s, mask=tl.program_id(0) + tl.program_id(1) == 0)
    if due:
        tile = loaded(x, i, j, rows, columns, row_stride, column_stride)
        if measure:
            tl.atomic_max(amax, tl.max(tl.max(magnitude(tile), 1), 0))
        if cast:
            code = fp8_code(divided(tile, s, rounding), mantissa, native)
            tl.store(codes + i.to(tl.int64) * columns + j, code, mask=(i < rows) & (j < columns))
            if both:
                # under a scale of NaN the code of zero is not that of what fills up
                code = tl.where(i < rows, code, 0)
                tl.store(turned + j.to(tl.int64) * turned_width + i, code, mask=(i < turned_width) & (j < columns))


def _row_codes(
    x: tl.tensor,
    scale: tl.tensor,
    codes: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    codes_width: tl.tensor,
    in_registers: tl.constexpr,
    mantissa: tl.constexpr,
    rounding: tl.constexpr,
    native: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
) -> None:
    i = tl.program_id(0) * height + tl.arange(0, height)[:, None]
    j = tl.arange(0, width)[None, :]
    if in_registers:
        tile = loaded(x, i, j, rows, columns, row_stride, column_stride)
        s = scale_of(tl.max(magnitude(tile), 1), mantissa, rounding)
        code = fp8_code(divided(tile, s[:, None], rounding), mantissa, native)
        tl.store(codes + i.to(tl.int64) * codes_width + j, code, mask=(i < rows) & (j < codes_width))
    else:
        amax = tl.zeros((height,), tl.int32)
        for start in range(0, columns, width):
            tile = loaded(x, i, start + j, rows, columns, row_stride, column_stride)
            amax = tl.maximum(amax, tl.max(magnitude(tile), 1))
        s = scale_of(amax, mantissa, rounding)
        for start in range(0, codes_width, width):
            at = start + j
            tile = loaded(x, i, at, rows, columns, row_stride, column_stride)
            code = fp8_code(divided(tile, s[:, None], rounding), mantissa, native)
            tl.store(codes + i.to(tl.int64) * codes_width + at, code, mask=(i < rows) & (at < codes_width))
    row = tl.program_id(0) * height + tl.arange(0, height)
    tl.store(scale + row, s, mask=row < rows)


def _quantized_tile(
    tile: tl.tensor,
    high: tl.constexpr,
    wide: tl.constexpr,
    mantissa: tl.constexpr,
    rounding: tl.constexpr,
    native: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    down: tl.constexpr = tile.shape[0] // high
    along: tl.constexpr = tile.shape[1] // wide
    blocks = tl.reshape(tile, (down, high, along, wide))
    s = scale_of(tl.max(tl.max(magnitude(blocks), 3), 1), mantissa, rounding)
    code = fp8_code(divided(blocks, s[:, None, :, None], rounding), mantissa, native)
    return tl.reshape(code, tile.shape), s


def _block_codes(
    x: tl.tensor,
    scale: tl.tensor,
    codes: tl.tensor,
    turned_scale: tl.tensor,
    turned: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    scale_height: tl.tensor,
    scale_width: tl.tensor,
    turned_width: tl.tensor,
    turned_scale_height: tl.tensor,
    turned_scale_width: tl.tensor,
    high: tl.constexpr,
    wide: tl.constexpr,
    both: tl.constexpr,
    mantissa: tl.constexpr,
    rounding: tl.constexpr,
    native: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
) -> None:
    i = tl.program_id(0) * height + tl.arange(0, height)[:, None]
    j = tl.program_id(1) * width + tl.arange(0, width)[None, :]
    tile = loaded(x, i, j, rows, columns, row_stride, column_stride)
    code, s = quantized_tile(tile, high, wide, mantissa, rounding, native)
    tl.store(codes + i.to(tl.int64) * columns + j, code, mask=(i < rows) & (j < columns))
    k = tl.program_id(0) * (height // high) + tl.arange(0, height // high)[:, None]
    m = tl.program_id(1) * (width // wide) + tl.arange(0, width // wide)[None, :]
    tl.store(scale + k * scale_width + m, s, mask=(k < scale_height) & (m < scale_width))
    if both:
        code, s = quantized_tile(tile, wide, high, mantissa, rounding, native)
        tl.store(turned + j.to(tl.int64) * turned_width + i, code, mask=(i < turned_width) & (j < columns))
        k = tl.program_id(0) * (height // wide) + tl.arange(0, height // wide)[:, None]
        m = tl.program_id(1) * (width // high) + tl.arange(0, width // high)[None, :]
        inside = (k < turned_scale_width) & (m < turned_scale_height)
        tl.store(turned_scale + m * turned_scale_width + k, s, mask=inside)


if has_triton():
    loaded = triton.jit(_loaded)
    quantized_tile = triton.jit(_quantized_tile)
    tensor_codes = triton.jit(_tensor_codes)
    row_codes = triton.jit(_row_codes)
    block_codes = triton.jit(_block_codes)


def quantize_triton(
    x: Tensor, past: Tensor | None, dtype: torch.dtype, block: tuple[int, int], rounding: str, both: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what `eff_kernels.fp8.fp8_quantize` does; the arguments are the same.

    Args:
        x: (R, K) in float32, bfloat16 or float16, of any strides, not empty.
        past: As there, float32 of one value; only with one scale a tensor.
        dtype: As there.
        block: As there; finite sides are powers of two up to 128.
        rounding: As there.
        both: As there.
    """
    rows, columns = x.shape
    turned_rows = rows + -rows % _MULTIPLE
    codes = x.new_empty(rows, columns, dtype=torch.uint8)
    turned = codes.new_empty((columns, turned_rows) if both else 0)
    constants = {
        "mantissa": 3 if dtype == torch.float8_e4m3fn else 2,
        "rounding": rounding,
        "native": has_native_fp8(x),
        # two casts of a tile take twice the registers
        "num_warps": 2 * _WARPS if both and block[1] else _WARPS,
        "enable_fp_fusion": False,
    }
    amax = x.new_zeros((1, 1) if block == (0, 0) else 0, dtype=torch.int32)
    turned_scale = x.new_empty(0, dtype=torch.float32)
    with device_of(x):
        if block == (0, 0):
            scale = x.new_empty(1, 1, dtype=torch.float32)
            height, width = (128, 128) if both or x.stride(1) != 1 else (64, 256)
            # a scale of past steps: cast and measured at once, and cast again only where that was in vain
            for measure, cast in ((True, past is not None), (False, True)):
                tensor_codes[(triton.cdiv(rows, height), triton.cdiv(columns, width))](
                    x, amax, amax if past is None else past, scale, codes, turned, rows, columns, *x.stride(),
                    turned_rows, measure=measure, cast=cast, delayed=past is not None, both=both, height=height,
                    width=width, **constants,
                )  # fmt: skip
        elif block == (1, 0):
            scale = _rows(x, codes, constants)
            if both:
                turned_scale = _rows(x.t(), turned, constants)
        else:
            high, wide = block
            height, width = (128, 128) if both or high > 1 or x.stride(1) != 1 else (32, 256)
            scale = x.new_empty(triton.cdiv(rows, high), triton.cdiv(columns, wide), dtype=torch.float32)
            if both:
                turned_scale = scale.new_empty(triton.cdiv(columns, high), triton.cdiv(rows, wide))
            sizes = turned_scale.shape if both else (0, 0)
            block_codes[(triton.cdiv(rows, height), triton.cdiv(columns, width))](
                x, scale, codes, turned_scale, turned, rows, columns, *x.stride(), *scale.shape, turned_rows, *sizes,
                high=high, wide=wide, both=both, height=height, width=width, **constants,
            )  # fmt: skip
    return codes.view(dtype), scale, amax.view(torch.float32), turned.view(dtype), turned_scale


def measure_amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of a matrix, not empty, as float32 (1, 1); NaN where there is one."""
    rows, columns = x.shape
    amax = x.new_zeros(1, 1, dtype=torch.int32)
    with device_of(x):
        tensor_codes[(triton.cdiv(rows, 64), triton.cdiv(columns, 256))](
            x, amax, amax, amax, amax, amax, rows, columns, *x.stride(), 0, measure=True, cast=False, delayed=False,
            both=False, mantissa=3, rounding="exact", native=False, height=64, width=256, num_warps=_WARPS,
        )  # fmt: skip
    return amax.view(torch.float32)


def _rows(x: Tensor, codes: Tensor, constants: Mapping[str, object]) -> Tensor:
    rows, columns = x.shape
    scale = x.new_empty(rows, 1, dtype=torch.float32)
    in_registers = columns <= _IN_REGISTERS and x.stride(1) == 1
    if in_registers:
        width = triton.next_power_of_2(codes.shape[1])
        height = max(1, min(triton.next_power_of_2(rows), 4096 // width))
    else:
        height, width = (1, 4096) if x.stride(1) == 1 else (32, 128)
    row_codes[(triton.cdiv(rows, height),)](
        x, scale, codes, rows, columns, *x.stride(), codes.shape[1], in_registers=in_registers, height=height,
        width=width, **constants,
    )  # fmt: skip
    return scale
