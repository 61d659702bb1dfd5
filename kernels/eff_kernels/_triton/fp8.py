"""`eff_kernels.fp8.quantize` in Triton: amax, scale and codes in as few sweeps as the blocks allow.

One launch for blocks and rows, with the transpose; two for a scale of the whole tensor, of one matrix or of two, and
for the rows of a large matrix and of its transpose. What is not finite, or the largest magnitude, is noted by the same
launches. Matrices are read where they lie, transposed ones too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eff_kernels._triton.encoding import device_of, has_native_fp8
from eff_kernels._triton.launch import cdiv, grid_of_tiles, has_triton, next_power_of_2, remembering
from eff_kernels.fp8 import Block, Source, is_swizzled

if has_triton():
    import triton
    import triton.language as tl

    from eff_kernels._triton.encoding import code_apart, divided, fp8_code, magnitude, narrowed, saturated, scale_of

_WARPS = 8
_IN_REGISTERS = 16384
_MULTIPLE = 16
# of a sweep: enough to fill a GPU, and few enough for each to look at the maxima of all
_PROGRAMS, _TILE = 1024, 16384
# of a matrix with scales of its rows and of its columns: elements up to which a second launch costs more than it saves
_IN_ONE_LAUNCH = 2**22
# height and width of a tile, and warps; with a thread for each column the compiler transposes what it reads, not codes
_MEASURED_LINES, _CAST_LINES = (64, 128, 4), (32, 128, 4)


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


def _converted(
    tile: tl.tensor,
    s: tl.tensor,
    out: tl.tensor,
    values: tl.constexpr,
    mantissa: tl.constexpr,
    rounding: tl.constexpr,
    native: tl.constexpr,
) -> tl.tensor:
    """Return the codes of a tile under a scale, or with `values` what they stand for, in the type of `out`."""
    quotient = divided(tile, s, rounding)
    if values:
        bias: tl.constexpr = 7 if mantissa == 3 else 15
        largest: tl.constexpr = 448.0 if mantissa == 3 else 57344.0
        y = narrowed(saturated(quotient, mantissa, bias, largest) * s, out.dtype.element_ty, native)
    else:
        y = fp8_code(quotient, mantissa, native)
    return y


def _noted(seen: tl.tensor, amax: tl.tensor, here: tl.tensor, seen_as: tl.constexpr) -> None:
    if seen_as == "flag":
        tl.store(seen, 1, mask=here & (amax >= 0x7F800000))
    elif seen_as == "largest":
        tl.atomic_max(seen, amax, mask=here)


def _swept(
    x: tl.tensor,
    past: tl.tensor,
    seen: tl.tensor,
    scale: tl.tensor,
    codes: tl.tensor,
    turned: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    turned_width: tl.tensor,
    maxima: tl.tensor,
    program: tl.tensor,
    programs: tl.tensor,
    both: tl.constexpr,
    last: tl.constexpr,
    delayed: tl.constexpr,
    seen_as: tl.constexpr,
    values: tl.constexpr,
    mantissa: tl.constexpr,
    rounding: tl.constexpr,
    native: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    most: tl.constexpr,
) -> None:
    """Go over this program's tiles of a matrix with one scale: once to measure, the last time to cast."""
    # With a scale of past steps the first sweep casts too, and the last one only where that was in vain: without a
    # past, or where something is not finite.
    across = (columns + width - 1) // width
    tiles = (rows + height - 1) // height * across
    largest = tl.full((), 0, tl.int32)
    if last:
        at = tl.arange(0, most)
        amax = tl.max(tl.load(maxima + at, mask=at < programs, other=0), 0)
        source = amax
        if delayed:
            source = tl.load(past).to(tl.int32, bitcast=True)
            due = (source <= 0) | (amax >= 0x7F800000)
            source = tl.where(due, amax, source)
            tiles = tl.where(due, tiles, 0)
        s = scale_of(source, mantissa, rounding)
        tl.store(scale, s, mask=program == 0)
        tl.store(scale + 1, amax.to(tl.float32, bitcast=True), mask=program == 0)
        noted(seen, amax, program == 0, seen_as)
    elif delayed:
        s = scale_of(tl.load(past).to(tl.int32, bitcast=True), mantissa, rounding)
    for t in range(program, tiles, programs):
        i = t // across * height + tl.arange(0, height)[:, None]
        j = t % across * width + tl.arange(0, width)[None, :]
        tile = loaded(x, i, j, rows, columns, row_stride, column_stride)
        if not last:
            largest = tl.maximum(largest, tl.max(tl.max(magnitude(tile), 1), 0))
        if last or delayed:
            code = converted(tile, s, codes, values, mantissa, rounding, native)
            tl.store(codes + i.to(tl.int64) * columns + j, code, mask=(i < rows) & (j < columns))
            if both:
                if x.dtype.element_ty == tl.float32:  # 16 bits are transposed before they are converted
                    code = code_apart(divided(tile, s, rounding), mantissa, native)
                # under a scale of NaN the code of zero is not that of what fills up
                code = tl.where(i < rows, code, 0)
                tl.store(turned + j.to(tl.int64) * turned_width + i, code, mask=(i < turned_width) & (j < columns))
    if not last:
        tl.store(maxima + program, largest)


