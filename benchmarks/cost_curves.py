"""The measurements of `cost.py`: how time and memory of each technique grow with one size, the others kept."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from measure import MIB, added, interleaved, live_tensor_bytes, peak_allocated
from speed.checkpointing import peak, peak_under, perceptron
from speed.distillation import chunked_steps
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from shared_core import Recipe, Session
from shared_core.activation_checkpointing.policies import plan_segments
from shared_core.loss_scaling import LossScaler, UnderflowTelemetry
from shared_core.privacy.per_sample_gradients import PerSample
from shared_core.pruning import prune_masks
from shared_core.soup import greedy_soup

SECONDS = 1.0  # of CPU time for one point
LAYERS = 4
MILLIONS = (1 << 22, 1 << 24, 1 << 26)  # beyond what caches hold


@dataclass(frozen=True)
class Curve:
    """One quantity as one size grows: in milliseconds or MiB; a power law, or a line where a part stays the same."""

    technique: str
    quantity: str
    axis: str
    unit: Literal["ms", "MiB"]
    sizes: tuple[int, ...]
    measure: Callable[[int], float]
    law: Literal["power", "line"]
    why: str
    """The expected growth, and its reason."""


def milliseconds(call: Callable[[], Any], base: Callable[[], Any] | None = None) -> float:
    """Return the median CPU milliseconds of a call, less those of another one in turn with it."""
    calls = {"ours": call} | ({"base": base} if base else {})
    times = interleaved(calls, rounds=25, seconds=SECONDS)
    return 1e3 * (added(times, "ours", "base").median if base else statistics.median(times["ours"]))


def stack(parameters: int, **how: Any) -> nn.Sequential:
    torch.manual_seed(0)
    width = round((parameters / LAYERS) ** 0.5)
    return nn.Sequential(*(nn.Linear(width, width, bias=False, **how) for _ in range(LAYERS)))


def begun(model: nn.Module, recipe: dict[str, Any], **how: Any) -> tuple[Session, torch.optim.Optimizer]:
    session = Session(Recipe.from_dict(recipe))
    session.attach(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, **how)
    session.begin([optimizer], total_steps=1_000_000)
    return session, optimizer


def after_step(parameters: int, recipe: dict[str, Any]) -> float:
    """Return the time of all that a technique does around an optimizer step."""
    model = stack(parameters)
    session, _ = begun(model, recipe)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)

    def step() -> None:
        session.before_step()
        session.after_step()

    return milliseconds(step)


def held(parameters: int, recipe: dict[str, Any], steps: int = 2, dtype: torch.dtype = torch.float32) -> float:
    """Return the memory that a technique holds after a few steps, beside weights, gradients and moments."""

    def total(options: dict[str, Any]) -> int:
        before = live_tensor_bytes()
        model = stack(parameters, dtype=dtype)
        session, optimizer = begun(model, options, momentum=0.9)
        for _ in range(steps):
            session.loss(model(torch.ones(1, model[0].in_features, dtype=dtype)).float().square().mean()).backward()
            session.before_step()
            optimizer.step()
            session.after_step()
            optimizer.zero_grad()
        return live_tensor_bytes() - before

    return (total(recipe) - total({})) / MIB


PRUNED = {"prune": {"sparsity": 0.5, "schedule": "one_shot", "begin": 0}}
AVERAGED = {"average": {"kind": "ema", "begin": 0, "warmup": False}}


def new_masks(parameters: int) -> float:
    scores = [layer.weight.detach().abs() for layer in stack(parameters) if isinstance(layer, nn.Linear)]
    return milliseconds(lambda: prune_masks(scores, 0.5))


def step_of(model: nn.Module, x: Tensor, recipe: dict[str, Any]) -> Callable[[], None]:
    session, _ = begun(model, recipe)

    def step() -> None:
        with session.forward():
            loss = model(x).float().square().mean()
        session.loss(loss).backward()
        model.zero_grad()

    return step


def added_by(recipe: dict[str, Any], parameters: int, rows: int) -> float:
    """Return the time that a technique adds to forward and backward."""
    width = round((parameters / LAYERS) ** 0.5)
    x = torch.randn(rows, width)
    return milliseconds(step_of(stack(parameters), x, recipe), step_of(stack(parameters), x, {}))


def scaler_time(parameters: int) -> float:
    model, scaler = stack(parameters), LossScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler.scale(torch.zeros(()))

    def step() -> None:
        scaler.unscale_(optimizer)
        scaler.update()

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return milliseconds(step)


def telemetry_time(parameters: int) -> float:
    named, telemetry = list(stack(parameters).named_parameters()), UnderflowTelemetry()
    for _, parameter in named:
        parameter.grad = torch.randn_like(parameter)
    return milliseconds(lambda: telemetry.measure(named, scale=1.0))


def distilled(tokens: int, vocabulary: int, which: str, memory: bool) -> float:
    step = chunked_steps(tokens, vocabulary, 128, 128)[which]
    return peak_allocated(step) / MIB if memory else milliseconds(step)


def adapted(rank: int, memory: bool) -> float:
    width, recipe = 512, {"lora": {"rank": rank, "base": "none"}}
    x = torch.randn(64, width)
    if not memory:
        return milliseconds(step_of(stack(LAYERS * width**2), x, recipe))
    before = live_tensor_bytes()
    step = step_of(stack(LAYERS * width**2), x, recipe)
    step()
    return (live_tensor_bytes() - before) / MIB


def factorized(rank: int) -> float:
    width = 512
    return milliseconds(
        step_of(stack(LAYERS * width**2), torch.randn(256, width), {"low_rank": {"rank": rank, "skip": ()}})
    )


def souped(checkpoints: int, parameters: int, memory: bool) -> float:
    """Return the time or the peak of a greedy soup that takes every checkpoint."""
    with tempfile.TemporaryDirectory(prefix="eff-cost-") as folder:
        paths = [Path(folder) / f"{number:02d}.pt" for number in range(checkpoints)]
        for path in paths:
            torch.save(stack(parameters).state_dict(), path)
        taken = iter(range(10**9))

        def soup() -> None:
            greedy_soup(paths, lambda state: float(next(taken)))

        return peak_allocated(soup) / MIB if memory else milliseconds(soup)


def averaged_in_torch(parameters: int) -> float:
    weights, average = [list(stack(parameters).parameters()) for _ in range(2)]
    update = get_ema_multi_avg_fn(0.999)
    return milliseconds(lambda: update([p.detach() for p in average], [p.detach() for p in weights], None))


def checkpointed(blocks: int, policy: str) -> float:
    """Return the activations' peak of a chain of like blocks, whose parameters are left out."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(perceptron(32) for _ in range(blocks))), torch.randn(2048, 32)
    if policy == "none":
        return peak(model, x) / MIB

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    return peak_under(model, x, plan_segments(model, policy, step=step).segments) / MIB


