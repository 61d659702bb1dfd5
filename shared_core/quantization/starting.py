"""Where training starts from: the folder that a model was released in, or one of post-training quantization.

It gives formats, weights, the scales of these, and ranges of inputs.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.checkpoint_formats.opening import open_ingredient
from shared_core.checkpoint_formats.plain import DEPLOYMENT_FILE, check_values, read_deployment, unlike
from shared_core.checkpoint_formats.released import (
    Grid,
    Released,
    grids_of,
    released_config,
    released_options,
    values_in,
    weight_names,
)
from shared_core.checkpoint_formats.saved_rows import saved_rows
from shared_core.distributed.sharded_tensors import fill_parameters_
from shared_core.errors import CheckpointError, CompatibilityError, require
from shared_core.modules.matching import plain_name
from shared_core.modules.weight_views import as_rows, weights_of
from shared_core.printing import listed
from shared_core.quantization.config import QatConfig
from shared_core.quantization.ranges.kept_scales import (
    WITHOUT_SCALES,
    KeptScale,
    check_grid,
    grid_of_baked,
    one_per_channel,
    saved_grids,
)
from shared_core.quantization.ranges.saved_ranges import check_range, saved_scheme
from shared_core.quantization.schemes import INPUTS, WEIGHTS, WIDE, LayerScheme

_REMEDY = "give a folder of eff quantize, or one that a quantized model was released in"


@dataclasses.dataclass(frozen=True)
class Start:
    """What a run takes from a folder.

    Attributes:
        config: The options, with the formats of the folder.
        folder: The folder; empty if none is given.
        options: The formats that were found there, as options.
        entries: Layer → what `eff quantize` saved for it; None in other folders.
        prefix: Prefix of the folder's names in the module to train.
        saved: True if scales are in the state of a checkpoint, so that the folder is not read.
    """

    config: QatConfig
    folder: str = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    entries: Mapping[str, Mapping[str, Any]] | None = None
    prefix: str = ""
    saved: bool = False

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.folder).expanduser()

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Return the ranges of inputs by layer."""
        entries = self.entries or {}
        found = {name: entry for name, entry in entries.items() if saved_scheme(entry, "qat").has_range}
        return {name: check_range(entry, f"qat: {self.folder}: {name}") for name, entry in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs instead of the folder."""
        return {"folder": self.folder, "options": dict(self.options)} if self.folder else {}


def find_start(config: QatConfig, model: nn.Module, state: Mapping[str, Any] | None) -> Start:
    """Return what a config starts from. Of the folder only the formats are read.

    Args:
        config: The options as given.
        model: The model to train, without techniques.
        state: `Start.state_dict` of a checkpoint whose weights are loaded next; None without one.

    Raises:
        CheckpointError: If the folder has no formats.
        CompatibilityError: If the model has adapters.
        ConfigError: If an option contradicts the formats.
    """
    if config.scheme != "released" and config.init is None:
        return Start(config)
    if any(hasattr(module, "get_base_layer") for module in model.modules()):
        rule = "scheme released and init need a model without adapters, because scales belong to whole weights"
        remedy = "train adapters without qat, and let `eff export --format released` merge and round them"
        raise CompatibilityError("qat", rule, remedy)
    if state:
        return Start(_with(config, state["options"]), state["folder"], state["options"], saved=True)
    folder = None if config.init is None else Path(config.init).expanduser()
    if folder is not None and (folder / DEPLOYMENT_FILE).exists():
        entries = read_deployment(folder).get("qat", {}).get("ranges") or {}
        require(entries, "qat", f"{folder / DEPLOYMENT_FILE} must name quantized layers", _REMEDY, CheckpointError)
        prefix = _inner_model(model, entries)[0]
        entries = {prefix + name: entry for name, entry in entries.items() if "weight" in entry}
        options = _options_of(entries) if config.is_open else {}
        return Start(_with(config, options), str(config.init), options, entries, prefix)
    prefix, inner = _inner_model(model)
    found, own = released_config(inner if folder is None else folder)
    options = _prefixed(released_options(own, inner, found), prefix) if config.is_open else {}
    return Start(_with(config, options), str(config.init or found), options, prefix=prefix)


def _inner_model(model: nn.Module, layers: Iterable[str] | None = None) -> tuple[str, Any]:
    """Return the outermost module that has these layers, or that transformers can load, with the prefix of its names.

    A LightningModule holds the model that the folder is of.
    """
    for name, module in model.named_modules():
        if layers is None:
            is_it = hasattr(getattr(module, "config", None), "_name_or_path") and hasattr(module, "from_pretrained")
        else:
            is_it = {*layers} <= {plain_name(inner) for inner, _ in module.named_modules()}
        if is_it:
            return f"{plain_name(name)}." if name else "", module
    return "", model


def _with(config: QatConfig, options: Mapping[str, Any]) -> QatConfig:
    """Return a config with formats that were found."""
    found: dict[str, Any] = {} if config.scheme != "released" else {"scheme": None}
    found |= {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    return dataclasses.replace(config, **found)


def _prefixed(options: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    overrides = [
        f"{prefix}{name}:{option}={value}"
        for name, own in options.get("overrides", {}).items()
        for option, value in own.items()
        if option != "include"
    ]
    return {**options, "include": [prefix + name for name in options["include"]], "overrides": overrides}


def _options_of(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the options that give layers the schemes of saved entries: the most common one, and overrides."""
    schemes = {name: saved_scheme(entry, f"qat: {name}") for name, entry in entries.items()}
    common = Counter(schemes.values()).most_common(1)[0][0]
    overrides = [
        f"{name}:{option}={value}"
        for name, scheme in schemes.items()
        if scheme != common
        for option, value in _options_of_scheme(scheme).items()
    ]
    signed = any(scheme.symmetric and not scheme.has_wide_inputs for scheme in schemes.values())
    symmetric = {"symmetric": True} if signed else {}
    return {**_options_of_scheme(common), **symmetric, "include": [*schemes], "overrides": overrides}


_WEIGHTS = {(kind, affine): name for name, (kind, _, _, affine) in WEIGHTS.items()}
_INPUTS = {(kind, affine, bits == WIDE): name for name, (kind, bits, affine, _) in INPUTS.items()}


def _options_of_scheme(scheme: LayerScheme) -> dict[str, Any]:
    found: dict[str, Any] = {
        "weights": _WEIGHTS[scheme.weight, scheme.affine],
        "inputs": _INPUTS[scheme.input, scheme.affine_input, scheme.has_wide_inputs],
    }
    if scheme.has_integers:
        found["weight_bits"] = scheme.weight_bits
    if scheme.has_byte_inputs:
        found["activation_bits"] = scheme.activation_bits
    if scheme.weight == "group":
        found["group_size"] = scheme.group_size
    return found


def kept_scales(
    start: Start, model: nn.Module, layers: Mapping[str, nn.Module], schemes: Mapping[str, LayerScheme]
) -> tuple[dict[str, KeptScale], list[str]]:
    """Return the scales to keep by layer, and notes. With ``init`` the folder's weights are put into the model.

    A layer whose format is another than the folder's has scales that follow from its weights.

    Args:
        start: What `find_start` returned.
        model: The model to train.
        layers: Name → layer to quantize.
        schemes: Name → its scheme.

    Raises:
        CheckpointError: If names or shapes in the folder are not the model's.
    """
    if not start.folder or start.saved:
        return {}, []
    prefix = start.prefix
    names = {f"{plain_name(name)}.".lstrip("."): module for name, module in model.named_modules()}
    inner: Any = names[prefix]
    loaded = {} if start.config.init is None else _load_(inner, start)
    able = {name: layer for name, layer in layers.items() if schemes[name].weight not in WITHOUT_SCALES}
    if start.entries is None:
        grids, notes = _released(start, inner, prefix, able, schemes)
    else:
        grids, notes = _quantized(start.entries, loaded, prefix, able, schemes), []
    for name, own in grids.items():
        for weight, grid in own.items():
            values: Any = weights_of(layers[name])[weight]
            check_grid(f"{name}.{weight}", as_rows(layers[name], torch.empty(values.shape, device="meta")), grid)
    if follows := [name for name in layers if name not in grids]:
        rule = f"{start.folder} has none for their format"
        notes.append(f"qat: weight scales of {listed(follows, 3)} follow the weights, because {rule}")
    return {name: KeptScale(own, schemes[name]) for name, own in grids.items()}, notes


def _quantized(
    entries: Mapping[str, Mapping[str, Any]],
    loaded: Mapping[str, Tensor],
    prefix: str,
    layers: Mapping[str, nn.Module],
    schemes: Mapping[str, LayerScheme],
) -> dict[str, dict[str, Grid]]:
    """Return the grids that post-training quantization found, of layers in the same format."""
    found: dict[str, dict[str, Grid]] = {}
    for name, layer in layers.items():
        entry, scheme = entries.get(name), schemes[name]
        if entry is None or saved_scheme(entry, "qat").of_weight != scheme.of_weight:
            continue
        # those of the folder, in float32: a model in 16 bits holds them rounded
        weights = {own: loaded[f"{name}.{own}".removeprefix(prefix)] for own in weights_of(layer)}
        if own := saved_grids(entry, scheme, f"qat: {name}"):
            found[name] = own
        elif "weight_scale" in entry:
            width = as_rows(layer, weights["weight"]).shape[1]
            found[name] = one_per_channel(torch.tensor(entry["weight_scale"]), width, scheme).grids
        else:
            found[name] = {own: grid_of_baked(layer, weight, scheme) for own, weight in weights.items()}
    return found


def _released(
    start: Start, model: Any, prefix: str, layers: Mapping[str, nn.Module], schemes: Mapping[str, LayerScheme]
) -> tuple[dict[str, dict[str, Grid]], list[str]]:
    """Return the released grids of layers in the same format, and a note about weights that no layer has."""
    released, rows = Released(start.path), saved_rows(model, weight_names(model))
    owners = {
        f"{name.removeprefix(prefix)}.{own}": (name, own) for name, layer in layers.items() for own in weights_of(layer)
    }
    coded = {name: released.weights[key].kind for key, saved in rows.items() if key in released.weights
             for name in saved.held}  # fmt: skip
    alike = [
        name for name, (layer, _) in owners.items()
        if name in coded and WEIGHTS[coded[name]][0] == schemes[layer].weight
    ]  # fmt: skip
    _check_dtype(model, alike)
    found: dict[str, dict[str, Grid]] = {}
    for name, grid in grids_of(released, rows, model, alike).items():
        layer, own = owners[name]
        found.setdefault(layer, {})[own] = grid
    left, lost = [name for name in coded if name not in owners], [key for key in released.weights if key not in rows]
    lines = [f"{listed(left, 3)} train in float"] if left else []
    lines += [f"the model does not have {listed(lost, 3)}"] if lost else []
    return found, [f"qat: not all quantized weights of {start.folder} are trained: {'; '.join(lines)}"] if lines else []


def _check_dtype(model: Any, names: list[str]) -> None:
    """Refuse weights that transformers dequantized into another dtype than the model's: its own layers then fail."""
    table = model.get_input_embeddings()
    for name in names:
        dtype = model.get_parameter(name).dtype
        if table is not None and dtype != table.weight.dtype:
            rule = f"{name} must have the model's dtype, {table.weight.dtype}, got {dtype}"
            remedy = "transformers dequantizes into bfloat16: load the model with dtype=torch.bfloat16, or cast it"
            raise CompatibilityError("qat", rule, remedy)


@torch.no_grad()
def _load_(model: Any, start: Start) -> Mapping[str, Tensor]:
    """Overwrite the model's weights with those of a folder, dequantized, and return these."""
    where = f"qat: init {start.folder}"
    if start.entries is None:
        weights, odd = _dequantized(model, start.path)
    elif (start.path / "config.json").is_file() and hasattr(model, "from_pretrained"):
        loaded, info = type(model).from_pretrained(start.path, dtype=torch.float32, output_loading_info=True)
        weights = loaded.state_dict()
        odd = [str(name) for kind in ("missing", "unexpected", "mismatched") for name in info[f"{kind}_keys"]]
    else:
        opened = open_ingredient(start.path)
        weights, odd = {name: opened.tensor(name) for name in (*opened.specs, *opened.ties)}, []
    odd += [name for names in unlike(model, weights) for name in names]
    differ = f"must hold the weights of this {type(model).__name__}, but these differ: {listed(odd, 5)}"
    require(not odd, where, differ, "build the model that was quantized", CheckpointError)
    check_values(model, weights, where)
    fill_parameters_(model, weights)
    return weights


def _dequantized(model: Any, folder: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights in a released folder by their names in the model, and the files' names without a place."""
    released, places = Released(folder), saved_rows(model, model.state_dict())
    weights = values_in(released, model, places, lambda layout, part: layout.read(part).values)
    # what a quantizer keeps beside its codes, such as scales of inputs
    coded = tuple(key.removesuffix("weight") for key in released.weights)
    parts = {part for layout in released.weights.values() for part in layout.keys.values()}
    lost = [key for key in released.files if key not in places and key not in parts and not key.startswith(coded)]
    return weights, lost
