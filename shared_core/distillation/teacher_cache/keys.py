"""Keys of examples, and fingerprints of what a cache was written with.

The key of an example is a hash of what a model is given, the same under any order, padding or batch size. Fingerprints
tell whether a teacher, a tokenizer or a chat template is the one that a cache was written with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from shared_core.distillation.unlabeled import IGNORED
from shared_core.errors import CheckpointError, ConfigError
from shared_core.files.json_yaml import parse_json

WHERE = "cached teacher"
"""Where errors of a cache say that they are."""
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
    """The keys of a batch's examples, and how each of its fields of at least two dimensions is padded."""

    keys: list[bytes]
    paddings: dict[str, Padding]


def mask_of(field: str) -> str:
    """Return the name of the mask that tells a field's padding."""
    return _MASKS[1] if field.startswith("decoder_") else _MASKS[0]


def tensors_of(inputs: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch by name; those of a tuple are called ``"0"``, ``"1"``, ..."""
    named: Mapping[Any, Any]
    if isinstance(inputs, Mapping):
        named = {name: value for name, value in inputs.items() if name not in NOT_INPUTS}
    else:
        named = dict(enumerate(inputs if isinstance(inputs, tuple | list) else [inputs]))
    found = {str(name): value for name, value in named.items() if isinstance(value, Tensor) and value.ndim}
    if not found:
        rule = f"a batch must be a tensor, or a tuple or mapping of tensors, got {type(inputs).__name__}"
        raise ConfigError(WHERE, rule, "let the collator return tensors")
    return found


def default_fields(inputs: Any, accepted: set[str] | None = None) -> tuple[str, ...]:
    """Return the names of what an example's key is made of: all that the model is given but padding masks.

    Of a mapping, those that are not among the keywords that the model accepts (None: it takes any) are left out.
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
    # 128 bits: two different examples of 10^12 share a key with a probability below 1e-14.
    hashes = [hashlib.blake2b(digest_size=KEY_BYTES) for _ in range(count)]
    paddings: dict[str, Padding] = {}
    for number, (name, tensor) in enumerate(chosen.items()):
        if tensor.shape[0] != count:
            rule = f"{name} must have the batch's {count} examples as first dimension, got shape {tuple(tensor.shape)}"
            raise ConfigError(WHERE, rule)
        padding = _padding(tensor, tensors.get(mask_of(name)))
        if tensor.ndim > 1:
            paddings[name] = padding
        tag, data = _bytes_of(tensor)
        # Bytes of one position, so that the unpadded part is one slice of the row.
        width = data.shape[1] // max(padding.length, 1)
        inner = "x".join(map(str, (tensor.ndim, *tensor.shape[2:])))
        for row, digest in enumerate(hashes):
            start, stop = int(padding.starts[row]), int(padding.stops[row])
            real = padding.real[row, start:stop]
            # Padding between real positions is part of what the model sees; padding around them is not.
            holes = b"" if real.all() else np.packbits(real).tobytes()
            # The header holds all sizes, so that the concatenation of fields can be read in one way only.
            digest.update(f"|{number}:{tag}:{inner}:{stop - start}:{len(holes)}|".encode() + holes)
            digest.update(data[row, start * width : stop * width].data)
    return ExampleRows([digest.digest() for digest in hashes], paddings)


def as_words(keys: Sequence[bytes]) -> Words:
    """Return keys as ``(n, 2)`` numbers that sort as their bytes do."""
    # Big-endian: numeric order is then the order of the bytes.
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
            WHERE,
            f"a batch must hold {', '.join(fields) or 'a field to hash'}, got {', '.join(tensors)}",
            "give the model the same fields as the teacher, or write the cache again with fields that both have",
        )
    return {name: tensors[name] for name in fields}


def _padding(tensor: Tensor, mask: Tensor | None) -> Padding:
    count, length = tensor.shape[0], tensor.shape[1] if tensor.ndim > 1 else 1
    if mask is None or mask.ndim != 2 or tuple(mask.shape) != tuple(tensor.shape[:2]):
        return Padding.whole(count, length)
    real = (mask.detach() != 0).cpu().numpy()
    # One past the last real position, by the first one from the right; 0 where an example has none.
    stops = np.where(real.any(1), length - real[:, ::-1].argmax(1), 0) if length else np.zeros(count, np.int64)
    starts = real.argmax(1) if length else np.zeros(count, np.int64)
    return Padding(starts.astype(np.int64), stops.astype(np.int64), real)


def _bytes_of(tensor: Tensor) -> tuple[str, npt.NDArray[np.uint8]]:
    """Return the name of the dtype and the bytes of each example."""
    tensor = tensor.detach()
    # Ids are int32 in one data set and int64 in the next; the model treats them alike, so the key does too.
    is_integer = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    tag = "int" if is_integer else str(tensor.dtype)
    tensor = (tensor.to(torch.int64) if is_integer else tensor).cpu().contiguous()
    # Not `size // rows`: a batch may have no rows.
    size = tensor[:1].numel() * tensor.element_size() if tensor.shape[0] else 0
    data: npt.NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy().reshape(tensor.shape[0], size)
    return tag, data


