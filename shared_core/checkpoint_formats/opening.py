"""Open ingredients: Hugging Face folders, Lightning checkpoints, state dict files.

Also folders with several modules (sentence-transformers, where ``modules.json`` names a folder for each), and teachers
of the student's class from bare weights. Ingredients in different formats get the same names: prefixes are removed, and
ties that a format does not record are found.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shared_core.checkpoint_formats.adapter import ADAPTER_CONFIG, open_adapter
from shared_core.checkpoint_formats.distributed import index_folder, is_file_name, open_distributed
from shared_core.checkpoint_formats.files import (
    ADAPTER,
    DISTRIBUTED,
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
from shared_core.checkpoint_formats.plain import check_values, is_made_by_model, unlike
from shared_core.errors import CheckpointError, require
from shared_core.files.journal import is_unfinished
from shared_core.files.json_yaml import parse_json
from shared_core.modules.matching import plain_name

MODULES = "modules.json"
_ROUTER = "router_config.json"
_MOST_NESTED = 8


class Part(NamedTuple):
    """A module of a model with its own folder."""

    folder: str
    """Its folder inside the model's folder; ``""`` for the model's folder itself."""
    module: str
    """Its name in the model."""
    inner: str
    """Its attribute that holds the saved model; ``""`` if the files are its own."""

    @property
    def prefix(self) -> str:
        """Prefix of its names in the model's state dict."""
        return "".join(f"{name}." for name in (self.module, self.inner) if name)


def parts_of(folder: Path) -> list[Part]:
    """Return a folder's modules, including those behind a router. Without ``modules.json``, the folder itself."""
    file = folder / MODULES
    if not file.is_file():
        return [Part("", "", "")]
    try:
        listed = parse_json(file.read_text(encoding="utf-8"))
        named = [(entry["path"], entry["name"], entry["type"]) for entry in listed]
    except (OSError, ValueError, TypeError, KeyError) as error:
        rule = f"file must list modules with path, name and type, got {error!r:.200}"
        raise CheckpointError(file, rule, "it is damaged") from error
    return [part for entry in named for part in _part(folder, "", *entry, file)]


def _part(root: Path, above: str, path: Any, name: Any, kind: Any, file: Path) -> list[Part]:
    # Bound the lengths, since names are used in error messages and paths.
    texts = all(isinstance(value, str) and len(value.encode(errors="replace")) < 256 for value in (path, name, kind))
    # The file is not trusted: accept only a single folder name, which cannot lead elsewhere.
    inside = texts and (not path or (Path(path).name == path and path not in (".", "..") and "\0" not in path))
    if not inside or not (root / above / path).is_dir():
        rule = "be in a folder next to this file" if texts else "have a name and a path"
        raise CheckpointError(file, f"module must {rule}, got {name!r:.100} in {path!r:.100}", "it is damaged")
    folder = f"{above}{path}"
    if (root / folder / _ROUTER).is_file():
        return _routes(root, folder, name)
    # versions before 6 call its transformers model `auto_model`
    wraps = kind.rpartition(".")[2] == "Transformer"
    inner = "" if not wraps else "model" if kind.startswith("sentence_transformers.base.") else "auto_model"
    return [Part(folder, name, inner)]


