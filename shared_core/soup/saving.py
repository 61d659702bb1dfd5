"""Write a soup in the format of its ingredients, so that the same code loads it."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from shared_core.checkpoint_formats import (
    ADAPTER,
    DISTRIBUTED,
    HF_FOLDER,
    LIGHTNING,
    SAFETENSORS,
    Ingredient,
    load_checkpoint,
    read_json,
    without_foreign,
)
from shared_core.checkpoint_formats.adapter import ADAPTER_CONFIG
from shared_core.checkpoint_formats.distributed import index_folder, write_distributed
from shared_core.checkpoint_formats.files import weights_key
from shared_core.checkpoint_formats.opening import parts_of
from shared_core.checkpoint_formats.plain import (
    CARD,
    DEPLOYMENT_FILE,
    DEPLOYMENT_KEY,
    LIGHTNING_META,
    add_section,
    read_deployment,
    write_deployment,
)
from shared_core.errors import CheckpointError
from shared_core.files.atomic import atomic_folder, atomic_write, check_writable, is_free, make_folder
from shared_core.files.journal import LIST_FILE
from shared_core.printing import markdown_text
from shared_core.soup.adapters import AdapterWeights

# Other files of a folder are copied (config, tokenizer, processor), but not weights, training state or pickles.
_LEFT_BEHIND = frozenset({
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".onnx", ".gguf",
    ".distcp",
})  # fmt: skip
_TRAINING_FILES = (
    "trainer_state.json", LIST_FILE, "model.safetensors.index.json", "pytorch_model.bin.index.json"
)  # fmt: skip
# What a Lightning checkpoint needs for loading. Optimizers and callbacks belong to one run and are dropped.
_KEPT_KEYS = ("epoch", "global_step", "pytorch-lightning_version", "hparams_name", "hyper_parameters",
              "hparams_type", "datamodule_hparams_name", "datamodule_hyper_parameters")  # fmt: skip

Say = Callable[[str], None]


def check_target(target: str | Path, like: Ingredient) -> Path:
    """Return the path of the soup after checking that it can be written."""
    target = Path(target)
    suffix = like.suffix
    if suffix and target.suffix != suffix:
        rule = f"out must be a file ending in {suffix}, like the ingredients, got {target}"
        raise CheckpointError("soup", rule, "rename it")
    # a link, even one that leads nowhere, could not be replaced by a folder when the search is over
    if target.is_symlink() or not is_free(target) or (suffix and target.is_dir()):
        raise CheckpointError(
            "soup", f"out must not exist yet, got {target}", "choose another; on the command line, --force replaces it"
        )
    check_writable(target, "soup")
    return target


def check_beside(ingredients: Iterable[Ingredient]) -> None:
    """Refuse, before a search, ingredients with an unreadable deployment file, which a soup may need to copy."""
    for item in ingredients:
        if item.path is not None and (item.path / DEPLOYMENT_FILE).exists():
            read_deployment(item.path)


def save_soup(
    state_dict: Mapping[str, Tensor],
    like: Ingredient,
    target: str | Path,
    beside: Callable[[Path], None] | None = None,
    say: Say = warnings.warn,
) -> Path:
    """Write a soup atomically in the format of an ingredient, and return its path.

    A folder keeps the ingredient's config, tokenizer and shards. A Lightning checkpoint keeps its hyper-parameters,
    epoch and step, but not the optimizer and callback states, which belong to one run. Quantization ranges of qat are
    kept only in a folder whose weights equal the ingredient's. Other weights are off the grid and need new ranges.

    Args:
        state_dict: The weights.
        like: The ingredient with the format to use, usually the best.
        target: The folder or file, which must not exist, or be an empty folder.
        beside: Called with the folder, or with the file after it was written, to write additional files.
        say: Called with a message if ranges were left out.

    Raises:
        CheckpointError: If it cannot be written.
    """
    target = check_target(target, like)
    lacking = next((key for key in (*like.specs, *like.ties, *like.shards) if key not in state_dict), None)
    if lacking is not None:
        rule = f"weights must have the names of {like.name}, whose format is used, got no {lacking!r}"
        raise CheckpointError("soup", rule, "pass the first ingredient, whose names a soup of several formats has")
    if like.kind in (HF_FOLDER, ADAPTER, DISTRIBUTED) and like.path is not None:
        # Built next to the target and renamed when complete, so a killed run leaves no partial folder.
        with atomic_folder(target) as folder:
            had_ranges = _write_folder(state_dict, like, like.path, folder, say)
            if _lost_ranges(state_dict, like, like.path, folder):
                say(_requantize(target, str(target)))
            elif had_ranges:
                say(_requantize(target, f"module:function --weights {target}"))
            if beside is not None:
                beside(folder)
        return target
    make_folder(target.parent)
    with atomic_write(target) as temporary:
        if like.kind == SAFETENSORS:
            save_file({key: state_dict[key] for key in like.specs}, temporary, metadata={"format": "pt"})
        elif like.kind == LIGHTNING and like.path is not None:
            content = load_checkpoint(like.path)
            torch.save({**_kept(content, say), "state_dict": dict(state_dict)}, temporary)
            if _has_ranges(content):
                say(_requantize(target, f"module:function --weights {target}"))
        else:
            key = None if like.path is None else weights_key(load_checkpoint(like.path))
            torch.save(dict(state_dict) if key is None else {key: dict(state_dict)}, temporary)
    if beside is not None:
        beside(target)
    return target


def write_path(target: Path, path: str) -> None:
    """Write the path of a soup: ``soup_path.json`` in its folder, or ``<name>_soup_path.json`` next to its file.

    efftrain's section in an ingredient's model card, which describes one run, is replaced by one about the soup.
    """
    file = target / "soup_path.json" if target.is_dir() else target.with_name(f"{target.stem}_soup_path.json")
    with atomic_write(file) as temporary:
        temporary.write_text(path + "\n", encoding="utf-8")
    if (card := target / CARD).is_file():
        made = json.loads(path)
        names = ", ".join(Path(each).name if Path(each).is_absolute() else each for each in made["ingredients"])
        what = f"The {made['kind']} merge" if "kind" in made else "The average"
        add_section(card, f"## Efficient training\n\n{what} of checkpoints: {markdown_text(f'{names} ({file.name})')}.")


def _kept(checkpoint: Mapping[str, Any], say: Say) -> dict[str, Any]:
    kept, lost = {}, []
    for key in _KEPT_KEYS:
        if key in checkpoint:
            values, foreign = without_foreign(checkpoint[key])
            lost += foreign
            if values is not None:
                kept[key] = values
    if lost:
        say(
            f"soup: hyperparameters {', '.join(lost)} are left out of the soup, because only plain values are read. "
            "Pass them to load_from_checkpoint by name"
        )
    # Ranges of qat belong to one member's weights. Other deployment values apply to all.
    deployment = {key: value for key, value in (checkpoint.get(DEPLOYMENT_KEY) or {}).items() if key != "qat"}
    return {**kept, DEPLOYMENT_KEY: deployment} if deployment else kept


def _has_ranges(checkpoint: Mapping[str, Any]) -> bool:
    return "qat" in (checkpoint.get(DEPLOYMENT_KEY) or ())


def _lost_ranges(state_dict: Mapping[str, Tensor], like: Ingredient, source: Path, folder: Path) -> bool:
    """Write the ingredient's deployment file. Return True if its qat ranges were left out."""
    if not (source / DEPLOYMENT_FILE).exists():
        return False
    values = read_deployment(source)
    # Ranges stay valid if the soup is bit-equal to this ingredient.
    lost = "qat" in values and not all(torch.equal(state_dict[key].cpu(), like.tensor(key)) for key in like.specs)
    if lost:
        del values["qat"]
    write_deployment(folder, values)
    return lost


