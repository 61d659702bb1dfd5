"""Open the comparison that a config asks for: load its teachers and check them against the student.

Student and teacher must use the same token numbers; `common_vocabulary` returns how many they share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from shared_core.distillation.comparison import CachedComparison, Comparison, load_named
from shared_core.distillation.config import EMA, DistillConfig
from shared_core.distillation.mutual import MutualComparison, Peers
from shared_core.distillation.outputs import check_heads, num_classes
from shared_core.distillation.teacher_cache.keys import teacher_fingerprint, tokenizer_vocabulary
from shared_core.distillation.teachers import StartingStudent, StudentAverage, Teachers, change_dtype_, check_separate
from shared_core.engine.technique import Context
from shared_core.errors import ConfigError
from shared_core.files.user_code import names_function


def open_comparison(
    config: DistillConfig,
    model: nn.Module,
    student: nn.Module,
    context: Context,
    made: Peers | StartingStudent | None,
    *,
    fuses_head: bool = False,
) -> Comparison:
    """Return the comparison that the options ask for, with teachers loaded, frozen and checked.

    Args:
        config: The options.
        model: The user's model.
        student: The part of it that is distilled.
        context: The run.
        made: Peers, or the copy of the student, made before any technique changed the model.
        fuses_head: True if the student returns log-probabilities of the labels instead of logits.
    """
    if isinstance(made, Peers):
        return MutualComparison(config, model, made, context)
    if made is not None:
        size = made.report()["teacher_mib"]
        context.note(f"distill: teacher self keeps a frozen copy of the student ({size} MiB), run on each micro-batch")
        copy = {"teacher": "the student as the run started", "teacher_parameters": _size(made.modules[0])}
        copy |= {"teacher_dtype": config.teacher_dtype, **made.report()}
        return _open(config, made, copy, student, fuses_head)
    if config.cache is not None:
        return CachedComparison(config, student)
    if config.teaching == EMA:
        average = {"teacher": f"moving average of the student, decay {config.ema_decay}"}
        return _open(config, StudentAverage(student, config.ema_decay), average, student, fuses_head)
    modules = [
        load_named(teacher, student, context, trust_remote_code=config.trust_remote_code) for teacher in config.teachers
    ]
    for given, module in zip(config.teachers, modules, strict=True):
        check_separate(model, module)
        # Each teacher may set vocab_size, and the next one is checked against it.
        config = _with_common_vocabulary(config, student, module, given, context)
        check_heads(student, module, divergence=config.divergence, logits=config.logits, vocab_size=config.vocab_size)
    report: dict[str, Any] = {**_teacher_report(modules, student, context), "teacher_dtype": config.teacher_dtype}
    if config.vocab_size is not None:
        report["vocab_size"] = config.vocab_size
    built = {
        name: teacher_fingerprint(module)
        for name, module in zip(config.teachers, modules, strict=True)
        if isinstance(name, str) and names_function(name)
    }
    for module in modules:
        change_dtype_(module, config.teacher_dtype)
    return _open(config, Teachers(modules, config.teacher_weights, built), report, student, fuses_head)


def _with_common_vocabulary(
    config: DistillConfig, student: nn.Module, module: nn.Module, teacher: Any, context: Context
) -> DistillConfig:
    """Return the options with `vocab_size` set if heads over one tokenizer are padded to different sizes."""
    name = teacher if isinstance(teacher, str) else None
    common = common_vocabulary(
        student, module, name=name, tokenizer=context.services.tokenizer(), vocab_size=config.vocab_size
    )
    if common == config.vocab_size:
        return config
    context.note(
        f"distill: the heads of student and teacher share a tokenizer but have different padding: comparing their "
        f"first {common} classes"
    )
    return dataclasses.replace(config, vocab_size=common)


def _open(
    config: DistillConfig, teachers: Teachers, report: Mapping[str, Any], student: nn.Module, fuses_head: bool
) -> Comparison:
    if config.chunked or (fuses_head and config.can_be_chunked):
        from shared_core.distillation.deferred_logits import ChunkedComparison

        try:
            return ChunkedComparison(config, teachers, report, student)
        except ConfigError as error:
            if config.chunked:
                raise
            report = {**report, "logits": f"of all positions: {error.rule}"}
    return Comparison(config, teachers, report)


def _teacher_report(modules: list[nn.Module], student: nn.Module, context: Context) -> dict[str, Any]:
    names, sizes = [type(module).__name__ for module in modules], [_size(module) for module in modules]
    report: dict[str, Any] = {"teacher": ", ".join(names), "teacher_parameters": sum(sizes)}
    if max(sizes) < _size(student):
        report["warning"] = "the teacher is smaller than the student; distilling from it may not help"
        context.services.say(
            f"distill: the teacher has {max(sizes):,} parameters, fewer than the student's "
            f"{_size(student):,}; distilling from it may not help"
        )
    return report


def _size(module: nn.Module) -> int:
    # Adapters do not count as the model's weights. bitsandbytes packs two 4-bit weights into one number.
    own = [weight for name, weight in module.named_parameters() if ".lora_" not in name]
    shapes = [getattr(getattr(weight, "quant_state", None), "shape", weight.shape) for weight in own]
    return sum(shape.numel() for shape in shapes)


_WAY_OUT = "use a teacher with the student's tokenizer, or train on text that this teacher generates"


def common_vocabulary(
    student: nn.Module, teacher: nn.Module, *, name: str | None, tokenizer: Any, vocab_size: int | None
) -> int | None:
    """Return how many tokens the heads of student and teacher share; None if their padding does not differ.

    If both tokenizers are known, they are compared: the student's from the trainer or its own folder, the teacher's
    from its folder. A vocabulary may lack tokens of the other, and 1 % may be renamed (reserved tokens are). Otherwise
    only the sizes are compared.
    """
    ours, theirs = _text_model(student), _text_model(teacher)
    if ours is None or theirs is None:
        return vocab_size
    mine = tokenizer_vocabulary(tokenizer) or _vocabulary_beside(ours)
    its = _vocabulary_in(name) or _vocabulary_beside(theirs)
    its_name = name or type(teacher).__name__
    known = bool(mine and its)
    if mine and its:
        _check_tokens(mine, its, its_name)
    rows = _num_tokens(ours), _num_tokens(theirs)
    classes = num_classes(ours), num_classes(theirs)
    are_heads = classes[0] == rows[0] and classes[1] == rows[1]
    if are_heads and (vocab_size is not None or not known):
        return vocab_size  # `check_sizes` compares the sizes of the heads
    _check_tokens_known(*rows, mine if known else None, its_name)
    return min(rows) if are_heads and rows[0] != rows[1] else vocab_size


def _check_tokens(ours: dict[str, int], theirs: dict[str, int], teacher: str) -> None:
    meant = {number: token for token, number in theirs.items()}
    shared = [(number, token, meant[number]) for token, number in ours.items() if number in meant]
    others = sorted((number, mine, other) for number, mine, other in shared if mine != other)
    if len(others) > len(shared) / 100:
        number, mine, other = others[0]
        raise ConfigError(
            "distill",
            f"teacher must have the student's tokenizer, but in {teacher!r} {len(others)} of {len(shared)} shared "
            f"token ids mean other tokens, such as {number}: {mine!r} and {other!r}",
            _WAY_OUT,
        )


def _check_tokens_known(ours: int, theirs: int, vocabulary: dict[str, int] | None, teacher: str) -> None:
    """Raise if the teacher's embedding lacks tokens that the student's inputs may hold."""
    needed = ours if vocabulary is None else min(max(vocabulary.values()) + 1, ours)
    if theirs < needed or (vocabulary is None and theirs != ours):
        verb = "have" if vocabulary is None else "know"
        rule = f"teacher must {verb} the student's {needed} tokens, got {teacher!r} with {theirs}"
        remedy = "add them to the teacher (resize_token_embeddings), or remove them from the student's tokenizer"
        if vocabulary is None:
            rule += ", and no tokenizers to check whether only padding differs"
            remedy = (
                "pass the student's tokenizer to the Trainer as processing_class and save the teacher's in its folder. "
                f"If they differ, {_WAY_OUT}"
            )
        raise ConfigError("distill", rule, remedy)


def _text_model(module: nn.Module) -> Any:
    """Return the single transformers language model that a module is or contains, or None."""
    if _num_tokens(module):
        return module
    found: list[nn.Module] = []
    for path, part in module.named_modules():
        if path and not any(part in set(other.modules()) for other in found) and _num_tokens(part):
            found.append(part)
    return found[0] if len(found) == 1 else None


def _num_tokens(module: Any) -> int:
    """Return how many tokens a transformers model embeds, 0 if it embeds something else or is another model."""
    embeddings = getattr(module, "get_input_embeddings", None)
    try:
        size = getattr(embeddings() if callable(embeddings) else None, "num_embeddings", 0)
    except NotImplementedError:  # transformers raises it for classes with several embeddings
        return 0
    return size if isinstance(size, int) else 0


def _vocabulary_beside(model: Any) -> dict[str, int] | None:
    return _vocabulary_in(getattr(model, "name_or_path", None))


def _vocabulary_in(name: Any) -> dict[str, int] | None:
    return tokenizer_vocabulary(Path(name).expanduser()) if isinstance(name, str) and name else None
