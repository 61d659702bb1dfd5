"""Weight scales that training keeps: those of a released file, of post-training quantization, or of saved ranges."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from eff_kernels.fp8 import block_scale
from eff_kernels.quantization import affine as kernels
from eff_kernels.quantization.group import group_qparams
from torch import Tensor, nn

from shared_core.checkpoint_formats.released import Grid
from shared_core.errors import CheckpointError
from shared_core.modules.matching import StackedExperts
from shared_core.modules.weight_views import as_rows, from_rows
from shared_core.numerics.block_formats import mx_encode, nvfp4_binary_scale, nvfp4_encode
from shared_core.numerics.rounding import decode
from shared_core.quantization.low_bit import from_blocks, to_blocks
from shared_core.quantization.rounding import beyond_codes, on_grid
from shared_core.quantization.schemes import HALF, LayerScheme

WITHOUT_SCALES = ("ternary", "binary", *HALF)
"""Formats without scales, or whose values follow from all weights of a channel, so that none can be kept."""


class KeptScale:
    """The given grids of a layer's weights, which training does not change.

    Args:
        grids: Name of each weight in the layer → its grid. A scale of 0 becomes the smallest one, because it divides.
        scheme: The layer's scheme.
    """

    def __init__(self, grids: Mapping[str, Grid], scheme: LayerScheme) -> None:
        self.scheme = scheme
        self.grids = {
            name: dataclasses.replace(grid, scale=grid.scale.clamp_min(2.0**-126)) for name, grid in grids.items()
        }

    def quantize(self, module: nn.Module, weight: Tensor, name: str = "weight", noise: Tensor | None = None) -> Tensor:
        """Return one of the layer's weights on its grid."""
        noise = None if noise is None else as_rows(module, noise)
        rows = as_rows(module, weight)
        return from_rows(module, on_grid(rows, self.grid(name, rows.device), self.scheme, noise), weight)

    @torch.no_grad()
    def clipped(self, module: nn.Module, weight: Tensor, name: str = "weight") -> int:
        """Return how many values of a weight lie outside the codes of their grid."""
        rows = as_rows(module, weight)
        return int(beyond_codes(rows, self.grid(name, rows.device), self.scheme).sum())

    def grid(self, name: str, device: torch.device) -> Grid:
        """Return the grid of a weight on a device."""
        grid = self.grids[name]
        if grid.scale.device != device:
            # moved once: a forward must not wait for a copy
            zero_point = None if grid.zero_point is None else grid.zero_point.to(device)
            self.grids[name] = grid = dataclasses.replace(grid, scale=grid.scale.to(device), zero_point=zero_point)
        return grid

    def scale(self, module: nn.Module) -> Tensor:
        """Return the scale per output channel, of a layer with one scale each."""
        (grid,) = self.grids.values()
        return grid.scale.squeeze(1)

    def state_dict(self) -> dict[str, Any]:
        """Return the grids as plain values and tensors."""
        return {name: vars(grid).copy() for name, grid in self.grids.items()}

    def plain(self) -> dict[str, dict[str, Tensor]]:
        """Return scale and zero point of each weight, on the CPU, to save with the layer's scheme."""
        return {
            name: {"scale": grid.scale.detach().cpu()}
            | ({} if grid.zero_point is None else {"zero_point": grid.zero_point.cpu()})
            for name, grid in self.grids.items()
        }


def saved_grids(entry: Mapping[str, Any], scheme: LayerScheme, where: str) -> dict[str, Grid]:
    """Return the grids that `KeptScale.plain` saved in a layer's entry; empty if there are none.

    Raises:
        CheckpointError: If they are not tensors.
    """
    found = {}
    for name, parts in (entry.get("weight_grids") or {}).items():
        if not all(isinstance(part, Tensor) for part in parts.values()) or "scale" not in parts:
            raise CheckpointError(where, f"scales of {name} must be tensors", "read the folder with read_deployment")
        found[name] = Grid(parts["scale"], parts.get("zero_point"), scheme.group_size)
    return found


def kept_from_state(state: Mapping[str, Mapping[str, Any]], scheme: LayerScheme) -> KeptScale:
    """Return the scales of which `KeptScale.state_dict` returned the state."""
    return KeptScale({name: Grid(**grid) for name, grid in state.items()}, scheme)


