"""Read distributed checkpoints (DCP) tensor by tensor, without a process group. Only the index is unpickled."""

from __future__ import annotations

import contextlib
import importlib
import io
import pickle
import warnings
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import torch
from torch import Tensor

from shared_core.checkpoint_formats.files import (
    DISTRIBUTED,
    RAW_KEY,
    Ingredient,
    LazyTensors,
    TensorSpec,
    load_torch_stream,
    read_config,
)
from shared_core.checkpoint_formats.foreign import load_checkpoint
from shared_core.checkpoint_formats.plain import LIGHTNING_META
from shared_core.errors import CheckpointError

INDEX = ".metadata"
# accelerate's folder for the model in a checkpoint of the Hugging Face Trainer under FSDP
_ACCELERATE_FOLDER = "pytorch_model_fsdp_0"
# Keys of the weights: Accelerate and Lightning's FSDP, Lightning's FSDP2, DeepSpeed and plain loops.
_ROOTS = ("model", "state_dict", "module")
_METADATA = "torch.distributed.checkpoint.metadata"
_ADMITTED = {
    *((_METADATA, name) for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # looks a name up in a table
    ("collections", "OrderedDict"),
}  # fmt: skip


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler for the index that admits only the classes DCP writes, none of which runs code from the file."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream)
        self._name = stream.name

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local"):  # a path of the machine that wrote it
            # PurePath: an index from Windows must open here, and its paths are never followed.
            return PurePath
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _ADMITTED:
            rule = f"the index may only contain classes that DCP writes, got {module}.{name}"
            raise CheckpointError(self._name, rule, "no code was run")
        # Only listed classes, all in torch and the standard library.
        return getattr(importlib.import_module(module), name)


def check_indexes(folder: Path) -> None:
    """Check that every index in a folder and its subfolders holds only what DCP writes.

    torch (2.13) itself unpickles anything in an index.
    """
    for file in folder.rglob(INDEX):
        _read_index(file)


def _read_index(file: Path) -> Any:
    with _as_damage(file), file.open("rb") as stream:
        index = _IndexUnpickler(stream).load()
        if type(index).__name__ != "Metadata":
            raise TypeError(type(index).__name__)
        return index


@contextlib.contextmanager
def _as_damage(file: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle or a wrong index may raise anything
        rule = f"cannot read the index: {str(error)[:200] or type(error).__name__}"
        remedy = "it is truncated or not a distributed checkpoint; leave it out"
        raise CheckpointError(file, rule, remedy) from error


def is_file_name(name: object) -> bool:
    """Return True if a shard's name, read from a file, stays in the file's folder."""
    return isinstance(name, str) and Path(name).name == name and len(name.encode(errors="replace")) < 256


def index_folder(folder: Path) -> Path | None:
    """Return the folder with a distributed checkpoint's index: this one or Accelerate's inside it, else None."""
    return next((place for place in (folder, folder / _ACCELERATE_FOLDER) if (place / INDEX).is_file()), None)


class DistributedWeights(LazyTensors):
    """The model's tensors in a distributed checkpoint, each assembled from its shards on access.

    Raises:
        CheckpointError: If it is damaged, refers to code, or does not show which tensors are the model's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with _as_damage(folder / INDEX):
            index = _read_index(folder / INDEX)
            # planner_data maps flat keys to paths in the saved nested dict. Without it a key is its own path.
            paths = {key: (index.planner_data or {}).get(key, (key,)) for key in index.state_dict_metadata}
            tensors = {key for key, entry in index.state_dict_metadata.items() if hasattr(entry, "chunks")}
            self.root = _root([paths[key] for key in paths if key in tensors], folder)
            """The keys that lead to the model in the saved nested dict."""
            depth = len(self.root)
            keys = {
                ".".join(map(str, path[depth:])): key for key, path in paths.items() if tuple(path[:depth]) == self.root
            }
            self._entries = index.state_dict_metadata
            # Location of each chunk, by key and offset in the whole tensor.
            self._stored = {(place.fqn, place.offset): where for place, where in index.storage_data.items()}
            other = next((name for name, key in keys.items() if key not in tensors), None)
            if other is not None:
                raise CheckpointError(folder, f"{other!r} is not a tensor", "save only the weights")
            self.specs = {name: self._spec(key) for name, key in keys.items()}
        super().__init__(keys, self._assembled)

    def _spec(self, key: str) -> TensorSpec:
        entry = self._entries[key]
        spec = TensorSpec(tuple(entry.size), entry.properties.dtype)
        # Compare the number of elements only.
        if not entry.chunks or sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
            raise CheckpointError(self._folder, f"shards of {key!r} are missing", "copy the whole checkpoint")
        for _, place in self._shards(key):
            file = self._folder / place.relative_path
            # A transform (compression, encryption) would need code named in the file. A name with a slash could lead
            # out of the folder.
            as_it_is = is_file_name(place.relative_path) and not place.transform_descriptors
            if not as_it_is or not file.is_file() or file.stat().st_size < place.offset + place.length:
                rule = "be whole" if as_it_is else "be a file name in the same folder, without transforms"
                got = "less" if as_it_is else place.transform_descriptors or place.relative_path
                raise CheckpointError(file, f"shard must {rule}, got {got}", "it is missing, truncated or damaged")
        return spec

    def _shards(self, key: str) -> Iterator[tuple[Any, Any]]:
        return ((chunk, self._stored[key, chunk.offsets]) for chunk in self._entries[key].chunks)

    def _assembled(self, key: str) -> Tensor:
        entry = self._entries[key]
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        for chunk, place in self._shards(key):
            file = self._folder / place.relative_path
            with file.open("rb") as stream:
                stream.seek(place.offset)
                # Read the shard's bytes: torch.save wrote each shard into the file as a complete archive.
                shard = load_torch_stream(io.BytesIO(stream.read(place.length)), f"{file} at {place.offset}")
            if not isinstance(shard, Tensor) or (shard.shape, shard.dtype) != (chunk.sizes, whole.dtype):
                raise CheckpointError(
                    file, f"shape or dtype of a shard of {key!r} differs from the index", "it is damaged"
                )
            # A single shard needs no copy.
            if chunk.sizes == whole.shape:
                return shard
            where = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[where] = shard
        return whole


def _root(paths: Sequence[Sequence[Any]], folder: Path) -> tuple[Any, ...]:
    """Return the path to the model among the paths of all tensors, which include optimizer states."""
    roots = {
        # The path up to the first known name, without optimizer states.
        tuple(path[: position + 1])
        for path in paths
        for position in [next((i for i, part in enumerate(path[:-1]) if part in _ROOTS), None)]
        if position is not None and not any("optim" in str(part).lower() for part in path[:position])
    }
    tops = {path[0] for path in paths if len(path) > 1}
    if len(roots) == 1:
        root = roots.pop()
        beside = [path for path in paths if tuple(path[: len(root)]) != root]
        # A root of one key is a trainer's. A deeper one may be a module named `model`, so it only counts if everything
        # else is optimizer state.
        if len(root) == 1 or all("optim" in str(path).lower() for path in beside):
            return root
    # Flat: a bare state dict was saved.
    elif not roots and not tops:
        return ()
    # A single unknown name above everything is the root.
    elif not roots and len(tops) == 1 and all(len(path) > 1 for path in paths) and "optim" not in str(tops):
        return (tops.pop(),)
    rule = f"distributed checkpoint must hold the weights under one of {', '.join(_ROOTS)}, or nothing else"
    got = ", ".join(sorted(map(repr, tops)))
    raise CheckpointError(folder, f"{rule}, got {got}", "save {'model': model.state_dict(), ...}")


def open_distributed(folder: Path, inner: Path) -> Ingredient:
    """Return the ingredient of a folder with a distributed checkpoint, in the folder itself or in `inner`."""
    weights = DistributedWeights(inner)
    meta = inner / LIGHTNING_META

    def load() -> Mapping[str, Tensor]:
        # Lightning's extra file next to the shards holds latent weights if those in the shards are rounded.
        raw = load_checkpoint(meta).get(RAW_KEY) if meta.is_file() else None
        # ChainMap reads the first that has a key: latent weights over rounded ones.
        return ChainMap(raw, weights) if raw else weights  # type: ignore[arg-type]

    return Ingredient(str(folder), DISTRIBUTED, folder, load, read_config(folder), specs=weights.specs)


def write_distributed(state_dict: Mapping[str, Tensor], like: Path, target: Path) -> None:
    """Write a state dict as a distributed checkpoint from this process, nested like the one in the folder `like`."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    nested: dict[Any, Any] = dict(state_dict)
    for key in reversed(DistributedWeights(like).root):
        nested = {key: nested}
    target.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")  # intended
        save(nested, storage_writer=FileSystemWriter(target), no_dist=True)
