"""GPTQ: choose codes column by column, each compensating the error of earlier ones (Frantar et al. 2022)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from eff_kernels.quantization import affine as kernels
from eff_kernels.quantization.group import group_codes, group_qparams
from torch import Tensor, nn

from shared_core.checkpoint_formats.released import Grid
from shared_core.config.options import TechniqueConfig, option
from shared_core.errors import ConfigError
from shared_core.modules.calls import call_model, has_rows, solve_in_order
from shared_core.modules.weight_views import as_rows, from_rows, weights_of
from shared_core.numerics.rounding import sqnr
from shared_core.numerics.second_order import compensated
from shared_core.quantization.layer_quantizer import LayerQuantizer
from shared_core.quantization.ranges.kept_scales import KeptScale

WHERE = "quantize: gptq"


@dataclass(frozen=True, kw_only=True)
class GptqConfig(TechniqueConfig):
    """Options of GPTQ (arXiv:2210.17323).

    Example:
        >>> GptqConfig().damping
        0.01
    """

    key: ClassVar[str] = "gptq"

    damping: float = option(0.01, above=0, help="Share of its mean diagonal to add to the Hessian.")
    actorder: bool = option(True, help="Quantize columns with large inputs first; groups stay neighbors in the weight.")
    grid: Literal["published", "pinned"] = option(
        "published",
        help="published: the scales of the GPTQ paper, stored with the weights. pinned: scales that plain rounding of "
        "the result gives again, with a larger error.",
    )


class WeightGrid:
    """The grid of one weight, for `compensated`.

    ``pinned``: the scales of plain rounding. The largest and smallest value of each group keep their codes, so that
    recomputing the scale from the result gives the same scale.

    ``published``: as in the authors' code. Symmetric scales are ``2·max|w| / (2^b - 1)``, with all 2^b codes, and
    no value is held. `regrid` sets a group's scale from the values that compensation left so far.

    Args:
        layer: A layer with a matrix of weights.
        quantizer: Its quantizer. Scales that were searched are taken as they are.
        kind: Which grid.

    Example:
        >>> from shared_core.quantization.ranges.observers import RangeBank
        >>> from shared_core.quantization.schemes import LayerScheme
        >>> layer = nn.Linear(2, 1)
        >>> _ = layer.weight.data.copy_(torch.tensor([[3.0, 1.0]]))
        >>> quantizer = LayerQuantizer(RangeBank([]), None, LayerScheme(weight_bits=3))
        >>> grid = WeightGrid(layer, quantizer, "pinned")
        >>> grid(torch.tensor([1.6]), 1), grid(torch.tensor([1.6]), 0)
        (tensor([2.]), tensor([3.]))
    """

    def __init__(
        self, layer: nn.Module, quantizer: LayerQuantizer, kind: Literal["published", "pinned"] = "published"
    ) -> None:
        self.layer, self.scheme, self.searched = layer, quantizer.scheme, quantizer.weight_scale
        scheme, self.is_pinned = self.scheme, kind == "pinned" and self.searched is None
        rows = as_rows(layer, layer.weight.detach())  # type: ignore[union-attr, operator, arg-type]
        rows = rows.to(kernels.compute_dtype(rows.dtype))
        self.size = scheme.group_size or rows.shape[1]
        self.low, self.high = scheme.weight_range
        if self.searched is not None:
            self.scale = self.searched.scale(layer).detach().to(rows).unsqueeze(1)
            self.zero = torch.zeros_like(self.scale)
        elif self.is_pinned:
            self._pin(rows)
        else:
            self.scale, self.zero = self._published(rows)

    def _pin(self, rows: Tensor) -> None:
        scheme = self.scheme
        self.low = -scheme.weight_qmax - scheme.affine
        self.scale, zero = group_qparams(rows, self.size, scheme.weight_bits, not scheme.affine)
        self.zero = zero.to(rows.dtype)
        codes = group_codes(rows, self.scale, self.zero, self.size, scheme.weight_bits)
        self.codes = codes.clamp(self.low, self.high).flatten(1)
        self.held = torch.zeros(rows.shape, dtype=torch.bool, device=rows.device)
        groups, held = (x.view(len(rows), -1, self.size) for x in (rows.contiguous(), self.held))
        ends = [groups.argmin(2, True), groups.argmax(2, True)] if scheme.affine else [groups.abs().argmax(2, True)]
        for end in ends:
            held.scatter_(2, end, True)

    def _published(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        if self.scheme.affine:
            scale, zero = group_qparams(rows, self.size, self.scheme.weight_bits, False)
            return scale, zero.to(rows.dtype)
        peak = rows.reshape(len(rows), -1, self.size).abs().amax(2)
        scale = torch.where(peak > 0, 2 * peak / (2**self.scheme.weight_bits - 1), torch.ones_like(peak))
        return scale, torch.zeros_like(scale)

    def regrid(self, values: Tensor, column: int) -> None:
        """Set the scale of a group from its current values."""
        at = slice(column // self.size, column // self.size + 1)
        self.scale[:, at], self.zero[:, at] = self._published(values.to(self.scale))

    def kept(self) -> KeptScale:
        """Return the scales, to round with and to save."""
        zero_point = self.zero.to(torch.int32) if self.scheme.affine else None
        return KeptScale({"weight": Grid(self.scale, zero_point, self.size)}, self.scheme)

    def __call__(self, values: Tensor, column: int) -> Tensor:
        """Return the values of a column on the grid."""
        scale, zero = self.scale[:, column // self.size], self.zero[:, column // self.size]
        codes = ((values / scale).round_() + zero).clamp_(self.low, self.high)
        if self.is_pinned:
            codes = torch.where(self.held[:, column], self.codes[:, column], codes)
        return codes.sub_(zero).mul_(scale)


def solve_weights(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    batches: Sequence[Any],
    config: GptqConfig,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, dict[str, float]]:
    """Round the weights of linear layers by GPTQ, in the order of the forward (`solve_in_order`).

    Other layers, shared weights and folded ones are rounded to nearest. Zeros stay zeros. Inputs are float activations.
    """
    owners = Counter(id(weight) for layer in layers.values() for weight in weights_of(layer).values())
    chosen = {name: layer for name, layer in layers.items() if _can_solve(layer, owners)}
    if not chosen:
        raise ConfigError(
            WHERE,
            "scheme must give linear layers integer codes per channel or group",
            "use int4_weight, int8_weight or int8_dynamic",
        )
    found: dict[str, dict[str, float]] = {}

    def one(name: str, layer: nn.Module, hessian: Tensor) -> None:
        quantizer: Any = layer.quantizer
        weight: Any = layer.weight
        rows = as_rows(layer, weight.detach())
        grid = WeightGrid(layer, quantizer, config.grid)
        # With actorder, columns of all groups are mixed, so their scales come from the weights as they were.
        follows = quantizer.scheme.weight == "group" and not grid.is_pinned and not config.actorder
        new, _ = compensated(
            rows, hessian, grid=grid, regrid=(grid.size, grid.regrid) if follows else None,
            actorder=config.actorder, damping=config.damping,
        )  # fmt: skip
        plain = as_rows(layer, quantizer.rounded(layer, weight.detach()))
        exact = _energy(rows, hessian)
        found[name] = {
            "sqnr_db": sqnr(rows, new),
            "largest_relative_error": ((new - rows).abs().max() / rows.abs().max().clamp_min(1e-30)).item(),
            "output_error": _energy(new - rows, hessian) / max(exact, 1e-30),
            "rounded_output_error": _energy(plain - rows, hessian) / max(exact, 1e-30),
        }
        if not grid.is_pinned:
            quantizer.weight_scale = kept = grid.kept()
            found[name]["weights_clipped"] = kept.clipped(layer, weight.detach())
        weight.copy_(from_rows(layer, new, weight))
        quantizer.baked = True

    def run(batch: Any) -> Any:
        return call_model(model, batch, f"{WHERE}: calibration")

    solve_in_order(model, chosen, run, batches, one, WHERE, progress)
    return found


def solved_note(found: Mapping[str, Mapping[str, float]]) -> str:
    """Return a note that compares the error of GPTQ with rounding.

    Example:
        >>> solved_note({"a": {"output_error": 0.05, "rounded_output_error": 0.08}})
        'gptq: 1 linear layers; error of their outputs on the calibration batches 0.0500 on average, 0.0800 if rounded'
    """
    mean = sum(each["output_error"] for each in found.values()) / len(found)
    rounded = sum(each["rounded_output_error"] for each in found.values()) / len(found)
    return (
        f"gptq: {len(found)} linear layers; error of their outputs on the calibration batches {mean:.4f} on average, "
        f"{rounded:.4f} if rounded"
    )


def _can_solve(layer: nn.Module, owners: Counter[int]) -> bool:
    quantizer: Any = layer.quantizer
    if not has_rows(layer) or quantizer.scheme.weight not in ("channel", "group") or quantizer.batch_norm is not None:
        return False
    return owners[id(layer.weight)] == 1


def _energy(rows: Tensor, hessian: Tensor) -> float:
    rows = rows.to(hessian.dtype)
    return float((rows @ hessian).mul_(rows).sum().clamp_min(0).sqrt())
