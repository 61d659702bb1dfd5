"""The manifest of a cache: what its arrays mean and what they were made with, as JSON.

Files of a cache: shards of examples and the index over them, safetensors that are mapped and never read whole.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from shared_core.distillation.teacher_cache.keys import Words, as_words
from shared_core.errors import CheckpointError
from shared_core.files.atomic import atomic_write
from shared_core.files.json_yaml import parse_json

MANIFEST_FILE = "eff_teacher_cache.json"
FORMAT = 1
DTYPES = {"float16": torch.float16, "float32": torch.float32}
FINGERPRINTS = ("teacher", "teacher_files", "tokenizer", "template", "data")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a cache.

    Attributes:
        temperature: ``T`` of the stored log-probabilities.
        top_k: Classes kept of each row.
        vocabulary: Classes that the softmax ran over.
        dtype: ``float16`` or ``float32``, of the log-probabilities.
        fields: The inputs that keys are made of.
        per_example: Whether the teacher has one output an example, ``(B, C)``, and not one a position.
        positions: The field whose positions the outputs follow; none: each example's outputs are taken as they are.
        labelled: Whether only positions that count for the loss were stored.
        fingerprints: Of the teacher, the files it came from, the tokenizer, the template and the data; none: not told.
        complete: Whether all examples are there.
        shards: Number of examples in each shard.
        rows: Number of stored rows.
        tail_mass_mean: Mean over rows of the probability outside the top k.
        tail_mass_max: The largest one.
    """

    temperature: float
    top_k: int
    vocabulary: int
    dtype: str
    fields: tuple[str, ...]
    per_example: bool
    positions: str | None
    labelled: bool
    fingerprints: Mapping[str, str | None]
    complete: bool = False
    shards: tuple[int, ...] = ()
    rows: int = 0
    tail_mass_mean: float = 0.0
    tail_mass_max: float = 0.0

    @property
    def examples(self) -> int:
        """Number of different examples."""
        return sum(self.shards)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the stored log-probabilities."""
        return DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored row: log-probabilities, their classes unless all are kept, and the tail."""
        classes = indices_dtype(self.vocabulary).itemsize if self.top_k < self.vocabulary else 0
        return self.top_k * (self.torch_dtype.itemsize + classes) + 4

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as they are written."""
        return {"format": FORMAT, **dataclasses.asdict(self), "examples": self.examples}

    def write(self, folder: Path) -> None:
        """Write it into the folder of a cache, whole or not at all."""
        with atomic_write(folder / MANIFEST_FILE) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Return the manifest in a folder.

        Raises:
            CheckpointError: If there is none, or it is damaged or of a newer format.
        """
        path = folder / MANIFEST_FILE
        if not path.is_file():
            raise CheckpointError(
                "cached teacher",
                f"{folder} must be a folder that `eff cache-teacher` wrote, got no {MANIFEST_FILE} in it",
            )
        try:
            content = parse_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise _damaged_manifest(path, str(error)) from error
        if not isinstance(content, dict):
            raise _damaged_manifest(path, type(content).__name__)
        version = content.pop("format", None)
        if not _is_int(version, 1):
            raise _damaged_manifest(path, f"format {version!r}")
        if version > FORMAT:
            raise CheckpointError(
                "cached teacher", f"{path} was written by a newer efftrain", "update it to read this cache"
            )
        examples = content.pop("examples", None)
        rules = _rules(content)
        for name, is_right in rules.items():
            if name not in content or not is_right(content[name]):
                raise _damaged_manifest(path, f"{name} {content.get(name)!r:.80}")
        if content.keys() - rules.keys():
            raise _damaged_manifest(path, f"the unknown {min(content.keys() - rules.keys())!r}")
        found = cls(**{**content, "fields": tuple(content["fields"]), "shards": tuple(content["shards"])})
        if found.examples != examples:
            raise _damaged_manifest(path, f"{examples!r} examples in shards of {found.examples}")
        return found


def _rules(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "vocabulary": lambda value: _is_int(value, 1) and value < 2**31,
        "temperature": lambda value: _is_number(value) and value > 0,
        "top_k": lambda value: _is_int(value, 1) and value <= content["vocabulary"],
        "dtype": lambda value: isinstance(value, str) and value in DTYPES,
        "fields": lambda value: isinstance(value, list) and value and all(isinstance(name, str) for name in value),
        "per_example": lambda value: isinstance(value, bool),
        "positions": lambda value: value is None or (isinstance(value, str) and value in content["fields"]),
        "labelled": lambda value: isinstance(value, bool),
        "fingerprints": _are_fingerprints,
        "complete": lambda value: isinstance(value, bool),
        "shards": lambda value: isinstance(value, list) and all(_is_int(count, 1) for count in value),
        "rows": lambda value: _is_int(value, 0),
        "tail_mass_mean": lambda value: _is_number(value) and value >= 0,
        "tail_mass_max": lambda value: _is_number(value) and value >= 0,
    }


