"""Histograms and the ranges found in them, against float64 references written from the definitions."""

import math
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from observed_data import DATA, sample

from shared_core.errors import ConfigError
from shared_core.quantization import Histogram, kl_range, mse_range, percentile_range


def histogram_of(x, bins=2048):
    histogram = Histogram(bins=bins)
    histogram.update(x.reshape(1, -1))
    return histogram


def reference_grid(x, bins):
    """Width and first cell: the smallest power of two whose cells over min, max and zero fit."""
    low, high = min(x.min(), 0.0), max(x.max(), 0.0)
    exponent = -200
    while math.floor(high / 2.0**exponent) - math.floor(low / 2.0**exponent) + 1 > bins:
        exponent += 1
    return 2.0**exponent, math.floor(low / 2.0**exponent)


def reference_cells(x, bins):
    width, first = reference_grid(x, bins)
    cells = np.zeros(bins)
    for value in x[x != 0]:
        cells[math.floor(value / width) - first] += 1
    return cells, width, first


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("bins", [4, 64])
def test_cells_are_those_of_a_histogram_made_at_once(name, bins):
    x = sample(name).double()
    histogram = Histogram(bins=bins)
    for part in x.split(7):
        histogram.update(part[None])
    cells, width, first = reference_cells(x.numpy(), bins)
    assert (histogram.width.item(), histogram.first.item()) == (width, first)
    assert np.array_equal(histogram.cells[0].numpy(), cells)
    assert histogram.zeros.item() == (x == 0).sum()
    assert histogram.total.item() == len(x)


SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-149), 3.4e38, -3.4e38, 2.0**20, math.nan, math.inf, -math.inf]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.one_of(st.sampled_from(SPECIAL), st.floats(width=32)), min_size=1, max_size=40),
    st.integers(0, 2**32),
)
def test_no_split_and_no_order_changes_a_bit(values, seed):
    random = Random(seed)
    joint = histogram_of(torch.tensor(values), bins=16)
    shuffled = list(values)
    random.shuffle(shuffled)
    halves = Histogram(bins=16), Histogram(bins=16)
    position = 0
    while position < len(shuffled):
        size = random.randint(0, 5)
        random.choice(halves).update(torch.tensor([shuffled[position : position + size]]))
        position += size
    halves[0].merge(halves[1])
    assert torch.equal(halves[0].data, joint.data)
    assert joint.total + joint.non_finite == len(values)


def test_rows_are_independent():
    x = torch.stack([sample("normal"), sample("heavy"), sample("relu") * 1e-30])
    histogram = Histogram(3, 64)
    for part in x.split(100, 1):
        histogram.update(part)
    for row in range(3):
        assert torch.equal(histogram.data[row : row + 1], histogram_of(x[row], 64).data)


def test_counts_stay_exact_far_beyond_float32():
    histogram = histogram_of(torch.tensor([1.0]))
    histogram.cells[histogram.cells == 1] = 2.0**53 - 2
    histogram.update(torch.tensor([[1.0]]))
    assert histogram.total.item() == 2**53 - 1


@pytest.mark.parametrize("bins", [3, 2, 100, 2**21, 64.0, True])
def test_bins_must_be_a_power_of_two(bins):
    with pytest.raises(ConfigError, match="power of two"):
        Histogram(bins=bins)


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("percentile", [99.0, 99.9, 99.99, 100.0, 51.5])
@pytest.mark.parametrize("symmetric", [True, False])
def test_percentiles_are_within_one_cell(name, percentile, symmetric):
    x = sample(name).double()
    values = np.sort((x.abs() if symmetric else x).numpy())
    # n·share as whole numbers: percentiles have two decimals at most
    cut = len(values) * round((100 - percentile) * 100) // (10_000 if symmetric else 20_000)
    histogram = histogram_of(torch.tensor(values))
    low, high = percentile_range(histogram, percentile, symmetric)[0].tolist()
    width = histogram.width.item()
    assert values[-1 - cut] <= high < values[-1 - cut] + width + 1e-12
    assert (values > high).sum() <= cut
    if symmetric:
        assert low == -high
    else:
        assert values[cut] - width - 1e-12 < low <= values[cut]
    if percentile == 100.0:
        assert high == values[-1]


