"""The known kinds of model outputs, and how each is distilled."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shared_core.errors import ConfigError, TrainingError

LOGITS, SPANS, SCORES, EMBEDDINGS = "logits", "spans", "scores", "embeddings"

KEYS: dict[str, tuple[str, ...]] = {
    SPANS: ("start_logits", "end_logits"),
    SCORES: ("scores",),
    EMBEDDINGS: ("sentence_embedding",),
}
"""Keys of outputs other than logits: question answering in transformers, and CrossEncoder and SentenceTransformer in
sentence-transformers. The option `logits` is the key of logits."""

_NUMBERS = ("logit_mse", "bernoulli_kl", "cosine")


@dataclass(frozen=True)
class Outputs:
    """The part of a forward's output that is compared.

    Args:
        kind: ``"logits"``, or a key of `KEYS`.
        parts: The tensors, in the order of their keys: logits and scores ``(..., classes)``, spans two of
            ``(B, positions)``, embeddings ``(B, width)``.
    """

    kind: str
    parts: tuple[Tensor, ...]


def find_outputs(output: Any, name: str, whose: str) -> Outputs:
    """Return the part of a forward's output to compare: its logits, or else the first kind in `KEYS` that it holds.

    A name set by the user must exist; there is no fallback.

    Example:
        >>> find_outputs({"scores": torch.zeros(3)}, "logits", "student").parts[0].shape
        torch.Size([3, 1])
    """
    if (logits := _logits(output, name)) is not None:
        return Outputs(LOGITS, (logits,))
    for kind, keys in _others(name).items():
        if holds(output, kind):
            parts = [_item(output, key) for key in keys]
            # A CrossEncoder may return one number per pair of texts.
            return Outputs(kind, tuple(part.unsqueeze(-1) if part.ndim == 1 else part for part in parts))
    return _nothing(output, f"logits under {name!r}" + (f", or {_known()}" if _others(name) else ""), whose)


def _others(name: str) -> dict[str, tuple[str, ...]]:
    """Return the kinds to look for if there are no logits of that name."""
    return KEYS if name == LOGITS else {}


def holds(output: Any, kind: str) -> bool:
    """Return True if a forward's output holds all parts of a kind in `KEYS`."""
    return all(isinstance(_item(output, key), Tensor) for key in KEYS[kind])


def find_logits(output: Any, name: str, whose: str) -> Tensor:
    """Return the logits in a forward's output, or raise; for the arguments see `find_outputs`."""
    if (logits := _logits(output, name)) is None:
        _nothing(output, f"logits under {name!r}", whose)
    return logits


def _logits(output: Any, name: str) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    # A namedtuple has a named attribute, which is looked up below.
    if isinstance(output, tuple | list) and not hasattr(output, name):
        # A model that gets labels returns its scalar loss first.
        return next((item for item in output if isinstance(item, Tensor) and item.ndim >= 2), None)
    found = _item(output, name)
    return found if isinstance(found, Tensor) else None


def _item(output: Any, key: str) -> Any:
    return output.get(key) if isinstance(output, Mapping) else getattr(output, key, None)


def _nothing(output: Any, what: str, whose: str) -> NoReturn:
    keys = f" with {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
    rule = f"the {whose}'s output must hold {what}, got {type(output).__name__}{keys}"
    raise TrainingError("distill", rule, "set distill.logits, and switch off fused losses that do not return logits")


def _known() -> str:
    return ", or ".join(" and ".join(keys) for keys in KEYS.values())


def kind_ahead(module: nn.Module, name: str, whose: str) -> str | None:
    """Return the kind of a model's outputs if its class tells it before a forward, else None."""
    model: Any = getattr(module, "get_base_model", lambda: module)()  # under PEFT's wrapper
    fields = _declared(type(model))
    for kind, keys in {LOGITS: (name,), **_others(name)}.items():
        if fields.issuperset(keys):
            return kind
    # Annotations of classes with a head may be wrong (transformers 5.23: AlbertForQuestionAnswering).
    if "last_hidden_state" in fields and hasattr(model, "config") and "For" not in type(model).__name__:
        raise ConfigError(
            "distill",
            f"the {whose} must return logits under {name!r}, or {_known()}, got {type(model).__name__}, which returns "
            f"{', '.join(sorted(fields))}",
            "use a model with a head, or set distill.logits to one of these",
        )
    return EMBEDDINGS if embedding_width(module) is not None else None


