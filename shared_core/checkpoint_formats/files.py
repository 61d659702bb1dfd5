"""Read files of weights and JSON without running any code in them.

An `Ingredient` has the names, shapes and ties of a state dict, and reads its tensors one at a time.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared_core.distributed.collectives import local_part
from shared_core.errors import CheckpointError, first_line
from shared_core.files.journal import read_object


class NotPlainError(CheckpointError):
    """An undamaged file that contains more than tensors and plain values."""


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, each read when it is accessed.

    Args:
        places: Name → what `read` takes.
        read: Returns the tensor at a place.

    Example:
        >>> LazyTensors({"bias": 2}, torch.zeros)["bias"]
        tensor([0., 0.])
    """

    def __init__(self, places: Mapping[str, Any], read: Callable[[Any], Tensor]) -> None:
        self._places, self._read = places, read

    def __getitem__(self, name: str) -> Tensor:
        return self._read(self._places[name])

    def __contains__(self, name: object) -> bool:
        return name in self._places  # Mapping's default would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class MappedSafetensors(LazyTensors):
    """The tensors of safetensors files, memory-mapped on access."""

    def __init__(self, files: Mapping[str, Path], prefix: str = "") -> None:
        # Open all files now to find damaged ones before a search begins. Data is memory-mapped and read on use.
        handles = {file: open_safetensors(file) for file in dict.fromkeys(files.values())}
        places = {name: (handles[file], name.removeprefix(prefix)) for name, file in files.items()}
        super().__init__(places, lambda place: place[0].get_tensor(place[1]))


def open_safetensors(file: Path) -> Any:
    """Return the open safetensors file. Raises `CheckpointError` if it is damaged."""
    _check_file(file)
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise _not_whole(file, error) from error


def load_torch_file(file: Path) -> Any:
    """Return the content of a ``torch.save`` file with memory-mapped tensors, without running its code."""
    _check_file(file)
    return load_torch_stream(file, str(file), mmap=_is_archive(file))


def _is_archive(file: Path) -> bool:
    """Return True if a file can be memory-mapped. Files from before torch 1.6 cannot."""
    # torch (2.13) maps compressed bytes as if they were the weights, so refuse compressed archives.
    try:
        if not zipfile.is_zipfile(file):
            return False
        with zipfile.ZipFile(file) as archive:
            # torch.save never compresses.
            packed = next((item.filename for item in archive.infolist() if item.compress_type), None)
    except Exception as error:  # zipfile raises more than BadZipFile for a wrong directory
        raise _not_whole(file, error) from error
    if packed is not None:
        raise CheckpointError(file, f"{packed!r:.99} in the file is compressed", "save it with torch.save")
    return True