def _requantize(target: Path, model: str) -> str:
    return (
        f"soup: {target} has no qat ranges, because averaged weights are off the grid and ranges are not averaged. "
        f"Quantize it again: eff quantize {model} --out NEW --scheme SCHEME, with --calibration if SCHEME has ranges"
    )


def _write_folder(state_dict: Mapping[str, Tensor], like: Ingredient, source: Path, folder: Path, say: Say) -> bool:
    """Write the folder. Return True if Lightning's metadata of the shards had ranges of qat."""
    had_ranges = False
    # A folder with modules.json (sentence transformers) has parts with their own files.
    for part in dict.fromkeys(part.folder for part in parts_of(source)):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for file in (source / part).iterdir():
            left_behind = file.suffix in _LEFT_BEHIND or file.name in _TRAINING_FILES or file.name.startswith(".")
            # These belong to one run, not to the soup.
            is_report = file.name.startswith("eff_") or file.name.endswith(("_results.json", ".eff.json"))
            if file.is_file() and not (left_behind or is_report):
                shutil.copyfile(file, folder / part / file.name)
    if like.kind == DISTRIBUTED:
        had_ranges = _write_distributed(state_dict, source, folder, say)
    if like.kind == ADAPTER:
        if not isinstance(state_dict, AdapterWeights):
            raise CheckpointError(like.name, "soup of adapters must be `AdapterWeights`, got a plain dict")
        (folder / ADAPTER_CONFIG).write_text(json.dumps(state_dict.config, indent=2, sort_keys=True), encoding="utf-8")
    # In the same shards as the ingredient, so that its index file stays valid.
    for name in dict.fromkeys(like.shards.values()):
        weights = {key: state_dict[key] for key, where in like.shards.items() if where == name}
        _write_weights(weights, like, folder / name, like.prefixes.get(name, ""))
    for index in like.indexes:
        content, place = read_json(source / index), Path(index).parent
        # total_size counts the written tensors, whose dtypes or ranks may differ from the ingredient's.
        own = [key for key in like.specs if Path(like.shards[key]).parent == place]
        total = sum(state_dict[key].numel() * state_dict[key].itemsize for key in own)
        content["metadata"] = {**content.get("metadata", {}), "total_size": total}
        (folder / index).write_text(json.dumps(content, indent=2), encoding="utf-8")
    return had_ranges


def _write_weights(weights: Mapping[str, Tensor], like: Ingredient, file: Path, prefix: str) -> None:
    named = {key.removeprefix(prefix): value for key, value in weights.items()}
    if file.suffix == ".safetensors":
        # safetensors refuses tensors that share memory, so only the owner of a tie is stored, as in the ingredient.
        held = {key: value for key, value in named.items() if prefix + key in like.specs}
        save_file(held, file, metadata={"format": "pt"})
    else:
        torch.save(named, file)


def _write_distributed(state_dict: Mapping[str, Tensor], source: Path, folder: Path, say: Say) -> bool:
    inner = index_folder(source)
    if inner is None:
        raise CheckpointError(source, "the folder no longer holds its distributed checkpoint", "restore it")
    write_distributed(state_dict, inner, folder / inner.relative_to(source))
    if not (inner / LIGHTNING_META).exists():
        return False
    content = load_checkpoint(inner / LIGHTNING_META)
    torch.save(_kept(content, say), folder / LIGHTNING_META)
    return _has_ranges(content)
