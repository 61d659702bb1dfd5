"""The file of a compressed model: a header of 32 bytes, the payloads of tensors and files, an index.

All numbers are little-endian. The index is deflated JSON: a list of tensors in payload order, additional
names of tied tensors, and files such as a config. It is not trusted: `read_index` checks every field
against the others and the file's length before it allocates memory of a declared size.

Symbols are entropy-coded with constriction's ANS coder, with tables of one byte per symbol.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from shared_core.errors import CheckpointError
from shared_core.files.json_yaml import parse_json
from shared_core.libraries import optional

MAGIC = b"\x89EFF\r\n\x1a\n"  # like PNG's: detects a file that was converted as text
VERSION = 1
HEADER = struct.Struct("<8sIIQII")  # magic, version, bytes of the index inflated, its offset, its length, its CRC-32
LARGEST_INDEX = 1 << 24
FREE_BYTES, FREE_RATIO = 1 << 26, 1000

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool,
        torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
        torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    )
}  # fmt: skip
Coding = Literal["raw", "deflate", "dense", "sparse"]
CODINGS = get_args(Coding)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """The index's entry of a tensor.

    `coding` is ``raw`` or ``deflate`` (its bytes), ``dense`` (values, then one code per element) or ``sparse``
    (values, then gaps between nonzero weights and their codes).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    coding: Coding
    bytes: int
    """Bytes of its payload."""
    crc: int
    """CRC-32 of its restored bytes."""
    values: int = 0
    """Shared values, in the tensor's dtype, at the start of the payload."""
    weights: int = 0
    """Nonzero weights of a sparse one."""
    gaps: int = 0
    """Number of gap symbols of a sparse tensor."""
    gap_bits: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes when restored."""
        return self.numel * DTYPES[self.dtype].itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileEntry:
    """The index's entry of a file: deflated, `size` bytes when restored, with their CRC-32."""

    name: str
    bytes: int
    size: int
    crc: int


@dataclasses.dataclass(frozen=True)
class Index:
    """The contents of a compressed file, in the order of the payloads: tensors, then files."""

    tensors: tuple[TensorEntry, ...]
    ties: Mapping[str, str]
    """Additional names of tensors, each with the name that it is stored under."""
    files: tuple[FileEntry, ...]

    def payloads(self) -> tuple[TensorEntry | FileEntry, ...]:
        """Return everything that has a payload, in order."""
        return (*self.tensors, *self.files)

    def pack(self) -> tuple[bytes, int]:
        """Return the index as written, and its inflated length."""
        defaults = {field.name: field.default for field in dataclasses.fields(TensorEntry)}
        content = {
            "tensors": [
                # Defaults are left out: most tensors have few fields, and the index is read by name.
                {key: value for key, value in dataclasses.asdict(entry).items() if value != defaults[key]}
                for entry in self.tensors
            ],
            "ties": dict(self.ties),
            "files": [dataclasses.asdict(entry) for entry in self.files],
        }
        text = json.dumps({key: value for key, value in content.items() if value}, separators=(",", ":")).encode()
        return zlib.compress(text, 9), len(text)


