"""Select the layers to quantize and their schemes, with a reason for each layer left out."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn

from shared_core.errors import CompatibilityError, ConfigError, MatchError
from shared_core.modules.like_stock import why_not_float, why_not_stock
from shared_core.modules.matching import (
    Matched,
    StackedExperts,
    frozen_helpers,
    gates_between_products,
    match_modules,
    options_by_module,
    own_class,
    plain_name,
    read_past_forward,
)
from shared_core.modules.weight_views import PACKED, as_rows, weights_of
from shared_core.printing import listed
from shared_core.quantization.config import QatConfig
from shared_core.quantization.fake_quant_layers import FAKE_QUANT, is_quantized, know_layers
from shared_core.quantization.low_bit import HALF_DTYPES
from shared_core.quantization.schemes import WITH_RANGE, LayerScheme

BASE = ".base_layer"
"""Name suffix of a layer wrapped by PEFT's adapters."""
_ADAPTER = "a LoRA adapter, which trains in float on a quantized base"
_TABLE = re.compile(r"position|token_type|segment|^wpe$")
_EVERY_TOKEN = "a table of positions or token types, whose error affects every token; name it in `include` to quantize"
_ORIGINAL = "peft trains a copy of it instead (modules_to_save)"


def select_layers(
    model: nn.Module,
    include: tuple[str, ...],
    skip: tuple[str, ...],
    min_size: int = 0,
    *,
    trains: bool = False,
    may_skip: bool = False,
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return (name → layer to quantize, name → why a matched layer stays in float).

    For a layer with adapters, the base layer is quantized, and `include` and `skip` match the layer's own name too.
    `may_skip` says that layers which `include` names by themselves may stay in float too.
    With `lora`, whose adapters are merged at the end, the base layer keeps that name. In a PEFT model it has PEFT's
    name (``…base_layer``).
    """
    know_layers(model)
    if any(is_quantized(module) for module in model.modules()):
        raise CompatibilityError("qat", "the model already has quantizers", "detach or finish the earlier run first")
    adapted = {plain_name(name): module for name, module in model.named_modules() if hasattr(module, "get_base_layer")}
    reach = [_reach_bases(model, patterns, list(adapted)) for patterns in (include, skip)]
    matched = match_modules(model, tuple(FAKE_QUANT), where="qat", include=reach[0], skip=reach[1], min_size=min_size)
    # a module with two names counts once, because `modules()` yields it once
    owners = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    replaced = {id(inner) for module in model.modules() for inner in _originals(module)}
    readers = read_past_forward(model) if trains else {}
    helpers = {} if include else frozen_helpers(model)
    reasons = [
        _ORIGINAL
        if id(found.module) in replaced
        else _why_adapted(found, adapted, include)
        or _why_not(found.module)
        or helpers.get(id(found.module))
        or (f"{readers[id(found.module)]}, which bypasses a quantizer" if id(found.module) in readers else None)
        or _in_every_token(found, include)
        for found in matched
    ]
    able = [found.module for found, reason in zip(matched, reasons, strict=True) if reason is None]
    quantized = Counter(id(weight) for module in able for weight in weights_of(module).values())
    layers: dict[str, nn.Module] = {}
    left_out: dict[str, str] = {}
    for found, why in zip(matched, reasons, strict=True):
        reason = why
        # an embedding and a head that share a weight quantize its rows in the same way
        if reason is None and any(owners[id(w)] > quantized[id(w)] for w in weights_of(found.module).values()):
            reason = "its weight is tied to another module, which would not be quantized"
        own = found.name.removesuffix(BASE)
        if reason is None:
            layers[own if hasattr(adapted.get(own), "user_layer") else found.name] = found.module
        elif ({found.name, own} & set(include) and not may_skip) or (
            type(found.module).__name__ in include and reason not in (_ADAPTER, _ORIGINAL)
        ):
            raise CompatibilityError(
                "qat", f"include must name only layers that can be quantized, not {found.name}: {reason}"
            )
        else:
            left_out[found.name] = reason
    if not layers:
        rule = "; ".join(f"{name}: {reason}" for name, reason in list(left_out.items())[:3])
        raise MatchError("qat", "must match at least one module that can be quantized", rule)
    return layers, left_out


def _in_every_token(found: Matched, include: tuple[str, ...]) -> str | None:
    is_table = own_class(found.module) is nn.Embedding and _TABLE.search(found.name.rpartition(".")[2])
    return _EVERY_TOKEN if is_table and not include else None


def _reach_bases(model: nn.Module, patterns: tuple[str, ...], adapted: list[str]) -> tuple[str, ...]:
    """Return `patterns` with adapted layers, first and last replaced by the names of their base layers."""
    if not adapted:
        return patterns
    able = [plain_name(name) for name, module in model.named_modules() if isinstance(module, tuple(FAKE_QUANT))]
    own = [name for name in able if not _is_adapter(name)]
    reached: list[str] = []
    for pattern in patterns:
        if pattern in ("first", "last"):
            reached += own[:1] if pattern == "first" else own[-1:]
            continue
        bases = [name + BASE for name in adapted if fnmatch.fnmatchcase(name, pattern)]
        reached += bases
        if not bases or any(fnmatch.fnmatchcase(name, pattern) for name in able):
            reached.append(pattern)
    return tuple(reached)


def _is_adapter(name: str) -> bool:
    return any(part.startswith("lora_") for part in name.split("."))


def _why_adapted(found: Matched, adapted: dict[str, nn.Module], include: tuple[str, ...]) -> str | None:
    if _is_adapter(found.name):
        if not any("lora_" in pattern and fnmatch.fnmatchcase(found.name, pattern) for pattern in include):
            return _ADAPTER
        if hasattr(adapted.get(found.name.partition(".lora_")[0]), "user_layer"):
            return "an adapter of lora, which is merged in float"
    if any(hasattr(found.module._parameters.get("weight"), state) for state in ("quant_state", "SCB")):
        raise CompatibilityError(
            "qat",
            f"bitsandbytes has already quantized the weights of {found.name}",
            "load the model without quantization_config and let the scheme quantize it (int4_weight, nvfp4), or skip "
            "the layer",
        )
    if isinstance(found.module, StackedExperts) and found.name.removesuffix(BASE) in adapted:
        return "peft's adapters add their weights to its float weights"
    if any(getattr(adapted.get(found.name.removesuffix(BASE)), "use_dora", {}).values()):
        return "DoRA also reads its float weight"
    return None


def _originals(module: nn.Module) -> Iterable[nn.Module]:
    original = module._modules.get("original_module") if "modules_to_save" in module._modules else None
    return () if original is None else original.modules()


def _why_not(module: nn.Module) -> str | None:
    if own_class(module) not in FAKE_QUANT:
        return why_not_stock(module)
    return why_not_float(weights_of(module).values())


_GROUP_SIZES = (128, 64, 32)


def layer_schemes(config: QatConfig, layers: dict[str, nn.Module]) -> dict[str, LayerScheme]:
    """Return the scheme of each layer: the config's, with the overrides that match the layer."""
    options = options_by_module("qat", config.override_options(), layers, "quantized layer")
    resolved = {}
    for name, layer in layers.items():
        own = config
        if options[name]:
            try:
                own = config.of_layer(options[name])
            except ConfigError as error:
                raise ConfigError("qat.overrides", f"{name}: {error.rule}", error.remedy) from error
        resolved[name] = _layer_scheme(own, name, layer)
        if isinstance(layer, StackedExperts) and "activation_bits" in options[name] and resolved[name].input == "none":
            raise ConfigError(
                "qat.overrides",
                f"activation_bits must not be given for {name}: inputs of stacked experts stay in float",
                "give only weight_bits for it, or use int8_dynamic",
            )
    _check_shared(layers, resolved)
    _check_changes(layers, resolved)
    return resolved


def _check_changes(layers: dict[str, nn.Module], schemes: dict[str, LayerScheme]) -> None:
    """Refuse a cast to the dtype that the weights have."""
    halves = [name for name in layers if schemes[name].is_half]
    dtypes = {name: {weight.dtype for weight in weights_of(layers[name]).values()} for name in halves}
    if halves and all(dtypes[name] == {HALF_DTYPES[schemes[name].weight]} for name in halves):
        rule = f"weights of {listed(halves, 3)} are {schemes[halves[0]].weight} already, so the scheme changes nothing"
        raise ConfigError("qat.scheme", rule, "choose another one")


def _check_shared(layers: dict[str, nn.Module], schemes: dict[str, LayerScheme]) -> None:
    owners: dict[int, str] = {}
    for name, layer in layers.items():
        for weight in weights_of(layer).values():
            first = owners.setdefault(id(weight), name)
            # A shared weight has one set of codes, so all its layers need the same scheme.
            if schemes[first].of_weight != schemes[name].of_weight:
                raise ConfigError(
                    "qat",
                    f"{name} shares its weight with {first} and must be quantized like it, got "
                    f"{schemes[name].of_weight} and {schemes[first].of_weight}",
                    "override both",
                )


def _layer_scheme(config: QatConfig, name: str, layer: nn.Module) -> LayerScheme:
    scheme = config.layer_scheme
    change: dict[str, Any] = {}
    if scheme.input == "fp8_static" and isinstance(layer, StackedExperts):
        change["input"] = "fp8"  # values inside the experts have no observed range
    # For experts, tokens of both products are quantized, the second inside. An embedding's inputs are indices.
    seen = change.get("input", scheme.input) not in ("none", *WITH_RANGE) and gates_between_products(layer)
    if isinstance(layer, nn.Embedding) or (
        isinstance(layer, StackedExperts) and not seen
    ):  # an embedding's are indices
        change |= {"input": "none", "activation_bits": 0}
    if scheme.weight == "group":
        change["group_size"] = _group_size(config, name, layer)
    return dataclasses.replace(scheme, **change)


def _group_size(config: QatConfig, name: str, layer: nn.Module) -> int:
    widths = {as_rows(layer, weight.detach()).shape[1] for weight in weights_of(layer).values()}
    wanted = _GROUP_SIZES if config.group_size is None else (config.group_size,)
    for size in wanted:
        if all(width % size == 0 for width in widths):
            return size
    if config.group_size is not None:
        raise ConfigError(
            "qat.group_size",
            f"group_size must divide the {sorted(widths)} weights per channel of {name}, got {config.group_size}",
            "skip the layer, or override its group_size",
        )
    if isinstance(layer, PACKED):
        # Rows that no group divides (a few inputs beside the hidden size) form one group, the others keep usual groups.
        return next((size for size in wanted if any(width % size == 0 for width in widths)), min(widths))
    size = math.gcd(*widths)  # no usual size divides: one group per channel, unless there are several widths
    if size < 4 and len(widths) > 1:
        raise ConfigError(
            "qat.scheme",
            f"no group of at least 4 divides the weights of {name}, {sorted(widths)} per channel",
            "skip the layer, or override its scheme with int8_weight",
        )
    return size
