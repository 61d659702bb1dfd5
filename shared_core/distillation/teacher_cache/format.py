"""A cache on disk, and its reader: the targets of a batch, found by what its examples are.

The manifest tells as JSON what the arrays mean and what they were made with. Beside it lie shards of examples and the
index over them, safetensors that are mapped and never read whole.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from shared_core.distillation.teacher_cache.keys import WHERE, ExampleRows, Words, as_words, example_rows, tensors_of
from shared_core.errors import CheckpointError, TrainingError
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
        labeled: Whether only positions that count for the loss were stored.
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
    labeled: bool
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
            rule = f"{folder} was not written by `eff cache-teacher`: it has no {MANIFEST_FILE}"
            raise CheckpointError(WHERE, rule)
        try:
            content = parse_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            _refuse(path, str(error), "manifest", error)
        if wrong := _wrong_in(content):
            _refuse(path, wrong, "manifest")
        if content.pop("format") > FORMAT:
            raise CheckpointError(WHERE, f"{path} was written by a newer efftrain", "update it to read this cache")
        del content["examples"]
        return cls(**{**content, "fields": tuple(content["fields"]), "shards": tuple(content["shards"])})


def _wrong_in(content: Any) -> str:
    """Return what is wrong in a manifest; of a newer one, nothing that this version could know."""
    if not isinstance(content, dict):
        return type(content).__name__
    version = content.get("format")
    if not isinstance(version, int) or not _is_int(version, 1):
        return f"format {version!r}"
    if version > FORMAT:
        return ""
    rules = _rules(content)
    for name, is_right in rules.items():
        if name not in content or not is_right(content[name]):
            return f"{name} {content.get(name)!r:.80}"
    if unknown := content.keys() - rules.keys() - {"format", "examples"}:
        return f"the unknown {min(unknown)!r}"
    stated, found = content.get("examples"), sum(content["shards"])
    return "" if stated == found else f"{stated!r} examples in shards of {found}"


def _rules(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "vocabulary": lambda value: _is_int(value, 1) and value < 2**31,
        "temperature": lambda value: _is_number(value) and value > 0,
        "top_k": lambda value: _is_int(value, 1) and value <= content["vocabulary"],
        "dtype": lambda value: isinstance(value, str) and value in DTYPES,
        "fields": lambda value: isinstance(value, list) and value and all(isinstance(name, str) for name in value),
        "per_example": lambda value: isinstance(value, bool),
        "positions": lambda value: value is None or (isinstance(value, str) and value in content["fields"]),
        "labeled": lambda value: isinstance(value, bool),
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


def _refuse(path: Path, what: str, kind: str = "file of this cache", cause: Exception | None = None) -> NoReturn:
    raise CheckpointError(WHERE, f"{path} is not a complete {kind}, got {what}", "write the cache again") from cause


Array = npt.NDArray[Any]
_Expected = dict[str, tuple[torch.dtype, tuple[int | str, ...]]]

# A key is 16 bytes, two big-endian words; the index is sorted by high, then low.
_INDEX_TENSORS: _Expected = {
    "high": (torch.uint64, ("keys",)), "low": (torch.uint64, ("keys",)),
    "shard": (torch.int32, ("keys",)), "row": (torch.int32, ("keys",)),
}  # fmt: skip


def shard_name(number: int) -> str:
    """Return the file name of a shard."""
    return f"shard-{number:06d}.safetensors"


def index_name(shards: int) -> str:
    """Return the file name of the index over so many shards; each extension of a store has one of its own."""
    return f"index-{shards:06d}.safetensors"


def indices_dtype(vocabulary: int) -> torch.dtype:
    """Return the smallest dtype for class numbers, which are half of what top-k stores."""
    return torch.uint16 if vocabulary <= 2**16 else torch.int32


@dataclass
class PendingShard:
    """Examples that are not on disk yet: their keys, and their lengths without padding."""

    keys: list[bytes] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    where: list[Array] = field(default_factory=list)
    """For each example the positions that have a row, counted from its first."""
    rows: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """The tensors with a row for each of these: indices (none if all classes are kept), log_probs, tail."""

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
        _save(tensors, path)


class Shard:
    """A shard's arrays, mapped: what is touched is read from disk, the rest is not.

    Args:
        folder: Of the cache.
        made: Its manifest.
        number: Of the shard; one that is not in the manifest may have any number of examples.
    """

    def __init__(self, folder: Path, made: Manifest, number: int) -> None:
        examples: int | str = made.shards[number] if 0 <= number < len(made.shards) else "examples"
        expected: _Expected = {
            "keys": (torch.uint64, (examples, 2)),
            "starts": (torch.int64, ("bounds",)),
            "lengths": (torch.int32, (examples,)),
            "where": (torch.int32, ("rows",)),
            "log_probs": (made.torch_dtype, ("rows", made.top_k)),
            "tail": (torch.float32, ("rows",)),
        }
        if made.top_k < made.vocabulary:
            expected["indices"] = (indices_dtype(made.vocabulary), ("rows", made.top_k))
        self.path, self._vocabulary = folder / shard_name(number), made.vocabulary
        arrays = _mapped(self.path, expected)
        self.keys: Words = arrays["keys"]
        self.starts, self.lengths, self.where = arrays["starts"], arrays["lengths"], arrays["where"]
        self.log_probs, self.tail = arrays["log_probs"], arrays["tail"]
        self.indices: Array | None = arrays.get("indices")
        if len(self.starts) != len(self) + 1:
            _refuse(self.path, f"{len(self.starts)} bounds of {len(self)} examples")

    def __len__(self) -> int:
        return len(self.keys)

    def places_of(self, row: int) -> tuple[int, slice, Array]:
        """Return an example's length without padding, where its rows lie, and which positions have one.

        Bounds that are damaged, or of an example that is not there, would read another's rows and are refused.
        """
        length, start, stop = -1, 0, 0
        if 0 <= row < len(self):
            length, start, stop = int(self.lengths[row]), int(self.starts[row]), int(self.starts[row + 1])
        places: Array = self.where[start:stop]
        # Rising and in range: the reader assigns by these positions, and a repeated one would overwrite a row.
        rising = not places.size or (places[0] >= 0 and places[-1] < length and (np.diff(places) > 0).all())
        # Bounds come from a file: an end beyond it would read another example's rows.
        if length < 0 or not 0 <= start <= stop <= len(self.tail) or not rising:
            text = f"no example {row} of {len(self)} with rising positions in rows {start} to {stop}"
            _refuse(self.path, f"{text} of {len(self.tail)}")
        return length, slice(start, stop), places

    def indices_of(self, rows: slice) -> Array | None:
        """Return the classes of some rows, None if all are kept in their order; damaged ones are refused."""
        if self.indices is None:
            return None
        found: Array = self.indices[rows]
        if found.size and not (found.min() >= 0 and found.max() < self._vocabulary):
            _refuse(self.path, f"a class that is not below {self._vocabulary}")
        return found


class Index:
    """Where each example lies: sorted keys, mapped, searched by halving."""

    def __init__(self, path: Path) -> None:
        arrays = _mapped(path, _INDEX_TENSORS)
        self._high, self._low = arrays["high"], arrays["low"]
        self._shard, self._row = arrays["shard"], arrays["row"]

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
    _save({name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in columns.items()}, path)


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    # save_file of safetensors 0.8 writes a file beside this one, under a name that nobody cleans up if it is killed
    with atomic_write(path) as temporary:
        temporary.write_bytes(save(tensors))


def _mapped(path: Path, expected: _Expected) -> dict[str, Array]:
    """Return the tensors of a file as arrays over its pages: of these dtypes and sizes, equal where a name is given."""
    if not path.is_file():
        raise CheckpointError(WHERE, f"{path} does not exist", "the cache is incomplete, write it again")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        _refuse(path, str(error), cause=error)
    sizes: dict[int | str, int] = {}
    if tensors.keys() != expected.keys() or not all(
        tensor.dtype == dtype
        and tensor.ndim == len(shape)
        and all(found == (size if isinstance(size, int) else sizes.setdefault(size, found))
                for size, found in zip(shape, tensor.shape, strict=True))
        for tensor, (dtype, shape) in ((tensors[name], expected[name]) for name in expected)
    ):  # fmt: skip
        text = ", ".join(f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        _refuse(path, text or "no tensors")
    # Views of the mapped file: pages are read when touched, and forks share them.
    return {name: tensor.numpy() for name, tensor in tensors.items()}


class CachedTargets(NamedTuple):
    """A teacher's stored outputs in the layout of a batch: ``(B, L)``, or ``(B,)`` for one output an example.

    Attributes:
        indices: ``(..., k)`` int64, the classes.
        log_probs: ``(..., k)`` float32, their log-probabilities among all classes at the store's temperature.
        tail_log_mass: ``(...)`` float32, the log-probability of all other classes together; -inf where there is none.
        mask: ``(...)`` bool, True where a target is stored; the others hold zeros.
    """

    indices: Tensor
    log_probs: Tensor
    tail_log_mass: Tensor
    mask: Tensor

    @property
    def tail_mass(self) -> Tensor:
        """The probability of all other classes together, ``(...)``, as `kd_topk_sum` takes it."""
        return self.tail_log_mass.exp()

    def counted(self, mask: Tensor | None) -> Tensor:
        """Return which positions the loss runs over: those that count, all of which must be stored.

        Args:
            mask: ``(...)`` bool, True where a position counts for the loss; None: all that are stored.

        Raises:
            TrainingError: If one that counts has no target, or the shapes differ.

        Example:
            >>> zeros, stored = torch.zeros(1, 3), torch.tensor([[True, True, False]])
            >>> targets = CachedTargets(zeros.long(), zeros, zeros, stored)
            >>> targets.counted(torch.tensor([[False, True, False]])).tolist()
            [[False, True, False]]
        """
        if mask is None:
            return self.mask
        if mask.shape != self.mask.shape:
            shapes = f"{tuple(self.mask.shape)}, got {tuple(mask.shape)}"
            raise TrainingError(WHERE, f"the student must have outputs of the teacher's shape {shapes}")
        mask = mask.to(self.mask.device)
        if lacking := int((mask & ~self.mask).sum()):
            rule = f"{lacking} of the {int(mask.sum())} positions in the loss have no cached target"
            raise TrainingError(WHERE, rule, "write the cache without --labeled, or with these labels")
        return mask


def normalized(log_probs: Tensor, tail_log_mass: Tensor) -> tuple[Tensor, Tensor]:
    """Return rounded log-probabilities and tail with their sum of probabilities, about 1 ± 2e-4, brought back to 1."""
    # As a distribution they must sum to 1, or the KL has a floor that is not 0.
    total = torch.logsumexp(torch.cat([log_probs, tail_log_mass.unsqueeze(-1)], -1), -1)
    return log_probs - total.unsqueeze(-1), tail_log_mass - total


_OPEN_SHARDS = 512  # mappings are limited, 65,530 a process on Linux


class TeacherCache:
    """A store of a teacher's outputs, opened for reading.

    It is mapped, not read: memory grows with what is looked up, and the system takes it back when it needs it. It never
    writes, so threads, forked or spawned workers and several processes may share it; pickled it is its path.

    Args:
        path: The folder that `write_teacher_cache` or ``eff cache-teacher`` wrote.

    Raises:
        CheckpointError: If it is missing, damaged, or its writing was interrupted.

    Example:
        >>> import tempfile
        >>> from shared_core.distillation.teacher_cache.writer import write_teacher_cache
        >>> folder, teacher, inputs = tempfile.mkdtemp(), torch.nn.Linear(4, 3), torch.randn(5, 4)
        >>> _ = write_teacher_cache(teacher, [inputs], folder, temperature=2.0)
        >>> targets = TeacherCache.open(folder).lookup(inputs[[3, 1]])
        >>> tuple(targets.log_probs.shape), targets.mask.tolist()
        ((2, 3), [True, True])
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.manifest = Manifest.read(self.path)
        """The description of the cache's contents."""
        if not self.manifest.complete:
            rule = f"{self.path} is incomplete, because writing it was interrupted"
            raise CheckpointError(WHERE, rule, "run the same command again with --resume")
        index = self.path / index_name(len(self.manifest.shards))
        self._index = Index(index)
        if len(self._index) != self.manifest.examples:
            _refuse(index, f"{len(self._index)} of {self.manifest.examples} examples")
        # no lock of our own, which a fork could copy while it is held
        self._shard = functools.lru_cache(maxsize=_OPEN_SHARDS)(self._open_shard)

    @classmethod
    def open(cls, path: Path | str) -> TeacherCache:
        """Return the cache in a folder."""
        return cls(path)

    def __len__(self) -> int:
        """Return the number of examples."""
        return self.manifest.examples

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self.path),)

    def check(
        self,
        *,
        temperature: float | None = None,
        vocabulary: int | None = None,
        teacher_fingerprint: str | None = None,
        tokenizer_fingerprint: str | None = None,
        template_fingerprint: str | None = None,
        data_fingerprint: str | None = None,
    ) -> tuple[str, ...]:
        """Refuse a store that was made with something else; None is not compared.

        Args:
            temperature: ``T`` of the loss.
            vocabulary: The student's number of classes.
            teacher_fingerprint: Of the teacher or of its folder: `teacher_fingerprint`, `folder_fingerprint`.
            tokenizer_fingerprint: What `tokenizer_fingerprint` returns.
            template_fingerprint: What `template_fingerprint` returns.
            data_fingerprint: ``manifest.fingerprints["data"]`` of the store that is meant.

        Returns:
            Names of what was given here but not when the store was written, so that nothing could be compared.

        Raises:
            CheckpointError: If one differs, with both values.
        """
        given = {
            "teacher": teacher_fingerprint, "tokenizer": tokenizer_fingerprint, "template": template_fingerprint,
            "data": data_fingerprint,
        }  # fmt: skip
        given = {name: value for name, value in given.items() if value is not None}
        for rule, remedy in self._misfits(temperature, vocabulary, given):
            raise CheckpointError(WHERE, rule, remedy)
        return tuple(name for name in given if not any(self._made_with(name)))

    def _made_with(self, name: str) -> list[str | None]:
        names = [name, *(["teacher_files"] if name == "teacher" else [])]
        return [self.manifest.fingerprints[each] for each in names]

    def _misfits(
        self, temperature: float | None, vocabulary: int | None, fingerprints: Mapping[str, str | None]
    ) -> Iterator[tuple[str, str]]:
        made = self.manifest
        if temperature is not None and temperature != made.temperature:
            yield (
                f"temperature must be the {made.temperature:g} that {self.path} was written at, got {temperature:g}",
                "log-probabilities of the top k at one T do not give those at another: set distill.temperature, or "
                "write the cache again",
            )
        if vocabulary not in (None, made.vocabulary):
            yield (
                f"the student must have the {made.vocabulary} classes of {self.path}, got {vocabulary}",
                "both must share labels or vocabulary. If only padding differs, write the cache with --vocabulary",
            )
        for name, value in fingerprints.items():
            known = [each for each in self._made_with(name) if each]
            if known and value not in known:
                yield (
                    f"{name} must be the one that {self.path} was written with, got another (fingerprint {value}, not "
                    f"{' or '.join(known)})",
                    "write the cache again",
                )

    def missing(self, inputs: Any) -> Tensor:
        """Return which examples of a batch are not in the store, ``(B,)`` bool; arguments as of `lookup`."""
        found = self._index.find(example_rows(inputs, self.manifest.fields).keys)
        return torch.tensor([place is None for place in found], dtype=torch.bool)

    def lookup(self, inputs: Any) -> CachedTargets:
        """Return the targets of a batch, in its order and its padding.

        Args:
            inputs: What the student is given: a mapping, tuple or tensor with the fields that the store was written
                with, examples first, on any device. What else it holds is ignored.

        Returns:
            Targets of shape ``(B, L)`` with the length ``L`` of the batch, or ``(B,)`` for one output an example, on
            the inputs' device.

        Raises:
            CheckpointError: If an example is not there, telling how many, or the file is damaged.
        """
        rows = example_rows(inputs, self.manifest.fields)
        places = self._index.find(rows.keys)
        lacking = [number for number, place in enumerate(places) if place is None]
        if lacking:
            raise CheckpointError(
                WHERE,
                f"{len(lacking)} of {len(places)} examples of a batch are not in {self.path} (the first is number "
                f"{lacking[0]}): the data set, the tokenizer or the template has changed, or inputs are random",
                "write the cache again from the inputs that the model gets now",
            )
        device = next(iter(tensors_of(inputs).values())).device
        return self._gather(rows, [place for place in places if place is not None], device)

    def _gather(self, rows: ExampleRows, places: list[tuple[int, int]], device: torch.device) -> CachedTargets:
        made = self.manifest
        shards = [self._shard(number) for number, _ in places]
        found = [shard.places_of(row) for shard, (_, row) in zip(shards, places, strict=True)]
        length, offsets = self._layout(rows, [each for each, *_ in found])
        # Pinned memory lets the copies to a GPU run beside the forward.
        shape, pin = (len(places), length), device.type == "cuda"
        is_dense = made.top_k == made.vocabulary
        log_probs = torch.zeros(*shape, made.top_k, dtype=made.torch_dtype, pin_memory=pin)
        # A dense store keeps all classes in their order, and so no numbers of classes.
        indices = torch.zeros(*shape, 1 if is_dense else made.top_k, dtype=torch.int32, pin_memory=pin)
        tail = torch.zeros(shape, dtype=torch.float32, pin_memory=pin)
        mask = torch.zeros(shape, dtype=torch.bool, pin_memory=pin)
        for number, (shard, (_, stored, where)) in enumerate(zip(shards, found, strict=True)):
            # Stored positions count from an example's first; `offsets` is where this batch's padding puts that.
            at = where + offsets[number]
            log_probs.numpy()[number, at] = shard.log_probs[stored]
            tail.numpy()[number, at] = shard.tail[stored]
            mask.numpy()[number, at] = True
            classes = shard.indices_of(stored)
            if classes is not None:
                indices.numpy()[number, at] = classes
        # narrow dtypes cross to the device, wide ones are made there
        there = [value.to(device, non_blocking=pin) for value in (indices, log_probs, tail, mask)]
        targets = _widened(*there, classes=made.top_k if is_dense else None)
        return CachedTargets(*(value[:, 0] for value in targets)) if made.per_example else targets

    def _layout(self, rows: ExampleRows, lengths: list[int]) -> tuple[int, npt.NDArray[np.int64]]:
        """Return the number of positions of the batch and where each example begins."""
        field = self.manifest.positions
        if field is not None:
            padding = rows.paddings[field]
            if (padding.stops - padding.starts).tolist() != lengths:
                raise CheckpointError(WHERE, f"{self.path} has lengths that differ from its keys", "it is damaged")
            return padding.length, padding.starts
        if len(set(lengths)) > 1:
            raise CheckpointError(
                WHERE,
                f"examples of a batch must have outputs of one length, got {sorted(set(lengths))}",
                f"{self.path} was written from batches with other padding: use the same batches",
            )
        return lengths[0] if lengths else 0, np.zeros(len(lengths), dtype=np.int64)

    def _open_shard(self, number: int) -> Shard:
        if not 0 <= number < len(self.manifest.shards):
            raise CheckpointError(WHERE, f"{self.path} has no shard {number}", "its index is damaged")
        return Shard(self.path, self.manifest, number)


def _widened(indices: Tensor, log_probs: Tensor, tail: Tensor, mask: Tensor, *, classes: int | None) -> CachedTargets:
    if classes is not None:
        indices = torch.arange(classes, device=indices.device).expand(*tail.shape, -1)
    exact = log_probs.dtype == torch.float32
    log_probs = log_probs.float()
    # float16 rounds each log-probability; positions without a row hold zeros and must not be rescaled.
    if not exact:
        balanced, tails = normalized(log_probs, tail)
        log_probs = torch.where(mask.unsqueeze(-1), balanced, log_probs)
        tail = torch.where(mask, tails, tail)
    return CachedTargets(indices.long(), log_probs, tail, mask)
