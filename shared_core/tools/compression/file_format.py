"""The file that holds a compressed model: a header of 32 bytes, the payloads of tensors and files, an index.

All numbers are little-endian. The index is JSON, deflated: a list of tensors in the order of their payloads, further
names of tied tensors, and files such as a config. Nothing in it is taken on trust: `read_index` checks every field
against the others and against the length of the file before anything of a declared size is allocated.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import torch

from shared_core.errors import CheckpointError
from shared_core.files.json_yaml import parse_json

MAGIC = b"\x89EFF\r\n\x1a\n"  # as PNG's: shows a file that was mangled as text
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

    `coding` is ``raw`` or ``deflate`` (its bytes), ``dense`` (values, then a code of each element) or ``sparse``
    (values, then gaps between nonzero weights and their codes).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    coding: Coding
    bytes: int
    """Of its payload."""
    crc: int
    """CRC-32 of its bytes when restored."""
    values: int = 0
    """Shared values, in the tensor's dtype, at the start of the payload."""
    weights: int = 0
    """Nonzero weights of a sparse one."""
    gaps: int = 0
    """Gap symbols of a sparse one."""
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
    """Further names of a tensor, each with the name that it is stored under."""
    files: tuple[FileEntry, ...]

    def payloads(self) -> tuple[TensorEntry | FileEntry, ...]:
        """Return everything that has a payload, in order."""
        return (*self.tensors, *self.files)

    def pack(self) -> tuple[bytes, int]:
        """Return the index as it is written, and its length inflated."""
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
    """Return what a compressed file holds, every field checked.

    Args:
        file: Open for reading.
        path: For errors.
        max_bytes: Most bytes that may come out of it; by default 64 MiB and a thousand times the file.
    """
    length = file.seek(0, 2)
    file.seek(0)
    head = file.read(HEADER.size)
    # The magic says that it is such a file, before any number in it is believed.
    if len(head) < HEADER.size or head[: len(MAGIC)] != MAGIC:
        raise damaged(path, "must begin as a file of `eff compress` does", repr(head[: len(MAGIC)]))
    _, version, size, offset, packed, crc = HEADER.unpack(head)
    if version != VERSION:
        raise CheckpointError(
            "decompress", f"{path} must have format {VERSION}, got {version}", "update efftrain to read this file"
        )
    # The index ends the file: nothing is behind it, and its length is bounded before it is inflated.
    if offset < HEADER.size or offset + packed != length or not 0 < size <= LARGEST_INDEX:
        raise damaged(path, "must hold its index at its end", f"{packed} bytes at {offset} of {length}")
    file.seek(offset)
    content = file.read(packed)
    if zlib.crc32(content) != crc:
        raise damaged(path, "must hold an index with its CRC", f"another than {crc}")
    try:
        values = parse_json(inflate(content, size))
        index = Index(
            tuple(_tensor_entry(item) for item in values.get("tensors", [])),
            {str(key): str(value) for key, value in values.get("ties", {}).items()},
            tuple(_file_entry(item) for item in values.get("files", [])),
        )
        _check(index, offset - HEADER.size)
    except (ValueError, TypeError, KeyError, AttributeError, zlib.error) as error:
        raise damaged(path, "must hold a consistent index", f"{error}") from error
    # What it would restore to, before any memory is taken: a small file may claim petabytes.
    total = sum(entry.num_bytes for entry in index.tensors) + sum(entry.size for entry in index.files)
    limit = FREE_BYTES + FREE_RATIO * length if max_bytes is None else max_bytes
    if total > limit:
        raise CheckpointError(
            "decompress",
            f"{path} must restore to at most {limit} bytes, got {total} declared by a file of {length}",
            "if you trust it, pass max_bytes (eff decompress: --max-bytes)",
        )
    return index


def damaged(path: Path, rule: str, got: str) -> CheckpointError:
    """Return the error for a file that breaks a rule of the format."""
    return CheckpointError(
        "decompress", f"{path} {rule}, got {got}", "the file is damaged or was not written by efftrain"
    )


def inflate(data: bytes, size: int) -> bytes:
    """Return `size` bytes that were deflated; never holds more."""
    engine = zlib.decompressobj()
    # size + 1: one byte more than allowed is enough to refuse, and no more is ever inflated.
    content = engine.decompress(data, size + 1)
    if len(content) != size or not engine.eof or engine.unused_data:
        raise ValueError(f"deflated data must be {size} bytes, got another length")
    return content


def _tensor_entry(values: Mapping[str, Any]) -> TensorEntry:
    entry = TensorEntry(**{**values, "shape": tuple(values["shape"])})
    if len(entry.shape) > 64 or not 0 <= entry.gap_bits <= 8:  # before anything is computed from them
        raise ValueError(f"{entry.name!r} has {len(entry.shape)} dimensions and gaps of {entry.gap_bits} bits")
    numbers = (entry.bytes, entry.crc, entry.values, entry.weights, entry.gaps, entry.gap_bits, *entry.shape)
    if not isinstance(entry.name, str) or entry.dtype not in DTYPES or entry.coding not in CODINGS:
        raise ValueError(f"{entry.name!r} has dtype {entry.dtype!r} and coding {entry.coding!r}")
    _check_numbers(entry.name, numbers)
    # Each coding's fields must be possible together, so that a reader allocates what a payload can hold.
    dtype, count = DTYPES[entry.dtype], entry.numel
    holds = True
    if entry.coding == "raw":
        holds = entry.bytes == entry.num_bytes
    elif entry.coding in ("dense", "sparse"):
        holds &= dtype.is_floating_point and dtype.itemsize > 1 and entry.values <= 257
        holds &= entry.bytes >= entry.values * (dtype.itemsize + 1)
        holds &= entry.values > 0 or count == 0 or entry.coding == "sparse"
    if entry.coding == "sparse":
        filler = 2**entry.gap_bits - 1
        holds &= entry.gap_bits >= 1 and entry.weights <= count and (entry.values > 0 or not entry.weights)
        # Each weight has one symbol; each filler stands for 2^b - 1 elements.
        holds &= entry.weights <= entry.gaps <= entry.weights + count // max(filler, 1)
        holds &= entry.bytes >= entry.values * (dtype.itemsize + 1) + filler + 1
    if not holds:
        raise ValueError(f"the fields of {entry.name!r} contradict each other")
    return entry


def _file_entry(values: Mapping[str, Any]) -> FileEntry:
    entry = FileEntry(**values)
    name = entry.name
    if not isinstance(name, str) or not is_plain_name(name):
        raise ValueError(f"{name!r} is no plain file name")
    _check_numbers(name, (entry.bytes, entry.size, entry.crc))
    return entry


def is_plain_name(name: str) -> bool:
    """Return whether a file name stays in the folder that it is put into.

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


def _check_numbers(name: str, numbers: tuple[Any, ...]) -> None:
    if any(isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**63 for number in numbers):
        raise ValueError(f"{name!r} has a number out of range among {numbers}")


def _check(index: Index, payload: int) -> None:
    names = [entry.name for entry in index.tensors]
    if len({*names, *index.ties}) != len(names) + len(index.ties):
        raise ValueError("two tensors have one name")
    if len({entry.name for entry in index.files}) != len(index.files):
        raise ValueError("two files have one name")
    if not set(index.ties.values()) <= set(names):
        raise ValueError("a tied tensor has no owner")
    declared = sum(entry.bytes for entry in index.payloads())
    if declared != payload:
        raise ValueError(f"{declared} bytes declared where there are {payload}")
