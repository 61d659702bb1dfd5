"""What distillation adds to a step at a language model's vocabulary: time and memory beside the textbook loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from measure import MIB, Row, interleaved, main, milliseconds, peak_allocated, ratio
from torch import Tensor, nn

from shared_core import Recipe, Session

TEMPERATURE, ALPHA = 2.0, 0.5


def textbook(student: Tensor, teacher: Tensor) -> Tensor:
    soft = F.kl_div(
        F.log_softmax(student / TEMPERATURE, -1), F.softmax(teacher / TEMPERATURE, -1), reduction="batchmean"
    )
    return TEMPERATURE**2 * soft


def steps(tokens: int, vocabulary: int) -> dict[str, Callable[[], None]]:
    """Return forward and backward of a head alone, with textbook distillation, and with ours."""
    torch.manual_seed(0)
    hidden, labels = torch.randn(tokens, 256), torch.randint(vocabulary, (tokens,))
    student, ours_student = nn.Linear(256, vocabulary), nn.Linear(256, vocabulary)
    teacher = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, vocabulary)).requires_grad_(False)
    recipe = {"distill": {"teacher": teacher, "temperature": TEMPERATURE, "alpha": ALPHA}}
    session = Session(Recipe.from_dict(recipe))
    session.attach(ours_student)
    session.begin([torch.optim.SGD(ours_student.parameters(), lr=0.0)], total_steps=1_000_000)

    def plain() -> None:
        student.zero_grad()
        F.cross_entropy(student(hidden), labels).backward()

    def naive() -> None:
        student.zero_grad()
        logits = student(hidden)
        with torch.no_grad():
            targets = teacher(hidden)
        (ALPHA * F.cross_entropy(logits, labels) + (1 - ALPHA) * textbook(logits, targets)).backward()

    def ours() -> None:
        ours_student.zero_grad()
        session.loss(F.cross_entropy(ours_student(hidden), labels)).backward()

    return {"plain": plain, "naive": naive, "ours": ours}


def measure(quick: bool) -> list[Row]:
    tokens, vocabulary = (64, 2000) if quick else (512, 32000)
    variants = steps(tokens, vocabulary)
    times = interleaved(variants, rounds=2 if quick else 9)
    peaks = {name: peak_allocated(call) / MIB for name, call in variants.items()}
    return [
        Row(
            f"distillation, {tokens} tokens, {vocabulary} classes, 256 features "
            f"(cross-entropy alone: {milliseconds(times, 'plain')})",
            milliseconds(times, "ours"),
            f"textbook loss {milliseconds(times, 'naive')}, {ratio(times, 'naive', 'plain').text()}",
            ratio(times, "ours", "plain").text(),
            f"{peaks['ours']:.0f} MiB at most, textbook {peaks['naive']:.0f}, cross-entropy alone {peaks['plain']:.0f}",
        )
    ]


if __name__ == "__main__":
    main(measure)