def saved(tokens: int, recipe: dict[str, Any]) -> float:
    """Return the peak of a forward and backward whose saved activations are packed."""
    torch.manual_seed(0)
    width = 128
    model = nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(width, width), nn.GELU())))
    step = step_of(model, torch.randn(tokens, width), recipe)
    step()
    return peak_allocated(step) / MIB


def private(examples: int, memory: bool) -> float:
    """Return the time or the peak of a sum of gradients that are clipped for each example."""
    model, x = stack(1 << 18), torch.randn(examples, 256)
    samples = PerSample(model, functorch=False)

    def step() -> None:
        samples.num_examples = examples
        model(x).square().sum().backward()
        for _ in samples.clipped_sums(torch.ones(examples), 1.0):
            pass
        model.zero_grad()

    return peak_allocated(step) / MIB if memory else milliseconds(step)


def fp8_time(tokens: int, recipe: dict[str, Any]) -> float:
    return milliseconds(step_of(stack(LAYERS * 256**2), torch.randn(tokens, 256), recipe))


TOKENS, MORE_TOKENS, VOCABULARIES = (128, 256, 512, 1024), (1024, 2048, 4096), (4000, 8000, 16_000, 32_000)
RANKS, INGREDIENTS, BLOCKS, EXAMPLES = (8, 16, 32, 64), (4, 8, 16), (8, 32, 128), (16, 64, 256)
FP8 = {"fp8": {"recipe": "tensorwise", "skip": (), "include": ("*",)}}