def one_per_channel(scale: Tensor, width: int, scheme: LayerScheme) -> KeptScale:
    """Return the scales of a layer with one weight and one scale per output channel, (channels,)."""
    return KeptScale({"weight": Grid(scale.unsqueeze(1), None, width)}, scheme)


def grid_of_baked(module: nn.Module, weight: Tensor, scheme: LayerScheme) -> Grid:
    """Return the grid of a weight that already lies on it: that of rounding with scales computed from its values.

    Args:
        module: The layer, which gives the layout of the weight.
        weight: The rounded weight.
        scheme: Its format, with a scale.
    """
    rows = as_rows(module, weight.detach())
    rows = rows.to(kernels.compute_dtype(rows.dtype))
    parts = rows.chunk(len(weight)) if scheme.spans_rows and isinstance(module, StackedExperts) else (rows,)
    found = [_grid_of_rows(part, scheme) for part in parts]  # no scale spans two experts
    zeros = [grid.zero_point for grid in found if grid.zero_point is not None]
    scale = torch.cat([grid.scale for grid in found]).float()
    return _exact(rows, Grid(scale, torch.cat(zeros) if zeros else None, found[0].group_size), scheme)


def _exact(rows: Tensor, grid: Grid, scheme: LayerScheme) -> Grid:
    """Return a grid with the neighbor of each scale, where that gives the values of its group bit for bit."""
    if not scheme.has_integers:
        return grid
    # The largest value, a rounded product, divided by its code may be an ulp off the scale.
    near = [torch.nextafter(grid.scale, grid.scale.new_full((), end)) for end in (0.0, torch.inf)]
    for scale in near:
        found = [on_grid(rows, dataclasses.replace(grid, scale=one), scheme) == rows for one in (grid.scale, scale)]
        now, other = (one.reshape(*grid.scale.shape, -1).all(2) for one in found)
        grid = dataclasses.replace(grid, scale=torch.where(other & ~now, scale, grid.scale))
    return grid


def _grid_of_rows(rows: Tensor, scheme: LayerScheme) -> Grid:
    kind, width = scheme.weight, rows.shape[1]
    if kind == "channel":
        return Grid(kernels.symmetric_scale(rows, 0, scheme.weight_qmax)[:, None], None, width)
    if kind == "group":
        size = scheme.group_of(width)
        scale, zero_point = group_qparams(rows, size, scheme.weight_bits, not scheme.affine)
        return Grid(scale, zero_point if scheme.affine else None, size)
    if kind == "nvfp4":
        tensor_scale = nvfp4_binary_scale(rows.abs().amax())
        blocks = nvfp4_encode(rows, per_tensor_scale=tensor_scale)
        return Grid(decode(blocks.scale, "fp8_e4m3") * tensor_scale, None, scheme.block)
    if scheme.block and scheme.element is not None:
        return Grid(decode(mx_encode(rows, scheme.element).scale, "e8m0"), None, scheme.block)
    size = scheme.group_of(width) if kind == "fp8_block" else width
    blocks_of = {"fp8_block": lambda: to_blocks(rows, size), "fp8_tensor": lambda: rows.reshape(1, -1)}
    values = blocks_of.get(kind, lambda: rows)()
    scale = block_scale(values.abs().amax(1, keepdim=True).float(), torch.float8_e4m3fn, "exact")
    if kind == "fp8_block":
        return Grid(from_blocks(scale.expand(values.shape), (*rows.shape,), size)[:, ::size], None, size)
    return Grid(scale.expand(len(rows), 1), None, size)


def check_grid(name: str, rows: Tensor, grid: Grid) -> None:
    """Raise `CheckpointError` if a grid does not have one valid scale for each group of a weight's rows."""
    rule, shape = "", (len(rows), -(-rows.shape[1] // grid.group_size))
    if tuple(grid.scale.shape) != shape or (grid.zero_point is not None and grid.zero_point.shape != shape):
        rule = f"scales of {name} must have the shape {shape}, got {tuple(grid.scale.shape)}"
    elif not bool((grid.scale.isfinite() & (grid.scale >= 0)).all()):
        rule = f"scales of {name} must be finite and not negative"
    if rule:
        raise CheckpointError("qat", rule, "the file belongs to another model, or is damaged")
