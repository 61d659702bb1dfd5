"""Which blocks to checkpoint together and which to leave alone, from what each costs: numbers in, numbers out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared_core.errors import ConfigError

# Recomputation time is counted in this many units at least: the programme's second dimension.
_UNITS = 1024
_HALVINGS = 7  # the peak of a plan is within 2^-7 of the way to the least one of the plans that take its time
_MIB = float(1 << 20)


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """Time and memory of one block of a chain in a step of training."""

    name: str
    input: int
    """Bytes of its input: what a segment that begins with it holds."""
    saved: int
    """Bytes that autograd saves inside it for the backward pass, without its input."""
    seconds: float
    """Time of its forward."""
    tail: float = 0.0
    """Time of its forward after the last tensor saved: a recomputation that ends with this block stops before."""
    inner: int = 0
    """The most bytes that the step holds while it runs, forward or backward, beside `input` and `saved` of it and of
    the blocks before: its output, gradients of activations, intermediate results, what is saved around the blocks."""
    follows: bool = True
    """True if its input is the output of the block before, so that one segment can hold both."""


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Time and memory of a step of training: its chain of blocks, in the order of their forward, and the rest."""

    blocks: tuple[BlockCost, ...]
    head: int = 0
    """The most bytes beside the blocks' that the step holds between the last block's forward and its backward: logits,
    the loss, what is saved around the blocks."""

    @property
    def forward_seconds(self) -> float:
        """Time of all blocks' forward."""
        return sum(block.seconds for block in self.blocks)


@dataclass(frozen=True, kw_only=True)
class SegmentPlan:
    """The chosen segments, and what they are predicted to cost."""

    segments: tuple[tuple[str, ...], ...]
    """Names of blocks that are checkpointed together; blocks that are in none are left alone."""
    peak: int
    """Bytes of activations that the step holds at most."""
    full_peak: int
    """The same with nothing checkpointed."""
    least_peak: int
    """The same of the segments that hold the least."""
    seconds: float
    """Time of the recomputation."""
    share: float
    """The same as a part of the blocks' forward time."""


def peak_bytes(cost: StepCost, segments: Sequence[Sequence[str]]) -> int:
    """Return the bytes of activations that a step holds at most when these segments are checkpointed.

    The backward pass goes from the last block to the first and releases what is behind it. When it recomputes segment
    ``j``, there are: what is around, the inputs of segments and all of the blocks left alone up to ``j``, and what is
    saved within ``j``. So an early segment may be larger than a late one, and for ``N`` like blocks that hold ``k``
    times their input each, with it, the least peak is near ``√(2kN)`` inputs where equal segments take ``2√(kN)``.

    Source: Chen et al., 2016, arXiv:1604.06174, for the segments.
    """
    chain = _Chain(cost)
    # `held` grows along the chain: forward reaches the last block holding all inputs and what was kept. The peak
    # inside a block comes on top; backward releases in reverse, so no later moment holds more.
    peak = held = 0
    for first, last, recomputed in chain.items(segments):
        if recomputed:
            held += int(chain.inputs[first])
            peak = max(peak, held + int(chain.recomputed(first)[last - first]))
        else:
            held += int(chain.kept[first])
            peak = max(peak, held + int(chain.inner[first]))
    return max(peak, held + cost.head)


def recompute_seconds(cost: StepCost, segments: Sequence[Sequence[str]]) -> float:
    """Return the time that recomputing these segments takes: their blocks' forward but for the tail of the last."""
    blocks = {block.name: block for block in cost.blocks}
    return sum(sum(blocks[name].seconds for name in segment) - blocks[segment[-1]].tail for segment in segments)


