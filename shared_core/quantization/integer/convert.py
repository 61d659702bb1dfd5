"""From a model with quantisers, or a baked one with its ranges, to a model that computes on integers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from shared_core.errors import MatchError
from shared_core.modules.fused_encoder import fast_paths_off
from shared_core.modules.matching import check_model
from shared_core.quantization.integer.backends import ON_INTEGERS, to_torchao, wants_kernels
from shared_core.quantization.integer.layers import INTEGER, CodeModule, IntEmbedding
from shared_core.quantization.layers.fake_quant_layers import STOCK, bake_, conv1d_as_linear, layer_entry, restore
from shared_core.quantization.ranges.saved_ranges import (
    apply_ranges,
    check_range,
    find_layers,
    merge_folds_,
    saved_scheme,
)

Backend = Literal["reference", "torchao", "auto"]


def convert(
    model: nn.Module, ranges: Mapping[str, Mapping[str, Any]] | None = None, *, backend: Backend = "reference"
) -> nn.Module:
    """Return a new model whose quantised layers hold int8 codes and sum integers; `model` stays as it is.

    That is for weights per channel and inputs with a range. Layers of other schemes compute on the values of their
    codes, weights baked and inputs quantised when they are seen. Weight codes are those of the fake-quantising model,
    and so are activation codes, up to float rounding of what comes before a layer. The new model is in evaluation
    mode; it cannot be trained.

    The reference is exact and portable, not fast. ``backend="torchao"`` puts linear layers on int8 kernels with these
    codes if their inputs have a range, or one for each token: on CPUs on oneDNN's, which sum the same integers,
    elsewhere on torchao's. Linear layers of which the weights alone are int8, or on CPUs int4, go onto torchao's too,
    and 2-d convolutions on CPUs onto oneDNN's. What has no such kernel stays on the reference; `conversion_report` says
    what runs where. On a CPU a compiled model is faster still: ``torch.compile(model, options={"freezing": True})``
    under `torch.no_grad`, which touches no setting of other models.

    Args:
        model: A model in or after quantization-aware training, or a plain one with baked weights.
        ranges: Module name → ``{"min", "max", "weight_bits", "activation_bits"}``, as
            `QuantizationAwareTraining.ranges` returns it; None: what the layers of `model` carry.
        backend: ``"reference"``, ``"torchao"`` (with oneDNN), or ``"auto"``: that, and without torchao what oneDNN has.

    Raises:
        ConfigError: If there is no such backend.
        MissingExtraError: If torchao is asked for and not installed.
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
    check_model(model, "convert")
    fast = wants_kernels(backend)
    converted = conv1d_as_linear(copy.deepcopy(model))
    merge_folds_(converted, ranges)
    layers: dict[str, nn.Module] = {}
    if ranges is None:
        found: dict[str, Mapping[str, Any]] = {}
        for name, module in converted.named_modules():
            entry = layer_entry(module)
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
    integer: dict[int, CodeModule] = {}
    baked: set[int] = set()
    for name, module in layers.items():
        where = f"convert: {name}"
        scheme = saved_scheme(ranges[name], where)
        if scheme.input == "static" and scheme.weight == "channel" and STOCK.get(type(module), type(module)) in INTEGER:
            bounds = check_range(ranges[name], where)
            restore(module)
            integer[id(module)] = INTEGER[type(module)](module, bounds, scheme, ranges[name])
            continue
        if scheme.weight == "channel" and STOCK.get(type(module), type(module)) is nn.Embedding:
            restore(module)
            integer[id(module)] = IntEmbedding(module, scheme, ranges[name])  # type: ignore[arg-type]
            continue
        if type(module) in STOCK and not module.quantizer.baked:  # type: ignore[union-attr]
            bake_(module, baked)
        restore(module)
        apply_ranges(module, {"": ranges[name]})
    if id(converted) in integer:
        return (to_torchao(integer[id(converted)]) if fast else integer[id(converted)]).eval()
    for parent in list(converted.modules()):
        for name, child in parent._modules.items():
            if child is not None and id(child) in integer:
                parent._modules[name] = integer[id(child)]
    if fast:
        converted = to_torchao(converted)
    fast_paths_off(converted, ON_INTEGERS)
    return converted.eval()
