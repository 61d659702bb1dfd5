"""Read models that were released in few bits: their formats as options of qat, and the scales of every weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.checkpoint_formats.files import MappedSafetensors, open_safetensors, read_config, read_json
from shared_core.checkpoint_formats.packed_layouts import METHODS as PACKED
from shared_core.checkpoint_formats.packed_layouts import NAMES, PackedLayout
from shared_core.checkpoint_formats.released_layouts import Fp8Layout, Layout, Stored, layout_of, parsed_groups, spread
from shared_core.checkpoint_formats.saved_rows import SavedRows, row_count, saved_rows
from shared_core.errors import CheckpointError, ConfigError
from shared_core.libraries import installed_version
from shared_core.modules.weight_views import from_rows, weights_of

_WHERE = "released"
METHODS = ("mxfp4", "fp8", "compressed-tensors", *PACKED)
_KNOWN = "MXFP4 of gpt-oss, FP8 of DeepSeek and Qwen, compressed-tensors, GPTQ or AWQ"


@dataclasses.dataclass(frozen=True)
class Grid:
    """The released grid of a parameter: its values are ``(code - zero_point)·scale``.

    Attributes:
        scale: float32, (rows, groups), with rows as `as_rows` orders them. The last group may be shorter.
        zero_point: In the same shape; None for symmetric codes.
        group_size: Weights of a row that share a scale.
    """

    scale: Tensor
    zero_point: Tensor | None
    group_size: int

    def spread(self, width: int) -> Tensor:
        """Return one scale per weight of rows of this width.

        Example:
            >>> Grid(torch.tensor([[1.0, 2.0]]), None, 2).spread(3).tolist()
            [[1.0, 1.0, 2.0]]
        """
        return spread(self.scale, (1, self.group_size), (len(self.scale), width))


class Released:
    """A folder with quantized weights, as released.

    Attributes:
        path: The folder.
        config: Its ``config.json``.
        quantization: Its ``quantization_config``.
        tensors: Every tensor by its name in the files, read on access.
        weights: Name that a float weight has in transformers' files → its layout.
    """

    def __init__(self, folder: Path | str) -> None:
        self.path = Path(folder)
        self.config, self.quantization = _configs(self.path)
        self.files = _index(self.path)
        self.tensors = MappedSafetensors(self.files)
        self.weights = dict(_weights(self.files, self.quantization))
        if not self.weights:
            rule = f"{self.path} must hold quantized weights, but none of its tensors has a scale"
            raise CheckpointError(_WHERE, rule, "give the folder that was released")

    def parts(self, layout: Layout) -> dict[str, Tensor]:
        """Return the tensors of a weight."""
        return {part: self.tensors[key] for part, key in layout.keys.items()}

    def read(self, name: str) -> Iterator[Stored]:
        """Yield the codes and scales of a weight by its name in float, in parts of whole rows."""
        layout = self.weights[name]
        yield from map(layout.read, layout.pieces(self.parts(layout)))


def released_config(model_or_folder: Any) -> tuple[Path, dict[str, Any]]:
    """Return the folder that a model was loaded from, and the ``quantization_config`` there.

    Args:
        model_or_folder: A transformers model, a folder, or a Hub name. A Hub name is only looked up in the local cache.

    Raises:
        CheckpointError: If there is no such folder, or it is not quantized in a format that can be read.
    """
    name = model_or_folder
    if not isinstance(name, str | Path):
        name = getattr(getattr(model_or_folder, "config", None), "_name_or_path", "") or ""
        if not name:
            rule = f"model must know the folder that it was loaded from, got {type(model_or_folder).__name__}"
            raise CheckpointError(_WHERE, rule, "load it with from_pretrained, or give the folder")
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = _cached(str(name))
    return folder, _configs(folder)[1]


def _cached(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception as error:  # the client raises many kinds
        rule = f"released model must be an existing folder, or in the Hub's cache, got {name!r}"
        raise CheckpointError(_WHERE, rule, "download it first, or give its folder") from error


def _configs(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``config.json`` and its quantization_config."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(_WHERE, f"{folder} must be a model folder, but it has no config.json", "check the path")
    config = read_config(folder)
    text = config.get("text_config")
    found = config.get("quantization_config") or (text or {}).get("quantization_config")
    if not found and (folder / "hf_quant_config.json").is_file():
        found = {"quant_method": "modelopt", **read_json(folder / "hf_quant_config.json").get("quantization", {})}
    if not found:
        rule = f"{folder} must be a quantized model, but its config.json has no quantization_config"
        raise CheckpointError(_WHERE, rule, "give the folder that was released")
    _check_method(found, folder)
    return config, dict(found)


def saved_dequantized(folder: Path | str) -> str:
    """Return how transformers (5.23) saved a model that it had dequantized on loading: ``mxfp4``, ``fp8`` or empty.

    Such a folder has no ``quantization_config``. Float weights of gpt-oss are called ``*_blocks`` there, and FP8 codes
    have scales that nothing applies.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file() or "quantization_config" in read_config(folder):
        return ""
    try:
        keys = _index(folder).keys()
    except CheckpointError:
        return ""
    if any(key.endswith("_blocks") and f"{key.removesuffix('_blocks')}_scales" not in keys for key in keys):
        return "mxfp4"
    return "fp8" if any(key.endswith(".weight_scale_inv") for key in keys) else ""


