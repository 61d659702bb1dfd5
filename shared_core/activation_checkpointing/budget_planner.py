"""Choose which blocks to checkpoint, and in which segments, from the cost of each block. Works on numbers only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared_core.errors import ConfigError

# Recomputation time is counted in at least this many units, the second dimension of the dynamic program.
_UNITS = 1024
_HALVINGS = 7  # bisection steps for the lowest peak of the plans with the same time
_MIB = float(1 << 20)


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """Time and memory of one block of a chain in a training step."""

    name: str
    input: int
    """Bytes of its input, which a segment that begins with it keeps."""
    saved: int
    """Bytes that autograd saves inside it for the backward pass, without its input."""
    seconds: float
    """Time of its forward."""
    tail: float = 0.0
    """Time of its forward after the last saved tensor, which a recomputation that ends with this block skips."""
    inner: int = 0
    """Peak bytes during its forward or backward, besides `input` and `saved` of it and the blocks before: its output,
    gradients of activations, intermediate results, and tensors saved outside the blocks."""
    follows: bool = True
    """True if its input is the previous block's output, so that one segment can hold both."""


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Time and memory of a training step: its chain of blocks in forward order, and the rest."""

    blocks: tuple[BlockCost, ...]
    head: int = 0
    """Peak bytes outside the blocks between the last block's forward and its backward: logits, the loss, and tensors
    saved outside the blocks."""

    @property
    def forward_seconds(self) -> float:
        """Forward time of all blocks."""
        return sum(block.seconds for block in self.blocks)


@dataclass(frozen=True, kw_only=True)
class SegmentPlan:
    """The chosen segments and their predicted cost."""

    segments: tuple[tuple[str, ...], ...]
    """Names of blocks that are checkpointed together. Blocks in no segment are not checkpointed."""
    peak: int
    """Peak bytes of activations in a step."""
    full_peak: int
    """The peak without checkpointing."""
    least_peak: int
    """The lowest peak that any segments can reach."""
    seconds: float
    """Time of the recomputation."""
    share: float
    """The recomputation as a fraction of the blocks' forward time."""


def peak_bytes(cost: StepCost, segments: Sequence[Sequence[str]]) -> int:
    """Return the peak bytes of activations in a step if these segments are checkpointed.

    The backward pass runs from the last block to the first and frees memory as it goes. While it recomputes segment
    ``j``, memory holds: tensors outside the blocks, up to ``j`` the inputs of segments and everything saved by blocks
    that are not checkpointed, and what ``j`` itself saves. So early segments can be larger than late ones. For ``N``
    equal blocks that each hold ``k`` times their input (including it), the lowest peak is about ``√(2kN)`` inputs;
    equal segments need ``2√(kN)``.

    Source: Chen et al., 2016, arXiv:1604.06174, for the segments.
    """
    chain = _Chain(cost)
    # `held` grows along the chain: at the last block, forward holds all inputs and kept tensors. The peak inside a
    # block is added; backward frees in reverse, so no later moment needs more.
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
    """Return the time to recompute these segments: their blocks' forward without the tail of each last block."""
    blocks = {block.name: block for block in cost.blocks}
    return sum(sum(blocks[name].seconds for name in segment) - blocks[segment[-1]].tail for segment in segments)