def _declared(kind: type[Any]) -> set[str]:
    """Return the fields of the output class in a forward's annotation, empty if there is none."""
    try:
        returned = typing.get_type_hints(kind.forward).get("return")
    except (AttributeError, NameError, TypeError):
        return set()
    for option in (returned, *typing.get_args(returned)):
        if isinstance(option, type) and dataclasses.is_dataclass(option) and issubclass(option, Mapping):
            return {field.name for field in dataclasses.fields(option)}
    return set()


def embedding_width(module: nn.Module) -> int | None:
    """Return the width of a SentenceTransformer's embeddings, None for another model."""
    for name in ("get_embedding_dimension", "get_sentence_embedding_dimension"):  # the older name until 5.2
        if callable(method := getattr(module, name, None)):
            width = method()
            return width if isinstance(width, int) else None
    return None


def check_heads(
    student: nn.Module, teacher: nn.Module, *, divergence: str, logits: str = LOGITS, vocab_size: int | None = None
) -> None:
    """Raise if the models' outputs do not fit each other or the divergence, as far as known before a batch."""
    for whose, module in (("student", student), ("teacher", teacher)):
        problem = getattr(getattr(module, "config", None), "problem_type", None)
        fitting = {"regression": "logit_mse", "multi_label_classification": "bernoulli_kl"}.get(problem or "")
        if fitting and divergence != fitting:
            rule = f"the {whose} must classify into single labels, got problem_type {problem!r}"
            raise ConfigError("distill", rule, f"use divergence {fitting}")
    kinds = kind_ahead(student, logits, "student"), kind_ahead(teacher, logits, "teacher")
    if EMBEDDINGS in kinds:
        widths = embedding_width(student), embedding_width(teacher)
        divergence_of(EMBEDDINGS, divergence, widths[0])
    else:
        widths = num_classes(student), num_classes(teacher)
    _refuse(_misfits(kinds, widths, vocab_size))


def _refuse(misfits: Iterable[tuple[str, str]]) -> None:
    for rule, remedy in misfits:
        raise ConfigError("distill", rule, remedy)


def _misfits(
    kinds: tuple[str | None, str | None], widths: tuple[int | None, int | None], vocab_size: int | None
) -> Iterator[tuple[str, str]]:
    """Yield the rules that two outputs break, as far as their kinds and last dimensions are known."""
    kind = kinds[0] or kinds[1]
    if None not in kinds and kinds[0] != kinds[1]:
        rule = f"teacher must return {kinds[0]} like the student, got {kinds[1]}"
        yield rule, "use a teacher for the student's task"
    if vocab_size is not None and kind in (SPANS, EMBEDDINGS):
        yield f"vocab_size must be none for {kind}, which have no classes, got {vocab_size}", ""
    student, teacher = widths
    if student is None or teacher is None:
        return
    if EMBEDDINGS in kinds and student != teacher:
        yield (
            f"teacher must return embeddings of the student's width {student}, got {teacher}",
            "add a final Dense layer of the teacher's width to the student, or one of the student's width to the "
            "teacher (the first principal components of its embeddings)",
        )
    elif vocab_size is None and student != teacher:
        yield (
            f"teacher must have as many classes as the student, {student}, got {teacher}",
            "both must share labels or vocabulary. If they share a tokenizer and only padding differs, set "
            "distill.vocab_size to the tokenizer's size. If tokenizers differ, use a teacher with the student's, "
            "distill with distill.hidden pairs, or train on text that the teacher generates",
        )
    elif vocab_size is not None and vocab_size > min(student, teacher):
        yield (
            f"vocab_size must be at most {min(student, teacher)}, the smaller of the student's {student} and the "
            f"teacher's {teacher} classes, got {vocab_size}",
            "",
        )


def check_sizes(student: int, teacher: int, vocab_size: int | None) -> None:
    """Raise if the numbers of classes differ, or are smaller than `vocab_size` if it is given."""
    _refuse(_misfits((LOGITS, LOGITS), (student, teacher), vocab_size))