def reference_kl(cells, first, low, high, threshold, levels):
    """D(P ‖ Q) by loops: clip to [-threshold, threshold] cells, merge, spread over what is occupied."""
    inside = [
        j for j in range(len(cells)) if max(low, -threshold) <= j + first < min(high, threshold)
    ]  # in cells with their own numbers
    if len(inside) < levels:
        return None
    reference = [cells[j] for j in inside]
    reference[0] += sum(cells[: inside[0]])
    reference[-1] += sum(cells[inside[-1] + 1 :])
    groups = {}
    for position in range(len(inside)):
        groups.setdefault(position * levels // len(inside), []).append(position)
    candidate = [0.0] * len(inside)
    for members in groups.values():
        occupied = [position for position in members if reference[position] > 0]
        for position in occupied:
            candidate[position] = sum(cells[inside[m]] for m in members) / len(occupied)
    p = np.array(reference) / sum(reference)
    if sum(candidate) == 0 or any(b == 0 for a, b in zip(p, candidate, strict=True) if a > 0):
        return math.inf
    q = np.array(candidate) / sum(candidate)
    freedom = np.count_nonzero(p) - sum(any(p[members] > 0) for members in groups.values())
    return max(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0) - freedom / (2 * sum(cells)), 0)


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("qmin", "qmax"), [(-3, 3), (-8, 7)])
@pytest.mark.parametrize("seed", range(3))
def test_kl_finds_the_threshold_of_the_exhaustive_search(name, symmetric, qmin, qmax, seed):
    x = sample(name, seed).double()[:400]
    x = x.abs() if symmetric else x
    bins, levels = 64, qmax + 1 if symmetric else qmax - qmin + 1
    cells, width, first = reference_cells(x.numpy(), bins)
    for cell, outer in ((-first, 1 - first), (-first - 1, -first - 2)):  # the spike next to zero is left out
        if 0 <= cell < bins:
            cells[cell] = min(cells[cell], cells[outer] if 0 <= outer < bins else 0)
    bottom = min(0, math.floor(x.min() / width))
    top = max(0, math.floor(x.max() / width) + 1)
    scores = {}
    average = sum(cells) / np.count_nonzero(cells)
    # an end where more values lie than in an occupied cell on average is not cut
    full = [
        reach
        for cell, reach in ((math.floor(x.min() / width), -bottom), (top - 1, top))
        if cells[cell - first] > average
    ]
    for threshold in range(max(1, *full, 1), max(-bottom, top) + 1):
        score = reference_kl(cells, first, bottom, top, threshold, levels)
        if score is not None and math.isfinite(score):
            scores[threshold] = score
    best = min(scores.values())
    low, high = kl_range(histogram_of(x, bins), qmin, qmax, symmetric)[0].tolist()
    equals = [threshold for threshold, score in scores.items() if score <= best + 1e-10]
    found = max(equals) * width
    assert high == min(x.max().item(), found)
    assert low == (-high if symmetric else max(x.min().item(), -found))


def test_kl_cuts_a_lonely_outlier_and_ignores_the_zeros_of_a_relu():
    x = torch.cat([sample("normal").abs(), torch.tensor([60.0])])
    zeros = torch.zeros(100_000)
    bare, padded = (kl_range(histogram_of(v), -8, 7, False) for v in (x, torch.cat([x, zeros])))
    assert padded[0, 1] == bare[0, 1]
    assert 1 < padded[0, 1] < 5
    assert padded[0, 0] == 0


def quantized(x, low, high, qmin, qmax, symmetric):
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high / qmax if symmetric else (high - low) / (qmax - qmin)) or 1.0
    zero = 0 if symmetric else min(max(round(qmin - low / scale), qmin), qmax)
    return (np.clip(np.round(x / scale) + zero, qmin, qmax) - zero) * scale


NEAR_ZERO = {
    "relu": lambda x: x.relu(),
    "tiny": lambda x: x.relu() + 5e-4 * torch.rand(len(x), generator=torch.Generator().manual_seed(1)),
    "softplus": lambda x: torch.nn.functional.softplus(20 * x) / 20,
    "both_sides": lambda x: torch.where(torch.arange(len(x)) % 20 < 9, 1e-4 * x, x),
}


@pytest.mark.parametrize("name", NEAR_ZERO)
@pytest.mark.parametrize("count", [2000, 20_000, 200_000])
def test_kl_comes_near_the_best_clip_of_values_half_of_which_almost_vanish(name, count):
    x = NEAR_ZERO[name](torch.randn(count, generator=torch.Generator().manual_seed(0)).double())
    low, high = min(x.min().item(), 0.0), x.max().item()

    def sqnr(low, high):
        lost = x.numpy() - quantized(x.numpy(), low, high, 0, 255, False)
        return 10 * math.log10(x.square().mean().item() / np.square(lost).mean())

    best = max(sqnr(share * low, share * high) for share in np.linspace(0.3, 1, 71))
    assert sqnr(*kl_range(histogram_of(x), 0, 255, False)[0].tolist()) > best - 4


