"""Store a state dict in one small file: shared values, entropy-coded; everything else exactly. It restores bit for bit.

Reading does not trust anything that a file declares.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared_core.config.options import checked
from shared_core.errors import CheckpointError, ConfigError, nearest
from shared_core.files.atomic import atomic_write
from shared_core.tools.compressed_file import (
    DTYPES,
    HEADER,
    LARGEST_INDEX,
    MAGIC,
    PIECE,
    VERSION,
    Coding,
    Decoder,
    FileEntry,
    Index,
    TensorEntry,
    check_crc,
    coded_bits,
    damaged,
    encode,
    gap_symbols,
    inflate,
    is_plain_name,
    make_table,
    read_index,
    runs_of_zeros,
    smallest_width,
    weight_places,
)
from shared_core.weight_clustering.clustering import SHARED_DTYPES, SharedValues, check_bits, share_values, wide

__all__ = ["CompressedFile", "Compression", "compress", "decompress"]

MIN_SIZE = 256


@dataclasses.dataclass(frozen=True)
class CompressedTensor:
    """The encoding and size of one stored tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    coding: str
    original_bytes: int
    stored_bytes: int
    """Without its index entry, which counts toward the whole file."""
    weights: int
    """Nonzero elements if values are shared, else all elements."""
    clusters: int
    """Number of shared values; 0: each stored exactly."""
    rms_error: float
    """Root mean squared change per element; 0: exact."""


@dataclasses.dataclass(frozen=True)
class Compression:
    """The result of `compress`. Sizes count every byte."""

    path: Path
    original_bytes: int
    """Bytes of the tensors in their own dtypes, tied ones once."""
    file_bytes: int
    """Bytes of the file: header, index, tensors, other files."""
    other_bytes: int
    """Bytes of the other files in it."""
    seconds: float
    tensors: tuple[CompressedTensor, ...]
    ties: Mapping[str, str]

    @property
    def ratio(self) -> float:
        """Original bytes per byte of the file."""
        return self.original_bytes / self.file_bytes


