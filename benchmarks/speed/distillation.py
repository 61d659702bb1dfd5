"""Measure what distillation adds to a step at a language model's vocabulary, beside the textbook loss."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from measure import MIB, Row, interleaved, main, milliseconds, peak_allocated, ratio
from torch import Tensor, nn

from shared_core import Recipe, Session
from shared_core.distillation.chunked_loss import chunked_kd_loss

TEMPERATURE, ALPHA = 2.0, 0.5
# of cross-entropy's time alone, of the textbook loss's peak, and how much longer the textbook loss takes
TIME, PEAK, FASTER = 1.65, 0.13, 1.5
LARGEST_MIB = 0.7e9 / MIB
PEERS = {"trl": "TRL's", "liger": "Liger's"}
PEERS_TIME, PEERS_MIB = 0.9, 0.4e9 / MIB


def textbook(student: Tensor, teacher: Tensor) -> Tensor:
    soft = F.kl_div(
        F.log_softmax(student / TEMPERATURE, -1), F.softmax(teacher / TEMPERATURE, -1), reduction="batchmean"
    )
    return TEMPERATURE**2 * soft


class Layers(nn.Sequential):
    """Linear layers, the last of which is the output head."""

    def __init__(self, *widths: int) -> None:
        super().__init__(*map(nn.Linear, widths, widths[1:]))

    def get_output_embeddings(self) -> nn.Module:
        return self[-1]


def steps(tokens: int, vocabulary: int) -> dict[str, Callable[[], None]]:
    """Return forward and backward of a head alone, with textbook distillation, and with ours, whole and in chunks."""
    torch.manual_seed(0)
    hidden, labels = torch.randn(tokens, 256), torch.randint(vocabulary, (tokens,))
    student, teacher = Layers(256, vocabulary), Layers(256, 512, vocabulary).requires_grad_(False)

    def plain() -> None:
        student.zero_grad()
        F.cross_entropy(student(hidden), labels).backward()

    def naive() -> None:
        student.zero_grad()
        logits = student(hidden)
        with torch.no_grad():
            targets = teacher(hidden)
        (ALPHA * F.cross_entropy(logits, labels) + (1 - ALPHA) * textbook(logits, targets)).backward()

    def ours(*, chunked: bool) -> Callable[[], None]:
        model = Layers(256, vocabulary)
        options = {"teacher": teacher, "temperature": TEMPERATURE, "alpha": ALPHA, "chunked": chunked}
        session = Session(Recipe.from_dict({"distill": options}))
        session.attach(model)
        session.begin([torch.optim.SGD(model.parameters(), lr=0.0)], total_steps=1_000_000)

        def step() -> None:
            model.zero_grad()
            session.loss(F.cross_entropy(model(hidden), labels)).backward()

        return step

    return {"plain": plain, "naive": naive, "ours": ours(chunked=False), "chunked": ours(chunked=True)}


def chunked_steps(tokens: int, vocabulary: int, width: int, teacher_width: int) -> dict[str, Callable[[], None]]:
    """Return forward and backward of a head: cross-entropy alone, with textbook distillation, and in chunks."""
    torch.manual_seed(0)
    hidden, teacher_hidden = torch.randn(tokens, width, requires_grad=True), torch.randn(tokens, teacher_width)
    weight = (torch.randn(vocabulary, width) / width**0.5).requires_grad_()
    teacher_weight = torch.randn(vocabulary, teacher_width) / teacher_width**0.5
    labels = torch.randint(vocabulary, (tokens,))

    def stepped(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def step() -> None:
            loss().backward()
            # freed here: at the start it would hide as much of the peak
            hidden.grad = weight.grad = None

        return step

    def naive() -> Tensor:
        logits = hidden @ weight.t()
        soft = textbook(logits, teacher_hidden @ teacher_weight.t())
        return ALPHA * F.cross_entropy(logits, labels) + (1 - ALPHA) * soft

    def ours() -> Tensor:
        options = {"temperature": TEMPERATURE, "labels": labels, "alpha": ALPHA}
        return chunked_kd_loss(hidden, weight, teacher_hidden, teacher_weight, **options)

    def plain() -> Tensor:
        return F.cross_entropy(hidden @ weight.t(), labels)

    return {"plain": stepped(plain), "naive": stepped(naive), "ours": stepped(ours)}


def chunked(tokens: int, vocabulary: int, width: int, teacher_width: int, *, rounds: int) -> Row:
    """Return time and memory of the chunked loss; without rounds its memory alone."""
    variants = chunked_steps(tokens, vocabulary, width, teacher_width)
    peaks = {name: peak_allocated(call) / MIB for name, call in variants.items() if rounds or name != "plain"}
    smaller = peaks["ours"] / peaks["naive"]
    what = (
        f"distillation from hidden states in chunks, {tokens} tokens, {vocabulary} classes, {width} features, "
        f"teacher's {teacher_width}"
    )
    memory = f"{peaks['ours']:.0f} MiB at most, {smaller:.3f} of textbook {peaks['naive']:.0f}"
    if not rounds:
        target = f"peak <= {PEAK} textbook, < {LARGEST_MIB:.0f} MiB"
        return Row(what, "", memory=memory, target=target, met=smaller <= PEAK and peaks["ours"] < LARGEST_MIB)
    times = interleaved(variants, rounds=rounds)
    slower, faster = ratio(times, "ours", "plain"), ratio(times, "naive", "ours")
    return Row(
        f"{what} (cross-entropy alone: {milliseconds(times, 'plain')})",
        milliseconds(times, "ours"),
        f"textbook loss {milliseconds(times, 'naive')}, {faster.text()} of ours",
        slower.text(),
        f"{memory}, cross-entropy alone {peaks['plain']:.0f}",
        f"time <= {TIME} plain, textbook >= {FASTER}, peak <= {PEAK} textbook and below cross-entropy's",
        slower.median <= TIME and faster.median >= FASTER and smaller <= PEAK and peaks["ours"] < peaks["plain"],
    )


def peers_steps(tokens: int, vocabulary: int, width: int, teacher_width: int) -> dict[str, Callable[[], None]]:
    """Return forward and backward of the JSD from hidden states and heads: ours, TRL's, and Liger's if it is there."""
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    torch.manual_seed(0)
    hidden, teacher_hidden = torch.randn(tokens, width, requires_grad=True), torch.randn(tokens, teacher_width)
    weight = (torch.randn(vocabulary, width) / width**0.5).requires_grad_()
    teacher_weight = torch.randn(vocabulary, teacher_width) / teacher_width**0.5
    labels = torch.randint(vocabulary, (tokens,))

    def ours() -> Tensor:
        return chunked_kd_loss(hidden, weight, teacher_hidden, teacher_weight, temperature=1.0, divergence="jsd")

    def trl() -> Tensor:
        inputs, mask = (hidden[None], teacher_hidden[None]), torch.ones(1, tokens)
        loss: Tensor = _chunked_divergence_loss(*inputs, weight, teacher_weight, mask, beta=0.5)[0]
        return loss

    losses = {"ours": ours, "trl": trl}
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

        reference = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, compiled=False)
        losses["liger"] = lambda: reference(hidden, weight, teacher_hidden, teacher_weight, labels)
    values = {name: loss().item() for name, loss in losses.items()}
    if any(abs(value / values["trl"] - 1) > 1e-4 for value in values.values()):
        raise ValueError(f"the losses must be one, got {values}")

    def stepped(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def step() -> None:
            loss().backward()
            hidden.grad = weight.grad = None

        return step

    return {name: stepped(loss) for name, loss in losses.items()}


def beside_peers(tokens: int, vocabulary: int, width: int, teacher_width: int, *, rounds: int) -> Row:
    """Return time and memory of the JSD in chunks beside TRL's, and Liger's in plain torch."""
    variants = peers_steps(tokens, vocabulary, width, teacher_width)
    peaks = {name: peak_allocated(call) / MIB for name, call in variants.items()}
    times = interleaved(variants, rounds=rounds)
    peers = [name for name in variants if name != "ours"]
    ratios = {name: ratio(times, "ours", name) for name in peers}
    return Row(
        f"JSD from hidden states in chunks, {tokens} tokens, {vocabulary} classes, {width} features, teacher's "
        f"{teacher_width}",
        milliseconds(times, "ours"),
        ", ".join(f"{PEERS[name]} {milliseconds(times, name)}" for name in peers),
        ", ".join(f"{ratios[name].text()} of {PEERS[name]}" for name in peers),
        f"{peaks['ours']:.0f} MiB at most, " + ", ".join(f"{PEERS[name]} {peaks[name]:.0f}" for name in peers),
        f"time <= {PEERS_TIME} and peak <= each peer's, peak <= {PEERS_MIB:.0f} MiB",
        peaks["ours"] <= PEERS_MIB
        and all(ratios[name].median <= PEERS_TIME and peaks["ours"] <= peaks[name] for name in peers),
    )


def measure(quick: bool) -> list[Row]:
    tokens, vocabulary = (64, 2000) if quick else (512, 32000)
    variants = steps(tokens, vocabulary)
    times = interleaved(variants, rounds=2 if quick else 5)
    peaks = {name: peak_allocated(call) / MIB for name, call in variants.items()}
    return [
        *(
            Row(
                f"distillation{how}, {tokens} tokens, {vocabulary} classes, 256 features "
                f"(cross-entropy alone: {milliseconds(times, 'plain')})",
                milliseconds(times, name),
                f"textbook loss {milliseconds(times, 'naive')}, {ratio(times, 'naive', 'plain').text()}",
                ratio(times, name, "plain").text(),
                f"{peaks[name]:.0f} MiB at most, textbook {peaks['naive']:.0f}, cross-entropy alone "
                f"{peaks['plain']:.0f}",
            )
            for name, how in (("ours", ""), ("chunked", " with `chunked`"))
        ),
        *large_vocabularies(quick),
    ]


def large_vocabularies(quick: bool) -> list[Row]:
    if quick:
        return [chunked(256, 4000, 64, 128, rounds=2), beside_peers(256, 4000, 64, 128, rounds=2)]
    return [
        chunked(1024, 32_000, 256, 512, rounds=5),
        chunked(2048, 128_000, 512, 512, rounds=0),
        beside_peers(512, 32_000, 256, 512, rounds=5),
        beside_peers(256, 128_000, 512, 512, rounds=5),
    ]


if __name__ == "__main__":
    main(measure)
