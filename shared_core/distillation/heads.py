"""What the models tell of their heads before a batch: the kind of their outputs and how many there are."""

from __future__ import annotations

from torch import Tensor, nn

from shared_core.errors import ConfigError


def check_heads(student: nn.Module, teacher: nn.Module, divergence: str, vocab_size: int | None = None) -> None:
    """Refuse, where the models tell before a batch, what the divergence is not for, and widths that do not fit.

    Raises:
        ConfigError: If they do not fit.
    """
    for whose, module in (("student", student), ("teacher", teacher)):
        problem = getattr(getattr(module, "config", None), "problem_type", None)
        fitting = {"regression": "logit_mse", "multi_label_classification": "bernoulli_kl"}.get(problem or "")
        if fitting and divergence != fitting:
            raise ConfigError(
                f"distill: the {whose} must classify into single labels, got problem_type {problem!r}; take divergence "
                f"{fitting}"
            )
    ours, theirs = num_classes(student), num_classes(teacher)
    if ours is not None and theirs is not None:
        check_sizes(ours, theirs, vocab_size)


def check_sizes(student: int, teacher: int, vocab_size: int | None) -> None:
    """Refuse different numbers of classes, or, of those that `vocab_size` lets count, too few.

    Raises:
        ConfigError: With both sizes.
    """
    if vocab_size is None and student != teacher:
        raise ConfigError(
            f"distill: teacher must have the student's {student} classes, got {teacher}; both must share labels or "
            "vocabulary. With one tokenizer and vocabularies that are only padded differently, set distill.vocab_size "
            "to the tokenizer's size; with different tokenizers take a teacher of the student's, distil "
            "distill.hidden pairs, or train on text that the teacher generates"
        )
    if vocab_size is not None and vocab_size > min(student, teacher):
        raise ConfigError(
            f"distill: vocab_size must be at most {min(student, teacher)}, the smaller of the student's {student} and "
            f"the teacher's {teacher} classes, got {vocab_size}"
        )


def num_classes(module: nn.Module) -> int | None:
    """Return the width of the logits where a Transformers model tells it, else None."""
    head = getattr(module, "get_output_embeddings", lambda: None)()
    weight, classes = getattr(head, "weight", None), getattr(head, "out_features", None)
    if isinstance(classes, int):  # a quantised weight is packed
        return classes
    if isinstance(weight, Tensor):
        return weight.shape[0]
    if "Classification" in type(module).__name__:
        num_labels = getattr(getattr(module, "config", None), "num_labels", None)
        return num_labels if isinstance(num_labels, int) else None
    return None