def compress(
    state_dict: Mapping[str, Tensor],
    path: str | Path,
    *,
    bits: int = 5,
    bits_of: Mapping[str, int | None] | None = None,
    min_size: int = MIN_SIZE,
    files: Mapping[str, bytes] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Compression:
    """Write a state dict to one small file and return its sizes.

    Three stages (Han, Mao and Dally 2016, arXiv:1510.00149). The nonzero weights of a tensor share at most ``2**bits``
    values, found by k-means (`share_values`). If most weights are zero, the gaps between the others are stored instead
    of their positions. Gaps and codes are entropy-coded, with asymmetric numeral systems instead of the paper's Huffman
    code. Zeros stay zeros. A tensor with that few values already, from training with `cluster`, is stored without any
    change.

    Vectors (biases, norms), small tensors, integers, booleans and other dtypes are stored exactly. So are tensors that
    would need more bytes with a table of values. Tied tensors are stored once.

    Args:
        state_dict: Dense tensors by name.
        path: The file to write, atomically; an older one is replaced.
        bits: Bits per code, in [2, 8].
        bits_of: Other bits for tensors or modules of these names (globs), None for exactly. The first match wins. Named
            tensors are compressed whatever their size.
        min_size: Tensors with fewer elements are stored exactly.
        files: Contents of further files, such as a config, by plain name.
        progress: Called with (tensors written, all tensors) after each.

    Raises:
        ConfigError: If an option breaks its rule, or a pattern matches nothing.
        CheckpointError: If an entry is not a dense tensor, or the file cannot be written.
        TrainingError: If a weight to be shared is NaN or infinite.
        MissingExtraError: If constriction is not installed.

    Example:
        >>> import tempfile
        >>> weight = torch.arange(4096.0).reshape(64, 64) % 16
        >>> done = compress({"weight": weight}, Path(tempfile.mkdtemp()) / "model.eff", bits=4)
        >>> done.original_bytes, done.ratio > 5, done.tensors[0].clusters
        (16384, True, 15)
    """
    started = time.perf_counter()
    check_bits(bits, "compress")
    min_size = checked(min_size, int, "compress", "min_size", low=0)
    if not isinstance(state_dict, Mapping):
        rule = f"state_dict must be tensors by name, got {type(state_dict).__name__}"
        raise ConfigError("compress", rule, "pass model.state_dict()")
    tensors, ties = _checked(state_dict)
    widths = _widths(tensors, ties, bits, dict(bits_of or {}), min_size)
    for name, content in (files or {}).items():
        if not is_plain_name(name) or not isinstance(content, bytes):
            rule = f"files must be bytes by plain name, got {type(content).__name__} as {name!r}"
            raise ConfigError("compress", rule)
    entries, lines, other = [], [], []
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        # The header needs the index's position: leave room for it, and write it at the end.
        file.write(bytes(HEADER.size))
        for number, (name, tensor) in enumerate(tensors.items(), 1):
            entry, line = _write_tensor(file, name, tensor, widths[name])
            entries.append(entry)
            lines.append(line)
            if progress is not None:
                progress(number, len(tensors))
        for name, content in (files or {}).items():
            packed = zlib.compress(content, 9)
            file.write(packed)
            other.append(FileEntry(name=name, bytes=len(packed), size=len(content), crc=zlib.crc32(content)))
        offset = file.tell()
        packed, size = Index(tuple(entries), ties, tuple(other)).pack()
        if size > LARGEST_INDEX:
            rule = f"index must be at most {LARGEST_INDEX} bytes, got {size}"
            raise CheckpointError("compress", rule, "shorten names")
        file.write(packed)
        file_bytes = file.tell()
        file.seek(0)
        file.write(HEADER.pack(MAGIC, VERSION, size, offset, len(packed), zlib.crc32(packed)))
    original, others = sum(entry.num_bytes for entry in entries), sum(entry.bytes for entry in other)
    seconds = time.perf_counter() - started
    return Compression(Path(path), original, file_bytes, others, seconds, tuple(lines), ties)


def _checked(state_dict: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors, each once, and further names of them."""
    # hold all at once, because ties are found by the addresses of living tensors
    given = dict(state_dict)
    if not given:
        raise CheckpointError("compress", "state dict must hold at least one tensor, got none", "check the path")
    owners: dict[Any, str] = {}
    tensors, ties = {}, {}
    for name, tensor in given.items():
        dtype, kind = str(getattr(tensor, "dtype", "")).removeprefix("torch."), ""
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
        elif hasattr(tensor, "to_local"):
            kind = "sharded"
        elif tensor.is_meta or tensor.layout != torch.strided or dtype not in DTYPES:
            kind = f"{tensor.layout}, {tensor.dtype} on {tensor.device}"
        if kind:
            rule = f"{name} must be a plain dense tensor, got {kind}"
            raise CheckpointError("compress", rule, "gather or convert it, or leave it out")
        key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), dtype) if tensor.numel() else name
        owner = owners.setdefault(key, name)
        if owner == name:
            tensors[name] = tensor.detach()
        else:
            ties[name] = owner
    return tensors, ties


def _widths(
    tensors: Mapping[str, Tensor], ties: Mapping[str, str], bits: int, bits_of: Mapping[str, int | None], min_size: int
) -> dict[str, int | None]:
    """Return the bits of each tensor, None if it is stored exactly."""
    for pattern, width in bits_of.items():
        if width is not None:
            check_bits(width, f"compress: bits_of {pattern!r}")
        if not any(_matches(name, pattern) for name in (*tensors, *ties)):
            raise ConfigError("compress", f"bits_of pattern {pattern!r} matches no tensor{nearest(pattern, tensors)}")
    widths: dict[str, int | None] = {}
    for name, tensor in tensors.items():
        # Only matrices by default: biases and norms are small and sensitive.
        is_matrix = tensor.ndim > 1 and tensor.numel() >= min_size
        names = [name, *(tied for tied, owner in ties.items() if owner == name)]
        named = (width for pattern, width in bits_of.items() if any(_matches(one, pattern) for one in names))
        width = next(named, bits if is_matrix else None)
        widths[name] = width if tensor.dtype in SHARED_DTYPES else None
    return widths


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name.rpartition(".")[0], pattern)


def _write_tensor(file: BinaryIO, name: str, tensor: Tensor, bits: int | None) -> tuple[TensorEntry, CompressedTensor]:
    raw = _tensor_bytes(tensor)
    payload, restored = raw, raw
    coding: Coding = "raw"
    fields: dict[str, int] = {}
    weights, clusters, error = tensor.numel(), 0, 0.0
    shared = None if bits is None else share_values(tensor, bits, name=f"compress: {name}")
    coded = None if shared is None else _code(shared)
    # An exact tensor is deflated if that helps: it hardly does for weights, but much for buffers and indices.
    if shared is None and len(deflated := zlib.compress(raw, 9)) < len(raw):
        payload, coding = deflated, "deflate"
    # a tensor of few weights may need more bytes with a table of values
    elif shared is not None and coded is not None and len(coded[0]) < len(raw):
        payload, coding, fields = coded
        # The CRC covers what a reader restores: the shared values, not the originals.
        weight = shared.weight()
        restored, clusters = _tensor_bytes(weight), len(shared.values)
        error = float(np.sqrt(np.mean(np.square(wide(tensor) - wide(weight), dtype=np.float64))))
        weights = int(shared.codes.count_nonzero())
    file.write(payload)
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    entry = TensorEntry(
        name=name, dtype=dtype, shape=shape, coding=coding, bytes=len(payload), crc=zlib.crc32(restored), **fields
    )
    return entry, CompressedTensor(name, dtype, shape, coding, len(raw), len(payload), weights, clusters, error)


def _code(shared: SharedValues) -> tuple[bytes, Coding, dict[str, int]]:
    """Return the smaller payload of a tensor with shared values, sparse or dense, and its fields."""
    codes: NDArray[np.integer] = shared.codes.reshape(-1).numpy()
    # Slot 0 counts zeros.
    counts = np.bincount(codes, minlength=len(shared.values) + 1)
    has_zeros = bool(counts[0])
    alphabet = counts if has_zeros else counts[1:]
    # Dense: one symbol per element. Zero is one more shared value.
    dense_bits = coded_bits(alphabet) + 8 * shared.values.element_size()
    if has_zeros:
        live = codes != 0
        runs = runs_of_zeros(live)
        width, gap_bits = smallest_width(runs)
        # Sparse: gaps and values separately. Chosen by coded size, table included.
        if gap_bits + coded_bits(counts[1:]) < dense_bits:
            gaps, numbers = gap_symbols(runs, width), codes[live] - 1
            tables = make_table(numbers, len(shared.values)), make_table(gaps, 2**width)
            # Gaps are decoded first: positions are needed before values.
            coded = encode([(gaps, tables[1]), (numbers, tables[0])])
            sizes = {"values": len(shared.values), "weights": len(numbers), "gaps": len(gaps), "gap_bits": width}
            return b"".join([_tensor_bytes(shared.values), *tables, coded]), "sparse", sizes
    # In the dense form 0.0 is one of the values.
    values = torch.cat([shared.values.new_zeros(int(has_zeros)), shared.values])
    symbols = codes if has_zeros else codes - 1
    table = make_table(symbols, len(alphabet))
    return (
        b"".join([_tensor_bytes(values), table, encode([(symbols, table)])]), "dense", {"values": len(values)}
    )  # fmt: skip


def _tensor_bytes(tensor: Tensor) -> bytes:
    """Return a tensor's elements in order, as little-endian bytes."""
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class CompressedFile:
    """A compressed model on disk, read one tensor at a time. The index is read and checked at construction.

    Args:
        path: A file that `compress` wrote.
        max_bytes: Most bytes that it may restore to; by default 64 MiB and a thousand times the file.

    Raises:
        CheckpointError: If it is missing, damaged, of a newer format, or declares more than `max_bytes`.
    """

    def __init__(self, path: str | Path, *, max_bytes: int | None = None) -> None:
        self.path = Path(path)
        with self._open() as file:
            self.index = read_index(file, self.path, max_bytes)
        offset = HEADER.size
        self._offsets: list[int] = []
        # Payloads are contiguous: offsets follow from their lengths and are not stored.
        for entry in self.index.payloads():
            self._offsets.append(offset)
            offset += entry.bytes

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors, each tensor once, in the order of the state dict that was compressed."""
        with self._open() as file:
            for number, entry in enumerate(self.index.tensors):
                yield entry.name, self._tensor(file, self._offsets[number], entry)

    def files(self) -> dict[str, bytes]:
        """Return the contents of the other files, by name."""
        found = {}
        with self._open() as file:
            for number, entry in enumerate(self.index.files, start=len(self.index.tensors)):
                file.seek(self._offsets[number])
                with self._whole(entry):
                    content = inflate(file.read(entry.bytes), entry.size)
                    check_crc(content, entry.crc)
                found[entry.name] = content
        return found

    @contextlib.contextmanager
    def _whole(self, entry: TensorEntry | FileEntry) -> Iterator[None]:
        try:
            yield
        except (zlib.error, ValueError, RuntimeError) as error:
            raise damaged(self.path, f"must hold {entry.name} whole", str(error)) from error

    def _open(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except OSError as error:
            raise CheckpointError("decompress", f"{self.path} must be a readable file, got {error}") from error

    def _tensor(self, file: BinaryIO, offset: int, entry: TensorEntry) -> Tensor:
        file.seek(offset)
        with self._whole(entry):
            tensor = _restored(file.read(entry.bytes), entry)
            # A checksum of the restored bytes guards the decoder as well as the file.
            check_crc(_tensor_bytes(tensor), entry.crc)
        return tensor


def decompress(path: str | Path, *, max_bytes: int | None = None) -> dict[str, Tensor]:
    """Return the state dict in a compressed file: names, shapes, dtypes and every bit as stored.

    Tensors are on the CPU. Tied ones are one tensor under several names. Names are in the order of the file, ties after
    their original.

    Args:
        path: A file that `compress` wrote.
        max_bytes: Most bytes that it may restore to, so that a small hostile file cannot fill the memory; by default
            64 MiB and a thousand times the file.

    Raises:
        CheckpointError: If it is missing, damaged, of a newer format, or declares more than `max_bytes`.
        MissingExtraError: If constriction is not installed.

    Example:
        >>> import tempfile

        >>> path = Path(tempfile.mkdtemp()) / "model.eff"
        >>> done = compress({"bias": torch.tensor([0.1, 0.2])}, path)
        >>> decompress(path)
        {'bias': tensor([0.1000, 0.2000])}
    """
    file = CompressedFile(path, max_bytes=max_bytes)
    tensors = dict(file.tensors())
    return {**tensors, **{name: tensors[owner] for name, owner in file.index.ties.items()}}


def _restored(payload: bytes, entry: TensorEntry) -> Tensor:
    dtype = DTYPES[entry.dtype]
    if entry.coding in ("raw", "deflate"):
        content = payload if entry.coding == "raw" else inflate(payload, entry.num_bytes)
        return _from_bytes(content, dtype).reshape(entry.shape)
    # The payload: shared values, a byte of the table for each, for sparse ones the table of gaps, then the ANS words.
    size = entry.values * dtype.itemsize
    values = _from_bytes(payload[:size], dtype)
    table = payload[size : size + entry.values]
    rest = payload[size + entry.values :]
    # Zeros: only a sparse tensor's weights are written.
    flat = torch.zeros(entry.numel, dtype=dtype)
    if entry.coding == "dense":
        decoder = Decoder(rest)
        _fill(flat, values, table, decoder)
    else:
        decoder = Decoder(rest[2**entry.gap_bits :])
        # Gaps were encoded last, so they come first.
        places = _places(entry, rest[: 2**entry.gap_bits], decoder)
        found = torch.empty(len(places), dtype=dtype)
        _fill(found, values, table, decoder)
        flat[torch.from_numpy(places)] = found
    if not decoder.is_empty():
        raise ValueError("symbols are left over")
    return flat.view(entry.shape)


def _places(entry: TensorEntry, table: bytes, decoder: Decoder) -> NDArray[np.int64]:
    model = decoder.model(table) if entry.gaps else None
    # Where the next run begins, across pieces.
    following = 0
    pieces = [np.empty(0, dtype=np.int64)]
    for first in range(0, entry.gaps, PIECE):
        symbols = decoder.take(min(PIECE, entry.gaps - first), model)
        places, following = weight_places(symbols, entry.gap_bits, following)
        pieces.append(places)
        # Checked per piece: a damaged stream must not make indices beyond the tensor.
        if following > entry.numel or sum(map(len, pieces)) > entry.weights:
            break
    found = np.concatenate(pieces)
    if following > entry.numel or len(found) != entry.weights:
        raise ValueError(f"gaps do not describe {entry.weights} weights within {entry.numel} elements")
    return found


def _fill(target: Tensor, values: Tensor, table: bytes, decoder: Decoder) -> None:
    model = decoder.model(table) if len(target) else None
    for first in range(0, len(target), PIECE):
        piece = target[first : first + PIECE]
        piece.copy_(values[torch.from_numpy(decoder.take(len(piece), model))])


def _from_bytes(content: bytes, dtype: torch.dtype) -> Tensor:
    if not content:
        return torch.empty(0, dtype=dtype)
    # bytearray: frombuffer of bytes would give a read-only tensor.
    raw = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    # A byte of 2 as a bool is undefined in torch.
    if dtype == torch.bool and int(raw.max()) > 1:
        raise ValueError("booleans must be 0 or 1")
    return raw.view(dtype)
