"""A ``tokenizer.json`` in the words of a GGUF file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from shared_core.errors import CompatibilityError

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {_LETTERS + r"\p{N}{1,3}" + _REST: "llama-bpe", _LETTERS + r"\p{N}" + _REST: "qwen2"}
"""The pattern that splits text before merges → llama.cpp's name."""


def add_tokenizer(writer: Any, folder: Path | None, size: int, where: str) -> None:
    """Write a folder's tokenizer, or that there is none.

    Args:
        writer: gguf's.
        folder: With ``tokenizer.json``; None: no tokenizer.
        size: Tokens that the model knows.
        where: The function, for errors.
    """
    import gguf

    if folder is None:
        writer.add_tokenizer_model("no_vocab")
        return
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    kind, split = _kind(described, where)
    tokens, types = _tokens(described, size, kind, where)
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    if kind == "llama":
        writer.add_token_scores(_scores(described, tokens))
        writer.add_add_space_prefix(_adds_space(described))
    writer.add_token_types(types)
    special = gguf.SpecialVocab(folder, load_merges=kind == "gpt2", n_vocab=size)
    for name in ("bos", "eos"):  # else llama.cpp has a default of its own
        special.add_special_token.setdefault(name, False)
    special.add_to_gguf(writer, quiet=True)


def _parts(described: dict[str, Any], name: str) -> list[dict[str, Any]]:
    part = described.get(name) or {}
    return part.get("pretokenizers") or part.get("normalizers") or [part]


def _kind(described: dict[str, Any], where: str) -> tuple[str, str]:
    """Return llama.cpp's names of a tokenizer and of how it splits text first."""
    model, parts = described.get("model", {}), _parts(described, "pre_tokenizer")
    split = next((part.get("pattern", {}).get("Regex", "?") for part in parts if part.get("type") == "Split"), None)
    levels = [part for part in parts if part.get("type") == "ByteLevel"]
    name = None
    if model.get("type") == "BPE" and levels:
        name = "gpt-2" if split is None and levels[0].get("use_regex", True) else SPLITS.get(split or "")
        kind = "gpt2"
    elif model.get("type") == "BPE" and model.get("byte_fallback"):
        name, kind = "default", "llama"
    if name is None:
        raise CompatibilityError(
            where,
            "tokenizer must be BPE that splits text as Llama's, Qwen2's or GPT-2's does, for llama.cpp, got "
            f"{model.get('type')} with {split or [part.get('type') for part in parts]}",
            "pass no tokenizer, and give llama.cpp tokens by number",
        )
    return kind, name


def _tokens(described: dict[str, Any], size: int, kind: str, where: str) -> tuple[list[str], list[int]]:
    from gguf import TokenType

    model = described["model"]
    tokens, types = [f"[PAD{index}]" for index in range(size)], [int(TokenType.UNUSED)] * size
    added = {token["content"]: token for token in described.get("added_tokens", [])}
    numbers = {**model["vocab"], **{content: token["id"] for content, token in added.items()}}
    if max(numbers.values()) >= size:
        raise CompatibilityError(
            where, f"tokenizer must have at most the model's {size} tokens, got number {max(numbers.values())}"
        )
    for content, number in numbers.items():
        tokens[number], found = content, TokenType.NORMAL
        if content == model.get("unk_token"):
            found = TokenType.UNKNOWN
        elif content in added:
            found = TokenType.CONTROL if added[content]["special"] else TokenType.USER_DEFINED
        elif kind == "llama" and re.fullmatch(r"<0x[0-9A-F]{2}>", content):
            found = TokenType.BYTE
        types[number] = int(found)
    return tokens, types


def _scores(described: dict[str, Any], tokens: list[str]) -> list[float]:
    """Return a score for each token that makes llama.cpp merge in the order of the merges."""
    scores: dict[str, float] = {}
    for rank, merge in enumerate(described["model"]["merges"]):
        scores.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), -float(rank))
    last = -float(len(scores))
    return [scores.get(token, last) for token in tokens]


def _adds_space(described: dict[str, Any]) -> bool:
    prepends = any(part.get("type") == "Prepend" for part in _parts(described, "normalizer"))
    return prepends or any(
        part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never"
        for part in _parts(described, "pre_tokenizer")
    )
