"""Keys of examples: a hash of what a model is given, the same under any order, padding or size of batch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shared_core.errors import CheckpointError, ConfigError

KEY_BYTES = 16
NOT_INPUTS = frozenset({"labels", "label", "label_ids", "num_items_in_batch"})
"""Tensors of a batch that are for the loss, not for the model."""

_MASKS = ("attention_mask", "decoder_attention_mask")

Words = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Padding:
    """Where the positions of a field lie in a batch: each row's first and one past its last, and which are real."""

    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    real: Bools

    @property
    def length(self) -> int:
        """Positions of the batch, padding included."""
        return int(self.real.shape[1])

    @classmethod
    def whole(cls, count: int, length: int) -> Padding:
        """Return that of a field without padding."""
        real = np.ones((count, length), dtype=np.bool_)
        return cls(np.zeros(count, np.int64), np.full(count, length, np.int64), real)


@dataclass(frozen=True)
class ExampleRows:
    """The examples of a batch: their keys, and how each field of at least two dimensions is padded."""

    keys: list[bytes]
    paddings: dict[str, Padding]


def mask_of(field: str) -> str:
    """Return the name of the mask that tells a field's padding.

    Example:
        >>> mask_of("input_ids"), mask_of("decoder_input_ids")
        ('attention_mask', 'decoder_attention_mask')
    """
    return _MASKS[1] if field.startswith("decoder_") else _MASKS[0]