def read_index(file: BinaryIO, path: Path, max_bytes: int | None = None) -> Index:
    """Read a compressed file's index and check every field."""
    length = file.seek(0, 2)
    file.seek(0)
    head = file.read(HEADER.size)
    # The magic identifies the file before any number in it is used.
    if len(head) < HEADER.size or head[: len(MAGIC)] != MAGIC:
        raise damaged(path, "must start like a file that `eff compress` wrote", repr(head[: len(MAGIC)]))
    _, version, size, offset, packed, crc = HEADER.unpack(head)
    if version != VERSION:
        rule = f"{path} must have format {VERSION}, got {version}"
        raise CheckpointError("decompress", rule, "update efftrain to read this file")
    # The index ends the file: nothing follows it, and its length is bounded before it is inflated.
    if offset < HEADER.size or offset + packed != length or not 0 < size <= LARGEST_INDEX:
        raise damaged(path, "must hold its index at its end", f"{packed} bytes at {offset} of {length}")
    file.seek(offset)
    content = file.read(packed)
    try:
        check_crc(content, crc)
        values = parse_json(inflate(content, size))
        index = Index(
            tuple(TensorEntry(**{**item, "shape": tuple(item["shape"])}) for item in values.get("tensors", [])),
            {str(key): str(value) for key, value in values.get("ties", {}).items()},
            tuple(FileEntry(**item) for item in values.get("files", [])),
        )
        if fault := next(_faults(index, offset - HEADER.size), None):
            raise ValueError(fault)
    except (ValueError, TypeError, KeyError, AttributeError, zlib.error) as error:
        raise damaged(path, "must hold a consistent index", f"{error}") from error
    # Check the restored size before allocating memory: a small file may claim petabytes.
    total = sum(entry.num_bytes for entry in index.tensors) + sum(entry.size for entry in index.files)
    limit = FREE_BYTES + FREE_RATIO * length if max_bytes is None else max_bytes
    if total > limit:
        rule = f"{path} ({length} bytes) must restore to at most {limit} bytes, but declares {total}"
        raise CheckpointError("decompress", rule, "if you trust it, pass max_bytes (eff decompress: --max-bytes)")
    return index


def damaged(path: Path, rule: str, got: str) -> CheckpointError:
    """Return the error for a file that breaks a rule of the format."""
    remedy = "the file is damaged or was not written by efftrain"
    return CheckpointError("decompress", f"{path} {rule}, got {got}", remedy)


def check_crc(content: bytes, crc: int) -> None:
    """Raise an error if bytes do not have their checksum."""
    if zlib.crc32(content) != crc:
        raise ValueError(f"checksum differs from {crc}")


def inflate(data: bytes, size: int) -> bytes:
    """Inflate data to exactly `size` bytes, never holding more."""
    engine = zlib.decompressobj()
    # size + 1: one extra byte is enough to reject, and no more is ever inflated.
    content = engine.decompress(data, size + 1)
    if len(content) != size or not engine.eof or engine.unused_data:
        raise ValueError(f"deflated data must be {size} bytes, got another length")
    return content


def _faults(index: Index, payload: int) -> Iterator[str]:
    """Yield the rules that an index breaks, each before dependent values are computed."""
    for entry in index.payloads():
        yield from _faults_of(entry)
    names = [entry.name for entry in index.tensors]
    if len({*names, *index.ties}) != len(names) + len(index.ties):
        yield "two tensors have one name"
    if len({entry.name for entry in index.files}) != len(index.files):
        yield "two files have one name"
    if not set(index.ties.values()) <= set(names):
        yield "a tied tensor has no owner"
    if (declared := sum(entry.bytes for entry in index.payloads())) != payload:
        yield f"{declared} bytes declared, but there are {payload}"


def _faults_of(entry: TensorEntry | FileEntry) -> Iterator[str]:
    numbers: tuple[Any, ...]
    if isinstance(entry, FileEntry):
        numbers, known = (entry.bytes, entry.size, entry.crc), isinstance(entry.name, str) and is_plain_name(entry.name)
    else:
        if len(entry.shape) > 64 or not 0 <= entry.gap_bits <= 8:  # before anything is computed from them
            yield f"{entry.name!r} has {len(entry.shape)} dimensions and gaps of {entry.gap_bits} bits"
        numbers = (entry.bytes, entry.crc, entry.values, entry.weights, entry.gaps, entry.gap_bits, *entry.shape)
        known = isinstance(entry.name, str) and entry.dtype in DTYPES and entry.coding in CODINGS
    if not known or any(type(number) is not int or not 0 <= number < 2**63 for number in numbers):
        yield f"{entry} has an invalid name, dtype or coding, or a number out of range"
        # Each coding's fields must be consistent, so that a reader allocates only what a payload can hold.
    if isinstance(entry, TensorEntry) and not _holds(entry):
        yield f"the fields of {entry.name!r} contradict each other"