def _routes(root: Path, folder: str, name: str) -> list[Part]:
    """Return the modules behind a router, each once."""
    file = root / folder / _ROUTER
    config = read_json(file)
    kinds, structure = config.get("types"), config.get("structure")
    if folder.count("/") > _MOST_NESTED or not isinstance(kinds, dict) or not isinstance(structure, dict):
        rule = f"router must have types and structure, nested at most {_MOST_NESTED} deep"
        raise CheckpointError(file, rule, "it is damaged")
    found: dict[str, Part] = {}
    for route, names in structure.items():
        for number, path in enumerate(names if isinstance(names, list) else [names]):
            # List a module that several routes share only once.
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
    """Open a checkpoint as an ingredient. Reads headers, not weights.

    Args:
        path: A Hugging Face folder (safetensors or ``.bin``, whole or sharded), a Lightning ``.ckpt``, a plain state
            dict file (``.safetensors``, or ``torch.save`` of a state dict or of a dict with it under ``model``), any
            distributed checkpoint (DCP), the folder of a PEFT adapter, or a sentence-transformers folder, whose
            modules have their own folders.
        alone: True to read only the weights directly in the folder, under their names there, not those of modules.

    Raises:
        CheckpointError: If it is missing, damaged, unsafe to read, or in an unsupported format.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path, alone=alone)
    if path.suffix == ".safetensors":
        files = dict.fromkeys(open_safetensors(path).keys(), path)
        return Ingredient(str(path), SAFETENSORS, path, lambda: MappedSafetensors(files))
    content = state_dict_in(load_checkpoint(path), path)
    kind = LIGHTNING if weights_key(content) == "state_dict" else STATE_DICT
    return Ingredient(str(path), kind, path, lambda: _weights_of(load_checkpoint(path), path))


def _weights_of(content: Mapping[str, Any], path: Path) -> Mapping[str, Tensor]:
    key = weights_key(content)
    if key is None:
        return content
    weights = content[key]
    # A checkpoint of quantized weights holds the rounded ones. Averages need the latent ones, so use those.
    raw = state_dict_in(content.get(RAW_KEY, {}), path)
    return {key: raw.get(key, value) for key, value in weights.items()}


def _open_folder(folder: Path, *, alone: bool) -> Ingredient:
    if is_unfinished(folder):
        raise CheckpointError(folder, "the folder is incomplete: saving was interrupted", "leave it out")
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
        kinds = f"{', '.join(_WEIGHT_FILES)}, {ADAPTER_CONFIG} or a DCP index"
        raise CheckpointError(folder, f"the folder holds none of {kinds}", "check the path")
    prefixes = [part.prefix for part, _ in held]
    # If one prefix contained another, names would belong to two modules.
    if any(one.startswith(two) for one, two in itertools.permutations(prefixes, 2)):
        raise CheckpointError(folder, f"names of modules must not overlap, got {', '.join(sorted(prefixes))}")
    files = [_PartFiles(folder, part, found) for part, found in held]
    # Keep each module's config under its folder's name, so that fields don't mix when configs are compared.
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
    """A module's weight files in a folder, under their names in the whole model."""

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
        """Return the memory-mapped tensors."""
        if self._where is not None:
            return MappedSafetensors(self._where, self._prefix)
        return {
            self._prefix + key: value
            for file in self._files
            for key, value in state_dict_in(load_torch_file(file), file).items()
        }

    def add_shards(self, ingredient: Ingredient) -> None:
        """Add the file of each tensor to the whole model's ingredient."""
        names = [name for name in (*ingredient.specs, *ingredient.ties) if name.startswith(self._prefix)]
        # Without an index, all tensors are in one file.
        index = self._index or {name.removeprefix(self._prefix): self._found for name in names}
        report = {self._prefix + key: self._below + file for key, file in index.items()}
        # Check both ways: names without a tensor, and tensors without a name.
        if odd := sorted(report.keys() ^ set(names)):
            rule = f"index and shards must have the same tensors, but only one of them has {odd[0]!r}"
            raise CheckpointError(self._place / self._found, rule)
        ingredient.shards |= report
        ingredient.prefixes |= dict.fromkeys(report.values(), self._prefix)
        if self._index is not None:
            ingredient.indexes.append(self._below + self._found)


def _read_index(index: Path) -> dict[str, str]:
    shards = read_json(index).get("weight_map")
    # Names of shards come from an untrusted file and must stay in this folder.
    if not isinstance(shards, dict) or not shards or not all(map(is_file_name, shards.values())):
        rule = "index must have a weight_map from tensors to file names in the same folder"
        raise CheckpointError(index, f"{rule}, got {shards!r:.300}", "it is damaged")
    return shards


