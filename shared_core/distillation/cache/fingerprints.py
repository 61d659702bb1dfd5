"""Fingerprints: whether a teacher, a tokenizer or a chat template is the one that a cache was written with."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.errors import CheckpointError
from shared_core.parsing import parse_json

_BYTES = 16
_WEIGHTS = (".safetensors", ".bin")
# where a model was loaded from and by which version say nothing about what it computes; what saving and loading fill in
# is told by its class and its tensors
_NOT_THE_MODEL = frozenset({"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"})


def teacher_fingerprint(teacher: nn.Module) -> str:
    """Return a hash of a model's class, configuration and every tensor of its state dict.

    Args:
        teacher: On any device; its values are read.

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
        # a quantised layer's extra state may be anything
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
        raise CheckpointError(f"cached teacher: {folder} must hold the teacher's weights, got none; check the path")
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
    return _hash_vocabulary(tokenizer_vocabulary(tokenizer))


def tokenizer_vocabulary(tokenizer: Any) -> dict[str, int] | None:
    """Return which token has which number, None if that cannot be told; argument as of `tokenizer_fingerprint`."""
    if isinstance(tokenizer, Path | str):
        return _vocabulary_in(Path(tokenizer))
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    get_vocabulary = getattr(tokenizer, "get_vocab", None)
    return dict(get_vocabulary()) if callable(get_vocabulary) else None


def template_fingerprint(tokenizer: Any) -> str | None:
    """Return a hash of a tokenizer's chat template, None if it has none.

    Args: As of `tokenizer_fingerprint`.
    """
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
    # subclasses that hold quantised codes have no bytes of their own
    dequantize = getattr(flat, "dequantize", None)
    if type(value) not in (Tensor, nn.Parameter) and callable(dequantize):
        flat = dequantize()
    flat = flat.reshape(-1)
    step = 2**24
    for at in range(0, flat.numel(), step):
        digest.update(flat[at : at + step].cpu().contiguous().view(torch.uint8).numpy())


def _hash_vocabulary(vocabulary: dict[str, int] | None) -> str | None:
    if not vocabulary:
        return None
    pairs = sorted(vocabulary.items(), key=lambda pair: (pair[1], pair[0]))
    return hashlib.blake2b(_canonical(pairs), digest_size=_BYTES).hexdigest()


def _vocabulary_in(folder: Path) -> dict[str, int] | None:
    """Return the vocabulary of a ``tokenizer.json``: a table, or for unigram models a list in the order of numbers."""
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
        raise CheckpointError(f"{folder / 'tokenizer.json'}: file must be a tokenizer's, got {error!r}") from error


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: file must be JSON, got {error}; it is damaged") from error
    return content if isinstance(content, dict) else {}
