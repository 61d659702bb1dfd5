"""Ranges of all layers: over steps, from histograms, and on two ranks those of one process on all data."""

import math
import sys

import pytest
import torch
import torch.distributed as dist
from observed_data import DATA, HISTOGRAMS, range_of, sample
from torch.utils.checkpoint import checkpoint
from two_ranks import leave, run_two_ranks

from shared_core.errors import ConfigError
from shared_core.quantization import EstimatorBank, Histogram, RangeBank


def bank_of(kind, layers=2, codes=(-8, 7), bins=64, **options):
    if kind in HISTOGRAMS:
        return EstimatorBank(kind, [codes] * layers, bins=bins, **options)
    return RangeBank([codes] * layers, ema_constant=None if kind == "minmax" else 0.01)


def ranges_of(kind, *steps, **options):
    bank = bank_of(kind, 1, **options)
    for x in steps:
        bank.observe(0, x)
        bank.commit(bank.take_window())
    bank.refresh()
    return bank


def windows_of(steps, layers=3):
    """Return (min, max) for each step and layer, NaN for a layer without input, infinite for a broken one."""
    draw = torch.Generator().manual_seed(5)
    found = torch.stack([-torch.rand(steps, layers, generator=draw), 1 + torch.rand(steps, layers, generator=draw)], 2)
    found[torch.rand(steps, layers, generator=draw) < 0.3] = math.nan
    found[torch.rand(steps, layers, generator=draw) < 0.1] = math.inf
    return found


def commit(bank, step):
    for layer, (low, high) in enumerate(step.tolist()):
        if not math.isnan(low):
            bank.observe(layer, torch.tensor([low, high]))
    bank.commit(bank.take_window())


@pytest.mark.parametrize("constant", [1e-9, 0.05, 0.5, 1.0])
def test_an_average_weighs_recent_windows_more_until_its_constant_is_larger(constant):
    bank = RangeBank([(-8, 7)] * 3, ema_constant=constant)
    expected, counts = torch.zeros(3, 2, dtype=torch.float64), [0, 0, 0]
    for number, step in enumerate(windows_of(60)):
        if number == 25:
            bank.forget()
            counts = [0, 0, 0]
        commit(bank, step)
        for layer in range(3):
            if step[layer].isfinite().all():
                weight = max(constant, 9 / (counts[layer] + 10)) if counts[layer] else 1.0
                expected[layer] += weight * (step[layer].double() - expected[layer])
                counts[layer] += 1
        seen = torch.tensor(counts) > 0
        assert bank.known.tolist() == seen.tolist()
        torch.testing.assert_close(bank.ranges[seen].double(), expected[seen], rtol=1e-6, atol=1e-6)


def test_an_average_resumes_bit_for_bit_with_its_layers_in_another_order():
    steps, order = windows_of(30), torch.tensor([2, 0, 1])
    straight, resumed = RangeBank([(-8, 7)] * 3), RangeBank([(-8, 7)] * 3)
    for step in steps[:9]:
        commit(straight, step)
    assert len({*straight.averaged.tolist()}) > 1
    resumed.load_state_dict(straight.state_dict(), order)
    for step in steps[9:]:
        commit(straight, step)
        commit(resumed, step[order])
    states = straight.state_dict(), resumed.state_dict()
    assert states[0].pop("num_updates") == states[1].pop("num_updates") == 30
    assert states[0].pop("counted_step") == states[1].pop("counted_step") == 0
    for name, value in states[0].items():
        assert torch.equal(value[order].nan_to_num(7), states[1][name].nan_to_num(7)), name


@pytest.mark.parametrize("kind", HISTOGRAMS)
def test_a_bank_has_the_ranges_of_the_committed_windows(kind):
    bank = bank_of(kind, 3)
    committed = []
    for step in range(8):
        x = sample("heavy", step)
        bank.observe(0, x[:1000].view(10, 100))
        bank.observe(0, x[1000:])
        bank.observe(1, torch.tensor([math.nan]))
        window = bank.take_window()
        if step == 3:
            continue  # this optimizer step was skipped
        committed.append(x)
        bank.commit(window)
    bank.refresh()
    assert bank.ranges[0].tolist() == pytest.approx(range_of(kind, committed, bits=4, bins=64), rel=1e-7)
    assert bank.known.tolist() == [True, False, False]
    assert bank.non_finite.tolist() == [0, 7, 0]
    assert bank.num_updates == 7


def test_ranges_are_derived_at_powers_of_two_and_every_k():
    bank = bank_of("percentile", 1, refresh_every=6)
    seen = []
    for step in range(14):
        bank.observe(0, torch.tensor([float(step + 1)]))
        bank.commit(bank.take_window())
        seen.append(bank.ranges[0, 1].item())
    assert [commit for commit in range(1, 15) if seen[commit - 1] == commit] == [1, 2, 4, 6, 8, 12]


