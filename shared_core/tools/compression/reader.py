"""Read what `compress` wrote, bit for bit as it was clustered, trusting nothing that the file declares."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared_core.errors import CheckpointError
from shared_core.tools.compression import coding as entropy
from shared_core.tools.compression.coding import weight_places
from shared_core.tools.compression.file_format import DTYPES, HEADER, TensorEntry, damaged, inflate, read_index
from shared_core.tools.compression.writer import tensor_bytes


class CompressedFile:
    """A compressed model on disk, read one tensor at a time. The index is read and checked when it is made.

    Args:
        path: A file that `compress` wrote.
        max_bytes: Most bytes that may come out of it; by default 64 MiB and a thousand times the file.

    Raises:
        CheckpointError: If it is missing, damaged, of a newer format, or declares more than `max_bytes`.
    """

    def __init__(self, path: str | Path, *, max_bytes: int | None = None) -> None:
        self.path = Path(path)
        with self._open() as file:
            self.index = read_index(file, self.path, max_bytes)
        offset = HEADER.size
        self._offsets: list[int] = []
        # Payloads lie one after another: offsets follow from their lengths, and are not told in the file.
        for entry in self.index.payloads():
            self._offsets.append(offset)
            offset += entry.bytes

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors, each tensor once, in the order of the state dict that was compressed.

        Raises:
            CheckpointError: If a payload is damaged.
        """
        with self._open() as file:
            for number, entry in enumerate(self.index.tensors):
                yield entry.name, self._tensor(file, self._offsets[number], entry)

    def files(self) -> dict[str, bytes]:
        """Return the contents of the other files, by name.

        Raises:
            CheckpointError: If one is damaged.
        """
        found = {}
        with self._open() as file:
            for number, entry in enumerate(self.index.files, start=len(self.index.tensors)):
                file.seek(self._offsets[number])
                try:
                    content = inflate(file.read(entry.bytes), entry.size)
                except (zlib.error, ValueError) as error:
                    raise damaged(self.path, f"must hold {entry.name} whole", str(error)) from error
                if zlib.crc32(content) != entry.crc:
                    raise damaged(self.path, f"must hold {entry.name} with its CRC", "another")
                found[entry.name] = content
        return found

    def _open(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except OSError as error:
            raise CheckpointError("decompress", f"{self.path} must be a readable file, got {error}") from error

    def _tensor(self, file: BinaryIO, offset: int, entry: TensorEntry) -> Tensor:
        file.seek(offset)
        payload = file.read(entry.bytes)
        try:
            tensor = _restored(payload, entry)
        except (zlib.error, ValueError, RuntimeError) as error:
            raise damaged(self.path, f"must hold {entry.name} whole", str(error)) from error
        # Of the restored bytes: it guards the decoder as well as the file.
        if zlib.crc32(tensor_bytes(tensor)) != entry.crc:
            raise damaged(self.path, f"must hold {entry.name} with its CRC", "another")
        return tensor


def decompress(path: str | Path, *, max_bytes: int | None = None) -> dict[str, Tensor]:
    """Return the state dict in a compressed file: names, shapes, dtypes and every bit as they were stored.

    Tensors lie on CPU; tied ones are one tensor under several names. The names come in the order of the file, ties
    after what they are tied to.

    Args:
        path: A file that `compress` wrote.
        max_bytes: Most bytes that may come out of it, so that a small hostile file cannot fill the memory; by default
            64 MiB and a thousand times the file.

    Raises:
        CheckpointError: If it is missing, damaged, of a newer format, or declares more than `max_bytes`.
        MissingExtraError: If constriction is not installed.

    Example:
        >>> import tempfile
        >>> from shared_core.tools.compression.writer import compress
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
    # The payload: shared values, a byte of the table for each, and for sparse ones the table of gaps; then the ANS
    # words.
    size = entry.values * dtype.itemsize
    values = _from_bytes(payload[:size], dtype)
    table = payload[size : size + entry.values]
    rest = payload[size + entry.values :]
    # Zeros: of a sparse tensor only weights are written.
    flat = torch.zeros(entry.numel, dtype=dtype)
    if entry.coding == "dense":
        decoder = entropy.Decoder(rest)
        _fill(flat, values, table, decoder)
    else:
        decoder = entropy.Decoder(rest[2**entry.gap_bits :])
        # Gaps were encoded last, so they come first.
        places = _places(entry, rest[: 2**entry.gap_bits], decoder)
        found = torch.empty(len(places), dtype=dtype)
        _fill(found, values, table, decoder)
        flat[torch.from_numpy(places)] = found
    if not decoder.is_empty():
        raise ValueError("symbols are left over")
    return flat.view(entry.shape)


def _places(entry: TensorEntry, table: bytes, decoder: entropy.Decoder) -> NDArray[np.int64]:
    model = decoder.model(table) if entry.gaps else None
    # Where the next run begins, across pieces.
    following = 0
    pieces = [np.empty(0, dtype=np.int64)]
    for first in range(0, entry.gaps, entropy.PIECE):
        symbols = decoder.take(min(entropy.PIECE, entry.gaps - first), model)
        places, following = weight_places(symbols, entry.gap_bits, following)
        pieces.append(places)
        # Checked in each piece: a damaged stream must not make indices beyond the tensor.
        if following > entry.numel:
            raise ValueError(f"gaps must end within {entry.numel} elements, got {following}")
    found = np.concatenate(pieces)
    if len(found) != entry.weights:
        raise ValueError(f"gaps must tell {entry.weights} weights, got {len(found)}")
    return found


def _fill(target: Tensor, values: Tensor, table: bytes, decoder: entropy.Decoder) -> None:
    model = decoder.model(table) if len(target) else None
    for first in range(0, len(target), entropy.PIECE):
        piece = target[first : first + entropy.PIECE]
        piece.copy_(values[torch.from_numpy(decoder.take(len(piece), model))])


def _from_bytes(content: bytes, dtype: torch.dtype) -> Tensor:
    if not content:
        return torch.empty(0, dtype=dtype)
    # bytearray: frombuffer of bytes would be a tensor that must not be written.
    raw = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    # A byte of 2 as a bool is undefined in torch.
    if dtype == torch.bool and int(raw.max()) > 1:
        raise ValueError("booleans must be 0 or 1")
    return raw.view(dtype)