def _tensor_codes(
    x: tl.tensor,
    past: tl.tensor,
    seen: tl.tensor,
    scale: tl.tensor,
    codes: tl.tensor,
    turned: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    turned_width: tl.tensor,
    programs: tl.tensor,
    y: tl.tensor,
    y_past: tl.tensor,
    y_seen: tl.tensor,
    y_scale: tl.tensor,
    y_codes: tl.tensor,
    y_turned: tl.tensor,
    y_rows: tl.tensor,
    y_columns: tl.tensor,
    y_row_stride: tl.tensor,
    y_column_stride: tl.tensor,
    y_turned_width: tl.tensor,
    y_programs: tl.tensor,
    maxima: tl.tensor,
    pair: tl.constexpr,
    both: tl.constexpr,
    y_both: tl.constexpr,
    last: tl.constexpr,
    delayed: tl.constexpr,
    seen_as: tl.constexpr,
    values: tl.constexpr,
    mantissa: tl.constexpr,
    rounding: tl.constexpr,
    native: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    most: tl.constexpr,
) -> None:
    """One sweep over a matrix, or over two: the first programs take the first one."""
    program = tl.program_id(0)
    if pair:
        if program < programs:
            swept(
                x, past, seen, scale, codes, turned, rows, columns, row_stride, column_stride, turned_width, maxima,
                program, programs, both, last, delayed, seen_as, values, mantissa, rounding, native, height, width,
                most,
            )  # fmt: skip
        else:
            swept(
                y, y_past, y_seen, y_scale, y_codes, y_turned, y_rows, y_columns, y_row_stride, y_column_stride,
                y_turned_width, maxima + programs, program - programs, y_programs, y_both, last, delayed, seen_as,
                values, mantissa, rounding, native, height, width, most,
            )  # fmt: skip
    else:
        swept(
            x, past, seen, scale, codes, turned, rows, columns, row_stride, column_stride, turned_width, maxima,
            program, programs, both, last, delayed, seen_as, values, mantissa, rounding, native, height, width, most,
        )  # fmt: skip


def _coded_rows(
    x: tl.tensor,
    seen: tl.tensor,
    scale: tl.tensor,
    codes: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    codes_width: tl.tensor,
    program: tl.tensor,
    in_registers: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    seen_as: tl.constexpr,
    values: tl.constexpr,
    mantissa: tl.constexpr,
    rounding: tl.constexpr,
    native: tl.constexpr,
) -> None:
    i = program * height + tl.arange(0, height)[:, None]
    j = tl.arange(0, width)[None, :]
    if in_registers:
        tile = loaded(x, i, j, rows, columns, row_stride, column_stride)
        amax = tl.max(magnitude(tile), 1)
        s = scale_of(amax, mantissa, rounding)
        code = converted(tile, s[:, None], codes, values, mantissa, rounding, native)
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
            code = converted(tile, s[:, None], codes, values, mantissa, rounding, native)
            tl.store(codes + i.to(tl.int64) * codes_width + at, code, mask=(i < rows) & (at < codes_width))
    row = program * height + tl.arange(0, height)
    if not values:
        tl.store(scale + row, s, mask=row < rows)
    noted(seen + row * 0, amax, row < rows, seen_as)


