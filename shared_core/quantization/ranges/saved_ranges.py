"""Restore saved ranges in a plain model with baked weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from shared_core.config.options import checked
from shared_core.errors import ConfigError, require
from shared_core.modules.matching import plain_name
from shared_core.modules.own_forward import fast_paths_off
from shared_core.modules.weight_views import as_rows
from shared_core.quantization.batch_norm import batch_norm_of, folded_weight, fuse_pair_
from shared_core.quantization.fake_quant_layers import (
    FAKE_QUANT,
    STOCK,
    fold_and_swap,
    is_quantized,
    know_layers,
    layer_entry,
    restore,
    swap,
)
from shared_core.quantization.layer_graph import chosen_layers
from shared_core.quantization.layer_quantizer import SavedQuantizer
from shared_core.quantization.ranges.kept_scales import one_per_channel
from shared_core.quantization.ranges.kv_cache import take_cache_scales_
from shared_core.quantization.ranges.observers import RangeBank
from shared_core.quantization.schemes import HALF, WIDE, Input, LayerScheme, Weight


def apply_ranges(model: nn.Module, ranges: Mapping[str, Mapping[str, Any]]) -> nn.Module:
    """Make a model's layers quantize their inputs as in training, in place; return the model.

    With baked weights and their saved ranges, the outputs equal, bit for bit, those of the model in
    quantization-aware training, in evaluation mode.

    Args:
        model: The plain model with baked weights.
        ranges: Module name → ``{"min", "max", "activation_bits", …}``, as `QuantizationAwareTraining.ranges`
            returns it; attention layer → the scales of its cache, as `calibrate_kv_cache` returns them. Nothing here
            rounds outputs: ``"output"``, their range, is for `export_onnx`.

    Raises:
        MatchError: If a name is no layer that can be quantized.
        ConfigError: If a range is empty or not finite, or a value is invalid.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 1, bias=False))
        >>> _ = net[0].weight.data.fill_(1.0)
        >>> ranged = apply_ranges(net, {"0": {"min": 0.0, "max": 2.55, "activation_bits": 8}})
        >>> round(ranged(torch.tensor([[0.011, 9.0]])).item(), 4)
        2.56
    """
    rule = f"ranges must map names of layers to values, got {type(ranges).__name__}"
    require(isinstance(ranges, Mapping), "apply_ranges", rule, 'pass read_deployment(folder)["qat"]["ranges"]')
    ranges = take_cache_scales_(model, ranges)
    layers = find_layers(model, ranges, "apply_ranges")
    schemes = {name: saved_scheme(ranges[name], f"apply_ranges: {name}") for name in layers}
    for name in layers:
        if "output" in ranges[name]:
            check_range(ranges[name]["output"], f"apply_ranges: output of {name}")
    static = [name for name in layers if schemes[name].has_range]
    symmetric = [schemes[name].symmetric for name in static]
    bank = RangeBank([schemes[name].input_range for name in static], symmetric=symmetric)
    bounds = [check_range(ranges[name], f"apply_ranges: {name}") for name in static]
    bank.set_ranges(torch.tensor(bounds).view(len(static), 2), torch.ones(len(static), dtype=torch.bool))
    for row, name in enumerate(static):
        _take_learned(bank, row, ranges[name])
    bank.quantizing = True
    for name, module in layers.items():
        restore(module)
        index = static.index(name) if name in static else None
        entry = ranges[name]
        # A folded layer's scales belong to the folded weight and cannot be computed from the unfolded one, so they
        # are saved.
        if "batch_norm" not in entry:
            swap(module, SavedQuantizer(bank, index, schemes[name], dict(entry)))
            continue
        width = as_rows(module, module.weight).shape[1]  # type: ignore[arg-type]
        scale = one_per_channel(torch.tensor(entry["weight_scale"]), width, schemes[name])
        quantizer = SavedQuantizer(bank, index, schemes[name], dict(entry), scale)
        quantizer.batch_norm = entry["batch_norm"]
        fold_and_swap(module, batch_norm_of(model, name, entry["batch_norm"], "apply_ranges"), quantizer)
    fast_paths_off(model, tuple(STOCK))
    return model


def _take_learned(bank: RangeBank, row: int | None, entry: Mapping[str, Any]) -> None:
    if row is not None and "scale" in entry:  # from the range alone it would be rounded differently
        bank.scale[row], bank.zero_point[row] = entry["scale"], entry["zero_point"]


def find_layers(model: nn.Module, names: Iterable[str], where: str) -> dict[str, nn.Module]:
    """Return the named layers, each of a type that can be quantized."""
    know_layers(model)
    known = {plain_name(name): module for name, module in model.named_modules()}
    able = {name: one for name, one in known.items() if type(one) in FAKE_QUANT or is_quantized(one)}
    return chosen_layers(able, list(names), "layer of the model that can be quantized", where)


def saved_scheme(entry: Mapping[str, Any], where: str) -> LayerScheme:
    """Return the scheme of a saved layer. Missing values are the defaults of `LayerScheme`."""
    if not isinstance(entry, Mapping):
        raise ConfigError(where, f"range must be a mapping, got {entry!r}")
    fields = {field.name: entry[field.name] for field in dataclasses.fields(LayerScheme) if field.name in entry}
    for name, kinds in (("weight", Weight), ("input", Input)):
        if name in fields:
            checked(fields[name], kinds, where, name)
    least = {"weight_bits": 1, "activation_bits": 2 if fields.get("input", "static") == "static" else 0}
    for name in ("weight_bits", "activation_bits", "group_size"):
        if name in fields:
            is_half = name == "weight_bits" and fields.get("weight") in HALF
            is_wide = name == "activation_bits" and fields[name] == WIDE and fields.get("symmetric") is True
            high = {"high": 16 if is_half or is_wide else 8} if "bits" in name else {}
            checked(fields[name], int, where, name, low=least.get(name, 0), **high)
    return LayerScheme(**fields)


def check_range(entry: Mapping[str, Any], where: str) -> tuple[float, float]:
    """Return (min, max) of a saved range."""
    minimum, maximum = (checked(entry.get(name), float, where, name) for name in ("min", "max"))
    if minimum > maximum:
        raise ConfigError(where, f"min must not exceed max, got {minimum} and {maximum}")
    return minimum, maximum


def merge_folds_(model: nn.Module, ranges: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Fuse folded batch norms into their quantized layers, in a model that is not trained further.

    Layers still quantize their inputs, and their weights hold quantized values.
    """
    if ranges is None:
        plain = {name: module for name, module in model.named_modules() if not is_quantized(module)}
        ranges = {name: entry for name, module in plain.items() if (entry := layer_entry(module)) is not None}
    folded = {name: entry for name, entry in ranges.items() if isinstance(entry, Mapping) and "batch_norm" in entry}
    if folded:
        apply_ranges(model, folded)
    for module in [module for module in model.modules() if is_quantized(module) and "fold" in vars(module)]:
        quantizer: Any = module.quantizer
        saved = quantizer.entry(module)
        layer: Any = module
        weight, batch_norm = (
            # Take the folded weight on its grid before fusing, because fusing rounds weight and factor again.
            quantizer.rounded(layer, folded_weight(layer, layer.weight.detach())),
            layer.fold.batch_norm,
        )
        restore(module)
        fuse_pair_(model, module, batch_norm)
        with torch.no_grad():
            layer.weight.copy_(weight)  # fusing rounds weight and factor separately
        saved = None if saved is None else {key: value for key, value in saved.items() if key != "batch_norm"}
        _take_learned(quantizer.bank, quantizer.index, saved or {})
        swap(module, SavedQuantizer(quantizer.bank, quantizer.index, quantizer.scheme, saved))