_IDS = ("input_ids", "decoder_input_ids")


def batches_of(data: Any, batch_size: int) -> Iterable[Any]:
    """Return batches of what a user's function gave: in order, always the same."""
    collate: Callable[[list[Any]], Any] = pad_examples
    if isinstance(data, tuple) and len(data) == 2 and _is_data_set(data[0]) and callable(data[1]):
        data, collate = data
    if _is_data_set(data):
        return DataLoader(data, batch_size=batch_size, collate_fn=collate)
    if not isinstance(data, Iterable) or isinstance(data, Tensor | Mapping | str):
        rule = f"data must be batches, a data set, or a pair of one and its collator, got {type(data).__name__}"
        raise ConfigError(WHERE, rule)
    return data


def pad_examples(examples: Sequence[Any]) -> Any:
    """Return a batch: sequences padded on the right with 0, labels with -100, a mask added where there is none.

    Of a pair (input, label) the input is taken, of a mapping what is numbers. What the padding is does not matter to
    a cache, as keys and targets leave it out.

    Example:
        >>> batch = pad_examples([{"input_ids": [5, 6], "text": "a"}, {"input_ids": [7], "text": "b"}])
        >>> batch["input_ids"].tolist(), batch["attention_mask"].tolist()
        ([[5, 6], [7, 0]], [[1, 1], [1, 0]])
    """
    first = examples[0]
    if isinstance(first, tuple | list) and len(first) == 2:
        return default_collate([example[0] for example in examples])
    if not isinstance(first, Mapping):
        return default_collate(list(examples))
    columns = {name: [_tensor(example[name]) for example in examples] for name in first}
    named = {name: [value for value in column if value is not None] for name, column in columns.items()}
    named = {name: column for name, column in named.items() if len(column) == len(examples)}
    if not named:
        raise ConfigError(WHERE, f"examples must hold numbers, got only {', '.join(map(str, first))}, which hold none")
    batch = {name: _padded(column, IGNORED if name == "labels" else 0) for name, column in named.items()}
    for name in _IDS:
        if name in batch and batch[name].ndim == 2 and mask_of(name) not in batch:
            batch[mask_of(name)] = _padded([torch.ones_like(value) for value in named[name]], 0)
    return batch


def _is_data_set(data: Any) -> bool:
    # those of `datasets` are no subclass of torch's
    if isinstance(data, list):
        return bool(data) and all(map(is_example, data))
    return isinstance(data, Dataset) or (hasattr(data, "column_names") and hasattr(data, "__getitem__"))


def is_example(value: Any) -> bool:
    """Return True for one example, not a batch: numbers, texts or flat lists of numbers by name, or ids of one row.

    Example:
        >>> is_example({"input_ids": [5, 6], "label": 1}), is_example({"input_ids": torch.tensor([5, 6])})
        (True, True)
        >>> is_example({"input_ids": [[5, 6]]}), is_example(torch.ones(4, 3))
        (False, False)
    """
    if not isinstance(value, Mapping) or not value:
        return False
    named = [value[name] for name in _IDS if name in value]
    if any(isinstance(ids, Tensor) for ids in named):
        return all(torch.as_tensor(ids).ndim == 1 for ids in named)
    return all(
        isinstance(one, int | float | str)
        or (isinstance(one, list) and all(isinstance(item, int | float) for item in one))
        for one in value.values()
    )


def _tensor(value: Any) -> Tensor | None:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _padded(values: list[Tensor], filler: int) -> Tensor:
    if values[0].ndim != 1 or len({value.shape for value in values}) == 1:
        return torch.stack(values)
    return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=filler)


_BYTES = 16
_WEIGHTS = (".safetensors", ".bin")
# where a model was loaded from and by which version say nothing about what it computes; what saving and loading fill in
# is told by its class and its tensors
_NOT_THE_MODEL = frozenset({"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"})


def teacher_fingerprint(teacher: nn.Module) -> str:
    """Return a hash of a model's class, configuration and every tensor of its state dict, on any device.

    Example:
        >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> _ = other.load_state_dict(one.state_dict())
        >>> teacher_fingerprint(one) == teacher_fingerprint(other)
        True
        >>> with torch.no_grad():
        ...     _ = other.bias.add_(1e-3)
        >>> teacher_fingerprint(one) == teacher_fingerprint(other)
        False
    """
    digest = hashlib.blake2b(digest_size=_BYTES)
    digest.update(type(teacher).__name__.encode())
    to_dict = getattr(getattr(teacher, "config", None), "to_dict", None)
    if callable(to_dict):
        digest.update(_canonical({name: item for name, item in to_dict().items() if name not in _NOT_THE_MODEL}))
    for name, value in sorted(teacher.state_dict().items()):
        # a quantized layer's extra state may be anything
        if isinstance(value, Tensor):
            _add_tensor(digest, name, value)
        else:
            digest.update(f"|{name}:{value!r}|".encode())
    return digest.hexdigest()


