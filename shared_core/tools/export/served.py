"""Shared by exports for language model engines: the first checks, codes of saved weights, the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.checkpoint_formats.released import Grid
from shared_core.errors import CompatibilityError, ConfigError
from shared_core.modules.matching import StackedExperts, is_transformers_conv1d
from shared_core.quantization.fake_quant_layers import STOCK, layer_entry
from shared_core.quantization.low_bit import to_blocks
from shared_core.quantization.ranges.kept_scales import saved_grids
from shared_core.quantization.ranges.kv_cache import cache_scales
from shared_core.quantization.schemes import LayerScheme
from shared_core.tools.export.source import (
    baked_copy,
    check_finite,
    check_installed,
    float_layers,
    quantized_reference,
    quiet,
)
from shared_core.tools.measuring import difference, outputs

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Matrices that engines fuse: their parts share one scheme, one input range and one tensor scale."""


@dataclasses.dataclass(frozen=True)
class ServedReport:
    """Report of a file or folder that was written for an engine.

    Attributes:
        path: The file or folder.
        bytes: Size of its weight files.
        format: How they store codes, in the format's terms.
        quantized: Layers with codes in the file; for stacked experts each matrix, by its name there.
        values: Embeddings and tied heads, stored as float values of their codes.
        unrounded_inputs: Layers of `values` whose input was rounded in training, but is not in engines.
        rounds_inputs: True if the file has formats of inputs.
        float_layers: Layers of the same types that stay in float.
        equal_layers: Layers whose codes give exactly the model's weights; None if not compared.
        largest_difference: Between the outputs in transformers and of the model, both with float layer inputs, relative
            to the largest output. None if not compared: transformers loads neither float experts, nor experts
            in W8A8 or with zero points, nor zero points of layers together with other schemes.
        relative_change: The same with inputs rounded as transformers does, whose per-token ranges differ from the
            model's and vLLM's.
        kv_cache: Attention layers with cache scales: engines keep their cache in FP8.
        cache_scales_left_out: Attention layers with cache scales that the format does not support.
        scale_error: Error from float16 scales (GGUF) and 16-bit weights, relative to the largest weight of a
            layer; None elsewhere.
    """

    path: Path
    bytes: int
    format: str
    quantized: tuple[str, ...]
    values: tuple[str, ...] = ()
    unrounded_inputs: tuple[str, ...] = ()
    rounds_inputs: bool = False
    float_layers: tuple[str, ...] = ()
    equal_layers: int | None = None
    largest_difference: float | None = None
    relative_change: float | None = None
    scale_error: float | None = None
    kv_cache: tuple[str, ...] = ()
    cache_scales_left_out: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A quantized model on its way to an engine.

    `reference` fake-quantizes (`quantized_reference`). `exported` has stock `layers` with quantized values
    (`baked_copy`). `qparams` are scales and zero points of inputs, `cache` the scales of attention layers.
    """

    where: str
    reference: nn.Module
    names: tuple[str, ...]
    exported: Any
    layers: dict[str, Any]
    schemes: dict[str, LayerScheme]
    qparams: dict[str, tuple[Tensor, Tensor] | None]
    float_layers: tuple[str, ...]
    dtype: torch.dtype
    cache: dict[str, dict[str, float]]

    def codes(self, name: str, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return `codes_of` for a layer's weight, or for one of its stacked experts'."""
        return codes_of(self.where, name, rows, self.schemes[name], self._entry(name), self.dtype)

    def zero_points(self, name: str, codes: Tensor) -> Tensor:
        """Return the zero points of a layer's groups: those that were saved, or `zero_points` of its codes."""
        scheme = self.schemes[name]
        grid = _saved_grid(self._entry(name), scheme, self.where)
        if grid is not None and grid.zero_point is not None:
            return grid.zero_point.view(-1).float()
        return zero_points(codes, scheme.weight_bits)

    def _entry(self, name: str) -> dict[str, Any]:
        return (layer_entry(self.reference.get_submodule(name)) if name in self.names else None) or {}

    def report(self, path: Path | str, bytes: int, format: str, **found: Any) -> ServedReport:
        """Return the report. `found` has the fields that differ between exports."""
        written = found.get("kv_cache", ())
        return ServedReport(
            path=Path(path), bytes=bytes, format=format, float_layers=self.float_layers,
            rounds_inputs=any(
                scheme.input != "none" for name, scheme in self.schemes.items()
                if name not in found.get("unrounded_inputs", ())
            ),
            cache_scales_left_out=tuple(name for name in self.cache if name not in written),
            **{"quantized": self.names, **found},
        )  # fmt: skip


