"""Open the comparison that a config asks for: its teachers are loaded and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from shared_core.distillation.comparison import CachedComparison, Comparison, load_named
from shared_core.distillation.config import EMA, DistillConfig
from shared_core.distillation.mutual import MutualComparison, Peers
from shared_core.distillation.outputs import check_heads
from shared_core.distillation.teachers import StudentAverage, Teachers, change_dtype_, check_separate
from shared_core.distillation.vocabularies import common_vocabulary
from shared_core.engine.technique import Context
from shared_core.errors import ConfigError


def open_comparison(
    config: DistillConfig,
    model: nn.Module,
    student: nn.Module,
    context: Context,
    peers: Peers | None,
    *,
    fuses_head: bool = False,
) -> Comparison:
    """Return the comparison that the options ask for, its teachers loaded, frozen and checked against the student."""
    if peers is not None:
        return MutualComparison(config, model, peers, context)
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
        # Each teacher may set vocab_size; the next is then checked against it.
        config = _with_common_vocabulary(config, student, module, given, context)
        check_heads(student, module, divergence=config.divergence, logits=config.logits, vocab_size=config.vocab_size)
    told: dict[str, Any] = {**_told(modules, student, context), "teacher_dtype": config.teacher_dtype}
    if config.vocab_size is not None:
        told["vocab_size"] = config.vocab_size
    for module in modules:
        change_dtype_(module, config.teacher_dtype)
    return _open(config, Teachers(modules, config.teacher_weights), told, student, fuses_head)


def _with_common_vocabulary(
    config: DistillConfig, student: nn.Module, module: nn.Module, teacher: Any, context: Context
) -> DistillConfig:
    """Return the options with `vocab_size` set where heads over one tokenizer are padded to different sizes."""
    name = teacher if isinstance(teacher, str) else None
    common = common_vocabulary(
        student, module, name=name, tokenizer=context.services.tokenizer(), vocab_size=config.vocab_size
    )
    if common == config.vocab_size:
        return config
    context.note(
        f"distill: the heads of student and teacher are padded differently over one tokenizer: their first {common} "
        "classes are compared"
    )
    return dataclasses.replace(config, vocab_size=common)


def _open(
    config: DistillConfig, teachers: Teachers, told: Mapping[str, Any], student: nn.Module, fuses_head: bool
) -> Comparison:
    if config.chunked or (fuses_head and config.can_be_chunked):
        from shared_core.distillation.chunked.comparison import ChunkedComparison

        try:
            return ChunkedComparison(config, teachers, told, student)
        except ConfigError as error:
            if config.chunked:
                raise
            told = {**told, "logits": f"of all positions: {error.rule}"}
    return Comparison(config, teachers, told)


def _told(modules: list[nn.Module], student: nn.Module, context: Context) -> dict[str, Any]:
    names, sizes = [type(module).__name__ for module in modules], [_size(module) for module in modules]
    told: dict[str, Any] = {"teacher": ", ".join(names), "teacher_parameters": sum(sizes)}
    if max(sizes) < _size(student):
        told["warning"] = "the teacher is smaller than the student; distilling from it may not help"
        context.services.say(
            f"distill: the teacher has {max(sizes):,} parameters, fewer than the student's "
            f"{_size(student):,}; distilling from it may not help"
        )
    return told


def _size(module: nn.Module) -> int:
    # adapters are none of a model's own weights; bitsandbytes packs two weights of 4 bits into one number
    own = [weight for name, weight in module.named_parameters() if ".lora_" not in name]
    shapes = [getattr(getattr(weight, "quant_state", None), "shape", weight.shape) for weight in own]
    return sum(shape.numel() for shape in shapes)
