"""Fake quantization and its gradient in Triton, with their tiles, grids and buffers.

Values are seen as rows of neighbors that share a scale. A program computes a tile of rows and columns, and leaves the
sums over its columns in a buffer of its own, so that equal inputs give equal gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eff_kernels._triton.launch import cdiv, has_triton, next_power_of_2, remembering

if has_triton():
    import triton
    import triton.language as tl

    from eff_kernels._triton.encoding import fused


def _within(values: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    low_bounded = tl.maximum(values, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(low_bounded, high, propagate_nan=tl.PropagateNan.ALL)


def _quotient(values: tl.tensor, scale: tl.tensor, bounded: tl.constexpr = False) -> tl.tensor:
    """Return ``values / scale`` rounded to nearest, like CPU and ONNX: ties would move, were it not."""
    # A reciprocal a row and two steps of Newton's, the last of which rounds correctly (Markstein, 1990): half of what a
    # division an element takes. `/` is off by two units on NVIDIA (Triton 3.9).

    # powers of two, which keep the reciprocal of a tiny or a huge scale normal
    power = tl.where(scale < 2.0**-60, 2.0**60, tl.where(scale > 2.0**60, 2.0**-60, 1.0))
    scale = scale * power
    values = values * power
    reciprocal = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    rough = values * reciprocal
    better = fused(fused(-rough, scale, values), reciprocal, rough)
    better = fused(fused(-better, scale, values), reciprocal, better)
    if not bounded:
        # far outside, where a residual is inf - inf, the rough one will do
        better = tl.where(tl.abs(rough) < 4194304.0, better, rough)
    return better


def _rounded(
    values: tl.tensor, noise: tl.tensor, at: tl.tensor, inside: tl.tensor, stochastic: tl.constexpr
) -> tl.tensor:
    if stochastic:
        low = tl.floor(values)
        codes = low + (tl.load(noise + at, mask=inside, other=0.0) < values - low).to(tl.float32)
    else:
        # halves to even below 2^22: the interpreter has no libdevice
        codes = (values + 12582912.0) - 12582912.0
    return codes


def _place(
    row: tl.tensor, tile: tl.tensor, rows: tl.tensor, columns: tl.tensor, block_columns: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    column = tile * tl.full((), block_columns, tl.int64) + tl.arange(0, block_columns)
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    return at, (row < rows)[:, None] & (column < columns)[None, :]


def _of_channels(values: tl.tensor, at: tl.tensor, channels: tl.tensor, across: tl.constexpr) -> tl.tensor:
    return tl.load(values + at, mask=at < channels, other=1) if across else tl.load(values + at % channels)


def _steps(
    scale: tl.tensor,
    zero_point: tl.tensor,
    at: tl.tensor,
    channels: tl.tensor,
    qmin: tl.tensor,
    qmax: tl.tensor,
    smallest: tl.tensor,
    zeros: tl.constexpr,
    across: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return scales and zero points of rows, or with `across` of columns."""
    steps = tl.maximum(of_channels(scale, at, channels, across), smallest, propagate_nan=tl.PropagateNan.ALL)
    zero = tl.zeros_like(steps)
    if zeros:
        zero = within(of_channels(zero_point, at, channels, across).to(tl.float32), qmin, qmax)
        zero = (zero + 12582912.0) - 12582912.0
    return tl.expand_dims(steps, 0 if across else 1), tl.expand_dims(zero, 0 if across else 1)


