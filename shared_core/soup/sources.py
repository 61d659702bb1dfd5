"""Where ingredients come from: Hugging Face folders, Lightning checkpoints, state dict files, mappings."""

from __future__ import annotations

import hashlib
import json
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared_core.errors import CheckpointError

# What the best ingredient looks like on disk, and so what the soup is written as.
HF_FOLDER, LIGHTNING, STATE_DICT, SAFETENSORS, IN_MEMORY = (
    "Hugging Face folder", "checkpoint with a state_dict", "state dict file", "safetensors file", "state dict",
)  # fmt: skip

RAW_KEY = "eff_raw_state_dict"
_WEIGHT_FILES = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor that has not been read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Ingredient:
    """A model to average, read one tensor at a time.

    Args:
        name: What errors and the soup's path call it.
        kind: What it looks like on disk, one of the constants of this module.
        path: The folder or file, None for a state dict in memory.
        load: Returns the state dict; called at the first read after each `close`. Files are mapped, not read.
        config: The fields of a Hugging Face ``config.json``.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        path: Path | None,
        load: Callable[[], Mapping[str, Tensor]],
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self.kind, self.path, self.config = name, kind, path, dict(config or {})
        self.shards: dict[str, str] = {}
        """The file in a folder that holds each tensor."""
        self.index: str | None = None
        """The index file of a sharded folder."""
        self._load = load
        self._open: Mapping[str, Tensor] | None = None
        tensors = self._tensors()
        owners: dict[tuple[Any, ...], str] = {}
        self.specs: dict[str, TensorSpec] = {}
        """The tensors, each once, in the order of the file."""
        self.ties: dict[str, str] = {}
        """Further names of a tensor, each with the name in `specs` that its data is read under."""
        for key, value in tensors.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"{name}: {key!r} must be a tensor, got {type(value).__name__}; save model.state_dict() alone"
                )
            owner = owners.setdefault(storage_key(value) or (key,), key)
            if owner == key:
                self.specs[key] = TensorSpec(tuple(value.shape), value.dtype)
            else:
                self.ties[key] = owner
        if not self.specs:
            raise CheckpointError(f"{name}: state dict must hold at least one tensor, got none; check the path")
        self.close()

    def _tensors(self) -> Mapping[str, Tensor]:
        if self._open is None:
            self._open = self._load()
        return self._open

    def tensor(self, key: str) -> Tensor:
        """Return one tensor; do not write to it, it may be a view of the file or of the caller's own weights."""
        return self._tensors()[self.ties.get(key, key)].detach()

    @property
    def suffix(self) -> str:
        """The suffix of its file, empty for a folder and in memory."""
        return "" if self.path is None or self.path.is_dir() else self.path.suffix

    def spec(self, key: str) -> TensorSpec:
        """Return shape and dtype of the tensor with this name, tied or not."""
        return self.specs[self.ties.get(key, key)]

    @property
    def tied_groups(self) -> set[frozenset[str]]:
        """The names of each tensor that has several."""
        return {
            frozenset({owner, *(alias for alias, its in self.ties.items() if its == owner)})
            for owner in self.ties.values()
        }

    def has(self, key: str) -> bool:
        """Return whether a tensor has this name, tied or not."""
        return key in self.specs or key in self.ties

    def close(self) -> None:
        """Let go of the file; the next read opens it again."""
        self._open = None

    def digest(self) -> str:
        """Return a hash of names, shapes and the two ends of every tensor, to tell ingredients apart cheaply."""
        digest = hashlib.sha256()
        for key in sorted(self.specs):
            flat = self.tensor(key).reshape(-1)
            ends = torch.cat([flat[:1024], flat[-1024:]]).cpu().contiguous().view(torch.uint8).numpy()
            digest.update(f"{key} {self.specs[key]}".encode() + ends.tobytes())
        self.close()
        return digest.hexdigest()


def storage_key(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return what two tied tensors have in common, None for a tensor without data."""
    if tensor.numel() == 0 or tensor.is_meta:
        return None
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


class _MappedSafetensors(Mapping[str, Tensor]):
    """The tensors of safetensors files, each mapped when it is asked for."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files
        self._handles = {file: _open_safetensors(file) for file in dict.fromkeys(files.values())}

    def __getitem__(self, key: str) -> Tensor:
        tensor: Tensor = self._handles[self._files[key]].get_tensor(key)
        return tensor

    def __iter__(self) -> Any:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _open_safetensors(file: Path) -> Any:
    _check_file(file)
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file}: file must be whole safetensors, got {error}; it is truncated or not a checkpoint, leave it out"
        ) from error


def load_torch_file(file: Path) -> Any:
    """Return what a file of ``torch.save`` holds, its tensors mapped from the file, running none of its code.

    Raises:
        CheckpointError: If it is missing, empty, truncated, or holds more than tensors and plain values.
    """
    _check_file(file)
    mapped = zipfile.is_zipfile(file)  # files from before torch 1.6 cannot be mapped
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        if "Weights only load failed" not in str(error):
            raise CheckpointError(f"{file}: file must be a whole checkpoint, got {error}; leave it out") from error
        reason = next((line for line in str(error).splitlines() if "WeightsUnpickler error" in line), str(error))
        raise CheckpointError(
            f"{file}: checkpoint must hold only tensors and plain values, got {reason.strip()[:200]}; its code was not "
            "run; save model.state_dict() or safetensors instead"
        ) from error
    except Exception as error:  # torch's readers raise RuntimeError, EOFError, KeyError, UnicodeDecodeError and more
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{file}: file must be a whole checkpoint, got {first_line[:200]}; it is truncated or not a checkpoint, "
            "leave it out"
        ) from error


