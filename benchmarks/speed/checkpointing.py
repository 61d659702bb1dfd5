"""Activation checkpointing: peak and time of each policy, and whether the planner's points lie on the Pareto front."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from measure import MIB, Row, in_turn, keep_freed_memory, main, milliseconds, ratio
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shared_core.activation_checkpointing import apply_segments, find_blocks
from shared_core.activation_checkpointing.budget_planner import choose_segments
from shared_core.activation_checkpointing.policies import plan_segments, profile_blocks
from shared_core.activation_checkpointing.profiler import measure_peak
from shared_core.activation_checkpointing.segments import Handle, selective_contexts

FRACTIONS = (0.2, 0.3, 0.5, 0.7, 0.9)
Segments = Sequence[Sequence[str]]


def perceptron(width: int) -> nn.Module:
    """Return a block that saves three tensors of its input's size: k = 3."""
    layers = [part for _ in range(3) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


class Block(nn.Module):
    """A pre-norm block of a transformer, without dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class StockCheckpoint(nn.Module):
    """The same blocks, each under torch's own checkpoint."""

    def __init__(self, blocks: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks, self.use_reentrant = blocks, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.children():
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


def step(model: nn.Module, x: Tensor) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    model(x).square().mean().backward()


def peak(model: nn.Module, x: Tensor) -> int:
    with measure_peak(model) as measured:
        step(model, x)
    return measured.activations


def equal_segments(names: Sequence[str], count: int) -> Segments:
    """Return the blocks in that many segments, as even as they can be."""
    edges = [round(i * len(names) / count) for i in range(count + 1)]
    return [names[a:b] for a, b in itertools.pairwise(edges)]


def peak_under(model: nn.Module, x: Tensor, segments: Segments) -> int:
    handle = apply_segments(model, segments) if segments else None
    try:
        return peak(model, x)
    finally:
        if handle:
            handle.remove()


def root_n(count: int, rows: int) -> Row:
    """Compare the planner with every even number of segments of `count` like blocks."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(perceptron(64) for _ in range(count))), torch.randn(rows, 64)
    names = find_blocks(model)
    none, single = peak_under(model, x, []), peak_under(model, x, [names])
    numbers = sorted({*range(2, min(count, 65), 1 + count // 32), round(count**0.5), count})
    peaks = {number: peak_under(model, x, equal_segments(names, number)) for number in numbers}
    root, best = round(count**0.5), min(peaks, key=lambda number: peaks[number])
    plan = plan_segments(model, "budget:least", step=partial(step, model, x))
    ours = peak_under(model, x, plan.segments)
    return Row(
        f"checkpointing, {count} blocks (k = 3), peak: none {none / MIB:.1f} MiB, 1 segment {single / MIB:.1f}, "
        f"√N = {root} segments {peaks[root] / MIB:.1f}",
        f"planner, {len(plan.segments)} segments: predicted {plan.peak / MIB:.1f}, measured {ours / MIB:.1f} MiB",
        f"best even split, {best} segments: {peaks[best] / MIB:.1f} MiB",
        memory=f"{ours / none:.3f} of none; {ours / peaks[best]:.3f} of the best even split",
        target="<= 1.05 of it; predicted within 5 %",
        met=ours <= 1.05 * peaks[best] and abs(plan.peak - ours) <= 0.05 * ours,
    )


def seconds(model: nn.Module, x: Tensor, apply: Callable[[], Handle] | None) -> float:
    """Return the CPU seconds of a step under a policy."""
    handle = apply() if apply else None
    try:
        start = time.process_time()
        step(model, x)
        return time.process_time() - start
    finally:
        if handle:
            handle.remove()


def policies(depth: int, width: int, tokens: int, rounds: int) -> list[Row]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width, heads=4) for _ in range(depth)))
    x = torch.randn(1, tokens, width)
    names = find_blocks(model)
    singles = [[name] for name in names]
    cost = profile_blocks(model, step=partial(step, model, x))
    least = choose_segments(cost, None)
    plans = {"budget:least": least}
    for fraction in FRACTIONS:
        plan = choose_segments(cost, max(fraction * least.full_peak, least.peak))
        if plan not in plans.values():
            plans[f"budget:{fraction}"] = plan
    segments: dict[str, Segments] = {
        "every block": singles,
        "every 2nd block": singles[::2],
        "every 4th block": singles[::4],
        **{f"{number} segments": equal_segments(names, number) for number in (8, 4, 2) if number < depth},
        **{name: plan.segments for name, plan in plans.items() if plan.segments},
    }
    applied = {name: partial(apply_segments, model, chosen) for name, chosen in segments.items()}
    applied["selective: save products"] = partial(apply_segments, model, singles, contexts=selective_contexts)
    stock = {f"torch, {how}reentrant": StockCheckpoint(model, how == "") for how in ("non-", "")}
    peaks = {"none": peak(model, x)} | {name: peak(other, x.requires_grad_()) for name, other in stock.items()}
    x.requires_grad_(False)
    for name, apply in applied.items():
        handle = apply()
        step(model, x)
        peaks[name] = peak(model, x)
        handle.remove()
    variants = {"none": partial(seconds, model, x, None)}
    variants |= {name: partial(seconds, model, x, apply) for name, apply in applied.items()}
    variants |= {name: partial(seconds, other, x.clone().requires_grad_(), None) for name, other in stock.items()}
    times = in_turn(variants, rounds=rounds, seconds=60.0)  # the front is decided by small differences

    def dominates(other: str, name: str) -> bool:
        """Whether the other holds no more and is surely faster, or holds less and is not slower."""
        if [*map(list, segments.get(other, []))] == [*map(list, segments.get(name, []))]:
            return False  # the same point
        paired = ratio(times, other, name)
        surely_faster = peaks[other] <= peaks[name] and paired.high < 1
        return surely_faster or (peaks[other] < 0.99 * peaks[name] and paired.median <= 1)

    rows = []
    for name in sorted(variants, key=lambda name: -peaks[name]):
        plan = plans.get(name)
        better = [other for other in variants if other != name and dominates(other, name)]
        text = f"dominated by {', '.join(better)}" if better else "on the Pareto front"
        rows.append(
            Row(
                f"checkpointing, transformer {depth} x {width}, {tokens} tokens: {name}",
                f"{milliseconds(times, name)}"
                + (f"; {len(plan.segments)} segments, recomputes {plan.share:.2f} of forward" if plan else ""),
                ratio=ratio(times, name, "none").text(3),
                memory=f"{peaks[name] / MIB:.1f} MiB, {peaks[name] / peaks['none']:.3f} of none"
                + (f"; predicted {plan.peak / MIB:.1f} MiB" if plan else ""),
                target=f"not dominated: {text}" if plan else text,
                met=not better if plan else None,
            )
        )
    return rows


def measure(quick: bool) -> list[Row]:
    keep_freed_memory()
    counts, tokens = ((8, 16), 512) if quick else ((8, 16, 64, 256), 1024)
    even = [root_n(count, tokens) for count in counts]
    return even + (policies(4, 64, 128, rounds=2) if quick else policies(16, 256, 512, rounds=9))


if __name__ == "__main__":
    main(measure)
