"""Read PEFT LoRA adapters without PEFT, and check that they can be averaged."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from shared_core.checkpoint_formats.files import (
    ADAPTER,
    Ingredient,
    MappedSafetensors,
    load_torch_file,
    open_safetensors,
    read_json,
    state_dict_in,
)
from shared_core.errors import CheckpointError

ADAPTER_CONFIG = "adapter_config.json"
_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_A = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?A(?P<suffix>\.weight)?")
KEY_PREFIX = "base_model.model."
"""PEFT's prefix before the names of the model."""

# Options whose effect is not linear in BA, or depends on more than BA.
_NOT_LINEAR = {
    "use_dora": "DoRA divides by the norm of W + BA",
    "kasa_config": "KaSA changes the base weight",
    "velora_config": "VeLoRA is not a sum of W and BA",
    "monteclora_config": "MonteCLoRA is not a sum of W and BA",
    "use_bdlora": "its factors are block-diagonal",
    "use_qalora": "QA-LoRA pools its input",
    "arrow_config": "Arrow routes between adapters",
    "target_parameters": "adapters of stacked experts are not supported",
}
# These initialize A and B at random or from data. All others (PiSSA, OLoRA, CorDA, LoftQ, ...) also change the base
# weight, by an amount that depends on the rank.
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
# Fields that may differ: the algebra handles them, or they don't change the function.
_FREE_FIELDS = frozenset({
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "lora_dropout", "inference_mode",
    "init_lora_weights", "peft_version", "runtime_config", "loftq_config", "eva_config",
})  # fmt: skip
# May be None if PEFT did not know them.
_OPTIONAL_FIELDS = frozenset({"base_model_name_or_path", "revision", "auto_mapping"})


@dataclass(frozen=True)
class LoraLayer:
    """The names of a layer's tensors in an adapter."""

    module: str
    """The layer in the base model."""
    a: str
    b: str
    bias: str
    """Bias of B (``lora_bias``); may not exist."""


def is_adapter_folder(folder: Path) -> bool:
    """Return True if a folder holds adapters in PEFT's format."""
    return (folder / ADAPTER_CONFIG).is_file()


def open_adapter(folder: Path) -> Ingredient:
    """Return the ingredient of a PEFT folder."""
    config = read_json(folder / ADAPTER_CONFIG)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(folder, f"peft_type must be LORA, got {config.get('peft_type')!r}", "leave it out")
    kinds = {"r": int, "lora_alpha": int | float, "rank_pattern": dict | None, "alpha_pattern": dict | None}
    for field, kind in kinds.items():
        if field in config and not isinstance(config[field], kind):
            raise CheckpointError(folder, f"{field} must be a {kind}, got {config[field]!r}", "it is damaged")
    file = next((folder / name for name in _FILES if (folder / name).exists()), None)
    if file is None:
        raise CheckpointError(folder, f"the folder holds none of {', '.join(_FILES)}", "check the path")

    def load() -> Mapping[str, Tensor]:
        if file.suffix == ".safetensors":
            return MappedSafetensors(dict.fromkeys(open_safetensors(file).keys(), file))
        content = state_dict_in(load_torch_file(file), file)
        return {key: value.clone() if isinstance(value, Tensor) else value for key, value in content.items()}  # no ties

    adapter = Ingredient(str(folder), ADAPTER, folder, load, config)
    # A soup is written with the same file name and keys.
    adapter.shards = dict.fromkeys([*adapter.specs, *adapter.ties], file.name)
    lora_layers(adapter)
    return adapter