def _check_file(file: Path) -> None:
    if not file.is_file():
        raise CheckpointError(f"{file}: file must exist, got none; check the path")
    if file.stat().st_size == 0:
        raise CheckpointError(f"{file}: file must be a whole checkpoint, got an empty file; leave it out")


def open_ingredient(path: str | Path) -> Ingredient:
    """Return the ingredient that a path names; its header is read, its weights are not.

    Args:
        path: A Hugging Face folder (safetensors or ``.bin``, whole or sharded), a Lightning ``.ckpt``, or a file of a
            plain state dict (``.safetensors``, or ``torch.save``).

    Raises:
        CheckpointError: If it is missing, damaged, unsafe to read, or a format that soups do not read.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if path.suffix == ".safetensors":
        files = dict.fromkeys(_open_safetensors(path).keys(), path)
        return Ingredient(str(path), SAFETENSORS, path, lambda: _MappedSafetensors(files))
    content = load_torch_file(path)
    kind = LIGHTNING if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping) else STATE_DICT
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        raise CheckpointError(
            f"{path}: file must hold a state dict, got {type(content).__name__}; save model.state_dict()"
        )
    return Ingredient(str(path), kind, path, lambda: _weights_of(load_torch_file(path)))


def _weights_of(content: Mapping[str, Any]) -> Mapping[str, Tensor]:
    weights = content.get("state_dict")
    if not isinstance(weights, Mapping):
        return content
    # a checkpoint written while weights are quantised holds the rounded ones; averages are made of the latent ones
    raw = content.get(RAW_KEY, {})
    return {key: raw.get(key, value) for key, value in weights.items()}


def _open_folder(folder: Path) -> Ingredient:
    found = next((folder / name for name in _WEIGHT_FILES if (folder / name).exists()), None)
    if found is None:
        raise _not_a_model(folder)
    index = _read_index(found) if found.suffix == ".json" else None
    files = [found] if index is None else [folder / name for name in dict.fromkeys(index.values())]
    config = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
    if files[0].suffix == ".safetensors":
        where = {key: file for file in files for key in _open_safetensors(file).keys()}  # noqa: SIM118
        ingredient = Ingredient(str(folder), HF_FOLDER, folder, lambda: _MappedSafetensors(where), config)
    else:

        def load() -> Mapping[str, Tensor]:
            return {key: value for file in files for key, value in _state_dict_in(file).items()}

        ingredient = Ingredient(str(folder), HF_FOLDER, folder, load, config)
    names = [*ingredient.specs, *ingredient.ties]
    ingredient.shards = dict.fromkeys(names, found.name) if index is None else index
    odd = sorted(ingredient.shards.keys() ^ set(names))
    if odd:
        raise CheckpointError(f"{found}: index must name the tensors of its shards, got {odd[0]!r} on one side only")
    ingredient.index = None if index is None else found.name
    return ingredient


def _not_a_model(folder: Path) -> CheckpointError:
    if (folder / "adapter_config.json").exists():
        return CheckpointError(
            f"{folder}: ingredient must be a whole model, got a PEFT adapter; averaging A and B apart is not averaging "
            "BA: merge each adapter into its model (merge_and_unload) and save that"
        )
    if (folder / ".metadata").exists():
        return CheckpointError(
            f"{folder}: ingredient must be a plain checkpoint, got a distributed one (DCP); convert it with "
            "torch.distributed.checkpoint.format_utils.dcp_to_torch_save"
        )
    return CheckpointError(f"{folder}: folder must hold one of {', '.join(_WEIGHT_FILES)}, got none; check the path")


def _state_dict_in(file: Path) -> Mapping[str, Tensor]:
    content = load_torch_file(file)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{file}: file must hold a state dict, got {type(content).__name__}; leave it out")
    return content


def _read_index(index: Path) -> dict[str, str]:
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(f"{index}: index must have a weight_map, got {shards!r}; the file is damaged")
    for name in shards.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index}: shard must be a file name in the same folder, got {name!r}")
    return shards


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        CheckpointError: If it cannot be read or holds something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: file must be JSON, got {error}; it is damaged, leave it out") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: file must hold a JSON object, got {type(content).__name__}")
    return content


def averaged(dtype: torch.dtype) -> bool:
    """Return whether tensors of this dtype are averaged; integers and booleans come from the best ingredient.

    Example:
        >>> averaged(torch.bfloat16), averaged(torch.int64), averaged(torch.bool)
        (True, False, False)
    """
    return dtype.is_floating_point or dtype.is_complex


def expand(paths: Sequence[str | Path]) -> list[Path]:
    """Return the paths, with each folder that only holds ``checkpoint-<step>`` folders replaced by these, by step."""
    found: list[Path] = []
    for path in map(Path, paths):
        weights = [name for name in _WEIGHT_FILES if (path / name).exists()]
        inner = [child for child in path.glob("checkpoint-*") if child.name.removeprefix("checkpoint-").isdigit()]
        if path.is_dir() and not weights and inner:
            found += sorted(inner, key=lambda child: int(child.name.removeprefix("checkpoint-")))
        else:
            found.append(path)
    return found