def _row_codes(
    x: tl.tensor,
    seen: tl.tensor,
    scale: tl.tensor,
    codes: tl.tensor,
    turned_scale: tl.tensor,
    turned: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    turned_width: tl.tensor,
    programs: tl.tensor,
    both: tl.constexpr,
    in_registers: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    turned_in_registers: tl.constexpr,
    turned_height: tl.constexpr,
    turned_wide: tl.constexpr,
    seen_as: tl.constexpr,
    values: tl.constexpr,
    mantissa: tl.constexpr,
    rounding: tl.constexpr,
    native: tl.constexpr,
) -> None:
    """Rows by the first programs, and the rows of the transpose by the others."""
    program = tl.program_id(0)
    if both:
        if program < programs:
            coded_rows(
                x, seen, scale, codes, rows, columns, row_stride, column_stride, columns, program, in_registers, height,
                width, seen_as, values, mantissa, rounding, native,
            )  # fmt: skip
        else:
            coded_rows(
                x, seen, turned_scale, turned, columns, rows, column_stride, row_stride, turned_width,
                program - programs, turned_in_registers, turned_height, turned_wide, "nothing", values, mantissa,
                rounding, native,
            )  # fmt: skip
    else:
        coded_rows(
            x, seen, scale, codes, rows, columns, row_stride, column_stride, columns, program, in_registers, height,
            width, seen_as, values, mantissa, rounding, native,
        )  # fmt: skip