def choose_segments(cost: StepCost, budget: float | None) -> SegmentPlan:
    """Return the segments with the least time of recomputation whose peak keeps within a budget.

    An exact dynamic programme over the blocks: for each block and each time of recomputation, in units of about a
    thousandth of the chain's forward, the least bytes held by the blocks up to it. Fewer bytes held are never worse
    for what follows. Among the plans of that time, the peak is within 1 % of the least. Without a budget in bytes, the
    peak is the least there is.
    """
    chain = _Chain(cost)
    least, full = chain.least_peak(), peak_bytes(cost, ())
    budget = least if budget is None else budget
    segments = () if full <= budget else chain.cheapest(budget)
    if segments is None:
        raise ConfigError(
            "checkpointing",
            f"budget must be at least {least} bytes ({least / _MIB:.1f} MiB, "
            f"{math.ceil(1e4 * least / max(full, 1)) / 1e4:.4f} of what the step holds without checkpointing), for no "
            f"segments hold less, got {budget / _MIB:.1f} MiB",
            "raise it, or make the batch smaller",
        )
    low, peak = float(least), peak_bytes(cost, segments)
    # The cheapest plan may hold more than it must: halve down to the lowest peak at the same time.
    units = chain.units_of(segments)
    for _ in range(_HALVINGS if segments else 0):
        if peak <= low * 1.01:
            break
        middle = (low + peak) / 2
        found = chain.cheapest(middle, units)
        if found is None:
            low = middle
        else:
            segments, peak = found, peak_bytes(cost, found)
    seconds = recompute_seconds(cost, segments)
    return SegmentPlan(
        segments=segments,
        peak=peak,
        full_peak=full,
        least_peak=least,
        seconds=seconds,
        share=seconds / cost.forward_seconds if cost.forward_seconds else 0.0,
    )


