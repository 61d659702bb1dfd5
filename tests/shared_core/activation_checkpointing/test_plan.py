"""The planner against every choice there is, and against the exhaustive optimum where that has a closed form."""

import itertools
import random

import pytest

import shared_core.activation_checkpointing.budget_planner as plan_module
from shared_core.activation_checkpointing.budget_planner import (
    BlockCost,
    StepCost,
    choose_segments,
    peak_bytes,
    recompute_seconds,
)
from shared_core.errors import ConfigError


def uneven(count, seed, **around):
    rng = random.Random(seed)
    blocks = []
    for i in range(count):
        seconds = rng.uniform(0.1, 1.0)
        blocks.append(
            BlockCost(
                name=f"b{i}",
                input=rng.randint(0, 100),
                saved=rng.randint(0, 400),
                seconds=seconds,
                tail=rng.choice([0.0, 0.3 * seconds]),
                inner=rng.choice([0, 40, 150]),
                follows=i > 0 and rng.random() > 0.1,
            )
        )
    return StepCost(blocks=tuple(blocks), **around)


def even(count, saved=2, unit=1, **around):
    blocks = [BlockCost(name=f"b{i}", input=unit, saved=saved * unit, seconds=0.5) for i in range(count)]
    return StepCost(blocks=tuple(blocks), **around)


def every_choice(cost):
    """All ways to cut the chain into segments and blocks left alone."""
    names = [block.name for block in cost.blocks]
    for cuts in itertools.product([False, True], repeat=len(names) - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(names)]
        parts = [names[a:b] for a, b in itertools.pairwise(edges)]
        if any(not cost.blocks[i].follows for a, b in itertools.pairwise(edges) for i in range(a + 1, b)):
            continue
        singles = [i for i, part in enumerate(parts) if len(part) == 1]
        for alone in itertools.product([False, True], repeat=len(singles)):
            left = {i for i, is_alone in zip(singles, alone, strict=True) if is_alone}
            yield [part for i, part in enumerate(parts) if i not in left]


def simulated_peak(cost, segments):
    """The peak by walking through a step: what is held is added and taken away, item by item."""
    by_name = {block.name: block for block in cost.blocks}
    in_segment = {name: segment for segment in segments for name in segment}
    held, peak, order = {}, 0, []
    for block in cost.blocks:
        segment = in_segment.get(block.name, [block.name])
        if segment[0] == block.name:
            held[block.name] = block.input + (0 if block.name in in_segment else block.saved)
            order.append(segment)
        if block.name not in in_segment:
            peak = max(peak, sum(held.values()) + block.inner)
    peak = max(peak, sum(held.values()) + cost.head)
    for segment in reversed(order):
        again = 0
        if segment[0] in in_segment:
            again = sum(by_name[n].input + by_name[n].saved for n in segment) - by_name[segment[0]].input
            again += max(by_name[n].inner for n in segment)
        peak = max(peak, sum(held.values()) + again)
        del held[segment[0]]
    return peak


@pytest.mark.parametrize("seed", range(6))
def test_peak_is_what_a_walk_through_the_step_finds(seed):
    cost = uneven(7, seed, head=seed * 40)
    for segments in every_choice(cost):
        assert peak_bytes(cost, segments) == simulated_peak(cost, segments)


@pytest.mark.parametrize("seed", range(8))
def test_plans_are_the_best_of_all_choices(seed):
    cost = uneven(8, seed, head=100 * (seed % 3))
    points = [(peak_bytes(cost, s), recompute_seconds(cost, s)) for s in every_choice(cost)]
    least = min(peak for peak, _ in points)
    plan = choose_segments(cost, None)
    assert plan.peak == plan.least_peak == least
    assert plan.seconds == pytest.approx(min(t for peak, t in points if peak == least), rel=0.01, abs=0.01)
    for fraction in (0.3, 0.5, 0.7, 0.9, 1.0):
        budget = fraction * plan.full_peak
        if budget < least:
            continue
        found = choose_segments(cost, budget)
        best = min(t for peak, t in points if peak <= budget)
        assert found.peak <= budget
        assert found.seconds == pytest.approx(best, rel=0.01, abs=0.01)
        # and of the plans of that time, one that holds about the least
        assert found.peak <= 1.02 * min(peak for peak, t in points if t <= found.seconds + 1e-9)


@pytest.mark.parametrize("count", [8, 9, 16, 31, 64, 100, 256])
def test_uniform_chains_are_within_five_percent_of_the_exhaustive_optimum(count):
    # k = 3 of measured.md B8. Segment j of n_j blocks peaks at j + 3 n_j - 1 units: with peak P at most
    # sum_j floor((P - j + 1) / 3) blocks fit, so the least P is found by counting.
    cost = even(count)
    exhaustive = next(p for p in itertools.count(3) if sum((p - j + 1) // 3 for j in range(1, p - 1)) >= count)
    plan = choose_segments(cost, None)
    assert plan.peak <= 1.05 * exhaustive
    assert plan.peak == exhaustive
    best_equal = min(
        peak_bytes(cost, [[b.name for b in cost.blocks[i : i + n]] for i in range(0, count, n)])
        for n in range(1, count + 1)
    )
    assert plan.peak <= best_equal
    if count >= 64:
        assert plan.peak < 0.9 * best_equal  # unequal segments hold less than the best number of equal ones


def test_256_uneven_blocks_within_every_budget():
    cost = uneven(256, 3, head=500)
    full, previous = peak_bytes(cost, ()), float("inf")
    for fraction in (0.1, 0.2, 0.4, 0.6, 0.8, 1.0):
        plan = choose_segments(cost, fraction * full)
        assert plan.peak == peak_bytes(cost, plan.segments) <= fraction * full
        assert plan.seconds == pytest.approx(recompute_seconds(cost, plan.segments))
        assert plan.seconds <= previous  # more memory never costs more time
        previous = plan.seconds
    assert previous == 0


@pytest.mark.parametrize("fraction", [0.15, 0.3, 0.6])
def test_units_of_time_are_fine_enough(fraction, monkeypatch):
    cost = uneven(100, 5, head=200)
    budget = fraction * peak_bytes(cost, ())
    coarse = choose_segments(cost, budget).seconds
    monkeypatch.setattr(plan_module, "_UNITS", 10_000)
    assert coarse <= 1.005 * choose_segments(cost, budget).seconds


def test_a_budget_below_the_least_is_refused_with_the_least_by_name():
    cost = even(16, head=3)
    least = choose_segments(cost, None).peak
    with pytest.raises(ConfigError, match=f"must be at least {least} bytes"):
        choose_segments(cost, least - 1)
    assert choose_segments(cost, least).peak == least


def test_degenerate_chains():
    assert choose_segments(even(1), None).peak == 3  # its input and what it saves, left alone or recomputed
    assert choose_segments(even(1), None).segments == ()
    nothing = StepCost(blocks=tuple(BlockCost(name=n, input=0, saved=0, seconds=0.0) for n in "ab"))
    assert choose_segments(nothing, 0).segments == ()
    loss = StepCost(blocks=even(4).blocks, head=1000)
    assert choose_segments(loss, None).peak == 1000 + 4 - 3  # one segment holds one input when the head peaks
