"""Where ingredients come from: Hugging Face folders, Lightning checkpoints, state dict files, mappings.

Folders of several modules, as sentence-transformers saves a model, where ``modules.json`` names a folder for each; a
teacher of the student's own class, from a file that holds weights and nothing else.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections import ChainMap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from shared_core.checkpoint_formats.adapter import ADAPTER_CONFIG, open_adapter
from shared_core.checkpoint_formats.distributed import index_folder, is_file_name, open_distributed
from shared_core.checkpoint_formats.files import (
    HF_FOLDER,
    LIGHTNING,
    RAW_KEY,
    SAFETENSORS,
    STATE_DICT,
    Ingredient,
    MappedSafetensors,
    load_torch_file,
    open_safetensors,
    read_config,
    read_json,
    state_dict_in,
    weights_key,
)
from shared_core.checkpoint_formats.foreign import load_checkpoint
from shared_core.checkpoint_formats.plain import check_values, unlike
from shared_core.errors import CheckpointError
from shared_core.files.journal import is_unfinished
from shared_core.files.json_yaml import parse_json

MODULES = "modules.json"
_ROUTER = "router_config.json"
_MOST_NESTED = 8


class Part(NamedTuple):
    """A module of a model."""

    folder: str
    """Where its files lie below the model's folder, ``""`` if right in it."""
    module: str
    """Its name in the model."""
    inner: str
    """Its name for the model inside that these files are of, ``""`` if they are its own."""

    @property
    def prefix(self) -> str:
        """Prefix of names in the model's state dict before those in its files."""
        return "".join(f"{name}." for name in (self.module, self.inner) if name)


def parts_of(folder: Path) -> list[Part]:
    """Return a folder's modules, with those that a module routes to; without ``modules.json`` the folder itself."""
    file = folder / MODULES
    if not file.is_file():
        return [Part("", "", "")]
    try:
        listed = parse_json(file.read_text(encoding="utf-8"))
        named = [(entry["path"], entry["name"], entry["type"]) for entry in listed]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            file, f"file must list modules with path, name and type, got {error!r:.200}", "it is damaged"
        ) from error
    return [part for entry in named for part in _part(folder, "", *entry, file)]


def _part(root: Path, above: str, path: Any, name: Any, kind: Any, file: Path) -> list[Part]:
    # Lengths are bounded, since names go into error messages and file systems.
    texts = all(isinstance(value, str) and len(value.encode(errors="replace")) < 256 for value in (path, name, kind))
    # A path in a file that is not trusted: one folder name, nothing that leads elsewhere.
    inside = texts and (not path or (Path(path).name == path and path not in (".", "..") and "\0" not in path))
    if not inside or not (root / above / path).is_dir():
        rule = "lie in a folder beside it" if texts else "have a name and a path"
        raise CheckpointError(file, f"module must {rule}, got {name!r:.100} in {path!r:.100}", "it is damaged")
    folder = f"{above}{path}"
    if (root / folder / _ROUTER).is_file():
        return _routes(root, folder, name)
    # transformers' model in it is called `auto_model` by versions before 6
    wraps = kind.rpartition(".")[2] == "Transformer"
    inner = "" if not wraps else "model" if kind.startswith("sentence_transformers.base.") else "auto_model"
    return [Part(folder, name, inner)]


def _routes(root: Path, folder: str, name: str) -> list[Part]:
    """Return the modules that a router sends its inputs to, each once."""
    file = root / folder / _ROUTER
    config = read_json(file)
    kinds, structure = config.get("types"), config.get("structure")
    if folder.count("/") > _MOST_NESTED or not isinstance(kinds, dict) or not isinstance(structure, dict):
        raise CheckpointError(
            file, f"router must have types and structure, {_MOST_NESTED} deep at most", "it is damaged"
        )
    found: dict[str, Part] = {}
    for route, names in structure.items():
        for number, path in enumerate(names if isinstance(names, list) else [names]):
            # A module that several routes share is there once.
            if str(path) not in found:
                above, module = f"{folder}/" if folder else "", f"{name}.sub_modules.{route}.{number}"
                kind = kinds.get(path) if isinstance(path, str) else None
                found |= {part.folder.removeprefix(above): part
                          for part in _part(root, above, path, module, kind, file)}  # fmt: skip
    return list(found.values())


_WEIGHT_FILES = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip


