"""From a model with quantisers, or a baked one with its ranges, to a model that computes on integers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from shared_core.errors import ConfigError, MatchError
from shared_core.fast_paths import fast_paths_off
from shared_core.quantization.integer_modules import INTEGER, IntegerLayer
from shared_core.quantization.modules import (
    STOCK,
    check_range,
    find_layers,
    layer_range,
    restore,
)


def convert(model: nn.Module, ranges: Mapping[str, Mapping[str, Any]] | None = None) -> nn.Module:
    """Return a new model whose quantised layers hold int8 codes and sum integers; `model` stays as it is.

    Weight codes are those of the fake-quantising model, and so are activation codes, up to float rounding of
    what comes before a layer. The new model is in evaluation mode; it cannot be trained.

    Args:
        model: A model in or after quantization-aware training, or a plain one with baked weights.
        ranges: Module name → ``{"min", "max", "weight_bits", "activation_bits"}``, as
            `QuantizationAwareTraining.ranges` returns it; None: what the layers of `model` carry.

    Raises:
        MatchError: If no layer carries a range, or `ranges` names none of the model's layers.
        CompatibilityError: If a layer's weights are not finite, or its sums could overflow 32 bits.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 1, bias=False))
        >>> _ = net[0].weight.data.copy_(torch.tensor([[0.5, 1.27]]))
        >>> integer = convert(net, {"0": {"min": 0.0, "max": 2.55}})
        >>> integer[0].weight_codes.tolist()
        [[50, 127]]
        >>> round(integer(torch.tensor([[1.0, 2.0]])).item(), 4)
        3.04
    """
    converted = copy.deepcopy(model)
    layers: dict[str, nn.Module] = {}
    if ranges is None:
        found: dict[str, Mapping[str, Any]] = {}
        for name, module in converted.named_modules():
            entry = layer_range(module)
            if entry is not None:
                layers[name], found[name] = module, entry
            elif type(module) in STOCK:
                warnings.warn(
                    f"convert: {name} stays in float: it saw no finite input in training",
                    UserWarning,
                    stacklevel=2,
                )
                restore(module)
        if not layers:
            raise MatchError(
                "convert: model must have layers with activation ranges, found none; train it with qat "
                "for at least one step, or pass ranges="
            )
        ranges = found
    else:
        layers = find_layers(converted, ranges, "convert")
    integer: dict[int, nn.Module] = {}
    for name, module in layers.items():
        restore(module)
        saved = ranges[name]
        where = f"convert: {name}"
        integer[id(module)] = INTEGER[type(module)](
            module,
            check_range(saved, where),
            _bits(saved, "weight_bits", where),
            _bits(saved, "activation_bits", where),
        )
    if id(converted) in integer:
        return integer[id(converted)].eval()
    for parent in list(converted.modules()):
        for name, child in parent._modules.items():
            if child is not None and id(child) in integer:
                parent._modules[name] = integer[id(child)]
    fast_paths_off(converted, (IntegerLayer,))
    return converted.eval()


def _bits(entry: Mapping[str, Any], key: str, where: str) -> int:
    bits = entry.get(key, 8)
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
        raise ConfigError(f"{where}: {key} must be a whole number from 2 to 8, got {bits!r}")
    return bits