def served_model(
    model: Any,
    where: str,
    engine: str,
    package: str,
    check: Callable[[str, Any, str], None],
    *,
    experts: bool = False,
    conv1d: bool = False,
) -> ServedModel:
    """Return the copies of a quantized model that an engine export works on."""
    check_installed(where, package, package)
    if not hasattr(model, "save_pretrained"):
        raise ConfigError(where, f"model must be one of transformers, got {type(model).__name__}", "load its folder")
    for name, module in () if conv1d else model.named_modules():
        if is_transformers_conv1d(module) and layer_entry(module) is not None:
            rule = f"{name} must be a linear layer for {engine}, got transformers' Conv1D"
            raise CompatibilityError(where, rule, "use onnx or gguf")

    def check_layer(name: str, module: Any, where: str) -> None:
        kind = STOCK[type(module)]
        if kind not in (nn.Linear, nn.Embedding) and not (experts and isinstance(module, StackedExperts)):
            known = "Linear, Embedding or experts" if experts else "Linear or Embedding"
            rule = f"{name} must be {known} for {engine}, got {kind.__name__}"
            raise CompatibilityError(where, rule, "skip it in qat")
        check(name, module, where)

    reference, names = quantized_reference(model, where, check_layer)
    if not names:
        raise ConfigError(where, "model must have quantized layers, got none", "train with qat, or eff quantize first")
    exported, layers, schemes, qparams, _ = baked_copy(reference, names)
    left = tuple(name for name in float_layers(exported) if name not in names)
    return ServedModel(
        where, reference, names, exported, layers, schemes, qparams, left, saved_type(model), cache_scales(reference)
    )


def saved_type(model: Any) -> torch.dtype:
    """Return the dtype in which a transformers model saves its weights."""
    dtype = getattr(model.config, "dtype", None) or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype  # a string after the model was saved


def exact_grid(
    rows: Tensor, largest: Iterable[float], levels: torch.dtype, dtype: torch.dtype, span: float = torch.inf
) -> tuple[Tensor, Tensor] | None:
    """Return (codes, scales) whose products, rounded to a dtype, are exactly each row's values; None if there are none.

    A row's scale is ``max|w|/m`` for the first m of `largest` with such codes, moved to the middle of the
    numbers that give every value of the row. Rows are float32 with values of `dtype`. Codes are rounded to `levels`,
    include 0, and differ by at most `span`.

    Example:
        >>> codes, scale = exact_grid(torch.tensor([[0.5, -1.0, 1.5]]), [7, 3], torch.int8, torch.float32)
        >>> codes.tolist(), scale.tolist()
        ([[1.0, -2.0, 3.0]], [0.5])
    """
    peaks = rows.abs().amax(1)
    codes, scale = torch.zeros_like(rows), torch.ones_like(peaks)
    left = torch.arange(len(rows))[peaks > 0]
    for top in largest:
        if not len(left):
            break
        exact = rows[left]
        found = _rounded(exact / (peaks[left] / top).unsqueeze(1), levels)
        step = _common_scale(exact, found, dtype)
        fits = ((found * step.unsqueeze(1)).to(dtype) == exact.to(dtype)).all(1)
        fits &= found.amax(1).clamp(min=0) - found.amin(1).clamp(max=0) <= span
        codes[left[fits]], scale[left[fits]] = found[fits], step[fits]
        left = left[~fits]
    return None if len(left) else (codes, scale)


def _rounded(codes: Tensor, levels: torch.dtype) -> Tensor:
    return codes.to(levels).float() if levels.is_floating_point else codes.round()