def num_classes(module: nn.Module) -> int | None:
    """Return the width of a Transformers model's logits if known, else None."""
    head = getattr(module, "get_output_embeddings", lambda: None)()
    weight, classes = getattr(head, "weight", None), getattr(head, "out_features", None)
    if isinstance(classes, int):  # a quantized weight is packed
        return classes
    if isinstance(weight, Tensor):
        return weight.shape[0]
    if any(name in type(module).__name__ for name in ("Classification", "CrossEncoder")):
        num_labels = getattr(getattr(module, "config", None), "num_labels", None)
        return num_labels if isinstance(num_labels, int) else None
    return None


def divergence_of(kind: str, divergence: str, width: int | None) -> str:
    """Return the divergence for outputs of a kind: the given one, or the usual one if the default does not apply.

    Example:
        >>> divergence_of("spans", "jsd", 384), divergence_of("scores", "forward_kl", 1)
        ('jsd', 'logit_mse')
        >>> divergence_of("embeddings", "forward_kl", 384)
        'cosine'
    """
    if kind == EMBEDDINGS:
        if divergence not in ("forward_kl", "logit_mse"):
            raise ConfigError(
                "distill",
                "divergence must be left at its default for embeddings (cosine similarity), or be logit_mse, got "
                f"{divergence!r}",
            )
        return "cosine" if divergence == "forward_kl" else divergence
    # One score is not a distribution.
    return "logit_mse" if kind == SCORES and width == 1 and divergence == "forward_kl" else divergence


def is_of_classes(divergence: str) -> bool:
    """Return True if a divergence compares distributions over classes rather than independent labels or numbers."""
    return divergence not in _NUMBERS


def over_positions(
    spans: Outputs, attention_mask: Any, *, of_classes: bool
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Return the parts of spans as logits, and a bool mask of the rows that count, None if all do.

    Start and end each choose one position of an example. Padding cannot be chosen: its logits become -inf, so that a
    longer batch gives the same loss. As independent numbers (not `of_classes`) each position is a separate row. An
    attention mask whose shape differs from the spans' ``(B, positions)`` is ignored.

    Example:
        >>> spans = Outputs("spans", (torch.zeros(1, 3), torch.ones(1, 3)))
        >>> over_positions(spans, torch.tensor([[1, 1, 0]]), of_classes=True)[0][0].tolist()
        [[0.0, 0.0, -inf]]
    """
    first = spans.parts[0]
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != first.shape:
        return spans.parts if of_classes else tuple(part.unsqueeze(-1) for part in spans.parts), None
    if not of_classes:
        return tuple(part.unsqueeze(-1) for part in spans.parts), (attention_mask != 0).to(first.device)
    # Here rows are examples and classes are positions, so padding is a class that neither model may choose.
    padding = (attention_mask == 0).to(first.device)
    parts = tuple(part.masked_fill(padding.to(part.device), -torch.inf) for part in spans.parts)
    return parts, ~padding.all(-1)


def check_outputs(
    student: Outputs, teacher: Outputs, *, of_classes: bool = True, vocab_size: int | None = None
) -> None:
    """Raise if the outputs of two models cannot be compared (as distributions if `of_classes`)."""
    _refuse(_differences(student, teacher, of_classes, vocab_size))


def _differences(
    student: Outputs, teacher: Outputs, of_classes: bool, vocab_size: int | None
) -> Iterator[tuple[str, str]]:
    mine, its, kinds = student.parts[0], teacher.parts[0], (student.kind, teacher.kind)
    has_classes = student.kind in (LOGITS, SCORES)
    if has_classes and kinds[0] == kinds[1] and (of_classes or vocab_size) and (mine.ndim < 2 or mine.shape[-1] == 1):
        yield (
            "the student must be a classifier or language model with logits (..., classes), got logits of shape "
            f"{tuple(mine.shape)}",
            "use divergence logit_mse for regression",
        )
    has_width = student.kind != SPANS and mine.ndim and its.ndim
    yield from _misfits(kinds, (mine.shape[-1], its.shape[-1]) if has_width else (None, None), vocab_size)
    cut = -1 if vocab_size else None
    if student.kind != EMBEDDINGS and mine.shape[:cut] != its.shape[:cut]:
        what = "logits of" if has_classes else "scores of the positions in"
        yield f"teacher must return {what} the student's shape {tuple(mine.shape)}, got {tuple(its.shape)}", ""
