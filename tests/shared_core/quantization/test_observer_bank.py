"""Ranges of all layers from histograms, and observers and banks on two ranks: those of one process on all data."""

import math
import sys

import pytest
import torch
import torch.distributed as dist
from observed_data import HISTOGRAMS, STREAMING, sample
from torch.utils.checkpoint import checkpoint
from two_ranks import leave, run_two_ranks

from shared_core.errors import ConfigError, TrainingError
from shared_core.quantization import EstimatorBank, Histogram, make_observer


def bank_of(kind, layers=2, **options):
    return EstimatorBank(kind, [(-8, 7)] * layers, bins=64, **options)


@pytest.mark.parametrize("kind", HISTOGRAMS)
def test_a_bank_has_the_ranges_of_an_observer_of_the_committed_windows(kind):
    bank = bank_of(kind, 3)
    observer = make_observer(kind, bits=4, bins=64)
    for step in range(8):
        x = sample("heavy", step)
        bank.observe(0, x[:1000].view(10, 100))
        bank.observe(0, x[1000:])
        bank.observe(1, torch.tensor([math.nan]))
        window = bank.take_window()
        if step == 3:
            continue  # this optimizer step was skipped
        observer.update(x)
        bank.commit(window)
    bank.refresh()
    assert torch.equal(bank.ranges[0], torch.stack(observer.range()))
    assert torch.equal(bank.scale[0], observer.scale_zero_point()[0])
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
        observer = make_observer("mse", bits=bits)
        observer.update(x)
        assert torch.equal(bank.ranges[layer], torch.stack(observer.range()))


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
        ({"kind": "percentile", "percentile": 101.0}, "at most 100"),
    ],
)
def test_a_bank_refuses(options, message):
    with pytest.raises(ConfigError, match=message):
        EstimatorBank(codes=[(-8, 7)], **options)


def per_rank(rank):
    data = sample("heavy", rank) * (1 + 9 * rank)
    return data[: 1200 + 600 * rank].view(-1, 3)


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    result = {}
    for kind in STREAMING:
        for axis in (None, 1):
            observer = make_observer(kind, axis=axis)
            observer.update(per_rank(rank))
            observer.all_reduce()
            observer.all_reduce()  # nothing is counted twice
            if rank == 0:  # a rank without a batch
                observer.update(torch.tensor([[5000.0, -1.0, math.nan]]).double())
            observer.all_reduce()
            result[f"{kind} {axis}"] = [*observer.range(), observer.non_finite]
    empty = make_observer("mse", axis=1)
    if rank == 1:
        empty.update(per_rank(1))
    empty.all_reduce()
    result["empty"] = list(empty.range())
    average = make_observer("ema")
    for step in range(3):
        average.update(sample("normal", 2 * step + rank))
        average.all_reduce()
    result["ema"] = list(average.range())
    bank = bank_of("kl")
    bank.observe(rank, per_rank(rank))
    bank.observe(0, per_rank(rank))
    bank.commit(bank.take_window())
    result["bank"] = [bank.ranges, bank.history]
    average.update(torch.ones(1))
    average.update(torch.full((1,), rank + 1.0))
    average.update(torch.ones(1))
    channels = make_observer("minmax", axis=0)
    channels.update(torch.ones(rank + 1))
    for observer, error in ((average, TrainingError), (channels, ConfigError)):
        with pytest.raises(error, match=r"every rank|all ranks"):
            observer.all_reduce()
    torch.save(result, f"{folder}/{rank}.pt")
    leave()


def test_two_ranks_hold_what_one_process_would(tmp_path):
    run_two_ranks(__file__, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    expected = {}
    for kind in STREAMING:
        for axis in (None, 1):
            observer = make_observer(kind, axis=axis)
            for batch in (per_rank(0), per_rank(1), torch.tensor([[5000.0, -1.0, math.nan]]).double()):
                observer.update(batch)
            expected[f"{kind} {axis}"] = [*observer.range(), observer.non_finite]
    alone = make_observer("mse", axis=1)
    alone.update(per_rank(1))
    expected["empty"] = list(alone.range())
    average = make_observer("ema")
    for step in range(3):
        average.update(torch.cat([sample("normal", 2 * step), sample("normal", 2 * step + 1)]))
    expected["ema"] = list(average.range())
    bank = bank_of("kl")
    for layer, rank in ((0, 0), (1, 1), (0, 0), (0, 1)):
        bank.observe(layer, per_rank(rank))
    bank.commit(bank.take_window())
    expected["bank"] = [bank.ranges, bank.history]
    for name, values in expected.items():
        for ours, theirs, one in zip(first[name], second[name], values, strict=True):
            assert torch.equal(ours, theirs), name
            assert torch.equal(ours, one), name


if __name__ == "__main__":
    worker(int(sys.argv[1]), sys.argv[2])