def _is_int(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_fingerprints(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == set(FINGERPRINTS)
        and all(found is None or isinstance(found, str) for found in value.values())
    )


def _damaged_manifest(path: Path, what: str) -> CheckpointError:
    return CheckpointError("cached teacher", f"{path} must be a whole manifest, got {what}", "write the cache again")


Array = npt.NDArray[Any]

# A key is 16 bytes, two big-endian words; the index is sorted by high, then low.
_INDEX_TENSORS = {"high": torch.uint64, "low": torch.uint64, "shard": torch.int32, "row": torch.int32}


def shard_name(number: int) -> str:
    """Return the file name of a shard.

    Example:
        >>> shard_name(3)
        'shard-000003.safetensors'
    """
    return f"shard-{number:06d}.safetensors"


def index_name(shards: int) -> str:
    """Return the file name of the index over so many shards; each extension of a store has one of its own."""
    return f"index-{shards:06d}.safetensors"


def indices_dtype(vocabulary: int) -> torch.dtype:
    """Return the smallest dtype for class numbers.

    Example:
        >>> indices_dtype(50257), indices_dtype(128256)
        (torch.uint16, torch.int32)
    """
    # Class numbers are half of what top-k stores: 2 bytes each up to 65,536 classes.
    return torch.uint16 if vocabulary <= 2**16 else torch.int32


@dataclass
class PendingShard:
    """Examples that are not on disk yet.

    Attributes:
        keys: One an example.
        lengths: Positions of each, without padding.
        where: For each example the positions that have a row, counted from its first.
        rows: The tensors that have a row for each of these positions: indices (none if all classes are kept),
            log_probs, tail.
    """

    keys: list[bytes] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    where: list[Array] = field(default_factory=list)
    rows: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def add(self, keys: list[bytes], lengths: list[int], where: list[Array], rows: Mapping[str, torch.Tensor]) -> None:
        """Take in the new examples of a batch; their rows follow each other in the order of the keys."""
        self.keys += keys
        self.lengths += lengths
        self.where += where
        for name, value in rows.items():
            self.rows.setdefault(name, []).append(value)

    def write(self, path: Path) -> None:
        """Write them as a shard: whole, on disk, or not at all."""
        # Rows of example i lie in starts[i] .. starts[i + 1], as in a CSR matrix: examples have different lengths.
        starts = np.cumsum([0, *(len(places) for places in self.where)], dtype=np.int64)
        tensors = {
            "keys": torch.from_numpy(as_words(self.keys)),
            "starts": torch.from_numpy(starts),
            "lengths": torch.tensor(self.lengths, dtype=torch.int32),
            "where": torch.from_numpy(np.concatenate(self.where).astype(np.int32)),
            **{name: torch.cat(parts).contiguous() for name, parts in self.rows.items()},
        }
        with atomic_write(path) as temporary:
            _save(tensors, temporary)


class Shard:
    """A shard's arrays, mapped: what is touched is read from disk, the rest is not.

    Args:
        path: The file.
        vocabulary: Number of classes.
        top_k: Classes a row.
        dtype: Of the log-probabilities.
    """

    def __init__(self, path: Path, *, vocabulary: int, top_k: int, dtype: torch.dtype) -> None:
        expected = {
            "keys": (torch.uint64, (None, 2)),
            "starts": (torch.int64, (None,)),
            "lengths": (torch.int32, (None,)),
            "where": (torch.int32, (None,)),
            "log_probs": (dtype, (None, top_k)),
            "tail": (torch.float32, (None,)),
        }
        if top_k < vocabulary:
            expected["indices"] = (indices_dtype(vocabulary), (None, top_k))
        arrays = _mapped(path, expected)
        self.path, self._vocabulary = path, vocabulary
        self.keys: Words = arrays["keys"]
        self.starts, self.lengths, self.where = arrays["starts"], arrays["lengths"], arrays["where"]
        self.log_probs, self.tail = arrays["log_probs"], arrays["tail"]
        self.indices: Array | None = arrays.get("indices")
        examples, rows = len(self.keys), len(self.tail)
        if (len(self.starts), len(self.lengths)) != (examples + 1, examples) or any(
            len(array) != rows for name, array in arrays.items() if name in ("where", "log_probs", "indices")
        ):
            raise _damaged(path, "arrays of different lengths")

    def __len__(self) -> int:
        return len(self.keys)

    def length_of(self, row: int) -> int:
        """Return an example's number of positions, without padding; one that is not there is refused."""
        if not 0 <= row < len(self):
            raise _damaged(self.path, f"no example {row}")
        return int(self.lengths[row])

    def rows_of(self, row: int) -> slice:
        """Return where an example's rows lie; damaged bounds are refused."""
        start, stop = int(self.starts[row]), int(self.starts[row + 1])
        if not 0 <= start <= stop <= len(self.tail):
            raise _damaged(self.path, f"rows {start} to {stop} of {len(self.tail)}")
        # Bounds come from a file: an end beyond it would read another example's rows.
        return slice(start, stop)

    def places_of(self, row: int) -> Array:
        """Return the positions of an example that have a row, counted from its first; damaged ones are refused."""
        places: Array = self.where[self.rows_of(row)]
        # Rising and in range: the reader assigns by these positions, and a repeated one would overwrite a row.
        if places.size and not (places[0] >= 0 and places[-1] < self.lengths[row] and (np.diff(places) > 0).all()):
            raise _damaged(self.path, f"positions that do not rise from 0 to {self.lengths[row]}")
        return places

    def indices_of(self, row: int) -> Array | None:
        """Return an example's classes, None if all are kept in their order; damaged ones are refused."""
        if self.indices is None:
            return None
        found: Array = self.indices[self.rows_of(row)]
        if found.size and not (found.min() >= 0 and found.max() < self._vocabulary):
            raise _damaged(self.path, f"a class that is not below {self._vocabulary}")
        return found


class Index:
    """Where each example lies: sorted keys, mapped, searched by halving."""

    def __init__(self, path: Path) -> None:
        arrays = _mapped(path, {name: (dtype, (None,)) for name, dtype in _INDEX_TENSORS.items()})
        self._high, self._low = arrays["high"], arrays["low"]
        self._shard, self._row = arrays["shard"], arrays["row"]
        if len({len(array) for array in arrays.values()}) != 1:
            raise _damaged(path, "arrays of different lengths")

    def __len__(self) -> int:
        return len(self._high)

    def find(self, keys: list[bytes]) -> list[tuple[int, int] | None]:
        """Return shard and row of each example, None for one that is not there."""
        words = as_words(keys)
        # Halving over the high words alone, which lie in one mapped column: O(log n) pages are read.
        firsts = np.searchsorted(self._high, words[:, 0], side="left")
        found: list[tuple[int, int] | None] = []
        for (high, low), first in zip(words, firsts, strict=True):
            at = int(first)
            # Two keys with the same high word are rare (n² / 2^65): walk to the low word.
            while at < len(self) and self._high[at] == high and self._low[at] != low:
                at += 1
            is_there = at < len(self) and self._high[at] == high
            found.append((int(self._shard[at]), int(self._row[at])) if is_there else None)
        return found

    def words(self) -> Words:
        """Return all keys, sorted, as `as_words` gives them."""
        return np.stack([self._high, self._low], axis=1)


def write_index(path: Path, shards: Iterable[Shard]) -> None:
    """Write the index over shards in their order."""
    words, places = [], []
    for number, shard in enumerate(shards):
        words.append(np.array(shard.keys))
        rows = np.arange(len(shard), dtype=np.int32)
        places.append(np.stack([np.full_like(rows, number), rows], axis=1))
    keys, place = np.concatenate(words), np.concatenate(places)
    # lexsort takes the primary column last.
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    keys, place = keys[order], place[order]
    columns = {"high": keys[:, 0], "low": keys[:, 1], "shard": place[:, 0], "row": place[:, 1]}
    with atomic_write(path) as temporary:
        _save({name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in columns.items()}, temporary)


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    # save_file of safetensors 0.8 writes a file beside this one, under a name that nobody cleans up if it is killed
    path.write_bytes(save(tensors))


def _mapped(path: Path, expected: Mapping[str, tuple[torch.dtype, tuple[int | None, ...]]]) -> dict[str, Array]:
    """Return the tensors of a file as arrays over its pages, their dtypes and inner sizes checked."""
    if not path.is_file():
        raise CheckpointError(
            "cached teacher", f"{path} must exist, got none", "the cache is not whole, write it again"
        )
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            if set(file.keys()) != set(expected):
                raise _damaged(path, f"tensors {sorted(file.keys())}")
            tensors = {name: file.get_tensor(name) for name in expected}
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _damaged(path, str(error)) from error
    for name, (dtype, shape) in expected.items():
        tensor = tensors[name]
        fits = tensor.ndim == len(shape) and all(
            size is None or size == found for size, found in zip(shape, tensor.shape, strict=True)
        )
        if tensor.dtype != dtype or not fits:
            raise _damaged(path, f"{name} {tensor.dtype} {tuple(tensor.shape)}")
    # Views of the mapped file: pages are read when touched, and forks share them.
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError("cached teacher", f"{path} must be a whole file of this cache, got {what}", "write it again")