def _holds(entry: TensorEntry) -> bool:
    if entry.coding in ("raw", "deflate"):
        return entry.coding == "deflate" or entry.bytes == entry.num_bytes
    dtype, count = DTYPES[entry.dtype], entry.numel
    table = entry.values * (dtype.itemsize + 1)
    if not (dtype.is_floating_point and dtype.itemsize > 1 and entry.values <= 257 and entry.bytes >= table):
        return False
    if entry.coding == "dense":
        return entry.values > 0 or count == 0
    filler = 2**entry.gap_bits - 1
    fits = entry.gap_bits >= 1 and entry.weights <= count and (entry.values > 0 or not entry.weights)
    # Each weight has one symbol; each filler represents 2^b - 1 elements.
    fits &= entry.weights <= entry.gaps <= entry.weights + count // max(filler, 1)
    return bool(fits and entry.bytes >= table + filler + 1)


def is_plain_name(name: str) -> bool:
    """Return True if a file name stays within its folder.

    Example:
        >>> is_plain_name("config.json"), is_plain_name("../config.json"), is_plain_name(".bashrc")
        (True, False, False)
    """
    return (
        bool(name)
        and not name.startswith(".")
        and len(name) <= 200
        and name.isprintable()
        and not set(name) & set("/\\:")
    )


PIECE = 1 << 20
# 2^16 · 2^(i/8), as whole numbers: machines may disagree in the last digit of a power
_EIGHTHS = (65536, 71468, 77936, 84990, 92682, 101070, 110218, 120194)


def coded_bits(counts: NDArray[np.integer]) -> float:
    """Return the bits for symbols with these counts, plus their table: ``Σ n_i log2(N / n_i) + 8`` per symbol.

    Example:
        >>> coded_bits(np.array([4, 4]))
        24.0
    """
    positive = counts[counts > 0].astype(np.float64)
    total = positive.sum()
    return float((positive * np.log2(total / positive)).sum()) + 8 * len(counts) if len(positive) else 8 * len(counts)


def make_table(symbols: NDArray[np.integer], size: int) -> bytes:
    """Return how often each of `size` symbols occurs, one byte each: 0 for never, else ``1 + round(8 log2(n))``.

    Steps of 9 % cost less than a thousandth of a bit per symbol, and the table is a quarter the size of one of counts.

    Example:
        >>> list(make_table(np.array([0, 0, 0, 0, 2]), 3))
        [17, 0, 1]
    """
    counts = np.bincount(symbols, minlength=size)
    # A logarithm in eighths of an octave: counts are off by at most 4 %, about 0.001 bits per symbol, and 255 means
    # 2^31.
    return bytes(min(255, 1 + round(8 * math.log2(count))) if count else 0 for count in counts.tolist())