def open_ingredient(path: str | Path, *, alone: bool = False) -> Ingredient:
    """Return the ingredient that a path names; its header is read, its weights are not.

    Args:
        path: A Hugging Face folder (safetensors or ``.bin``, whole or sharded), a Lightning ``.ckpt``, a file of a
            plain state dict (``.safetensors``, or ``torch.save`` of it or of a dict with it under ``model``), a
            distributed checkpoint (DCP) of either trainer or of one's own, the folder of a PEFT adapter, or one of
            sentence-transformers, whose modules have folders of their own in it.
        alone: Of a folder with several modules only the weights right in it, under the names that they have there.

    Raises:
        CheckpointError: If it is missing, damaged, unsafe to read, or a format that soups do not read.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path, alone=alone)
    if path.suffix == ".safetensors":
        files = dict.fromkeys(open_safetensors(path).keys(), path)
        return Ingredient(str(path), SAFETENSORS, path, lambda: MappedSafetensors(files))
    content = state_dict_in(load_checkpoint(path), path)
    kind = LIGHTNING if weights_key(content) == "state_dict" else STATE_DICT
    return Ingredient(str(path), kind, path, lambda: _weights_of(load_checkpoint(path)))


def _weights_of(content: Mapping[str, Any]) -> Mapping[str, Tensor]:
    key = weights_key(content)
    if key is None:
        return content
    weights = content[key]
    # a checkpoint written while weights are quantised holds the rounded ones; averages are made of the latent ones
    raw = content.get(RAW_KEY, {})
    if not isinstance(raw, Mapping):
        raise CheckpointError("checkpoint", f"{RAW_KEY} must be a dict, got {type(raw).__name__}", "it is damaged")
    # Latent weights stand in for rounded ones under their names.
    return {key: raw.get(key, value) for key, value in weights.items()}


def _open_folder(folder: Path, *, alone: bool) -> Ingredient:
    if is_unfinished(folder):
        raise CheckpointError(folder, "folder must be complete, but its writer was stopped", "leave it out")
    parts = [Part("", "", "")] if alone else parts_of(folder)
    held = [
        (part, found)
        for part in parts
        if (found := next((name for name in _WEIGHT_FILES if (folder / part.folder / name).exists()), None))
    ]
    if not held:
        sharded = index_folder(folder)
        if sharded is not None:
            return open_distributed(folder, sharded)
        if (folder / ADAPTER_CONFIG).exists():
            return open_adapter(folder)
        raise CheckpointError(
            folder,
            f"folder must hold one of {', '.join(_WEIGHT_FILES)}, {ADAPTER_CONFIG} or a DCP index, got none",
            "check the path",
        )
    prefixes = [part.prefix for part, _ in held]
    # One prefix inside another would make names that belong to two modules.
    if any(one.startswith(two) for one, two in itertools.permutations(prefixes, 2)):
        raise CheckpointError(folder, f"modules must have names of their own, got {', '.join(sorted(prefixes))}")
    files = [_PartFiles(folder, part, found) for part, found in held]
    # Configs of all modules are compared: under their folder's name, so that fields do not mix.
    config = read_config(folder)
    for part in parts:
        if part.folder:
            config[f"{part.folder}/config.json"] = read_config(folder / part.folder)

    def load() -> Mapping[str, Tensor]:
        loaded = [each.load() for each in files]
        # Prefixes differ, so no key is in two files.
        return loaded[0] if len(loaded) == 1 else ChainMap(*loaded)  # type: ignore[arg-type]

    ingredient = Ingredient(str(folder), HF_FOLDER, folder, load, config)
    for each in files:
        each.add_shards(ingredient)
    return ingredient


class _PartFiles:
    """The files of weights of a module in a folder, under their names in the whole model."""

    def __init__(self, folder: Path, part: Part, found: str) -> None:
        self._prefix, self._found = part.prefix, found
        self._place, self._below = folder / part.folder, f"{part.folder}/" if part.folder else ""
        self._index = _read_index(self._place / found) if found.endswith(".json") else None
        shards = [found] if self._index is None else dict.fromkeys(self._index.values())
        self._files = [self._place / name for name in shards]
        self._where: dict[str, Path] | None = None
        if self._files[0].suffix == ".safetensors":
            self._where = {
                self._prefix + key: file
                for file in self._files
                for key in open_safetensors(file).keys()  # noqa: SIM118
            }

    def load(self) -> Mapping[str, Tensor]:
        """Return the tensors, mapped."""
        if self._where is not None:
            return MappedSafetensors(self._where, self._prefix)
        return {
            self._prefix + key: value
            for file in self._files
            for key, value in state_dict_in(load_torch_file(file), file).items()
        }

    def add_shards(self, ingredient: Ingredient) -> None:
        """Let the whole model's ingredient know in which file each tensor lies."""
        names = [name for name in (*ingredient.specs, *ingredient.ties) if name.startswith(self._prefix)]
        # Without an index all tensors lie in the one file.
        index = self._index or {name.removeprefix(self._prefix): self._found for name in names}
        told = {self._prefix + key: self._below + file for key, file in index.items()}
        # Both ways: an index that names what no file has, and tensors that no index names.
        if odd := sorted(told.keys() ^ set(names)):
            raise CheckpointError(
                self._place / self._found, f"index must name the tensors of its shards, got {odd[0]!r} on one side only"
            )
        ingredient.shards |= told
        ingredient.prefixes |= dict.fromkeys(told.values(), self._prefix)
        if self._index is not None:
            ingredient.indexes.append(self._below + self._found)


