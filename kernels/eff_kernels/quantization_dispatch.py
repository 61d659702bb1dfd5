"""Fake quantisation on CUDA as custom ops, and what they take; the rest is for torch's own operations.

The gradients are those of the functions that call them: an op here has none of its own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eff_kernels.eager_cuda import on_eager_cuda


def grid_on_triton(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, noise: Tensor | None = None, grad: Tensor | None = None
) -> bool:
    """Return whether `round_to_grid` takes these, or with `grad` `grid_gradients`, which has no gradient of its own.

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
    """Return rows and columns of `x` such that a row has one scale; (0, 0) if the kernels have no such view."""
    if scale.numel() == 1 and scale.dim() <= x.dim():
        return 1, x.numel()
    axes = [dim for dim, size in enumerate(scale.shape) if size != 1]
    if scale.dim() != x.dim() or len(axes) != 1 or scale.shape[axes[0]] != x.shape[axes[0]]:
        return 0, 0
    columns = math.prod(x.shape[axes[0] + 1 :])
    rows = x.numel() // columns
    # counted in 32 bits
    return (rows, columns) if rows < 2**31 else (0, 0)


def _dense(x: Tensor, scale: Tensor) -> Tensor:
    """Return `x` without gaps, which under a single scale may lie in any order."""
    lies_dense = scale.numel() == 1 and x.is_contiguous(memory_format=torch.channels_last)
    return x if lies_dense else x.contiguous()


def _like(values: Tensor, x: Tensor) -> Tensor:
    """Return `values` in memory as `x` is."""
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
    """Return ``s·(clamp(ne(x/s) + z, qmin, qmax) − z)`` in the type of `x`, at 2 reads or writes an element.

    Args:
        x: Any shape with elements; float32, bfloat16 or float16.
        scale: Of one element, or of the axes of `x` and along one of them; float32.
        zero_point: Of the shape of `scale` or (), rounded and clamped to the codes; None: 0.
        noise: As in `eff_kernels.quantization.round_codes`, of the shape of `x`, float32.
        qmin: Smallest code, of at most 17 bits.
        qmax: Largest code, likewise.
        smallest: A smaller scale counts as this one.
    """
    from eff_kernels.quantization_launch import grid_forward_triton

    x = _dense(x, scale)
    noise = None if noise is None else _like(noise, x)
    operands = x, *_qparams(scale, zero_point), noise, _grid(x, scale)
    # Triton launches on the current device, which need not be that of the values
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
    """Return the gradient of `x` and the sums that are those of what is learned; 3 reads or writes an element.

    Args:
        grad: That of the result, of the shape and type of `x`.
        x: As in `round_to_grid`, and so are the other operands.
        scale: For ``"pact"`` its α.
        zero_point: For ``"pact"`` None, for ``"range"`` given.
        noise: Used where the gate asks for the rounded code.
        qmin: Smallest code.
        qmax: Largest code.
        rounded_gate: Gate on the rounded code.
        kind: ``"fixed"``: no sums; ``"lsq"``: scale, and zero point if there is one; ``"range"``: maximum and minimum;
            ``"pact"``: α.
        grad_scale: Factor on the sums.
        smallest: A smaller scale, or α, counts as this one.

    Returns:
        Like `x`, and (sums, scales) in float32, added up in an order that does not vary.
    """
    from eff_kernels.quantization_launch import grid_backward_triton

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
    """Return `x` rounded to codes under a range for each `columns` neighbours; 2 reads or writes up to 16384 of them.

    Args:
        x: Any shape with elements; float32, bfloat16 or float16.
        noise: As in `round_to_grid`.
        columns: Divides the number of elements.
        qmin: Smallest code.
        qmax: Largest code.
        symmetric: Scale of `eff_kernels.quantization.scale_of_largest` and zero point 0, else `affine_qparams`.
    """
    from eff_kernels.quantization_launch import rows_forward_triton

    x = x.contiguous()
    noise = None if noise is None else noise.contiguous()
    with torch.cuda.device(x.get_device()):
        return rows_forward_triton(x, noise, columns, qmin, qmax, symmetric)


@round_rows.register_fake
def _(x: Tensor, noise: Tensor | None, columns: int, qmin: int, qmax: int, symmetric: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
