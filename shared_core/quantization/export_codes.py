"""The integers that a quantised layer's weight and bias stand for, found from their values."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.errors import CompatibilityError
from shared_core.quantization.layers import TRANSPOSED, as_rows, from_rows
from shared_core.quantization.schemes import LayerScheme

_ON_GRID = 1e-3
_SAME_SCALE = 0.009  # onnxruntime leaves a Conv in float whose bias scale is 1 % off s_x·s_w


def grid_of(rows: Tensor, qmax: int, limit: int) -> tuple[Tensor, Tensor] | None:
    """Return (codes, scales) of rows that hold whole multiples of a scale each; None if one does not.

    The scale is ``max|w|/m`` for the first m of `qmax`, 1, 2, … `limit` that makes every value of the row whole. Two
    different grids differ by at least 1/128 of a step somewhere, so none is taken for another.

    Args:
        rows: (rows, values), float32, finite.
        qmax: Largest code, and the magnitude that the largest value most likely has.
        limit: Largest magnitude of a code.

    Returns:
        int8 and float32; a row of zeros has the smallest scale of the others.

    Example:
        >>> codes, scale = grid_of(torch.tensor([[0.5, -1.0, 1.5]]), 7, 8)
        >>> codes.tolist(), scale.tolist()
        ([[1, -2, 3]], [0.5])
    """
    largest = rows.abs().amax(1)
    codes, scale = torch.zeros_like(rows), torch.zeros_like(largest)
    left = torch.arange(len(rows), device=rows.device)[largest > 0]
    for steps in (qmax, *(m for m in range(1, limit + 1) if m != qmax)):
        if not len(left):
            break
        step = largest[left] / steps
        exact = rows[left] / step.unsqueeze(1)
        rounded = exact.round()
        fits = ((exact - rounded).abs() <= _ON_GRID).all(1) & (rounded.amax(1) <= qmax)
        codes[left[fits]], scale[left[fits]] = rounded[fits], step[fits]
        left = left[~fits]
    if len(left):
        return None
    known = scale[scale > 0]
    scale[scale == 0] = known.min() if len(known) else 1.0
    return codes.to(torch.int8), scale


def bias_codes(bias: Tensor, step: Tensor, tolerance: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return (codes, scales) of a bias, for integer kernels that add it to their sums; None if it does not fit.

    The scale is ``s_x·s_w``. Where rounding would move a bias by more than the tolerance, scales are moved to
    ``b/code``, which stands for it exactly: by 1 % at most, if that does. Kernels that sum integers take the codes
    alone.

    Args:
        bias: (channels,).
        step: ``s_x·s_w``, (channels,).
        tolerance: (channels,).

    Example:
        >>> bias_codes(torch.tensor([0.5, 0.26]), torch.tensor([0.1, 0.1]), torch.zeros(2))
        (tensor([5, 3], dtype=torch.int32), tensor([0.1000, 0.0867]))
    """
    bias, step = bias.double(), step.double()
    codes = (bias / step).round()
    if not bool((codes.abs() < 2**30).all()):
        return None
    near = (bias / torch.where(codes == 0, torch.ones_like(codes), codes)).clamp(
        step * (1 - _SAME_SCALE), step * (1 + _SAME_SCALE)
    )
    for scale in (step, near):
        if bool(((codes * scale - bias).abs() <= tolerance).all()):
            return codes.to(torch.int32), scale.float()
    codes = torch.where((codes == 0) & (bias != 0), bias.sign(), codes)
    return codes.to(torch.int32), torch.where(codes == 0, step, bias / codes).float()


@dataclasses.dataclass(frozen=True)
class Quantized:
    """What one layer is written from.

    Attributes:
        codes: int8, of the weight's shape, or as rows for a transposed convolution with groups.
        scale: float32, (channels,) or (channels, blocks).
        axis: Of the channels, or of the blocks.
        block: Weights that share a scale along it; 0: all of a channel.
    """

    codes: Tensor
    scale: Tensor
    axis: int
    block: int


def weight_grid(name: str, module: Any, values: Tensor, scheme: LayerScheme) -> Quantized:
    """Return the codes that a layer's quantised weight stands for.

    Raises:
        CompatibilityError: If the weight is not finite, or no int8 grid holds it.
    """
    if not bool(torch.isfinite(values).all()):
        raise CompatibilityError(
            f"export_onnx: weights of {name} must be finite, got NaN or infinity; look for the diverged step"
        )
    rows = as_rows(module, values).contiguous()
    bits = max(scheme.weight_bits, 2)
    qmax, limit = 2 ** (bits - 1) - 1, 2 ** (bits - 1)
    block = 0
    if scheme.weight == "group":
        block = scheme.group_size
        if scheme.affine:  # q − z is stored
            qmax = min(127, 2**bits - 1)
        limit = qmax
    found = grid_of(rows.view(-1, block) if block else rows, qmax, limit)
    if found is None:
        raise CompatibilityError(
            f"export_onnx: {name} must have weights on a grid of int8 codes, got {scheme.weight} of {bits} bits "
            f"{'with zero points ' if scheme.affine else ''}that are not; bake them, or take fewer bits"
        )
    codes, scale = found
    if not block and bits < 7:
        # The same values on a finer grid, for it is that of the bias too; −2^(b−1) becomes −64: with codes of 8 bits
        # products saturate on processors without VNNI
        factor = 2 ** (7 - bits)
        codes, scale = codes * factor, scale / factor
    codes = codes.view(rows.shape)
    if block:
        if module.__class__ is nn.Embedding or isinstance(module, nn.Linear):
            return Quantized(codes, scale.view(len(rows), -1), 1, block)
        raise CompatibilityError(
            f"export_onnx: {name} must have a scale for each channel to be exported as a convolution, got groups; "
            "skip it in qat, or override its scheme with int8_weight"
        )
    if not isinstance(module, TRANSPOSED):
        return Quantized(codes.view(values.shape), scale, 0, 0)
    if module.groups > 1:  # its channels lie on two axes
        return Quantized(codes, scale, 0, 0)
    return Quantized(from_rows(module, codes, values).contiguous(), scale, 1, 0)


def shared_grid(name: str, module: Any, scheme: LayerScheme, shared: dict[int, Quantized]) -> Quantized:
    """Return the codes of a layer's weight: of tied layers the same tensors, by the weight's identity in `shared`."""
    key = id(module.weight)
    if key not in shared:
        shared[key] = weight_grid(name, module, module.weight.detach(), scheme)
    return shared[key]