class _Chain:
    """A step's costs as arrays over its blocks, and the programmes over them."""

    def __init__(self, cost: StepCost) -> None:
        blocks = cost.blocks
        self._cost, self._names = cost, [block.name for block in blocks]
        self.inputs = np.array([block.input for block in blocks], dtype=np.float64)
        self.kept = self.inputs + [block.saved for block in blocks]
        self.inner = np.array([block.inner for block in blocks], dtype=np.float64)
        self._sums = np.concatenate([[0.0], np.cumsum(self.kept)])
        # a multiple of the number of blocks, so that like blocks take the same number of units
        self._units = len(blocks) * math.ceil(_UNITS / max(len(blocks), 1))
        scale = self._units / (cost.forward_seconds or 1.0)
        # Times are rounded to units as prefix sums, so that the units of a segment do not depend on how it is cut.
        times = np.cumsum([0.0] + [block.seconds for block in blocks])
        self._ticks = np.rint(times * scale).astype(np.int64)
        tails = np.rint([block.tail * scale for block in blocks]).astype(np.int64)
        self._tails = np.clip(tails, 0, np.diff(self._ticks))
        # A segment cannot pass a block whose input is not the output of the one before.
        breaks = [i for i, block in enumerate(blocks) if not block.follows] + [len(blocks)]
        self._stops = [min(stop for stop in breaks if stop > i) for i in range(len(blocks))]

    def recomputed(self, first: int) -> NDArray[np.float64]:
        """Return the bytes that recomputing adds to a segment's input, for one from `first` on, by its last block."""
        stop = self._stops[first]
        # All that the segment's blocks save, without the input, which is counted as held, and the worst block inside.
        within = self._sums[first + 1 : stop + 1] - self._sums[first] - self.inputs[first]
        total: NDArray[np.float64] = within + np.maximum.accumulate(self.inner[first:stop])
        return total

    def items(self, segments: Sequence[Sequence[str]]) -> Iterator[tuple[int, int, bool]]:
        """Yield first and last block of every segment and of every block left alone, in order, and which it is."""
        number = {name: i for i, name in enumerate(self._names)}
        ends = {number[segment[0]]: number[segment[-1]] for segment in segments}
        first = 0
        while first < len(self._names):
            last = ends.get(first, first)
            yield first, last, first in ends
            first = last + 1

    def units_of(self, segments: Sequence[Sequence[str]]) -> int:
        """Return the time that recomputing these segments takes, in units."""
        return sum(int(self._time(a)[b - a]) for a, b, recomputed in self.items(segments) if recomputed)

    def _time(self, first: int) -> NDArray[np.int64]:
        """Return the time of recomputation in units, for a segment of blocks from `first` on, by its last block."""
        stop = self._stops[first]
        units: NDArray[np.int64] = self._ticks[first + 1 : stop + 1] - self._ticks[first] - self._tails[first:stop]
        return units

    def least_peak(self) -> int:
        """Return the least bytes that a step can hold at most, whatever the time."""
        # Peaks are whole bytes: bisection ends at the exact least one.
        low, high = -1, peak_bytes(self._cost, ())
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._can_keep(middle) else (middle, high)
        return high

    def _can_keep(self, budget: float) -> bool:
        """Return True if any segments keep within a budget: the programme of `cheapest` without the time."""
        held = np.full(len(self._names) + 1, np.inf)
        held[0] = 0.0
        for a, stop in enumerate(self._stops):
            if held[a] + self.kept[a] + self.inner[a] <= budget:
                held[a + 1] = min(held[a + 1], held[a] + self.kept[a])
            with_input = held[a] + self.inputs[a]
            fits = with_input + self.recomputed(a) <= budget
            # All segments that begin at block a at once, by their last block.
            reached = held[a + 1 : stop + 1]
            reached[fits] = np.minimum(reached[fits], with_input)
        return bool(held[-1] + self._cost.head <= budget)

    def cheapest(self, budget: float, most: int | None = None) -> tuple[tuple[str, ...], ...] | None:
        """Return the segments within a budget that take the least units, at most `most`; None if there are none."""
        # held[b, t]: the least bytes held by the blocks before b, of those plans that keep within the budget and take
        # t units of recomputation. Block a alone, or a segment a .. b - 1, which holds its input alone:
        #   held[a + 1, t] = held[a, t] + kept(a)                      if that + inner(a) <= budget
        #   held[b, t + time(a, b)] = held[a, t] + input(a)            if that + recomputed(a, b) <= budget
        count, width = len(self._names), (self._units if most is None else most) + 1
        held = np.full((count + 1, width), np.inf)
        begun = np.full((count + 1, width), -1, dtype=np.int16)  # where the last segment began; -1: a block left alone
        held[0, 0] = 0.0
        for a in range(count):
            alone = held[a] + self.kept[a]
            better = (alone <= held[a + 1]) & (alone + self.inner[a] <= budget)
            held[a + 1][better], begun[a + 1][better] = alone[better], -1
            with_input = held[a] + self.inputs[a]
            times, room = self._time(a), budget - self.recomputed(a)
            # Only ends that some state can afford. Times rise with the end, so few are tried for small budgets.
            for i in np.flatnonzero((room >= with_input.min()) & (times < width)):
                units = int(times[i])
                # One row of the table shifted by the segment's time: all t at once.
                candidate, there = with_input[: width - units], held[a + 1 + i, units:]
                better = (candidate < there) & (candidate <= room[i])
                there[better], begun[a + 1 + i, units:][better] = candidate[better], a
        # The first reachable t is the least time.
        reachable = np.flatnonzero(held[-1] + self._cost.head <= budget)
        return self._segments(begun, int(reachable[0])) if len(reachable) else None

    def _segments(self, begun: NDArray[np.int16], units: int) -> tuple[tuple[str, ...], ...]:
        """Follow the choices back from the last block."""
        segments, end = [], len(self._names)
        while end:
            first = int(begun[end, units])
            if first < 0:
                end -= 1
                continue
            segments.append(tuple(self._names[first:end]))
            units -= int(self._time(first)[end - 1 - first])
            end = first
        return tuple(reversed(segments))