def test_the_first_window_after_forgetting_gives_ranges():
    bank = bank_of("mse", 1, refresh_every=50)
    for step in range(5):
        bank.observe(0, sample("normal", step))
        bank.commit(bank.take_window())
    bank.forget()
    bank.observe(0, torch.tensor([0.5, -0.25]))
    assert not bank.known
    bank.commit(bank.take_window())
    assert bank.known
    assert bank.ranges.abs().max() <= 0.5
    assert bank.num_updates == 6


def test_codes_may_differ_between_layers():
    x = sample("normal")
    bank = EstimatorBank("mse", [(-8, 7), (-128, 127), (-8, 7)])
    for layer in range(3):
        bank.observe(layer, x)
    bank.commit(bank.take_window())
    for layer, bits in enumerate((4, 8, 4)):
        assert bank.ranges[layer].tolist() == pytest.approx(range_of("mse", [x], bits=bits), rel=1e-7)


def test_a_bank_resumes_bit_for_bit_with_its_layers_in_another_order():
    straight, resumed = bank_of("kl"), bank_of("kl")
    for layer in (0, 1):
        straight.observe(layer, sample("normal", layer))
    straight.commit(straight.take_window())
    straight.observe(0, sample("heavy"))  # an open window
    resumed.load_state_dict(straight.state_dict(), torch.tensor([1, 0]))
    for bank in (straight, resumed):
        bank.commit(bank.take_window())
    for name in ("ranges", "known", "history", "window", "scale", "zero_point", "non_finite"):
        assert torch.equal(getattr(straight, name), getattr(resumed, name).flip(0)), name
    resumed.forget()
    assert not resumed.known.any()
    assert Histogram.of(resumed.history).total.sum() == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_in_backward_is_not_counted_again(reentrant):
    bank = bank_of("percentile", 1)
    x = sample("normal").requires_grad_()

    def forward(x):
        bank.observe(0, x)
        return (x * x).sin()

    checkpoint(forward, x, use_reentrant=reentrant).sum().backward()
    assert Histogram.of(bank.window).total.item() == 3000
    bank.observe(0, x)
    assert Histogram.of(bank.window).total.item() == 6000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "minmax"}, "kind"),
        ({"kind": "kl", "bins": 16}, "twice"),
        ({"kind": "mse", "refresh_every": 0}, "refresh_every"),
        ({"kind": "percentile", "percentile": 101.0}, r"percentile must be in \(50, 100\]"),
    ],
)
def test_a_bank_refuses(options, message):
    with pytest.raises(ConfigError, match=message):
        EstimatorBank(codes=[(-8, 7)], **options)


@pytest.mark.parametrize("kind", ["minmax", *HISTOGRAMS])
@pytest.mark.parametrize("name", DATA)
def test_ranges_do_not_depend_on_batches_and_order(kind, name):
    x = sample(name)
    shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))]
    assert torch.equal(ranges_of(kind, x).ranges, ranges_of(kind, *shuffled.split(217)).ranges)


@pytest.mark.parametrize("kind", ["minmax", "ema", *HISTOGRAMS])
@pytest.mark.parametrize("value", [0.0, 3.3, -7.1, 1e-38, -3e38])
@pytest.mark.parametrize("count", [1, 1000])
def test_a_constant_is_its_own_range(kind, value, count):
    bank = ranges_of(kind, torch.full((count,), value))
    assert bank.ranges[0].tolist() == [torch.tensor(value).item()] * 2
    assert 0 < bank.scale < math.inf
    assert -8 <= bank.zero_point <= 7


@pytest.mark.parametrize("kind", HISTOGRAMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_values_count_as_they_are_and_nan_and_infinity_move_nothing(kind, dtype):
    x = sample("normal").to(dtype)
    odd = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype)
    assert torch.equal(ranges_of(kind, x.double()).ranges, ranges_of(kind, torch.cat([x[:9], odd, x[9:]])).ranges)


@pytest.mark.parametrize("kind", ["minmax", *HISTOGRAMS])
def test_codes_of_a_relu_begin_at_zero(kind):
    bank = ranges_of(kind, sample("relu"), codes=(0, 255), bins=2048)
    assert bank.zero_point == 0
    assert bank.scale == bank.ranges[0, 1] / 255


def per_rank(rank):
    data = sample("heavy", rank) * (1 + 9 * rank)
    return data[: 1200 + 600 * rank].view(-1, 3)


def observed(ranks, kind):
    bank = bank_of(kind)
    for rank in ranks:
        bank.observe(rank, per_rank(rank))
        bank.observe(0, per_rank(rank))
    bank.commit(bank.take_window())
    return [bank.ranges, getattr(bank, "history", bank.known)]


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.save({kind: observed([rank], kind) for kind in ("minmax", "ema", *HISTOGRAMS)}, f"{folder}/{rank}.pt")
    leave()


def test_two_ranks_hold_what_one_process_would(tmp_path):
    run_two_ranks(__file__, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    for kind, values in first.items():
        for ours, theirs, one in zip(values, second[kind], observed([0, 1], kind), strict=True):
            assert torch.equal(ours, theirs), kind
            assert torch.equal(ours, one), kind


if __name__ == "__main__":
    worker(int(sys.argv[1]), sys.argv[2])