def _line_maxima(
    x: tl.tensor,
    maxima: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    turned_width: tl.tensor,
    height: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """Raise what is zero to the largest magnitudes of the rows, and `turned_width` behind them of the columns."""
    across = (columns + width - 1) // width
    i = tl.program_id(0) // across * height + tl.arange(0, height)
    j = tl.program_id(0) % across * width + tl.arange(0, width)
    tile = magnitude(loaded(x, i[:, None], j[None, :], rows, columns, row_stride, column_stride))
    # programs touch the same numbers, but a launch sees all that the one before it wrote
    tl.atomic_max(maxima + i, tl.max(tile, 1), mask=i < rows, sem="relaxed")
    tl.atomic_max(maxima + turned_width + j, tl.max(tile, 0), mask=j < columns, sem="relaxed")


def _line_codes(
    x: tl.tensor,
    maxima: tl.tensor,
    seen: tl.tensor,
    scale: tl.tensor,
    codes: tl.tensor,
    turned_scale: tl.tensor,
    turned: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    codes_width: tl.tensor,
    turned_width: tl.tensor,
    seen_as: tl.constexpr,
    mantissa: tl.constexpr,
    rounding: tl.constexpr,
    native: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """Cast tiles under the scales of their rows, and their transposes under those of the columns."""
    across = (columns + width - 1) // width
    # what was measured last is still in the cache
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row, column = program // across, program % across
    i = row * height + tl.arange(0, height)[:, None]
    j = column * width + tl.arange(0, width)[None, :]
    tile = loaded(x, i, j, rows, columns, row_stride, column_stride)
    amax = tl.load(maxima + i, mask=i < rows, other=0)
    s = scale_of(amax, mantissa, rounding)
    turned_s = scale_of(tl.load(maxima + turned_width + j, mask=j < columns, other=0), mantissa, rounding)
    # one tile of a row, and one of a column, tells their scale
    first = i < tl.where(column == 0, rows, 0)
    tl.store(scale + i, s, mask=first)
    tl.store(turned_scale + j, turned_s, mask=j < tl.where(row == 0, columns, 0))
    noted(seen + i * 0, amax, first, seen_as)
    code = fp8_code(divided(tile, s, rounding), mantissa, native)
    tl.store(codes + i.to(tl.int64) * codes_width + j, code, mask=(i < rows) & (j < codes_width))
    code = fp8_code(divided(tile, turned_s, rounding), mantissa, native)
    tl.store(turned + j.to(tl.int64) * turned_width + i, code, mask=(i < turned_width) & (j < columns))


def _quantized_tile(
    tile: tl.tensor,
    high: tl.constexpr,
    wide: tl.constexpr,
    mantissa: tl.constexpr,
    rounding: tl.constexpr,
    native: tl.constexpr,
    apart: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    down: tl.constexpr = tile.shape[0] // high
    along: tl.constexpr = tile.shape[1] // wide
    blocks = tl.reshape(tile, (down, high, along, wide))
    amax = tl.max(tl.max(magnitude(blocks), 3), 1)
    s = scale_of(amax, mantissa, rounding)
    quotient = divided(blocks, s[:, None, :, None], rounding)
    code = code_apart(quotient, mantissa, native) if apart else fp8_code(quotient, mantissa, native)
    return tl.reshape(code, tile.shape), s, amax


def _store_scale(
    scale: tl.tensor,
    s: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    i: tl.tensor,
    j: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    high: tl.constexpr,
    wide: tl.constexpr,
    swizzled: tl.constexpr,
) -> None:
    """Store the scales of blocks from a row and a column on, and what fills up their layout."""
    k, m = row + i, column + j
    inside = (k < height) & (m < width)
    if swizzled:
        # a program has one tile of 128 by 4 bytes; what lies outside is 2^-127
        tile = scale + (row // 128 * row_stride + column // 4).to(tl.int64) * 512
        exponent = tl.where(inside, s.to(tl.int32, bitcast=True) >> 23, 0).to(tl.uint8)
        tl.store(
            tile + (i % 32 * 16 + i // 32 * 4 + j), exponent, mask=(row + i * 0 < height) & (column + j * 0 < width)
        )
    else:
        tl.store(scale + k * row_stride + m * column_stride, s, mask=inside)
        if high == wide:
            # the padding of a row follows its last scale
            is_last = (m == width - 1) & inside
            for beyond in tl.static_range(1, 4):
                tl.store(scale + k * row_stride + m + beyond, 1.0, mask=is_last & (m + beyond < row_stride))


def _block_codes(
    x: tl.tensor,
    seen: tl.tensor,
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
    scale_row_stride: tl.tensor,
    scale_column_stride: tl.tensor,
    turned_width: tl.tensor,
    turned_scale_height: tl.tensor,
    turned_scale_width: tl.tensor,
    turned_row_stride: tl.tensor,
    turned_column_stride: tl.tensor,
    high: tl.constexpr,
    wide: tl.constexpr,
    both: tl.constexpr,
    swizzled: tl.constexpr,
    seen_as: tl.constexpr,
    mantissa: tl.constexpr,
    rounding: tl.constexpr,
    native: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
) -> None:
    row, column = tl.program_id(0), tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    i = row * height + tl.arange(0, height)[:, None]
    j = column * width + tl.arange(0, width)[None, :]
    tile = loaded(x, i, j, rows, columns, row_stride, column_stride)
    code, s, amax = quantized_tile(tile, high, wide, mantissa, rounding, native, False)
    tl.store(codes + i.to(tl.int64) * columns + j, code, mask=(i < rows) & (j < columns))
    k, m = tl.arange(0, height // high)[:, None], tl.arange(0, width // wide)[None, :]
    down, along = row * (height // high), column * (width // wide)
    noted(seen + k * 0 + m * 0, amax, (down + k < scale_height) & (along + m < scale_width), seen_as)
    store_scale(
        scale, s, down, along, k, m, scale_height, scale_width, scale_row_stride, scale_column_stride, high, wide,
        swizzled,
    )  # fmt: skip
    if both:
        code, s, _ = quantized_tile(tile, wide, high, mantissa, rounding, native, high == wide)
        tl.store(turned + j.to(tl.int64) * turned_width + i, code, mask=(i < turned_width) & (j < columns))
        store_scale(
            turned_scale, s, column * (width // high), row * (height // wide),
            tl.arange(0, width // high)[None, :], tl.arange(0, height // wide)[:, None], turned_scale_height,
            turned_scale_width, turned_row_stride, turned_column_stride, high, wide, swizzled,
        )  # fmt: skip


if has_triton():
    loaded = triton.jit(_loaded)
    converted = triton.jit(_converted)
    noted = triton.jit(_noted)
    swept = triton.jit(_swept)
    coded_rows = triton.jit(_coded_rows)
    quantized_tile = triton.jit(_quantized_tile)
    # rows of a bank lie at addresses of any alignment: one variant for all
    _numbers = [f"{prefix}{name}" for prefix in ("", "y_") for name in ("past", "seen", "scale")]
    tensor_codes = remembering(
        triton.jit(_tensor_codes, do_not_specialize=["programs", "y_programs"], do_not_specialize_on_alignment=_numbers)
    )
    row_codes = remembering(triton.jit(_row_codes))
    line_maxima = remembering(triton.jit(_line_maxima))
    line_codes = remembering(triton.jit(_line_codes))
    store_scale = triton.jit(_store_scale)
    block_codes = remembering(triton.jit(_block_codes))


class Cast(NamedTuple):
    """Results of casting one matrix: codes and scales of it and of its transpose, and the largest magnitude or None."""

    codes: Tensor
    scale: Tensor
    turned: Tensor
    turned_scale: Tensor
    amax: Tensor | None


def quantize_triton(sources: Sequence[Source], dtype: torch.dtype, block: Block, rounding: str) -> list[Cast]:
    """Return what `eff_kernels.fp8.quantize_all` does; of one scale a tensor, two matrices share each launch.

    Args:
        sources: Matrices (R, K) in float32, bfloat16 or float16 on one device, of any strides, not empty.
        dtype: As there.
        block: As there; finite sides are powers of two up to 128.
        rounding: As there.
    """
    constants = _constants(sources[0].x, dtype, rounding)
    with device_of(sources[0].x):
        if block == (0, 0):
            pairs = (sources[start : start + 2] for start in range(0, len(sources), 2))
            return [made for pair in pairs for made in _one_scale(pair, dtype, constants)]
        cast = _rows if block == (1, 0) else _blocks
        return [cast(source, dtype, block, constants) for source in sources]


def fake_quantize_triton(x: Tensor, dtype: torch.dtype, by_row: bool) -> Tensor:
    """Return a matrix, not empty, rounded to FP8 under an exact scale for all or for each row, in its own type."""
    y, source = torch.empty_like(x), Source(x)
    constants = _constants(x, dtype, "exact")
    with device_of(x):
        if by_row:
            _launch_rows(source, y, y, y, y, constants | {"values": True})
        else:
            numbers = x.new_empty(2, 1, dtype=torch.float32)
            _sweep([source], [Cast(y, numbers, y, y, None)], constants | {"values": True})
    return y


def measure_amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of a matrix, not empty, as float32 (1, 1); NaN where there is one."""
    with device_of(x):
        maxima = _sweep([Source(x)], [Cast(x, x, x, x, None)], _constants(x, torch.float8_e4m3fn, "exact"), cast=False)
    return maxima.amax().view(torch.float32).view(1, 1)


def _constants(x: Tensor, dtype: torch.dtype, rounding: str) -> dict[str, Any]:
    return {
        "mantissa": 3 if dtype == torch.float8_e4m3fn else 2,
        "rounding": rounding,
        "native": has_native_fp8(x),
        "num_warps": _WARPS,
        "enable_fp_fusion": False,
    }


def _seen(sources: Sequence[Source]) -> dict[str, Any]:
    seen = sources[0].seen
    return {"seen_as": "nothing" if seen is None else "largest" if seen.is_floating_point() else "flag"}


def _turned(source: Source, dtype: torch.dtype) -> Tensor:
    rows, columns = source.x.shape
    return source.x.new_empty((columns, rows + -rows % _MULTIPLE) if source.both else 0, dtype=dtype)


def _one_scale(sources: Sequence[Source], dtype: torch.dtype, constants: dict[str, Any]) -> list[Cast]:
    made = []
    for source in sources:
        codes = source.x.new_empty(source.x.shape, dtype=dtype)
        numbers = source.x.new_empty(2, 1, dtype=torch.float32)
        scale = numbers[:1]
        made.append(Cast(codes, scale, _turned(source, dtype), scale, numbers[1:]))
    _sweep(sources, made, constants | {"values": False})
    return made


def _sweep(sources: Sequence[Source], made: Sequence[Cast], constants: dict[str, Any], cast: bool = True) -> Tensor:
    """Sweep twice over one or two matrices, or once if nothing is cast; return the maxima of the programs."""
    first = sources[0]
    turning = any(source.both or source.x.stride(1) != 1 for source in sources)
    # of a few long rows wide tiles
    height = 128 if turning else min(64, next_power_of_2(max(source.x.shape[0] for source in sources)))
    tile = _TILE // 2 if turning and any(source.x.itemsize == 4 for source in sources) else _TILE  # or registers spill
    width = tile // height
    counts = [min(_PROGRAMS, cdiv(source.x.shape[0], height) * cdiv(source.x.shape[1], width)) for source in sources]
    maxima = first.x.new_empty(sum(counts), dtype=torch.int32)
    given: list[Any] = []
    for source, out, count in zip(sources, made, counts, strict=True):
        x = source.x
        past = maxima if source.past is None else source.past
        seen = maxima if source.seen is None else source.seen.view(torch.int32)
        codes, turned = (part.view(torch.uint8) if part.itemsize == 1 else part for part in (out.codes, out.turned))
        given += [x, past, seen, out.scale, codes, turned, *x.shape, *x.stride(), x.shape[0] + -x.shape[0] % _MULTIPLE]
        given.append(count)
    if len(sources) == 2:
        constants = constants | {"num_warps": 2 * _WARPS}  # a tile of either in the registers of one program
    for last in (False, True) if cast else (False,):
        tensor_codes[(sum(counts),)](
            *given, *(given if len(sources) == 1 else ()), maxima, pair=len(sources) == 2, both=first.both,
            y_both=sources[-1].both, last=last, delayed=first.past is not None, height=height, width=width,
            most=_PROGRAMS, **_seen(sources), **{"values": False} | constants,
        )  # fmt: skip
    return maxima


def _rows(source: Source, dtype: torch.dtype, block: Block, constants: dict[str, Any]) -> Cast:
    x, turned = source.x, _turned(source, dtype)
    codes = x.new_empty(x.shape, dtype=dtype)
    scale = x.new_empty(x.shape[0], 1, dtype=torch.float32)
    turned_scale = x.new_empty((x.shape[1], 1) if source.both else 0, dtype=torch.float32)
    out, other = codes.view(torch.uint8), turned.view(torch.uint8)
    if source.both and x.numel() > _IN_ONE_LAUNCH:
        _launch_lines(source, scale, out, turned_scale, other, constants)
    else:
        _launch_rows(source, scale, out, turned_scale, other, constants | {"values": False})
    return Cast(codes, scale, turned, turned_scale, None)


def _launch_lines(
    source: Source, scale: Tensor, codes: Tensor, turned_scale: Tensor, turned: Tensor, constants: dict[str, Any]
) -> None:
    x, scale, codes, turned_scale, turned = _as_it_lies(source.x, scale, codes, turned_scale, turned)
    maxima = x.new_zeros(turned.shape[1] + x.shape[1], dtype=torch.int32)
    measured, cast = (
        {"height": height, "width": width, "num_warps": warps, "enable_fp_fusion": False}
        for height, width, warps in (_MEASURED_LINES, _CAST_LINES)
    )
    given = *x.shape, *x.stride()
    line_maxima[_tiles(x, measured),](x, maxima, *given, turned.shape[1], **measured)
    line_codes[_tiles(x, cast),](
        x, maxima, x if source.seen is None else source.seen, scale, codes, turned_scale, turned, *given,
        codes.shape[1], turned.shape[1], **_seen([source]), **constants | cast,
    )  # fmt: skip


def _as_it_lies(
    x: Tensor, scale: Tensor, codes: Tensor, turned_scale: Tensor, turned: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return these, or of a transposed matrix what it is the transpose of, whose rows lie in one piece."""
    if x.stride(0) == 1 != x.stride(1):
        return x.t(), turned_scale, turned, scale, codes
    return x, scale, codes, turned_scale, turned


def _tiles(x: Tensor, tile: dict[str, int]) -> int:
    tiles: int = cdiv(x.shape[0], tile["height"]) * cdiv(x.shape[1], tile["width"])
    return tiles


def _launch_rows(
    source: Source, scale: Tensor, codes: Tensor, turned_scale: Tensor, turned: Tensor, constants: dict[str, Any]
) -> None:
    x = source.x
    (rows, columns), turned_width = x.shape, x.shape[0] + -x.shape[0] % _MULTIPLE
    in_registers, height, width = _row_tile(rows, columns, x.stride(1))
    turned_in_registers, turned_height, turned_wide = _row_tile(columns, turned_width, x.stride(0))
    programs = cdiv(rows, height)
    row_codes[(programs + (cdiv(columns, turned_height) if source.both else 0),)](
        x, x if source.seen is None else source.seen, scale, codes, turned_scale, turned, rows, columns, *x.stride(),
        turned_width, programs, both=source.both, in_registers=in_registers, height=height, width=width,
        turned_in_registers=turned_in_registers, turned_height=turned_height, turned_wide=turned_wide,
        **_seen([source]), **constants,
    )  # fmt: skip


def _row_tile(rows: int, width: int, stride: int) -> tuple[bool, int, int]:
    if stride != 1:
        return False, 32, 128
    if width > _IN_REGISTERS:
        return False, 1, 4096
    width = next_power_of_2(width)
    return True, max(1, min(next_power_of_2(rows), 4096 // width)), width


def _blocks(source: Source, dtype: torch.dtype, block: Block, constants: dict[str, Any]) -> Cast:
    x, both, turned, (high, wide) = source.x, source.both, _turned(source, dtype), block
    rows, columns = x.shape
    swizzled = is_swizzled(block, constants["rounding"])
    height, width = (128, 128) if both or high > 1 or swizzled or x.stride(1) != 1 else (32, 256)
    codes = x.new_empty(x.shape, dtype=dtype)
    scale, sizes = _block_scale(x, rows, columns, block, swizzled)
    turned_scale, turned_sizes = _block_scale(x, columns, rows, block, swizzled) if both else (scale, sizes)
    # two casts of a tile take twice the registers; blocks of a row are quicker on eight warps all the same (H200)
    constants = constants | {"num_warps": 2 * _WARPS if both and block != (1, 128) else _WARPS}
    block_codes[grid_of_tiles(cdiv(rows, height), cdiv(columns, width))](
        x, x if source.seen is None else source.seen, scale, codes.view(torch.uint8), turned_scale,
        turned.view(torch.uint8), rows, columns, *x.stride(), *sizes, rows + -rows % _MULTIPLE, *turned_sizes,
        high=high, wide=wide, both=both, swizzled=swizzled, height=height, width=width, **_seen([source]), **constants,
    )  # fmt: skip
    return Cast(codes, scale, turned, turned_scale, None)


def _block_scale(x: Tensor, rows: int, columns: int, block: Block, swizzled: bool) -> tuple[Tensor, tuple[int, ...]]:
    """Return an empty scale of blocks, laid out as cuBLAS reads it, and its size and strides; in tiles if swizzled."""
    down, along = cdiv(rows, block[0]), cdiv(columns, block[1])
    if swizzled:
        tiles = cdiv(along, 4)
        return x.new_empty(512 * cdiv(down, 128) * tiles, dtype=torch.uint8), (down, along, tiles, 1)
    if block == (1, 128):
        scale = x.new_empty(along, down, dtype=torch.float32).t()
    else:
        wide = along + -along % 4 if block == (128, 128) else along
        scale = x.new_empty(down, wide, dtype=torch.float32)[:, :along]
    return scale, (*scale.shape, *scale.stride())