def _common_scale(values: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return for each row the middle of the scales that, times its codes, round to its values."""
    value, code = values.abs().double(), codes.abs().double()
    held = values.abs().to(dtype)
    low, high = (torch.nextafter(held, torch.full_like(held, way)).double() for way in (0.0, torch.inf))
    never = torch.full_like(value, torch.inf)
    some = code > 0
    below = torch.where(some, (value + low) / 2 / code, -never).amax(1)
    above = torch.where(some, (value + high) / 2 / code, never).amin(1)
    return ((below + above) / 2).float()


def codes_of(
    where: str, name: str, rows: Tensor, scheme: LayerScheme, entry: dict[str, Any], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of a weight with quantized values."""
    check_finite(where, name, rows)
    groups = rows.reshape(-1, scheme.group_size) if scheme.weight == "group" else rows
    if scheme.weight == "fp8_block":
        groups = to_blocks(rows, scheme.group_of(rows.shape[1]))
    if scheme.weight == "fp8_tensor":
        groups = rows.reshape(1, -1)
    is_float = scheme.weight.startswith("fp8")
    levels = torch.float8_e4m3fn if is_float else torch.int8
    qmax = 448 if is_float else scheme.weight_qmax
    grid = _saved_grid(entry, scheme, where)
    if grid is not None or "weight_scale" in entry:
        scales = torch.tensor(entry["weight_scale"]) if grid is None else grid.scale
        scale = scales.to(torch.float32).view(-1)
        codes = (groups / scale.unsqueeze(1)).round()
        found = (codes, scale) if torch.equal((codes * scale.unsqueeze(1)).to(dtype), groups.to(dtype)) else None
    elif scheme.affine:
        span = 2**scheme.weight_bits - 1
        found = exact_grid(groups, range(span, 0, -1), levels, dtype, span)
    else:
        # Scales that training kept need not reach the largest code, or have one more negative one.
        kept = [*range(416, 255, -32), 240] if is_float else [*range(qmax - 1, 0, -1), qmax + 1]
        found = exact_grid(groups, [qmax, *kept], levels, dtype)
    if found is None:
        raise off_grid(where, name, scheme)
    return found


def _saved_grid(entry: dict[str, Any], scheme: LayerScheme, where: str) -> Grid | None:
    """Return the saved grid of a layer's only weight. Stacked experts have several, whose scales are found again."""
    grids = [*saved_grids(entry, scheme, where).values()]
    return grids[0] if len(grids) == 1 else None


def off_grid(where: str, name: str, scheme: LayerScheme) -> CompatibilityError:
    """Return the error for a layer whose weight is not on the grid of its codes."""
    got = f"{scheme}, off it"
    remedy = "export what qat or eff quantize saved, unchanged"
    return CompatibilityError(where, f"{name} must have weights on its quantization grid, got {got}", remedy)


def zero_points(codes: Tensor, bits: int) -> Tensor:
    """Return the offset of each affine group's codes: its smallest value, or 0, gets the smallest code."""
    lowest: Tensor = codes.amin(1).clamp(max=0).neg().sub(2 ** (bits - 1))
    return lowest


def compare_outputs(
    where: str,
    loaded: nn.Module,
    switch: Callable[[bool], None],
    expected: tuple[Any, Any],
    inputs: Any,
    tolerance: float,
) -> tuple[float, float]:
    """Return a loaded model's output differences, with float layer inputs and with rounded ones."""
    found = []
    for rounds in (False, True):
        switch(rounds)
        with quiet():
            found.append(outputs(loaded, inputs))
    plain, rounded = (difference(*pair) for pair in zip(expected, found, strict=True))
    check_difference(where, "folder", plain, tolerance)
    return plain, rounded


def check_difference(where: str, what: str, found: float, tolerance: float) -> None:
    """Raise an error if the file's outputs differ from the model's. NaN counts as a difference."""
    if not found <= tolerance:
        rule = f"outputs of the {what}, loaded by transformers, must equal the model's to {tolerance:g}"
        raise CompatibilityError(where, f"{rule}, got a difference of {found:.3g}", "nothing was written")