def _check_method(config: Mapping[str, Any], folder: object) -> None:
    method = str(config.get("quant_method", "none"))
    if method not in METHODS:
        rule = f"{folder} must be in {_KNOWN}, got quant_method {method}"
        raise CheckpointError(_WHERE, rule, "train the float model, and quantize it with qat")
    if method == "fp8" and config.get("expert_dtype", "fp8") != "fp8":
        rule = f"{folder} must have experts in FP8, got expert_dtype {config['expert_dtype']}"
        raise CheckpointError(_WHERE, rule, "use a release in FP8")
    if method == "compressed-tensors" and installed_version("compressed-tensors") is None:
        raise CheckpointError(_WHERE, f"{folder} needs compressed-tensors", "pip install compressed-tensors")
    if method in PACKED:
        PackedLayout(str(folder), {}, config)  # refuses other bits and packings


def _index(folder: Path) -> dict[str, Path]:
    """Return (tensor → its file) of a folder."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {key: folder / file for key, file in read_json(index)["weight_map"].items()}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(_WHERE, f"{folder} must hold .safetensors files, got none", "download all files")
    found: dict[str, Path] = {}
    for file in files:
        found |= dict.fromkeys(open_safetensors(file).keys(), file)
    return found


_PARTS = {
    "mxfp4": ("_blocks", {"blocks": "_blocks", "scales": "_scales"}, ""),
    "fp8": (".weight_scale_inv", {"weight": ".weight", "scale": ".weight_scale_inv"}, ".weight"),
    "compressed-tensors": (
        ".weight_scale",
        {
            part: f".{part}"
            for part in (
                "weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_global_scale"
            )
        },
        ".weight",
    ),
    **dict.fromkeys(PACKED, (".qweight", {part: f".{part}" for part in NAMES}, ".weight")),
}  # fmt: skip
"""Method → the end of a key that shows a quantized weight, ends of its parts, and of its name in float."""


def _weights(keys: Collection[str], config: Mapping[str, Any]) -> Iterable[tuple[str, Layout]]:
    """Yield (name in float, layout) of every quantized weight in a file."""
    sign, parts, end = _PARTS[config["quant_method"]]
    for key in keys:
        if key.endswith(sign):
            stem = key.removesuffix(sign)
            found = {part: stem + suffix for part, suffix in parts.items() if stem + suffix in keys}
            yield stem + end, _layout(stem + end, found, config)


def _layout(name: str, keys: Mapping[str, str], config: Mapping[str, Any]) -> Layout:
    make = PackedLayout if config["quant_method"] in PACKED else layout_of
    return make(name, keys, config)


def released_options(
    quantization_config: Mapping[str, Any], model: nn.Module | None = None, folder: Path | str | None = None
) -> dict[str, Any]:
    """Return the options of `QatConfig` that quantize the same layers in the same formats.

    Args:
        quantization_config: Of the released folder.
        model: The model, for the exact names of its layers. None: patterns from the config, which may name more layers
            than the files quantize.
        folder: The released folder, needed with a model.

    Raises:
        CheckpointError: If a format is not supported, or layers are only described by regular expressions.

    Example:
        >>> released_options({"quant_method": "mxfp4"})
        {'weights': 'mxfp4', 'inputs': 'none', 'include': ('*.experts',)}
    """
    _check_method(quantization_config, "quantization_config")
    if model is not None:
        if folder is None:
            raise ConfigError(_WHERE, "folder must be given with a model, got None", "pass released_config(model)[0]")
        return _exact_options(model, Released(folder))
    method = quantization_config["quant_method"]
    if method == "mxfp4":
        return {"weights": "mxfp4", "inputs": "none", "include": ("*.experts",)}
    if method == "fp8" or method in PACKED:
        layout = _layout("", {}, quantization_config)
        left = quantization_config.get("modules_to_not_convert") or quantization_config.get("ignored_layers") or ()
        head = () if method == "fp8" or quantization_config.get("lm_head") else ("lm_head",)
        return _format(layout) | {"skip": ("Embedding", *head, *left)}
    groups, ignored = parsed_groups(quantization_config)[1], quantization_config.get("ignore") or ()
    if len(groups) > 1 or any(target.startswith("re:") for group in groups for target in group.targets):
        rule = "layers of quantization_config must be found in a model, because groups name them by patterns"
        raise CheckpointError(_WHERE, rule, "pass model and folder")
    linear = {name: {**group, "targets": ["Linear"]} for name, group in quantization_config["config_groups"].items()}
    layout = layout_of("Linear", {}, {**quantization_config, "config_groups": linear})
    skip = tuple(name.removeprefix("re:").replace(".*", "*").replace("\\.", ".") for name in ignored)
    return _format(layout) | {"skip": ("Embedding", *skip)}


def _format(layout: Layout) -> dict[str, Any]:
    if isinstance(layout, Fp8Layout) and layout.size not in (None, (128, 128)):
        rule = f"weight_block_size must be [128, 128] to be trained, got {list(layout.size or ())}"
        raise CheckpointError(_WHERE, rule, "use another release")
    return {"weights": layout.kind, "inputs": layout.inputs, **layout.options}


def _exact_options(model: nn.Module, released: Released) -> dict[str, Any]:
    """Return options that name every layer with codes in the files."""
    layers: dict[str, dict[str, Any]] = {}
    for key, saved in saved_rows(model, weight_names(model)).items():
        if key in released.weights:
            for name in saved.held:
                layers.setdefault(name.rpartition(".")[0], _format(released.weights[key]))
    if not layers:
        first = next(iter(released.weights))
        rule = f"{released.path} must hold weights of {type(model).__name__}, but no name fits, such as {first}"
        raise CheckpointError(_WHERE, rule, "give the model's own release")
    formats = [repr(sorted(one.items())) for one in layers.values()]
    usual = max(set(formats), key=formats.count)
    main = layers[next(name for name, one in zip(layers, formats, strict=True) if one == usual)]
    overrides = {name: one for (name, one), written in zip(layers.items(), formats, strict=True) if written != usual}
    return {**main, "include": tuple(layers)} | ({"overrides": overrides} if overrides else {})


def weight_names(model: nn.Module) -> tuple[str, ...]:
    """Return the parameters with at least two axes, a shared one under its first name."""
    return tuple(name for name, value in model.named_parameters() if value.ndim > 1)


def grids_of(
    released: Released, rows: Mapping[str, SavedRows], model: nn.Module, names: Collection[str]
) -> dict[str, Grid]:
    """Return (parameter → its released grid).

    Args:
        released: The released folder.
        rows: `saved_rows` of at least these parameters.
        model: A transformers model of the architecture in the folder.
        names: Parameters of the model. Stacked experts have the rows of all experts.

    Raises:
        CheckpointError: If the folder holds no codes of a parameter, or parts of it differ in their format.
    """
    grids: dict[str, Grid] = {}
    for key, saved in rows.items():
        if not saved.held.keys() <= {*names}:
            continue
        if key not in released.weights:
            rule = f"{key} must have codes in {released.path}, got float weights or none"
            raise CheckpointError(_WHERE, rule, "leave it out")
        _fill(grids, saved, released.read(key), model)
    lacking = [name for name in names if name not in grids]
    if lacking:
        raise CheckpointError(_WHERE, f"{lacking[0]} must be in transformers' files, got none", "leave it out")
    return grids


def values_in(
    released: Released,
    model: nn.Module,
    places: Mapping[str, SavedRows],
    read: Callable[[Layout, dict[str, Tensor]], Tensor],
) -> dict[str, Tensor]:
    """Return a folder's weights by their names in a model, with NaN where the folder lacks rows.

    Args:
        released: The folder.
        model: The model.
        places: `saved_rows` of its parameters and buffers.
        read: Decodes some of a weight's tensors.
    """
    own: dict[str, Tensor] = model.state_dict()
    rows: dict[str, Tensor] = {}
    for key, place in places.items():
        if key in released.weights:
            layout = released.weights[key]
            values = torch.cat([read(layout, part) for part in layout.pieces(released.parts(layout))])
        elif key in released.files:
            values = place.rows_of(released.tensors[key])
        else:
            continue
        for name in place.held:
            count = row_count(model.get_submodule(name.rpartition(".")[0]), own[name])
            rows.setdefault(name, values.new_full((count, values.shape[1]), torch.nan))
        place.scatter_(rows, values)
    found = {}
    for name, values in rows.items():
        module, like = model.get_submodule(name.rpartition(".")[0]), torch.empty(own[name].shape, device="meta")
        is_weight = name.rpartition(".")[2] in weights_of(module) and like.ndim > 1
        found[name] = from_rows(module, values, like) if is_weight else values.view(like.shape)
    return found


def _fill(grids: dict[str, Grid], saved: SavedRows, pieces: Iterable[Stored], model: nn.Module) -> None:
    """Add a weight's scales to the grids of the parameters that it belongs to."""
    scales, zeros, count = [], [], 0
    for stored in pieces:
        down, rows = (stored.block[0], 1), len(stored.codes)
        scales.append(spread(stored.step, down, (rows, stored.step.shape[1])))
        if stored.zero_point is not None:
            zeros.append(spread(stored.zero_point, down, (rows, stored.step.shape[1])))
        size, count = stored.block[1], count + rows
    if count != len(saved.rows):
        rule = f"{saved.names} must have {len(saved.rows)} rows in the released file, got {count}"
        raise CheckpointError(_WHERE, rule, "give the model's own release")
    found = {"scale": torch.cat(scales)} | ({"zero_point": torch.cat(zeros)} if zeros else {})
    for name in saved.held:
        if name not in grids:
            count = row_count(model.get_submodule(name.rpartition(".")[0]), model.get_parameter(name))
            empty = {part: value.new_full((count, value.shape[1]), torch.nan) for part, value in found.items()}
            grids[name] = Grid(empty["scale"], empty.get("zero_point"), size)
        grid = grids[name]
        if (grid.scale.shape[1], grid.zero_point is None) != (found["scale"].shape[1], not zeros):
            raise CheckpointError(_WHERE, f"{name} must have one format in the released files, got two", "skip it")
    for part, value in found.items():
        saved.scatter_({name: getattr(grid, part) for name, grid in grids.items()}, value)