def lora_layers(adapter: Ingredient) -> list[LoraLayer]:
    """Return the layers of an adapter, in the order of its file."""
    layers = []
    for key in adapter.specs:
        match = _A.fullmatch(key)
        if match is not None:
            # PEFT names an embedding's factors `lora_embedding_A`, without `.weight`, since they are bare parameters.
            stem = f"{match['module']}.lora_{match['embedding'] or ''}B"
            layer = LoraLayer(
                match["module"].removeprefix(KEY_PREFIX), key, stem + (match["suffix"] or ""), f"{stem}.bias"
            )
            if not adapter.has(layer.b):
                raise CheckpointError(adapter.name, f"{key!r} has no matching {layer.b!r}", "the file is damaged")
            layers.append(layer)
    if not layers:
        raise CheckpointError(adapter.name, "the adapter has no lora_A and lora_B", "leave it out")
    return layers


def rank_and_alpha(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Return a layer's rank and alpha from the adapter's config. The first matching pattern wins."""

    def of(patterns: str, default: str) -> Any:
        fitting = (value for key, value in (config.get(patterns) or {}).items()
                   if re.match(rf"(.*\.)?({key})$", module))  # fmt: skip
        # PEFT's rule: a pattern must match the end of the name, after a dot or from the start. Dicts keep the order.
        return next(fitting, config.get(default, 8))

    return of("rank_pattern", "r"), of("alpha_pattern", "lora_alpha")


def scaling(config: Mapping[str, Any], module: str) -> float:
    """Return the factor of BA in a layer: alpha / r, or alpha / sqrt(r) with rsLoRA (Kalajdzievski, 2023)."""
    rank, alpha = rank_and_alpha(config, module)
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def check_adapters(first: Ingredient, other: Ingredient) -> None:
    """Raise `CheckpointError` unless two adapters can be averaged."""
    for adapter in (first, other):
        if broken := next(_not_averaged(adapter), None):
            remedy = "leave one of them out, or merge each into its model and average these"
            raise CheckpointError("soup", f"{adapter.name} must {broken}", remedy)
    # Compare only fields that both have, since newer versions of PEFT add fields.
    for field in sorted((first.config.keys() & other.config.keys()) - _FREE_FIELDS):
        one, two = (_comparable(adapter.config[field]) for adapter in (first, other))
        if one != two and not (field in _OPTIONAL_FIELDS and None in (one, two)):
            rule = f"adapters must have the same {field}, got {one!r} in {first.name} and {two!r} in {other.name}"
            raise CheckpointError("soup", rule, "leave one of them out")


def _not_averaged(adapter: Ingredient) -> Iterator[str]:
    """Yield the rules for averaging that an adapter breaks."""
    for field, why in _NOT_LINEAR.items():
        if adapter.config.get(field):
            yield f"have no {field}, got it: {why}"
    start = adapter.config.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        why = "which changes it by an amount that depends on the rank"
        yield f"leave the base model as it is, got init_lora_weights {start!r}, {why}"
    for key in adapter.specs:
        if ".lora_" in key and not re.search(r"\.lora_(embedding_)?[AB](\.weight|\.bias)?$", key):
            yield f"hold plain LoRA, got {key!r}"
    for layer in lora_layers(adapter):
        # The rank is dimension 0 of A and dimension 1 of B. Both must match the config, or the scale would be wrong.
        ranks = adapter.spec(layer.a).shape[0], adapter.spec(layer.b).shape[1]
        rank = rank_and_alpha(adapter.config, layer.module)[0]
        if ranks != (rank, rank):
            got = f"{ranks[0]} in A and {ranks[1]} in B of {layer.module!r} (damaged, or a convolution with groups)"
            yield f"have rank {rank} as the config says, got {got}"


def _comparable(value: Any) -> Any:
    if isinstance(value, list):
        # PEFT writes sets in any order, and extends modules_to_save each time it wraps a model.
        value = sorted(dict.fromkeys(map(str, value)))
    return value or None


def rank_dimension(key: str) -> int | None:
    """Return the dimension of a tensor that is the adapter's rank, None if it has none."""
    if re.search(r"\.lora_(embedding_)?A(\.weight)?$", key):
        return 0
    return 1 if re.search(r"\.lora_(embedding_)?B(\.weight)?$", key) else None
