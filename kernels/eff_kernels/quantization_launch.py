"""Tiles, grids and memory for the kernels of `eff_kernels.quantization_triton`."""

from __future__ import annotations

import torch
from torch import Tensor

from eff_kernels import quantization_triton as kernels
from eff_kernels.triton_available import has_triton

if has_triton():
    import triton

_KINDS = {"fixed": 0, "lsq": 1, "range": 2, "pact": 3}
# Sixteen values in the registers of a thread; thirty-two where that keeps a row there as a whole.
_BLOCK, _ROW_BLOCK, _PER_WARP, _WARPS = 4096, 16384, 512, 16


def _tile(rows: int, columns: int, most: int) -> tuple[int, int]:
    wide = min(triton.next_power_of_2(columns), most)
    return max(1, min(triton.next_power_of_2(rows), most // wide)), wide


def _warps(block_rows: int, block_columns: int) -> int:
    return max(1, min(_WARPS, block_rows * block_columns // _PER_WARP))


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
    """Return what `eff_kernels.quantization_dispatch.round_to_grid` does; `x` and `noise` lie densely, in one order.

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
    rows, columns = shape
    block_rows, block_columns = _tile(rows, columns, block)
    splits = triton.cdiv(columns, block_columns)
    kernels.grid_forward[(triton.cdiv(rows, block_rows) * splits,)](
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
        stochastic=noise is not None,
        block_rows=block_rows,
        block_columns=block_columns,
        num_warps=_warps(block_rows, block_columns),
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
    """Return what `eff_kernels.quantization_dispatch.grid_gradients` does; arguments as in `grid_forward_triton`."""
    x_grad = torch.empty_like(x)
    rows, columns = shape
    block_rows, block_columns = _tile(rows, columns, block)
    splits = triton.cdiv(columns, block_columns)
    outputs = 0 if kind == "fixed" else 1 if zero_point is None else 2
    sums = x.new_empty((outputs, rows // scale.numel(), scale.numel(), splits), dtype=torch.float32)
    kernels.grid_backward[(triton.cdiv(rows, block_rows) * splits,)](
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
        stochastic=noise is not None,
        rounded_gate=rounded_gate,
        block_rows=block_rows,
        block_columns=block_columns,
        num_warps=_warps(block_rows, block_columns),
    )
    return x_grad, sums.sum((1, 3))


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
    """Return what `eff_kernels.quantization_dispatch.round_rows` does; `x` and `noise` are contiguous.

    Args:
        x: As there.
        noise: As there.
        columns: As there.
        qmin: As there.
        qmax: As there.
        symmetric: As there.
        block: Values of a tile of several rows, a power of two.
        row_block: Columns up to which a row is read once, a power of two.
    """
    y = torch.empty_like(x)
    rows = x.numel() // columns
    block_rows, block_columns = _tile(rows, columns, block)
    if block_columns < columns <= row_block:
        block_columns = triton.next_power_of_2(columns)
    kernels.rows_forward[(triton.cdiv(rows, block_rows),)](
        x,
        x if noise is None else noise,
        y,
        rows,
        columns,
        float(qmin),
        float(qmax),
        symmetric=symmetric,
        stochastic=noise is not None,
        tiles=triton.cdiv(columns, block_columns),
        block_rows=block_rows,
        block_columns=block_columns,
        num_warps=_warps(block_rows, block_columns),
    )
    return y
