"""Layers that fake-quantise weight and input: a stock layer becomes one by a change of class, and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_core.errors import ConfigError, MatchError, nearest
from shared_core.fast_paths import fast_paths_off
from shared_core.module_match import plain_name
from shared_core.quantization.observers import LayerQuantizer, RangeBank


class _FakeQuantConv:
    quantizer: LayerQuantizer

    def forward(self, input: Tensor) -> Tensor:
        x = self.quantizer.quantize_input(input, self.training)  # type: ignore[attr-defined]
        weight = self.quantizer.quantize_weight(self.weight)  # type: ignore[attr-defined]
        return self._conv_forward(x, weight, self.bias)  # type: ignore[attr-defined, no-any-return]


class FakeQuantLinear(nn.Linear):
    """`torch.nn.Linear` on fake-quantised weight and input."""

    quantizer: LayerQuantizer

    def forward(self, input: Tensor) -> Tensor:
        """Return ``x̂ ŵᵀ + b``."""
        x = self.quantizer.quantize_input(input, self.training)
        return F.linear(x, self.quantizer.quantize_weight(self.weight), self.bias)


class FakeQuantConv1d(_FakeQuantConv, nn.Conv1d):
    """`torch.nn.Conv1d` on fake-quantised weight and input."""


class FakeQuantConv2d(_FakeQuantConv, nn.Conv2d):
    """`torch.nn.Conv2d` on fake-quantised weight and input."""


class FakeQuantConv3d(_FakeQuantConv, nn.Conv3d):
    """`torch.nn.Conv3d` on fake-quantised weight and input."""


FAKE_QUANT: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: FakeQuantLinear,
    nn.Conv1d: FakeQuantConv1d,
    nn.Conv2d: FakeQuantConv2d,
    nn.Conv3d: FakeQuantConv3d,
}
STOCK: dict[type[nn.Module], type[nn.Module]] = {fake: stock for stock, fake in FAKE_QUANT.items()}


def swap(module: nn.Module, quantizer: LayerQuantizer) -> None:
    """Make a stock layer fake-quantise; its parameters and keys stay as they are."""
    module.quantizer = quantizer  # type: ignore[assignment]
    module.__class__ = FAKE_QUANT[type(module)]


def restore(module: nn.Module) -> None:
    """Make a layer stock again; one that is stock stays so."""
    if type(module) in STOCK:
        module.__class__ = STOCK[type(module)]
        del module.quantizer


def layer_range(module: nn.Module) -> dict[str, Any] | None:
    """Return a layer's range and widths, from its quantiser or as training left them; None if it has none."""
    if type(module) not in STOCK:
        return getattr(module, "quantized_range", None)
    quantizer: LayerQuantizer = module.quantizer  # type: ignore[assignment]
    if not quantizer.has_range:
        return None
    minimum, maximum = quantizer.bank.ranges[quantizer.index].tolist()
    bank = quantizer.bank
    return {
        "min": minimum,
        "max": maximum,
        "weight_bits": bank.weight_bits,
        "activation_bits": bank.activation_bits,
    }


def apply_ranges(model: nn.Module, ranges: Mapping[str, Mapping[str, Any]]) -> nn.Module:
    """Return `model`, changed in place so that its layers quantise their inputs by fixed ranges.

    A model with baked weights and the ranges saved beside it computes, bit for bit, what the model in
    quantization-aware training computed in evaluation.

    Args:
        model: The plain model with baked weights.
        ranges: Module name → ``{"min", "max", "activation_bits"}``, as `QuantizationAwareTraining.ranges`
            returns it.

    Raises:
        MatchError: If a name is no layer that can be quantised.
        ConfigError: If a range is empty, not finite, or the widths differ.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 1, bias=False))
        >>> _ = net[0].weight.data.fill_(1.0)
        >>> ranged = apply_ranges(net, {"0": {"min": 0.0, "max": 2.55, "activation_bits": 8}})
        >>> round(ranged(torch.tensor([[0.011, 9.0]])).item(), 4)
        2.56
    """
    layers = find_layers(model, ranges, "apply_ranges")
    bank = RangeBank(len(layers), activation_bits=one_width(ranges, "activation_bits", "apply_ranges"))
    bank.set_ranges(
        torch.tensor([check_range(ranges[name], f"apply_ranges: {name}") for name in layers]),
        torch.ones(len(layers), dtype=torch.bool),
    )
    bank.quantize_activations = True
    for index, module in enumerate(layers.values()):
        restore(module)
        quantizer = LayerQuantizer(bank, index)
        quantizer.has_range = True
        swap(module, quantizer)
    fast_paths_off(model, tuple(STOCK))
    return model


def find_layers(model: nn.Module, names: Iterable[str], where: str) -> dict[str, nn.Module]:
    """Return the named layers, each of a type that can be quantised.

    Raises:
        MatchError: If there is no name, or one that is no such layer.
    """
    known = {plain_name(name): module for name, module in model.named_modules()}
    able = [name for name, module in known.items() if type(module) in FAKE_QUANT or type(module) in STOCK]
    layers: dict[str, nn.Module] = {}
    for name in names:
        if name not in able:
            raise MatchError(f"{where}: {name!r} must be a Linear or Conv layer of the model{nearest(name, able)}")
        layers[name] = known[name]
    if not layers:
        raise MatchError(f"{where}: ranges must name at least one layer, got none; train with qat first")
    return layers


def one_width(ranges: Mapping[str, Mapping[str, Any]], key: str, where: str) -> int:
    """Return the width in bits that all layers share; 8 where it is not said."""
    widths = {entry.get(key, 8) for entry in ranges.values()}
    width = widths.pop()
    if widths or isinstance(width, bool) or not isinstance(width, int) or not 2 <= width <= 8:
        raise ConfigError(f"{where}: {key} must be one whole number from 2 to 8 for all layers, got {width!r}")
    return width


def check_range(entry: Mapping[str, Any], where: str) -> tuple[float, float]:
    """Return (min, max) of a saved range.

    Raises:
        ConfigError: If one is missing or not finite, or they are the wrong way round.
    """
    try:
        minimum, maximum = float(entry["min"]), float(entry["max"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: range must have a min and a max, got {entry!r}") from error
    if not (math.isfinite(minimum) and math.isfinite(maximum) and minimum <= maximum):
        raise ConfigError(f"{where}: min and max must be finite and in this order, got {minimum} and {maximum}")
    return minimum, maximum