def folder_fingerprint(folder: Path | str) -> str:
    """Return a hash of the configuration and the weight files in a model's folder, without building the model.

    Args:
        folder: With weights in ``.safetensors`` or ``.bin``; its ``config.json`` counts too, if there is one.

    Raises:
        CheckpointError: If it holds no weights.
    """
    folder = Path(folder)
    weights = sorted(file for file in folder.glob("*") if file.suffix in _WEIGHTS and file.is_file())
    if not weights:
        raise CheckpointError(WHERE, f"{folder} has no weights of the teacher", "check the path")
    digest = hashlib.blake2b(digest_size=_BYTES)
    config = _json(folder / "config.json")
    digest.update(_canonical({name: item for name, item in config.items() if name not in _NOT_THE_MODEL}))
    for file in weights:
        with file.open("rb") as stream:
            digest.update(f"|{file.name}:".encode() + hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str | None:
    """Return a hash of which token has which number, None if that cannot be told.

    That is what the stored classes mean. How text is split needs no fingerprint: other splits are other inputs, so
    other keys.

    Args:
        tokenizer: An object with ``get_vocab()``, such as a Transformers tokenizer or a processor that holds one, or
            the folder that one was saved in (its ``tokenizer.json``).
    """
    vocabulary = tokenizer_vocabulary(tokenizer)
    if not vocabulary:
        return None
    # By number: the order of a tokenizer's dictionary is not part of what it means.
    pairs = sorted(vocabulary.items(), key=lambda pair: (pair[1], pair[0]))
    return hashlib.blake2b(_canonical(pairs), digest_size=_BYTES).hexdigest()


def tokenizer_vocabulary(tokenizer: Any) -> dict[str, int] | None:
    """Return which token has which number, None if that cannot be told; argument as of `tokenizer_fingerprint`."""
    if isinstance(tokenizer, Path | str):
        return _vocabulary_in(Path(tokenizer))
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    get_vocabulary = getattr(tokenizer, "get_vocab", None)
    return dict(get_vocabulary()) if callable(get_vocabulary) else None


def template_fingerprint(tokenizer: Any) -> str | None:
    """Return a hash of a tokenizer's chat template, None if it has none; argument as of `tokenizer_fingerprint`."""
    if isinstance(tokenizer, Path | str):
        folder = Path(tokenizer)
        file = folder / "chat_template.jinja"
        template: Any = file.read_text(encoding="utf-8") if file.is_file() else None
        for name in ("tokenizer_config.json", "chat_template.json"):
            template = _json(folder / name).get("chat_template") if template is None else template
    else:
        template = getattr(tokenizer, "chat_template", None)
    return None if template is None else hashlib.blake2b(_canonical(template), digest_size=_BYTES).hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str, separators=(",", ":")).encode()


def _add_tensor(digest: Any, name: str, value: Tensor) -> None:
    digest.update(f"|{name}:{value.dtype}:{tuple(value.shape)}|".encode())
    flat = value.detach()
    # subclasses that hold quantized codes have no bytes of their own
    dequantize = getattr(flat, "dequantize", None)
    if type(value) not in (Tensor, nn.Parameter) and callable(dequantize):
        flat = dequantize()
    flat = flat.reshape(-1)
    # 16 M elements at a time: a whole embedding on the CPU as bytes would double the memory.
    step = 2**24
    for at in range(0, flat.numel(), step):
        digest.update(flat[at : at + step].cpu().contiguous().view(torch.uint8).numpy())


def _vocabulary_in(folder: Path) -> dict[str, int] | None:
    """Return the vocabulary of a ``tokenizer.json``: a table, or for unigram models a list in the order of numbers."""
    if not (folder / "tokenizer.json").is_file():
        return _older_vocabulary_in(folder)
    content = _json(folder / "tokenizer.json")
    model, added = content.get("model"), content.get("added_tokens") or []
    known = model.get("vocab") if isinstance(model, dict) else None
    try:
        if isinstance(known, list):
            known = {str(entry[0]): number for number, entry in enumerate(known)}
        if not isinstance(known, dict):
            return None
        return {**known, **{str(token["content"]): int(token["id"]) for token in added}}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(folder / "tokenizer.json", f"file is not a tokenizer: {error!r}") from error


def _older_vocabulary_in(folder: Path) -> dict[str, int] | None:
    known = _json(folder / "vocab.json")
    if not known and (file := folder / "vocab.txt").is_file():
        lines = file.read_text(encoding="utf-8").split("\n")
        known = {token: number for number, token in enumerate(lines) if token}
    found = {**known, **_json(folder / "added_tokens.json")}
    return found if known and all(isinstance(number, int) for number in found.values()) else None


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(file, f"file must be JSON, got {error}", "it is damaged") from error
    return content if isinstance(content, dict) else {}