def _read_index(index: Path) -> dict[str, str]:
    shards = read_json(index).get("weight_map")
    # Names of shards come from the file: they must stay in this folder.
    if not isinstance(shards, dict) or not shards or not all(map(is_file_name, shards.values())):
        rule = "index must have a weight_map of tensors to file names in the same folder"
        raise CheckpointError(index, f"{rule}, got {shards!r:.300}", "it is damaged")
    return shards


def expand(paths: Sequence[str | Path]) -> list[Path]:
    """Return the paths, with each folder that only holds ``checkpoint-<step>`` folders replaced by these, by step.

    Raises:
        CheckpointError: If one comes twice, which would count double in an average.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        names = (*_WEIGHT_FILES, ADAPTER_CONFIG, MODULES)
        weights = index_folder(path) or [name for name in names if (path / name).exists()]
        inner = [child for child in path.glob("checkpoint-*") if child.name.removeprefix("checkpoint-").isdigit()]
        if path.is_dir() and not weights and inner:
            found += sorted(inner, key=lambda child: int(child.name.removeprefix("checkpoint-")))
        else:
            found.append(path)
    # By real path: a link to a folder given as well would count its weights twice.
    places: dict[str, Path] = {}
    for path in found:
        if (other := places.setdefault(os.path.realpath(path), path)) is not path:
            raise CheckpointError(
                "soup", f"each checkpoint must be named once, got {path} and {other}", "leave one out"
            )
    return found


def is_bare_weights(path: Path) -> bool:
    """Return whether a path is a ``.safetensors`` file, or a folder with one of a model that has no ``config.json``."""
    if path.is_dir():
        return not (path / "config.json").exists() and any(path.glob("model*.safetensors"))
    return path.suffix == ".safetensors"


def teacher_from_weights(path: Path, student: nn.Module) -> nn.Module:
    """Return a copy of the student with the weights of such a path."""
    opened = open_ingredient(path)
    return same_class_teacher({name: opened.tensor(name) for name in (*opened.specs, *opened.ties)}, student, str(path))


def same_class_teacher(weights: Mapping[str, Tensor], student: nn.Module, source: str) -> nn.Module:
    """Return a copy of the student, on its device, with other weights.

    Example:
        >>> import torch
        >>> student, earlier = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> teacher = same_class_teacher(earlier.state_dict(), student, "earlier")
        >>> torch.equal(teacher.weight, earlier.weight), teacher.weight is student.weight
        (True, False)
    """
    # Layers that techniques have replaced are in the student already: a copy of it would be no plain model.
    kinds = map(type, student.modules())
    replaced = next((kind for kind in kinds if kind.__module__.startswith("shared_core.")), None)
    teacher = copy.deepcopy(student)
    missing, others = unlike(teacher, weights)
    if replaced is not None or missing or others:
        rule = (
            f"be of a class that can be built where a technique replaces the student's layers, here by "
            f"{replaced.__name__}"
            if replaced is not None
            else f"hold the weights of a {type(student).__name__} like the student, got missing {missing[:3]} and "
            f"others {others[:3]}"
        )
        remedy = "give a Transformers folder, a .ckpt with hyperparameters, or the module itself"
        raise CheckpointError("distill", f"teacher {source} must {rule}", remedy)
    check_values(teacher, weights, f"distill: teacher {source}")
    # strict=False: `unlike` has checked names, ties aside.
    teacher.load_state_dict(dict(weights), strict=False)
    return teacher