def encode(streams: Sequence[tuple[NDArray[np.integer], bytes]]) -> bytes:
    """Return streams of symbols, each with its table, as one byte string. The first is decoded first."""
    library = optional("constriction", "compress", "compress")
    coder = library.stream.stack.AnsCoder()  # a stack: the last symbol encoded is decoded first
    # Last stream first, and each from its last piece to its first, so that the decoder gets the first symbol first.
    for symbols, table in reversed(streams):
        model = _model(library, table) if len(symbols) else None
        if model is None:
            continue
        # In pieces, to avoid int32 copies of a large tensor at once.
        for first in range((len(symbols) - 1) // PIECE * PIECE, -1, -PIECE):
            coder.encode_reverse(symbols[first : first + PIECE].astype(np.int32), model)
    words: bytes = coder.get_compressed().astype("<u4").tobytes()
    return words


class Decoder:
    """Decodes symbols from the result of `encode`, in the order in which they were encoded.

    Any bytes decode to some symbols, so damage is not detected here. No more memory is used than requested.
    """

    def __init__(self, data: bytes) -> None:
        self._library = optional("constriction", "compress", "compress")
        # ANS never ends in a zero word, so such data is invalid.
        if len(data) % 4 or data[-4:] == b"\0\0\0\0":
            raise ValueError(f"coded symbols must be whole words, the last not 0, got {len(data)} bytes")
        words = np.frombuffer(data, dtype="<u4").astype(np.uint32)
        self._coder = self._library.stream.stack.AnsCoder(words)

    def model(self, table: bytes) -> Any:
        """Return the distribution of a stream, for `take`."""
        return _model(self._library, table)

    def take(self, count: int, model: Any) -> NDArray[np.int32]:
        """Return the next `count` symbols of a stream, int32."""
        # A single symbol needs no bits.
        if model is None:
            return np.zeros(count, dtype=np.int32)
        symbols: NDArray[np.int32] = self._coder.decode(model, count)
        return symbols

    def is_empty(self) -> bool:
        """Return True if nothing is left, as required at the end."""
        return bool(self._coder.is_empty())


def _model(library: Any, table: bytes) -> Any:
    """Return the distribution of a table; None for a single symbol, which needs no bits."""
    if len(table) < 2:
        return None
    weights = [_EIGHTHS[(byte - 1) % 8] * 2.0 ** ((byte - 1) // 8) if byte else 0.0 for byte in table]
    if not any(weights):
        raise ValueError("the table of symbols is empty")
        # perfect=False is the library's stable rounding: sums and products of float64, the same on every machine
    return library.stream.model.Categorical(np.array(weights), perfect=False)


WIDTHS = range(1, 9)
"""Possible bits of a gap; the paper uses 8 for convolutions and 5 for fully connected layers."""

Ints = NDArray[np.integer]


def runs_of_zeros(live: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the number of zeros before each nonzero weight. Those after the last one are not included.

    Example:
        >>> runs_of_zeros(np.array([False, True, True, False, False, True, False])).tolist()
        [1, 0, 2]
    """
    places = np.flatnonzero(live).astype(np.int64)
    # prepend -1: the zeros before the first weight are places[0] - (-1) - 1.
    return np.diff(places, prepend=-1) - 1


def gap_symbols(runs: Ints, bits: int) -> NDArray[np.uint8]:
    """Return runs of zeros as symbols of `bits` bits: ``s < 2**bits - 1`` is s zeros and a weight.

    The largest symbol is as many zeros as its value and no weight: the paper's filler zero, which needs no value code
    here (Han, Mao and Dally 2016, arXiv:1510.00149, figure 2).

    Example:
        >>> gap_symbols(np.array([1, 0, 9]), 2).tolist()
        [1, 0, 3, 3, 3, 0]
    """
    filler = 2**bits - 1
    # The relative index of Deep Compression (Han et al. 2016, arXiv:1510.00149, figure 2): a run of at least 2^b - 1
    # zeros has fillers, each 2^b - 1 zeros without a weight, and a last symbol: runs // filler + 1 symbols per run.
    ends = np.cumsum(runs // filler + 1)
    symbols = np.full(int(ends[-1]) if len(runs) else 0, filler, dtype=np.uint8)
    symbols[ends - 1] = runs % filler
    return symbols


def weight_places(symbols: Ints, bits: int, start: int) -> tuple[NDArray[np.int64], int]:
    """Return the flat indices of the weights that gap symbols describe, and the start for the next symbols.

    Example:
        >>> places, following = weight_places(np.array([1, 0, 3, 3, 3, 0]), 2, start=0)
        >>> places.tolist(), following
        ([1, 2, 12], 13)
    """
    has_weight = symbols != 2**bits - 1
    # A symbol s < filler skips s zeros and adds a weight; a filler skips 2^b - 1 zeros.
    after = start + np.cumsum(symbols.astype(np.int64) + has_weight)
    return after[has_weight] - 1, int(after[-1]) if len(after) else start


def smallest_width(runs: Ints) -> tuple[int, float]:
    """Return the gap width with the fewest coded bits, including the symbol table, and those bits.

    Example:
        >>> smallest_width(np.full(1000, 2))[0]
        2
    """
    # There are few widths, so try each: the best one depends on the whole distribution of runs.
    cost = {bits: _gap_bits(runs, bits) for bits in WIDTHS}
    best = min(cost, key=lambda bits: cost[bits])
    return best, cost[best]


def _gap_bits(runs: Ints, bits: int) -> float:
    filler = 2**bits - 1
    # The symbols of `gap_symbols`, counted without creating them.
    counts = np.bincount(runs % filler, minlength=filler + 1)
    counts[filler] = int((runs // filler).sum())
    return coded_bits(counts)
