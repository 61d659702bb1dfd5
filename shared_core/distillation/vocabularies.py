"""Whether student and teacher mean the same tokens by the same numbers, and how many of them both have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from shared_core.distillation.outputs import num_classes
from shared_core.distillation.teacher_cache.keys import tokenizer_vocabulary
from shared_core.errors import ConfigError

_WAY_OUT = "take a teacher of the student's tokenizer, or train on text that this one generates"


def common_vocabulary(
    student: nn.Module, teacher: nn.Module, *, name: str | None, tokenizer: Any, vocab_size: int | None
) -> int | None:
    """Return how many tokens a student's and a teacher's heads have in common; None where no padding differs.

    The tokenizers are compared where both are known: the student's from the trainer or from the folder that it was
    loaded from, the teacher's from its folder. A vocabulary may lack tokens of the other, and a hundredth may be
    renamed, as reserved ones are. Otherwise the sizes tell.

    Args:
        student: The model that learns.
        teacher: The model that teaches, loaded.
        name: Of the teacher's folder, None where a module was given.
        tokenizer: The student's, or the processor that holds it; None where nobody has it.
        vocab_size: The option: how many classes count; None for all.
    """
    ours, theirs = _text_model(student), _text_model(teacher)
    if ours is None or theirs is None:
        return vocab_size
    mine = tokenizer_vocabulary(tokenizer) or _vocabulary_beside(ours)
    its = _vocabulary_in(name) or _vocabulary_beside(theirs)
    told = name or type(teacher).__name__
    known = bool(mine and its)
    if mine and its:
        _check_tokens(mine, its, told)
    rows = _num_tokens(ours), _num_tokens(theirs)
    classes = num_classes(ours), num_classes(theirs)
    are_heads = classes[0] == rows[0] and classes[1] == rows[1]
    if are_heads and (vocab_size is not None or not known):
        return vocab_size  # of language models the sizes of the heads tell: `check_sizes`
    _check_tokens_known(*rows, mine if known else None, told)
    return min(rows) if are_heads and rows[0] != rows[1] else vocab_size


def _check_tokens(ours: dict[str, int], theirs: dict[str, int], teacher: str) -> None:
    meant = {number: token for token, number in theirs.items()}
    shared = [(number, token, meant[number]) for token, number in ours.items() if number in meant]
    others = sorted((number, mine, other) for number, mine, other in shared if mine != other)
    if len(others) > len(shared) / 100:
        number, mine, other = others[0]
        raise ConfigError(
            "distill",
            f"teacher must have the student's tokenizer, got one in {teacher!r} where {len(others)} of {len(shared)} "
            f"numbers mean other tokens, such as {number}: {mine!r} and {other!r}",
            _WAY_OUT,
        )


def _check_tokens_known(ours: int, theirs: int, vocabulary: dict[str, int] | None, teacher: str) -> None:
    """Refuse a teacher whose embedding lacks tokens that the student's inputs may hold."""
    if vocabulary is not None:
        needed = min(max(vocabulary.values()) + 1, ours)
        if theirs < needed:
            raise ConfigError(
                "distill",
                f"teacher must know the student's {needed} tokens, got {teacher!r} with {theirs}",
                "add them to it (resize_token_embeddings), or take them out of the student's tokenizer",
            )
    elif ours != theirs:
        raise ConfigError(
            "distill",
            f"teacher must have the student's vocabulary of {ours} tokens, got {teacher!r} with {theirs}, and no "
            "tokenizers that would tell whether only padding differs. Give the Trainer the student's as "
            f"processing_class and save the teacher's in its folder. With another tokenizer {_WAY_OUT}",
        )


def _text_model(module: nn.Module) -> Any:
    """Return the one transformers model of tokens that a module is or holds, None if it is not one."""
    if _num_tokens(module):
        return module
    found: list[nn.Module] = []
    for path, part in module.named_modules():
        if path and not any(part in set(other.modules()) for other in found) and _num_tokens(part):
            found.append(part)
    return found[0] if len(found) == 1 else None


def _num_tokens(module: Any) -> int:
    """Return how many tokens a transformers model embeds, 0 where it embeds something else or is none."""
    embeddings = getattr(module, "get_input_embeddings", None)
    try:
        size = getattr(embeddings() if callable(embeddings) else None, "num_embeddings", 0)
    except NotImplementedError:  # transformers' own, where a class has several
        return 0
    return size if isinstance(size, int) else 0


def _vocabulary_beside(model: Any) -> dict[str, int] | None:
    return _vocabulary_in(getattr(model, "name_or_path", None))


def _vocabulary_in(name: Any) -> dict[str, int] | None:
    return tokenizer_vocabulary(Path(name).expanduser()) if isinstance(name, str) and name else None