def expand(paths: Sequence[str | Path]) -> list[Path]:
    """Return the paths, with each folder of ``checkpoint-<step>`` folders replaced by those, ordered by step.

    Raises:
        CheckpointError: If a checkpoint is listed twice, which would double its weight in an average.
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
    # Compare real paths: a link to a listed folder would count its weights twice.
    places: dict[str, Path] = {}
    for path in found:
        if (other := places.setdefault(os.path.realpath(path), path)) is not path:
            rule = f"each checkpoint must be listed once, but {path} and {other} are the same"
            raise CheckpointError("soup", rule, "leave one out")
    return found


def is_bare_weights(path: Path) -> bool:
    """Return True if a path is a ``.safetensors`` file, or a folder with one but without ``config.json``."""
    if path.is_dir():
        return not (path / "config.json").exists() and any(path.glob("model*.safetensors"))
    return path.suffix == ".safetensors"


def teacher_from_weights(path: Path, student: nn.Module) -> nn.Module:
    """Return a copy of the student with the weights of a path that `is_bare_weights`."""
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
    # If techniques have already replaced layers of the student, a copy of it is not a plain model.
    kinds = map(type, student.modules())
    replaced = next((kind for kind in kinds if kind.__module__.startswith("shared_core.")), None)
    teacher = copy.deepcopy(student)
    missing, others = unlike(teacher, weights)
    remedy = "give a Transformers folder, a .ckpt with hyperparameters, or in code the module: teacher=my_teacher"
    rule = ""
    if replaced is not None:
        rule = f"have its own model class, as a technique replaced the student's layers by {replaced.__name__}"
    elif missing or others:
        shapes = {name: tuple(value.shape) for name, value in student.state_dict().items()}
        reshaped = None if missing else next((name for name in others if name in shapes), None)
        got = f"missing {missing[:3]} and others {others[:3]}"
        if reshaped is not None:
            got = f"{reshaped} of shape {tuple(weights[reshaped].shape)}, the student's is {shapes[reshaped]}"
        parts = (name for name, part in student.named_modules() if name and not any(unlike(part, weights)))
        if (part := next(parts, None)) is not None:
            remedy = f"they fit its submodule {part}: add student={part!r}"
        rule = f"have the weights of a {type(student).__name__} of the student's shape, got {got}"
    require(not rule, "distill", f"teacher {source} must {rule}", remedy, CheckpointError)
    check_values(teacher, weights, f"distill: teacher {source}")
    # strict=False: `unlike` has checked the names except ties.
    teacher.load_state_dict(dict(weights), strict=False)
    return teacher


# Names of a layer's tensors in earlier versions of transformers and torch.
_EARLIER = {
    "gamma": "weight",
    "beta": "bias",
    "weight_g": "parametrizations.weight.original0",
    "weight_v": "parametrizations.weight.original1",
}


def present_name(name: str) -> str:
    """Return a tensor's name in present library versions, without the parts that wrappers insert.

    Example:
        >>> present_name("module.encoder._orig_mod.LayerNorm.gamma")
        'encoder.LayerNorm.weight'
    """
    holder, dot, last = plain_name(name).rpartition(".")
    return f"{holder}{dot}{_EARLIER.get(last, last) if holder else last}"


def named_as(names: Collection[str], wanted: Collection[str]) -> dict[str, str]:
    """Return for each name the one in `wanted` for the same tensor, or the name itself without a match.

    Names may differ in parts inserted by wrappers, in older spellings, and in a prefix of all names on one side:
    Lightning's start with the attribute that holds the model (``model.``), those of ``save_pretrained`` do not.

    Example:
        >>> named_as(["model.0._orig_mod.weight", "model.0.bias"], ["0.weight", "0.bias"])
        {'model.0._orig_mod.weight': '0.weight', 'model.0.bias': '0.bias'}
    """
    if not names or {*names} == {*wanted}:
        return {name: name for name in names}
    for call in (present_name, plain_name, str):
        theirs, mine = {call(name): name for name in names}, {call(name): name for name in wanted}
        found = {theirs[called]: mine.get(own, own) for called, own in _without_prefix(theirs, mine).items()}
        # Two names that become the same would be different tensors.
        if len({*found.values()}) == len(names) and len(mine) == len(wanted):
            break
    return found


def _without_prefix(names: Collection[str], wanted: Collection[str]) -> dict[str, str]:
    # One name gives the prefix, which all others must have.
    unchanged = {name: name for name in names}
    mine = next((name for name in wanted if not is_made_by_model(name, ())), None)
    if mine is None or mine in names:
        return unchanged
    # Their name has a prefix (a wrapper's name): remove it.
    theirs = next((name for name in names if name.endswith(f".{mine}")), None)
    if theirs is not None:
        prefix = theirs.removesuffix(mine)
        if all(name.startswith(prefix) for name in names):
            return {name: name.removeprefix(prefix) for name in names}
    # My name has a prefix: add it to theirs.
    mine_ends = next((name for name in names if mine.endswith(f".{name}")), None)
    return unchanged if mine_ends is None else {name: mine.removesuffix(mine_ends) + name for name in names}


def under_same_names(ingredients: Sequence[Ingredient]) -> list[Ingredient]:
    """Return the ingredients under the names of the first, where only ties or spellings (`named_as`) differ.

    A safetensors folder holds a tied tensor once, a ``.ckpt`` under all names, a distributed checkpoint as copies.
    Buffers that a model creates by itself are taken from the first, since files of other versions may lack them.
    """
    first, *others = ingredients
    # Adapters have PEFT's names everywhere.
    if any(item.kind == ADAPTER for item in ingredients):
        return list(ingredients)
    opened = [first, *(_with_buffers_of(first, _with_names_of(first, other)) for other in others)]
    if len({frozenset((*item.specs, *item.ties)) for item in opened}) == 1:
        return opened
    # A distributed checkpoint stores tied tensors as copies. They are found by equal values under names that others
    # lack.
    shared = set.intersection(*({*item.specs, *item.ties} for item in opened))
    opened = [_with_found_ties(item, shared) if item.kind == DISTRIBUTED else item for item in opened]
    return [opened[0], *(_with_ties_of(opened[0], other) for other in opened[1:])]


def _with_names_of(first: Ingredient, other: Ingredient) -> Ingredient:
    names = named_as([*other.specs, *other.ties], [*first.specs, *first.ties])
    if all(name == own for name, own in names.items()):
        return other
    return other.renamed(
        {names[name]: name for name in other.specs}, {names[tie]: names[owner] for tie, owner in other.ties.items()}
    )


def _with_buffers_of(first: Ingredient, other: Ingredient) -> Ingredient:
    made = {
        name: mine
        for mine, its in ((True, first), (False, other))
        for name, spec in its.specs.items()
        if is_made_by_model(name, spec.shape) and not (other if mine else first).has(name)
    }
    tied = {*other.ties.values()}
    left_out = {name for name, mine in made.items() if not mine and name not in tied}
    lent = {name: first.tensor(name).clone() for name, mine in made.items() if mine}
    first.close()
    return other.fitted(lent, left_out) if lent or left_out else other


def _with_found_ties(item: Ingredient, shared: set[str]) -> Ingredient:
    """Return an ingredient in which copies of a tensor, under names that others lack, become ties."""
    ties = {}
    for name in (name for name in item.specs if name not in shared):
        twin = next(
            (key for key in item.specs if key in shared and item.spec(key) == item.spec(name)
             and torch.equal(item.tensor(key), item.tensor(name))), None,
        )  # fmt: skip
        if twin is not None:
            ties[name] = twin
    return item.renamed({name: name for name in item.specs if name not in ties}, {**item.ties, **ties})


def _with_ties_of(first: Ingredient, other: Ingredient) -> Ingredient:
    """Return `other` with all names that `first` has for tied tensors, if it has one of them."""
    names: dict[str, str] = {}
    ties: dict[str, str] = {}
    # All names of each tensor of the first.
    groups = {frozenset({name}) for name in first.specs if name not in first.ties.values()} | first.tied_groups
    for group in groups:
        held = sorted(name for name in group if other.has(name))
        owner = next((name for name in first.specs if name in group), "")
        # The other has none of these names, or has them for different tensors: its ties differ.
        if not held or len({other.ties.get(name, name) for name in held}) > 1:
            return other  # a later check reports it
        names[owner] = held[0]
        ties.update(dict.fromkeys(sorted(group - {owner}), owner))
    taken = {other.ties.get(name, name) for name in names.values()}
    # Each tensor of the other must be used exactly once, or renaming would hide a difference.
    if len(taken) < len(names) or taken != set(other.specs):
        return other
    return other.renamed({name: names[name] for name in first.specs}, ties)
