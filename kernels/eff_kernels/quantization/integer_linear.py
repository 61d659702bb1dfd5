"""The product of int8 codes with a CPU's integer instructions: oneDNN's, and the engine of FBGEMM's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

FBGEMM = "fbgemm"
"""The name of FBGEMM among ``torch.backends.quantized.supported_engines``."""


@contextlib.contextmanager
def fbgemm_engine() -> Iterator[None]:
    """Return a context in which weights are packed for FBGEMM. The process's engine stays what it was."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = FBGEMM
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


def pack(weight: Tensor) -> Tensor:
    """Return the codes of a linear layer's weight in oneDNN's layout, for `integer_linear`.

    Args:
        weight: int8, (outputs, inputs), on a CPU.
    """
    packed: Tensor = torch.ops.onednn.qlinear_prepack(weight, None)
    return packed


def integer_linear(
    codes: Tensor,
    scale: float,
    zero_point: int,
    packed: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None = None,
) -> Tensor:
    """Return ``s_x·s_w·Σ(q_x − z)·q_w + b`` in float32, the sums exact 32-bit integers.

    x86 without VNNI or AMX adds pairs of products in 16 bits, so q_w must lie within ±64 there.

    Args:
        codes: uint8, (..., inputs), on a CPU.
        scale: s_x, or with `row_scale` a factor of it.
        zero_point: z, for unsigned codes.
        packed: q_w, from `pack`.
        weight_scale: s_w, float32, (outputs,).
        bias: b, float32, (outputs,), or None.
        row_scale: A factor of s_x for each row, float32, (..., 1).

    Example:
        >>> codes, weight = torch.tensor([[130, 127]], dtype=torch.uint8), torch.tensor([[3, -5]], dtype=torch.int8)
        >>> integer_linear(codes, 0.5, 128, pack(weight), torch.tensor([0.1]), None)  # (2·3 + (-1)·(-5))·0.05
        tensor([[0.5500]])
    """
    if torch.compiler.is_compiling():
        # inductor's lowering of oneDNN's operator only supports weights that are constants of the graph (torch 2.13)
        opaque: Tensor = _opaque(codes, scale, zero_point, packed, weight_scale, bias, row_scale)
        return opaque
    zero_points = torch.zeros(len(weight_scale), dtype=torch.int32)
    # bias is added after scaling the rows, so not by the kernel if rows have scales.
    added = bias if row_scale is None else None
    y: Tensor = torch.ops.onednn.qlinear_pointwise(
        codes, scale, zero_point, packed, weight_scale, zero_points, added, 1.0, 0, torch.float32, "none", [], ""
    )
    if row_scale is None:
        return y
    return y.mul_(row_scale) if bias is None else torch.addcmul(bias, y, row_scale, out=y)


_opaque = torch.library.custom_op("eff_kernels::integer_linear", integer_linear, mutates_args=())


@_opaque.register_fake
def _(codes: Tensor, scale: float, zero_point: int, packed: Tensor, weight_scale: Tensor, *_: object) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], len(weight_scale)), dtype=torch.float32)