def _grid_forward(
    x: tl.tensor,
    scale: tl.tensor,
    zero_point: tl.tensor,
    noise: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    channels: tl.tensor,
    splits: tl.tensor,
    qmin: tl.tensor,
    qmax: tl.tensor,
    smallest: tl.tensor,
    zeros: tl.constexpr,
    across: tl.constexpr,
    stochastic: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    row = program // splits * block_rows + tl.arange(0, block_rows)
    at, inside = place(row, program % splits, rows, columns, block_columns)
    of = program % splits * block_columns + tl.arange(0, block_columns) if across else row
    s, z = steps(scale, zero_point, of, channels, qmin, qmax, smallest, zeros, across)
    exact = quotient(tl.load(x + at, mask=inside, other=0.0).to(tl.float32), s)
    # clamped first, which between whole bounds is the same
    codes = rounded(within(exact, qmin - z, qmax - z), noise, at, inside, stochastic)
    tl.store(y + at, (codes * s).to(y.dtype.element_ty), mask=inside)


def _grid_backward(
    x: tl.tensor,
    grad: tl.tensor,
    scale: tl.tensor,
    zero_point: tl.tensor,
    noise: tl.tensor,
    x_grad: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    channels: tl.tensor,
    splits: tl.tensor,
    qmin: tl.tensor,
    qmax: tl.tensor,
    smallest: tl.tensor,
    grad_scale: tl.tensor,
    kind: tl.constexpr,
    zeros: tl.constexpr,
    across: tl.constexpr,
    stochastic: tl.constexpr,
    rounded_gate: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    row = program // splits * block_rows + tl.arange(0, block_rows)
    at, inside = place(row, program % splits, rows, columns, block_columns)
    of = program % splits * block_columns + tl.arange(0, block_columns) if across else row
    s, z = steps(scale, zero_point, of, channels, qmin, qmax, smallest, zeros, across)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    if kind == 3:
        below = value < 0.0
        above = value >= s
    else:
        exact = quotient(value, s)
        codes = exact
        if rounded_gate:
            codes = rounded(exact, noise, at, inside, stochastic)
        below = codes + z < qmin
        above = codes + z > qmax
    outside = below | above
    tl.store(x_grad + at, tl.where(outside, 0.0, g).to(x_grad.dtype.element_ty), mask=inside)
    if kind != 0:
        if kind == 1:
            nearest = within(rounded(exact, noise, at, inside, False), qmin - z, qmax - z)
            first = g * (nearest - tl.where(outside, 0.0, exact))
            second = tl.where(outside, g, 0.0)
        else:
            first = tl.where(above, g, 0.0)
            second = tl.where(below, g, 0.0)
        # a program's own sums of its rows, or of its columns
        if across:
            sum_at, summed = sums + (program // splits).to(tl.int64) * columns + of, of < columns
            count = (tl.num_programs(0) // splits).to(tl.int64) * columns
        else:
            sum_at, summed = sums + row.to(tl.int64) * splits + program % splits, row < rows
            count = tl.cast(rows, tl.int64) * splits
        tl.store(sum_at, grad_scale * tl.sum(first, 0 if across else 1), mask=summed)
        if zeros:
            total = grad_scale * tl.sum(second, 0 if across else 1)
            if kind == 1:
                # one step for all that is summed
                total = -total * tl.reshape(s, total.shape)
            tl.store(sum_at + count, total, mask=summed)


def _extremes(
    values: tl.tensor, low: tl.tensor, high: tl.tensor, symmetric: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    # Sought among integers in the order of the floats that they are the bits of: they see NaN, which lies beyond
    # infinity. Both start at zero, as the range has to contain it. The largest signed one is the highest float, for no
    # negative one exceeds 0; the largest unsigned one the lowest, for the sign is their highest bit.
    bits = values.to(tl.int32, bitcast=True)
    if symmetric:
        high = tl.maximum(high, tl.max(bits & 0x7FFFFFFF, 1))
    else:
        high = tl.maximum(high, tl.max(bits, 1))
        low = tl.maximum(low, tl.max(bits.to(tl.uint32, bitcast=True), 1))
    return low, high


def _on_grid(
    values: tl.tensor,
    noise: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    s: tl.tensor,
    z: tl.tensor,
    qmin: tl.tensor,
    qmax: tl.tensor,
    symmetric: tl.constexpr,
    stochastic: tl.constexpr,
) -> tl.tensor:
    # no quotient exceeds the range that its row's scale was made for
    exact = quotient(values, s, True)
    if not symmetric:
        # clamped first, which between whole bounds is the same
        exact = within(exact, qmin - z, qmax - z)
    return rounded(exact, noise, at, inside, stochastic) * s


def _rows_forward(
    x: tl.tensor,
    noise: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    qmin: tl.tensor,
    qmax: tl.tensor,
    symmetric: tl.constexpr,
    stochastic: tl.constexpr,
    held: tl.constexpr,
    tiles: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    row = program * block_rows + tl.arange(0, block_rows)
    low = tl.zeros((block_rows,), tl.uint32)
    high = tl.zeros((block_rows,), tl.int32)
    row_values: tl.tuple = ()
    if held:
        for i in tl.static_range(tiles):
            at, inside = place(row, i, rows, columns, block_columns)
            values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            low, high = extremes(values, low, high, symmetric)
            row_values += (values,)
    else:
        for i in range(tiles):
            at, inside = place(row, i, rows, columns, block_columns)
            values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            low, high = extremes(values, low, high, symmetric)
    largest = high.to(tl.float32, bitcast=True)
    z = tl.zeros((block_rows,), tl.float32)
    if symmetric:
        s = tl.div_rn(largest, qmax)
        # the next number up, where the largest value would lie outside
        up = (tl.div_rn(largest, s) > qmax).to(tl.int32)
        s = (s.to(tl.int32, bitcast=True) + up).to(tl.float32, bitcast=True)
        s = tl.where(largest == 0.0, 1.0, s)
    else:
        least = tl.where(low >= 0x80000000, low, 0).to(tl.float32, bitcast=True).to(tl.float64)
        s = ((largest.to(tl.float64) - least) / (qmax - qmin)).to(tl.float32)
        s = tl.where(s == 0.0, 1.0, s)
        # halves to even in float64
        zero = (qmin - least / s.to(tl.float64) + 6755399441055744.0) - 6755399441055744.0
        z = within(zero.to(tl.float32), qmin, qmax)
        z = tl.where(z != z, 0.0, z)
    s = s[:, None]
    z = z[:, None]
    if held:
        for i in tl.static_range(tiles):
            at, inside = place(row, i, rows, columns, block_columns)
            values = on_grid(row_values[i], noise, at, inside, s, z, qmin, qmax, symmetric, stochastic)
            tl.store(y + at, values.to(y.dtype.element_ty), mask=inside)
    else:
        for i in range(tiles):
            at, inside = place(row, i, rows, columns, block_columns)
            values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            values = on_grid(values, noise, at, inside, s, z, qmin, qmax, symmetric, stochastic)
            tl.store(y + at, values.to(y.dtype.element_ty), mask=inside)


if has_triton():
    # a kernel finds what it calls among its module's globals
    within = triton.jit(_within)
    quotient = triton.jit(_quotient)
    rounded = triton.jit(_rounded)
    place = triton.jit(_place)
    of_channels = triton.jit(_of_channels)
    steps = triton.jit(_steps)
    extremes = triton.jit(_extremes)
    on_grid = triton.jit(_on_grid)
    grid_forward = remembering(triton.jit(_grid_forward))
    grid_backward = remembering(triton.jit(_grid_backward))
    rows_forward = remembering(triton.jit(_rows_forward))


if has_triton():
    import triton

_KINDS = {"fixed": 0, "lsq": 1, "range": 2, "pact": 3}
# Sixteen values in the registers of a thread; thirty-two where that keeps a row there as a whole, or where scales lie
# across, so many of them in a tile: a thread divides by eight of them, the more values by each the better.
_BLOCK, _ROW_BLOCK, _PER_WARP, _WARPS = 4096, 16384, 512, 16
_ACROSS = 64


def _tile(rows: int, columns: int, most: int) -> tuple[int, int]:
    wide = min(next_power_of_2(columns), most)
    return max(1, min(next_power_of_2(rows), most // wide)), wide


def _grid(shape: tuple[int, int], scales: int, most: int) -> tuple[int, int, bool, int, int]:
    """Return rows, columns, whether scales lie across, one a column, and the sides of a tile."""
    rows, columns = shape
    if columns > 1 or scales == 1:
        return rows, columns, False, *_tile(rows, columns, most)
    rows, columns = rows // scales, scales
    wide = min(next_power_of_2(columns), _ACROSS)
    return rows, columns, True, max(1, min(next_power_of_2(rows), 2 * most // wide)), wide


def _warps(block_rows: int, block_columns: int, across: bool = False) -> int:
    return max(1, min(_WARPS, block_rows * block_columns // (2 * _PER_WARP if across else _PER_WARP)))


def grid_forward_triton(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    noise: Tensor | None,
    shape: tuple[int, int],
    qmin: int,
    qmax: int,
    smallest: float,
    block: int = _BLOCK,
) -> Tensor:
    """Return what `eff_kernels.quantization.affine.round_to_grid` does; `x` and `noise` lie densely, in one order.

    Args:
        x: As there.
        scale: As there, contiguous.
        zero_point: As there, one for each scale, contiguous.
        noise: As there.
        shape: Rows, and columns that share a scale; row r has scale ``r mod scales``.
        qmin: As there.
        qmax: As there.
        smallest: As there.
        block: Values of a tile, a power of two.
    """
    y = torch.empty_like(x)
    rows, columns, across, block_rows, block_columns = _grid(shape, scale.numel(), block)
    splits = cdiv(columns, block_columns)
    grid_forward[(cdiv(rows, block_rows) * splits,)](
        x,
        scale,
        scale if zero_point is None else zero_point,
        x if noise is None else noise,
        y,
        rows,
        columns,
        scale.numel(),
        splits,
        float(qmin),
        float(qmax),
        smallest,
        zeros=zero_point is not None,
        across=across,
        stochastic=noise is not None,
        block_rows=block_rows,
        block_columns=block_columns,
        num_warps=_warps(block_rows, block_columns, across),
        enable_fp_fusion=True,
    )
    return y


def grid_backward_triton(
    x: Tensor,
    grad: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    noise: Tensor | None,
    shape: tuple[int, int],
    qmin: int,
    qmax: int,
    smallest: float,
    rounded_gate: bool,
    kind: str,
    grad_scale: float,
    block: int = _BLOCK,
) -> tuple[Tensor, Tensor]:
    """Return what `eff_kernels.quantization.affine.grid_gradients` does; arguments as in `grid_forward_triton`."""
    x_grad = torch.empty_like(x)
    rows, columns, across, block_rows, block_columns = _grid(shape, scale.numel(), block)
    splits, programs = cdiv(columns, block_columns), cdiv(rows, block_rows)
    outputs = 0 if kind == "fixed" else 1 if zero_point is None else 2
    parts = (programs, columns, 1) if across else (rows // scale.numel(), scale.numel(), splits)
    sums = x.new_empty((outputs, *parts), dtype=torch.float32)
    grid_backward[(programs * splits,)](
        x,
        grad,
        scale,
        scale if zero_point is None else zero_point,
        x if noise is None else noise,
        x_grad,
        sums,
        rows,
        columns,
        scale.numel(),
        splits,
        float(qmin),
        float(qmax),
        smallest,
        grad_scale,
        kind=_KINDS[kind],
        zeros=zero_point is not None,
        across=across,
        stochastic=noise is not None,
        rounded_gate=rounded_gate,
        block_rows=block_rows,
        block_columns=block_columns,
        num_warps=_warps(block_rows, block_columns, across),
        enable_fp_fusion=True,
    )
    return x_grad, sums.sum((1, 3)) if outputs else sums.new_empty(0, parts[1])


def rows_forward_triton(
    x: Tensor,
    noise: Tensor | None,
    columns: int,
    qmin: int,
    qmax: int,
    symmetric: bool,
    block: int = _BLOCK,
    row_block: int = _ROW_BLOCK,
) -> Tensor:
    """Return what `eff_kernels.quantization.affine.round_rows` does; `x` and `noise` are contiguous."""
    y = torch.empty_like(x)
    rows = x.numel() // columns
    block_rows, block_columns = _tile(rows, columns, block)
    if block_columns < columns <= row_block:
        block_columns = next_power_of_2(columns)
    held, warps = columns <= block_columns, _warps(block_rows, block_columns)
    if held and block_rows > 1:
        # A thread divides once a row: its vectors of 16 bytes lie in one, of which neighbors read 128 bytes or more.
        block_columns //= max(1, min(x.itemsize, block_columns * x.itemsize // 128))
    rows_forward[(cdiv(rows, block_rows),)](
        x,
        x if noise is None else noise,
        y,
        rows,
        columns,
        float(qmin),
        float(qmax),
        symmetric=symmetric,
        stochastic=noise is not None,
        held=held,
        tiles=cdiv(columns, block_columns),
        block_rows=block_rows,
        block_columns=block_columns,
        num_warps=warps,
        enable_fp_fusion=True,
    )
    return y