CURVES: tuple[Curve, ...] = (
    Curve("prune", "masks kept after a step", "parameters", "ms", MILLIONS, partial(after_step, recipe=PRUNED), "power",
          "1: a pass over weights and masks"),
    Curve("prune", "new masks under one threshold", "parameters", "ms", MILLIONS, new_masks, "power",
          "1: a sample, then one pass; no sorting"),
    Curve("prune", "memory of the masks", "parameters", "MiB", MILLIONS, partial(held, recipe=PRUNED), "power",
          "1: one byte a weight"),
    Curve("qat", "int8, added to forward and backward of one row", "parameters", "ms", MILLIONS,
          partial(added_by, {"qat": {"scheme": "int8"}}, rows=1), "power", "1: weights are quantized once a forward"),
    Curve("qat", "int8, added to forward and backward", "tokens", "ms", (64, 256, 1024),
          partial(added_by, {"qat": {"scheme": "int8"}}, 1 << 20), "line", "a line: weights once, activations a token"),
    Curve("average", "update of an EMA", "parameters", "ms", MILLIONS, partial(after_step, recipe=AVERAGED), "power",
          "1: one pass"),
    Curve("average", "torch's update of the same, for comparison", "parameters", "ms", MILLIONS, averaged_in_torch,
          "power", "1"),
    Curve("average", "memory of the EMA", "parameters", "MiB", MILLIONS, partial(held, recipe=AVERAGED), "power",
          "1: four bytes a weight"),
    Curve("primary_weights", "memory of float32 copies of bfloat16 weights", "parameters", "MiB", MILLIONS,
          partial(held, recipe={"primary_weights": {"kind": "fp32_copy"}}, dtype=torch.bfloat16), "power",
          "1: copy and moments in four bytes instead of two"),
    Curve("loss_scale", "unscaling and the check", "parameters", "ms", MILLIONS, scaler_time, "power", "1: one pass"),
    Curve("loss_scale", "telemetry, each time it is due", "parameters", "ms", MILLIONS, telemetry_time, "power",
          "1: one pass"),
    Curve("distill", "chunked loss, forward and backward", "tokens", "ms", TOKENS,
          partial(distilled, vocabulary=8000, which="ours", memory=False), "power",
          "1: products of tokens by vocabulary"),
    Curve("distill", "chunked loss, peak", "tokens", "MiB", MORE_TOKENS,
          partial(distilled, vocabulary=8000, which="ours", memory=True), "line",
          "flat: 64 MiB of logits at a time, and gradients"),
    Curve("distill", "textbook loss, peak, for comparison", "tokens", "MiB", MORE_TOKENS,
          partial(distilled, vocabulary=8000, which="naive", memory=True), "power", "1: all logits at a time"),
    Curve("distill", "chunked loss, forward and backward", "vocabulary", "ms", VOCABULARIES,
          lambda size: distilled(256, size, "ours", False), "power", "1"),
    Curve("distill", "chunked loss, peak", "vocabulary", "MiB", VOCABULARIES,
          lambda size: distilled(256, size, "ours", True), "line", "a line: the budget, and the head's gradient"),
    Curve("distill", "textbook loss, peak, for comparison", "vocabulary", "MiB", VOCABULARIES,
          lambda size: distilled(256, size, "naive", True), "power", "1"),
    Curve("lora", "forward and backward", "rank", "ms", (16, 64, 256), partial(adapted, memory=False), "line",
          "a line: the base, and two products of the rank"),
    Curve("lora", "memory of base and adapters", "rank", "MiB", RANKS, partial(adapted, memory=True), "line",
          "a line: the base, and the adapters"),
    Curve("low_rank", "forward and backward of factorized layers", "rank", "ms", (16, 32, 64, 128), factorized, "line",
          "a line: two products of the rank"),
    Curve("soup", "greedy, all accepted", "ingredients", "ms", INGREDIENTS,
          partial(souped, parameters=1 << 20, memory=False), "power", "1: each is read twice, averaged once"),
    Curve("soup", "greedy, peak", "ingredients", "MiB", INGREDIENTS, partial(souped, parameters=1 << 20, memory=True),
          "line", "flat: one after the other, however many there are"),
    Curve("soup", "greedy of four, all accepted", "parameters", "ms", (1 << 20, 1 << 22, 1 << 24),
          lambda size: souped(4, size, False), "line", "a line: opening files, and a pass a checkpoint"),
    Curve("checkpoint", "activations under `budget:least`, peak", "blocks", "MiB", BLOCKS,
          partial(checkpointed, policy="budget:least"), "power", "1/2: √N segments"),
    Curve("checkpoint", "activations without checkpointing, peak, for comparison", "blocks", "MiB", BLOCKS,
          partial(checkpointed, policy="none"), "power", "1"),
    Curve("activations", "packed in int8, peak", "tokens", "MiB", (512, 2048, 8192),
          partial(saved, recipe={"activations": {"pack": "int8"}}), "power", "1"),
    Curve("activations", "not packed, peak, for comparison", "tokens", "MiB", (512, 2048, 8192),
          partial(saved, recipe={}), "power", "1"),
    Curve("fp8", "emulated on CPU, forward and backward", "tokens", "ms", (64, 256, 1024),
          partial(fp8_time, recipe=FP8), "line", "a line: weights are cast once, activations a token"),
    Curve("dp", "sum of clipped gradients", "examples", "ms", EXAMPLES, partial(private, memory=False), "line",
          "a line: sums of all parameters, and products of the examples"),
    Curve("dp", "sum of clipped gradients, peak", "examples", "MiB", EXAMPLES, partial(private, memory=True), "line",
          "a line: sums of all parameters, and inputs of layers"),
)  # fmt: skip