@pytest.mark.parametrize("name", ["normal", "relu", "negative", "heavy"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_mse_is_as_good_as_an_exhaustive_search_over_the_values(name, symmetric, bits):
    x = sample(name).double().numpy()
    low, high = x.min(), x.max()
    qmin, qmax = (1 - 2 ** (bits - 1) if symmetric else -(2 ** (bits - 1))), 2 ** (bits - 1) - 1

    def error(low, high):
        return np.square(quantized(x, low, high, qmin, qmax, symmetric) - x).mean()

    shares = np.linspace(0.02, 1.0, 40)
    amax = np.abs(x).max()
    if symmetric:
        best = min(error(-share * amax, share * amax) for share in np.linspace(0.005, 1.0, 400))
    else:
        below, above = (shares if low < 0 else [0.0]), (shares if high > 0 else [0.0])
        best = min(error(a * low, b * high) for a in below for b in above)
    found = mse_range(histogram_of(torch.tensor(np.abs(x) if symmetric else x)), qmin, qmax, symmetric)[0].tolist()
    assert error(*found) <= best * 1.03


def test_mse_expects_what_evenly_filled_cells_have():
    """16 cells of 1, uniform: the error of [-α, α] by a fine sum, minimized by a fine search."""
    counts = np.array([1, 5, 9, 7, 5, 4, 3, 2, 2, 1, 1, 0, 0, 0, 0, 1.0])
    histogram = Histogram(bins=16)
    histogram.data[0] = torch.tensor([2.0**-40, -(16 - 2.0**-40), *counts, 0, 0])
    inside = (np.arange(2000) + 0.5) / 2000
    points, weights = (np.arange(16)[:, None] + inside).ravel(), np.repeat(counts, 2000)
    points[-2000:] = 16  # those of the last cell lie at its end
    alphas = np.linspace(1, 16, 1501)
    errors = [weights @ np.square(quantized(points, -a, a, -3, 3, True) - points) for a in alphas]
    found = mse_range(histogram, -3, 3, True)[0, 1].item()
    assert abs(found - alphas[int(np.argmin(errors))]) < 16 / 128 / 16 + 0.01


NORMAL = sample("normal").double()
# values that many inputs have at an end of their range
SATURATED = {
    "one_hot": torch.eye(10)[torch.arange(400) % 10].flatten(),
    "relu6": (NORMAL * 4 + 3).clamp(0, 6),
    "minus_relu6": -(NORMAL * 4 + 3).clamp(0, 6),
    "image": (NORMAL * 100 + 128).clamp(0, 255).round(),
    "tanh": torch.tanh(NORMAL * 8),
    "signs": NORMAL.sign(),
    "hardtanh": (NORMAL * 2).clamp(-1, 1),
    "unequal_ends": (NORMAL * 2).clamp(-0.37, 1.3),
    "one_value": torch.full((50,), 3.7),
    "ones": torch.ones(50),
    "minus_ones": -torch.ones(50),
    "two_values": torch.tensor([0.3, 1.0]).repeat(100),
    "two_below": torch.tensor([-0.3, -1.0]).repeat(100),
    "three_values": torch.tensor([0.0, 0.5, 1.0]).repeat(100),
    "far_above": torch.cat([NORMAL, torch.full((200,), 20.0)]),
    "far_below": torch.cat([NORMAL, torch.full((200,), -20.0)]),
    "few_ones": torch.cat([torch.zeros(100_000), torch.ones(3), NORMAL * 1e-3]),
    "almost_one": torch.tensor([1.0, 1 - 2.0**-24]).repeat(100),
}


def found_noise(kind, x, qmin, qmax, symmetric):
    """Mean square of what is lost with the scale and zero point of a range, and the cells' width."""
    histogram = histogram_of(x.abs() if symmetric else x)
    if kind == "minmax":
        high = x.abs().max() if symmetric else x.max()
        found = torch.stack([-high if symmetric else x.min(), high])
    else:
        found = (mse_range if kind == "mse" else kl_range)(histogram, qmin, qmax, symmetric)[0]
    lost = x.numpy() - quantized(x.numpy(), *found.tolist(), qmin, qmax, symmetric)
    return np.square(lost).mean(), histogram.width.item()


@pytest.mark.parametrize("name", SATURATED)
@pytest.mark.parametrize(
    ("qmin", "qmax", "symmetric"), [(0, 255, False), (-127, 127, True), (0, 15, False), (-1, 1, True)]
)
def test_values_at_an_end_are_not_clipped_away(name, qmin, qmax, symmetric):
    x = SATURATED[name].double()
    noise = {kind: found_noise(kind, x, qmin, qmax, symmetric) for kind in ("minmax", "mse", "kl")}
    cell = noise["mse"][1]  # within one nothing is known, half of it may be lost
    least = noise["minmax"][0]
    high = x.abs().max().item() if symmetric else x.clamp(min=0).max().item()
    low = -high if symmetric else x.clamp(max=0).min().item()
    for share in np.linspace(0.05, 1, 96):  # by brute force: every pair of ends, or one
        for other in (share,) if symmetric or not (low and high) else np.linspace(0.05, 1, 20):
            clipped = quantized(x.numpy(), low * other, high * share, qmin, qmax, symmetric)
            least = min(least, np.square(clipped - x.numpy()).mean())
    assert math.sqrt(noise["mse"][0]) <= math.sqrt(least) * 1.02 + cell / 2
    if (qmin, qmax) in ((0, 255), (-127, 127)):
        assert math.sqrt(noise["kl"][0]) <= math.sqrt(noise["minmax"][0]) * 1.02 + cell / 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=30),
    st.lists(st.integers(1, 200), min_size=30, max_size=30),
    st.sampled_from([(0, 255, False), (-127, 127, True), (-8, 7, False)]),
)
def test_mse_never_loses_more_than_min_and_max_do(values, repeats, codes):
    x = torch.repeat_interleave(torch.tensor(values), torch.tensor(repeats[: len(values)])).double()
    noise, width = found_noise("mse", x, *codes)
    assert math.sqrt(noise) <= math.sqrt(found_noise("minmax", x, *codes)[0]) * 1.02 + width