def choose_segments(cost: StepCost, budget: float | None) -> SegmentPlan:
    """Return the segments with the shortest recomputation time whose peak fits into a budget.

    An exact dynamic program over the blocks. For each block and each recomputation time, in units of about 1/1000 of
    the chain's forward, it stores the fewest bytes held by the blocks up to it. Fewer bytes are never worse for later
    blocks. Among the plans with the shortest time, the peak is within 1 % of the lowest. A budget of None asks for the
    lowest possible peak.
    """
    chain = _Chain(cost)
    least, full = chain.least_peak(), peak_bytes(cost, ())
    budget = least if budget is None else budget
    segments = () if full <= budget else chain.cheapest(budget)
    if segments is None:
        raise ConfigError(
            "checkpointing",
            f"budget must be at least {least} bytes ({least / _MIB:.1f} MiB, "
            f"{math.ceil(1e4 * least / max(full, 1)) / 1e4:.4f} of the peak without checkpointing), the lowest "
            f"possible peak, got {budget / _MIB:.1f} MiB",
            "raise it, or use a smaller batch",
        )
    low, peak = float(least), peak_bytes(cost, segments)
    # The cheapest plan may use more memory than needed: bisect for the lowest peak with the same time.
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
    """A step's costs as arrays over its blocks, and the dynamic programs over them."""

    def __init__(self, cost: StepCost) -> None:
        blocks = cost.blocks
        self._cost, self._names = cost, [block.name for block in blocks]
        self.inputs = np.array([block.input for block in blocks], dtype=np.float64)
        self.kept = self.inputs + [block.saved for block in blocks]
        self.inner = np.array([block.inner for block in blocks], dtype=np.float64)
        self._sums = np.concatenate([[0.0], np.cumsum(self.kept)])
        # A multiple of the number of blocks, so that equal blocks take equally many units.
        self._units = len(blocks) * math.ceil(_UNITS / max(len(blocks), 1))
        scale = self._units / (cost.forward_seconds or 1.0)
        # Prefix sums of times are rounded to units, so that a segment's units do not depend on how it is split.
        times = np.cumsum([0.0] + [block.seconds for block in blocks])
        self._ticks = np.rint(times * scale).astype(np.int64)
        tails = np.rint([block.tail * scale for block in blocks]).astype(np.int64)
        self._tails = np.clip(tails, 0, np.diff(self._ticks))
        # A segment cannot continue at a block whose input is not the previous block's output.
        breaks = [i for i, block in enumerate(blocks) if not block.follows] + [len(blocks)]
        self._stops = [min(stop for stop in breaks if stop > i) for i in range(len(blocks))]

    def recomputed(self, first: int) -> NDArray[np.float64]:
        """Return the bytes that recomputing a segment from `first` on adds to its input, for each last block."""
        stop = self._stops[first]
        # Everything its blocks save, except the input (already counted as held), and the worst block's peak.
        within = self._sums[first + 1 : stop + 1] - self._sums[first] - self.inputs[first]
        total: NDArray[np.float64] = within + np.maximum.accumulate(self.inner[first:stop])
        return total

    def items(self, segments: Sequence[Sequence[str]]) -> Iterator[tuple[int, int, bool]]:
        """Yield (first block, last block, True if a segment) of all segments and single kept blocks, in order."""
        number = {name: i for i, name in enumerate(self._names)}
        ends = {number[segment[0]]: number[segment[-1]] for segment in segments}
        first = 0
        while first < len(self._names):
            last = ends.get(first, first)
            yield first, last, first in ends
            first = last + 1

    def units_of(self, segments: Sequence[Sequence[str]]) -> int:
        """Return the time to recompute these segments, in units."""
        return sum(int(self._time(a)[b - a]) for a, b, recomputed in self.items(segments) if recomputed)

    def _time(self, first: int) -> NDArray[np.int64]:
        """Return the recomputation time in units of a segment from `first` on, for each last block."""
        stop = self._stops[first]
        units: NDArray[np.int64] = self._ticks[first + 1 : stop + 1] - self._ticks[first] - self._tails[first:stop]
        return units

    def least_peak(self) -> int:
        """Return the lowest possible peak of a step, regardless of time."""
        # Peaks are whole bytes, so bisection finds the exact minimum.
        low, high = -1, peak_bytes(self._cost, ())
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._can_keep(middle) else (middle, high)
        return high

    def _can_keep(self, budget: float) -> bool:
        """Return True if any segments fit into a budget: the program of `cheapest` without time."""
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
        """Return the segments within a budget that take the fewest units, at most `most`; None if there are none."""
        # held[b, t]: the fewest bytes held by the blocks before b over all plans within the budget that take t units
        # of recomputation. Either block a is kept, or a segment a .. b - 1 keeps only its input:
        #   held[a + 1, t] = held[a, t] + kept(a)                      if that + inner(a) <= budget
        #   held[b, t + time(a, b)] = held[a, t] + input(a)            if that + recomputed(a, b) <= budget
        count, width = len(self._names), (self._units if most is None else most) + 1
        held = np.full((count + 1, width), np.inf)
        begun = np.full((count + 1, width), -1, dtype=np.int16)  # start of the last segment; -1: a kept block
        held[0, 0] = 0.0
        for a in range(count):
            alone = held[a] + self.kept[a]
            better = (alone <= held[a + 1]) & (alone + self.inner[a] <= budget)
            held[a + 1][better], begun[a + 1][better] = alone[better], -1
            with_input = held[a] + self.inputs[a]
            times, room = self._time(a), budget - self.recomputed(a)
            # Only ends that some state can afford. Times grow with the end, so small budgets need few tries.
            for i in np.flatnonzero((room >= with_input.min()) & (times < width)):
                units = int(times[i])
                # One row of the table, shifted by the segment's time: all t at once.
                candidate, there = with_input[: width - units], held[a + 1 + i, units:]
                better = (candidate < there) & (candidate <= room[i])
                there[better], begun[a + 1 + i, units:][better] = candidate[better], a
        # The first reachable t is the least time.
        reachable = np.flatnonzero(held[-1] + self._cost.head <= budget)
        return self._segments(begun, int(reachable[0])) if len(reachable) else None

    def _segments(self, begun: NDArray[np.int16], units: int) -> tuple[tuple[str, ...], ...]:
        """Trace the choices back from the last block."""
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