def tensors_of(inputs: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch by name; those of a tuple are called ``"0"``, ``"1"``, ...

    Raises:
        ConfigError: If it is no tensor, tuple or mapping with a tensor.
    """
    named: Mapping[Any, Any]
    if isinstance(inputs, Mapping):
        named = {name: value for name, value in inputs.items() if name not in NOT_INPUTS}
    else:
        named = dict(enumerate(inputs if isinstance(inputs, tuple | list) else [inputs]))
    found = {str(name): value for name, value in named.items() if isinstance(value, Tensor) and value.ndim}
    if not found:
        raise ConfigError(
            f"cached teacher: a batch must be a tensor, or a tuple or mapping of tensors, got {type(inputs).__name__} "
            "without; let the collator return tensors"
        )
    return found


def default_fields(inputs: Any, accepted: set[str] | None = None) -> tuple[str, ...]:
    """Return the names of what an example's key is made of: all that the model is given but padding masks.

    Args:
        inputs: A batch.
        accepted: The keywords that the model takes, None for any; of a mapping the others are left out.

    Example:
        >>> ids = torch.ones(2, 3, dtype=torch.int64)
        >>> default_fields({"input_ids": ids, "attention_mask": ids, "labels": ids, "length": ids[:, 0]}, {"input_ids"})
        ('input_ids',)
    """
    tensors = tensors_of(inputs)
    if isinstance(inputs, Mapping) and accepted is not None:
        tensors = {name: value for name, value in tensors.items() if name in accepted or name in _MASKS}
    return tuple(name for name, value in tensors.items() if not (name in _MASKS and value.ndim == 2))


def example_rows(inputs: Any, fields: Sequence[str]) -> ExampleRows:
    """Return the key of every example in a batch, and how its fields are padded.

    A key is the 128-bit BLAKE2b hash of the fields in their order: dtype, shape and bytes of each. Fields with the two
    leading sizes of their padding mask are cut to the positions between the mask's first and last 1, so that left,
    right or no padding gives the same key; a 0 between them is hashed too. Integers of any width are alike.

    Args:
        inputs: A batch: a tensor, a tuple or a mapping, its first dimension the examples.
        fields: Names of what is hashed. Those of a tuple ("0", "1", ...) are, in a mapping, its first tensors.

    Raises:
        CheckpointError: If the batch lacks a field.
        ConfigError: If the fields have different numbers of examples.

    Example:
        >>> left = {"input_ids": torch.tensor([[0, 5, 6]]), "attention_mask": torch.tensor([[0, 1, 1]])}
        >>> right = {"input_ids": torch.tensor([[5, 6]])}
        >>> example_rows(left, ["input_ids"]).keys == example_rows(right, ["input_ids"]).keys
        True
    """
    tensors = tensors_of(inputs)
    chosen = _chosen(tensors, fields, positional=not isinstance(inputs, Mapping))
    count = next(iter(chosen.values())).shape[0]
    hashes = [hashlib.blake2b(digest_size=KEY_BYTES) for _ in range(count)]
    paddings: dict[str, Padding] = {}
    for number, (name, tensor) in enumerate(chosen.items()):
        if tensor.shape[0] != count:
            raise ConfigError(
                f"cached teacher: {name} must have the batch's {count} examples first, got shape {tuple(tensor.shape)}"
            )
        padding = _padding(tensor, tensors.get(mask_of(name)))
        if tensor.ndim > 1:
            paddings[name] = padding
        tag, data = _bytes_of(tensor)
        width = data.shape[1] // max(padding.length, 1)
        inner = "x".join(map(str, (tensor.ndim, *tensor.shape[2:])))
        for row, digest in enumerate(hashes):
            start, stop = int(padding.starts[row]), int(padding.stops[row])
            real = padding.real[row, start:stop]
            holes = b"" if real.all() else np.packbits(real).tobytes()
            digest.update(f"|{number}:{tag}:{inner}:{stop - start}:{len(holes)}|".encode() + holes)
            digest.update(data[row, start * width : stop * width].data)
    return ExampleRows([digest.digest() for digest in hashes], paddings)


def as_words(keys: Sequence[bytes]) -> Words:
    """Return keys as ``(n, 2)`` numbers that sort as their bytes do.

    Example:
        >>> as_words([bytes(15) + bytes([7])]).tolist()
        [[0, 7]]
    """
    return np.frombuffer(b"".join(keys), dtype=">u8").astype(np.uint64).reshape(-1, 2)


def as_keys(words: Words) -> list[bytes]:
    """Return the keys that `as_words` made numbers of."""
    data = words.astype(">u8").tobytes()
    return [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]


def _chosen(tensors: Mapping[str, Tensor], fields: Sequence[str], *, positional: bool) -> dict[str, Tensor]:
    if not positional and all(name.isdigit() for name in fields) and not set(fields) <= tensors.keys():
        # written from tuples: the same arguments, by the names that another model gives them
        tensors = dict(zip(fields, tensors.values(), strict=False))
    lacking = [name for name in fields if name not in tensors]
    if lacking or not fields:
        raise CheckpointError(
            f"cached teacher: a batch must hold {', '.join(fields) or 'a field to hash'}, got {', '.join(tensors)}; "
            "give the model what the teacher was given, or write the cache again with the fields that both have"
        )
    return {name: tensors[name] for name in fields}


def _padding(tensor: Tensor, mask: Tensor | None) -> Padding:
    count, length = tensor.shape[0], tensor.shape[1] if tensor.ndim > 1 else 1
    if mask is None or mask.ndim != 2 or tuple(mask.shape) != tuple(tensor.shape[:2]):
        return Padding.whole(count, length)
    real = (mask.detach() != 0).cpu().numpy()
    stops = np.where(real.any(1), length - real[:, ::-1].argmax(1), 0) if length else np.zeros(count, np.int64)
    starts = real.argmax(1) if length else np.zeros(count, np.int64)
    return Padding(starts.astype(np.int64), stops.astype(np.int64), real)


def _bytes_of(tensor: Tensor) -> tuple[str, npt.NDArray[np.uint8]]:
    """Return the name of the dtype and the bytes of each example."""
    tensor = tensor.detach()
    is_integer = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    tag = "int" if is_integer else str(tensor.dtype)
    tensor = (tensor.to(torch.int64) if is_integer else tensor).cpu().contiguous()
    size = tensor[:1].numel() * tensor.element_size() if tensor.shape[0] else 0
    data: npt.NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy().reshape(tensor.shape[0], size)
    return tag, data