def load_torch_stream(stream: Any, name: str, *, mmap: bool | None = None) -> Any:
    """Return the content of a ``torch.save`` file or stream without running its code. Errors call it `name`."""
    try:
        # weights_only: torch's own restricted unpickler, which admits tensors and plain values.
        return torch.load(stream, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        if "Weights only load failed" not in str(error):
            raise _not_whole(name, error) from error
        # torch puts the reason after, or instead of, advice on how to run the file's code.
        message = str(error).partition("WeightsUnpickler error:")[2] or str(error).partition("\n")[2] or str(error)
        reason = next((line for line in message.splitlines() if line.strip()), "")
        rule = f"checkpoint must hold only tensors and plain values, got {reason.strip()[:200]}"
        remedy = "its code was not run; save model.state_dict() or safetensors instead"
        raise NotPlainError(name, rule, remedy) from error
    except Exception as error:  # torch's readers raise RuntimeError, EOFError, KeyError, UnicodeDecodeError and more
        raise _not_whole(name, first_line(error)) from error


def _check_file(file: Path) -> None:
    if not file.is_file():
        raise CheckpointError(file, "the file does not exist", "check the path")
    if file.stat().st_size == 0:
        raise _not_whole(file, "an empty file")


def _not_whole(name: object, got: object) -> CheckpointError:
    remedy = "it is truncated or not a checkpoint; leave it out"
    return CheckpointError(name, f"cannot read the checkpoint: {got}", remedy)


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    return read_object(file, "leave it out")


def read_config(folder: Path) -> dict[str, Any]:
    """Return the fields of a folder's ``config.json``, empty without one."""
    return read_json(folder / "config.json") if (folder / "config.json").exists() else {}


# Format of an ingredient on disk, in which the soup is also written.
HF_FOLDER, LIGHTNING, STATE_DICT, SAFETENSORS, IN_MEMORY, DISTRIBUTED, ADAPTER = (
    "Hugging Face folder", "checkpoint with a state_dict", "state dict file", "safetensors file", "state dict",
    "distributed checkpoint", "PEFT adapter",
)  # fmt: skip

# Keys under which training scripts save the weights.
_WEIGHTS_KEYS = ("model", "model_state_dict", "module")

RUN_KEY, RAW_KEY = "eff_run", "eff_raw_state_dict"


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor that has not been read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Ingredient:
    """A model to average, read one tensor at a time.

    Args:
        name: Name in errors and in the soup's path.
        kind: Format on disk, one of the constants of this module.
        path: The folder or file, None for a state dict in memory.
        load: Returns the state dict. Called at the first read after each `close`; files are mapped, not read.
        config: The fields of a Hugging Face or adapter config.
        specs: Shapes and dtypes, if the file gives them without reading its tensors. None of them is tied.
        parts_on: Device for communication between processes that each read parts of the tensors; None if every
            process reads whole tensors.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        path: Path | None,
        load: Callable[[], Mapping[str, Tensor]],
        config: Mapping[str, Any] | None = None,
        specs: Mapping[str, TensorSpec] | None = None,
        parts_on: torch.device | None = None,
    ) -> None:
        self.name, self.kind, self.path, self.config = name, kind, path, dict(config or {})
        self.parts_on = parts_on
        self.shards: dict[str, str] = {}
        """The file in a folder that holds each tensor."""
        self.prefixes: dict[str, str] = {}
        """Prefix that a file's names get here, by file, if a folder has several modules."""
        self.indexes: list[str] = []
        """The index files of a sharded folder."""
        self._load = load
        self._open: Mapping[str, Tensor] | None = None
        self._stored: dict[str, str] = {}
        self._lent: dict[str, Tensor] = {}
        self._is_fitted = False
        # Tensors that share memory are tied: they count as one and are averaged once.
        owners: dict[tuple[Any, ...], str] = {}
        self.specs: dict[str, TensorSpec] = dict(specs or {})
        """Shape and dtype of each tensor, once, in the order of the file."""
        self.ties: dict[str, str] = {}
        """Further names of tensors → the name in `specs` with the data."""
        for key, value in (self._tensors() if specs is None else {}).items():
            if not isinstance(value, Tensor):
                rule = f"{key!r} must be a tensor, got {type(value).__name__}"
                raise CheckpointError(name, rule, "save only model.state_dict()")
            owner = owners.setdefault(storage_key(value) or (key,), key)
            if owner == key:
                self.specs[key] = TensorSpec(tuple(value.shape), value.dtype)
            else:
                self.ties[key] = owner
        if not self.specs:
            raise CheckpointError(name, "the state dict has no tensors", "check the path")
        # Only headers were read. Data is read on access.
        self.close()

    def _tensors(self) -> Mapping[str, Tensor]:
        if self._open is None:
            self._open = self._load()
        return self._open

    def tensor(self, key: str) -> Tensor:
        """Return one tensor. Do not change it: it may be a view of the file or of the caller's own weights."""
        key = self.ties.get(key, key)
        if key in self._lent:
            return self._lent[key]
        return self._tensors()[self._stored.get(key, key)].detach()

    def renamed(self, names: Mapping[str, str], ties: Mapping[str, str]) -> Ingredient:
        """Return this ingredient with other names for its tensors."""
        # A shallow copy with the same loader but other names. The first read opens the file.
        other = copy.copy(self)
        other.specs = {new: self.spec(old) for new, old in names.items()}
        other.ties = dict(ties)
        other._stored = {}
        other._lent = {new: self._lent[old] for new, old in names.items() if old in self._lent}
        # Resolve earlier renamings: `_stored` always maps to the name on disk.
        for new, old in names.items():
            owner = self.ties.get(old, old)
            other._stored[new] = self._stored.get(owner, owner)
        return other

    def fitted(self, lent: Mapping[str, Tensor], left_out: Collection[str]) -> Ingredient:
        """Return this ingredient with additional tensors from memory, and without some of its own."""
        other = copy.copy(self)
        other._lent, other._is_fitted = {**self._lent, **lent}, True
        other.specs = {name: spec for name, spec in self.specs.items() if name not in left_out}
        other.specs |= {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in lent.items()}
        return other

    @property
    def is_renamed(self) -> bool:
        """True if its tensors differ in name from those on disk, or are not the same set."""
        return self._is_fitted or any(new != old for new, old in self._stored.items())

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
        """Return True if there is a tensor with this name, tied or not."""
        return key in self.specs or key in self.ties

    def close(self) -> None:
        """Release the file; the next read opens it again."""
        self._open = None

    def digest(self) -> str:
        """Return a hash of names, shapes and both ends of every tensor, a cheap identity of the ingredient."""
        # The scale of BA is in the config.
        digest = hashlib.sha256(repr(sorted(self.config.items())).encode() if self.kind == ADAPTER else b"")
        # Sorted, since files of one model may differ in order. Any training changes the ends of each tensor.
        for key in sorted(self.specs):
            flat = self.tensor(key).reshape(-1)
            ends = torch.cat([flat[:1024], flat[-1024:]]).cpu().contiguous().view(torch.uint8).numpy()
            digest.update(f"{key} {self.specs[key]}".encode() + ends.tobytes())
        self.close()
        return digest.hexdigest()


def state_dict_in(content: Any, file: Path) -> Mapping[str, Tensor]:
    """Return a file's content, which must be a state dict."""
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        rule = f"file must hold a state dict, got {type(content).__name__}"
        raise CheckpointError(file, rule, "save model.state_dict()")
    return content


def weights_key(content: Any) -> str | None:
    """Return the key of a saved dict that holds the model's weights, None without one.

    Example:
        >>> weights_key({"model": {"w": torch.ones(1)}, "epoch": 3}), weights_key({"model": torch.ones(1)})
        ('model', None)
    """
    if not isinstance(content, Mapping):
        return None
    if isinstance(content.get("state_dict"), Mapping):
        return "state_dict"
    nested = (key for key in _WEIGHTS_KEYS if isinstance(content.get(key), Mapping) and content[key])
    return next((key for key in nested if all(isinstance(value, Tensor) for value in content[key].values())), None)


def storage_key(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return a key that is equal for tied tensors, None for a tensor without data."""
    if tensor.numel() == 0 or tensor.is_meta:
        return None
    # Address, shape and strides: views of the same memory with different shapes are different parameters.
    start: Any = tensor.data_ptr()
    if (part := local_part(tensor)) is not tensor:  # may be empty and then has no address
        start = part.untyped_storage().data_ptr(), part.storage_offset()
    return tensor.device, start, tuple(tensor.shape), tensor.stride(), tensor.dtype


def averaged(dtype: torch.dtype) -> bool:
    """Return True if tensors of this dtype are averaged. Integers and booleans come from the best ingredient.

    Example:
        >>> averaged(torch.bfloat16), averaged(torch.int64), averaged(torch.bool)
        (True, False, False)
    """
    return dtype.is_floating_point or dtype.is_complex


def stored_weights(ingredient: Ingredient) -> LazyTensors:
    """Return the tensors of an `Ingredient`, ties under each of their names."""
    return LazyTensors({name: name for name in (*ingredient.specs, *ingredient.ties)}, ingredient.tensor)
