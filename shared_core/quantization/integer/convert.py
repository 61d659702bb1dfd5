"""From a model with quantisers, or a baked one with its ranges, to a model that computes on integers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from shared_core.errors import MatchError
from shared_core.modules.matching import check_model, plain_name, replaced
from shared_core.modules.own_forward import fast_paths_off, stock_kind
from shared_core.quantization.integer.backends import ON_INTEGERS, to_torchao, wants_kernels
from shared_core.quantization.integer.layers import INTEGER, CodeModule, IntEmbedding
from shared_core.quantization.layers.fake_quant_layers import STOCK, bake_, conv1d_as_linear, layer_entry, restore
from shared_core.quantization.ranges.kv_cache import take_cache_scales_
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
    entries = _carried(converted) if ranges is None else take_cache_scales_(converted, ranges)
    integer: dict[nn.Module, nn.Module] = {}
    baked: set[int] = set()
    for name, module in find_layers(converted, entries, "convert").items():
        made = _on_codes(f"convert: {name}", module, entries[name])
        if made is not None:
            integer[module] = made
            continue
        if type(module) in STOCK and not module.quantizer.baked:  # type: ignore[union-attr]
            # Weights that are not on their codes yet are put there, each shared one once.
            bake_(module, baked)
        restore(module)
        apply_ranges(module, {"": entries[name]})
    converted = replaced(converted, integer)
    if fast:
        converted = to_torchao(converted)
    fast_paths_off(converted, ON_INTEGERS)
    return converted.eval()


def _carried(model: nn.Module) -> dict[str, Mapping[str, Any]]:
    """Return the ranges that the layers of a model carry; layers that should have one and have none are restored."""
    found: dict[str, Mapping[str, Any]] = {}
    for name, module in model.named_modules():
        entry = layer_entry(module)
        if entry is not None:
            found[plain_name(name)] = entry
        elif type(module) in STOCK:
            warnings.warn(
                f"convert: {name} stays in float: it saw no finite input in training", UserWarning, stacklevel=3
            )
            restore(module)
    if not found:
        raise MatchError(
            "convert",
            "model must have layers with activation ranges, found none",
            "train it with qat for at least one step, or pass ranges=",
        )
    return found


def _on_codes(where: str, module: nn.Module, entry: Mapping[str, Any]) -> CodeModule | None:
    """Return the layer that computes on codes, for a layer that then is a stock one; None if there is no such layer."""
    scheme, kind = saved_scheme(entry, where), stock_kind(STOCK.get(type(module), type(module)))
    if scheme.weight != "channel":
        return None
    if scheme.input == "static" and kind in INTEGER:
        bounds = check_range(entry, where)
        restore(module)
        return INTEGER[kind](module, bounds, scheme, entry)
    if kind is nn.Embedding:
        restore(module)
        return IntEmbedding(module, scheme, entry)  # type: ignore[arg-type]
    return None
