"""The int16 recipe: fixed point with one exponent a tensor, moved by the count of overflows."""

import math

import pytest
import torch
from fp8_values import skewed
from two_ranks import be_a_rank, saved_by_two_ranks

from shared_core.errors import CheckpointError
from shared_core.fp8.recipes import Int16Cast, SharedExponentBank, fixed_point_round_to, needed_exponent

CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ROLES = ["input", "weight", "gradient"]


def int16_reference(values, exponent):
    out = []
    for value in values:
        steps = value / 2.0**exponent
        out.append(max(min(round(steps), 32767), -32768) * 2.0**exponent)  # round: halves to even
    return out


@pytest.mark.parametrize("exponent", [-126, -20, -15, 0, 3, 112])
def test_fixed_point_is_its_definition(exponent):
    steps = torch.cat([skewed(2000, torch.float64, exponent=12), torch.arange(-6, 7) / 2, torch.tensor([1e5, -1e5])])
    x = (steps.clamp(-65000, 65000) * 2.0**exponent).float()
    expected = torch.tensor(int16_reference(x.double().tolist(), exponent), dtype=torch.float64)
    y = fixed_point_round_to(x, torch.tensor(exponent))
    assert torch.equal(y.double(), expected)
    assert y.isfinite().all()
    assert torch.equal(fixed_point_round_to(x.double(), torch.tensor(exponent)), expected)


def test_the_needed_exponent_is_the_smallest_that_holds_all():
    for value in (1.0, 32767.0, 32767.49, 32767.5, 32768.0, 0.3, 1e-30, 1e30, 16383.75):
        exponent = needed_exponent(torch.tensor([value, -value / 3, INF, NAN], dtype=torch.float64)).item()
        assert round(value / 2.0**exponent) <= 32767 < round(value / 2.0 ** (exponent - 1))
    assert needed_exponent(torch.tensor([1e-45])).item() == -126
    assert needed_exponent(torch.tensor([3e38])).item() == 112
    assert needed_exponent(torch.tensor([0.0, NAN])).item() < -(10**6)


def test_nothing_overflows_before_the_first_step_and_nothing_is_kept_of_an_evaluation():
    bank = SharedExponentBank(2)
    cast = Int16Cast(bank, 1)
    for power in (-30, 0, 30):
        x = skewed(1000, exponent=power)[None]
        assert (cast(x, "input", False) - x).abs().max() <= x.abs().max() / 2**15
    assert bank.take_window()[:, 1:].abs().max() == 0
    bank.commit(bank.take_window())
    assert (bank.exponents == SharedExponentBank(2).exponents).all()


def step(bank, *tensors, applied=True, role="input"):
    for x in tensors:
        Int16Cast(bank, 0)(x, role, record=True)
    window = bank.take_window()
    if applied:
        bank.commit(window)
    return bank.exponent(0, role, CPU).item()


def test_the_first_step_holds_all_micro_batches():
    bank = SharedExponentBank(1)
    assert step(bank, torch.tensor([[1.0]]), torch.tensor([[5.0]]), torch.tensor([[0.0]])) == -12
    assert step(bank, torch.tensor([[0.1]]), role="gradient") == -18, "roles are apart"
    assert bank.exponent(0, "input", CPU).item() == -12, "a role that was not seen stays"


def policy(exponent, tensors):
    """Algorithm 1 of Courbariaux et al. 2014 with r_max = 0.01 %."""
    values = [abs(value) for x in tensors for value in x.flatten().tolist()]
    rate = sum(round(value / 2.0**exponent) > 32767 for value in values) / len(values)
    rate_of_double = sum(round(2 * value / 2.0**exponent) > 32767 for value in values) / len(values)
    return exponent + 1 if rate > 1e-4 else exponent - 1 if rate_of_double <= 1e-4 else exponent


def test_the_exponent_follows_algorithm_1():
    bank, exponents = SharedExponentBank(1), []
    expected = step(bank, torch.ones(1, 16))
    for index, size in enumerate([1.0, 1.0, 8.0, 8.0, 8.0, 8.0, 1e-3, 1e-3, 1e-3, 300.0, 300.0, 300.0]):
        tensors = [skewed(300, seed=index, exponent=0)[None] * size, skewed(80, seed=-index, exponent=0)[None] * size]
        expected = policy(expected, tensors)
        exponents.append(step(bank, *tensors))
        assert exponents[-1] == expected
    moves = torch.tensor(exponents).diff()
    assert {-1, 0, 1} >= set(moves.tolist())
    assert 1 in moves
    assert -1 in moves
    assert bank.overflows[0] > 0
    assert bank.num_updates == 13


@pytest.mark.parametrize(("overflows", "move"), [(0, -1), (1, -1), (2, 1)])
def test_the_rate_is_one_in_ten_thousand(overflows, move):
    bank = SharedExponentBank(1)
    before = step(bank, torch.ones(1, 16))  # 2^-14: codes up to 16384, so all of 0.9 may double
    x = torch.full((1, 10_000), 0.9)
    x[0, :overflows] = 100.0
    assert step(bank, x) == before + move
    assert bank.overflows.tolist() == [overflows, 0, 0]


def test_skipped_steps_zeros_and_non_finite_tensors_move_nothing():
    bank = SharedExponentBank(1)
    before = step(bank, torch.ones(1, 16))
    assert step(bank, torch.full((1, 16), 1e6), applied=False) == before
    assert step(bank, torch.zeros(1, 16)) == before, "a dead layer would fall for ever"
    assert step(bank, torch.tensor([[1e6, NAN]]), torch.full((1, 9), 1e6)) == before
    assert step(bank, torch.tensor([[1e-6, INF]])) == before
    assert step(bank) == before
    assert step(bank, torch.full((1, 16), 1e6)) == before + 1, "windows before it have left no trace"
    bank.forget()
    assert step(bank, torch.zeros(1, 16)) < -(10**6)
    assert step(bank, torch.full((1, 16), 3.0)) == -13


def test_a_bank_resumes_bit_for_bit():
    def run(bank, steps):
        for index in steps:
            step(bank, skewed(500, seed=index, exponent=index % 5)[None])
        return bank

    whole = run(SharedExponentBank(2), range(12))
    first = run(SharedExponentBank(2), range(6))
    Int16Cast(first, 1)(torch.ones(1, 3), "weight", True)
    state = first.state_dict()
    second = SharedExponentBank(2)
    second.load_state_dict(state)
    assert second.window[4, 1] == 3, "an open window is state"
    first.widen(0, "input", torch.tensor([0, 1, 1, 1, 0]))
    assert torch.equal(second.window, state["window"]), "a copy"
    second.take_window()
    second = run(second, range(6, 12))
    for name, value in whole.state_dict().items():
        assert torch.equal(torch.as_tensor(second.state_dict()[name]), torch.as_tensor(value)), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exponents": torch.zeros(6, dtype=torch.int64)}, r"saved exponents must be torch.int64 of shape \(3,\)"),
        ({"window": torch.zeros(3, 5)}, "saved window must be torch.int64.*got torch.float32"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(change, message):
    bank = SharedExponentBank(1)
    step(bank, torch.ones(1, 16))
    before = bank.state_dict()
    other = SharedExponentBank(1).state_dict()
    with pytest.raises(CheckpointError, match=message):
        bank.load_state_dict({**other, **change})
    assert all(torch.equal(torch.as_tensor(bank.state_dict()[key]), torch.as_tensor(before[key])) for key in before)


def shards():
    # the ranks differ: alone, rank 0 would keep its exponent where rank 1 makes it rise
    sizes = [(0, 1), (0, 9), (0, 9), (0, 9), (9, 0), (-9, -9), (-9, -9), (0, 9)]
    return [[skewed(800, seed=seed, exponent=size)[None] for size in pair] for seed, pair in enumerate(sizes)]


def worker(rank, folder):
    bank = SharedExponentBank(1)
    trace = [step(bank, pair[rank], applied=index != 4) for index, pair in enumerate(shards())]
    return {"trace": trace, **bank.state_dict()}


def test_two_processes_have_the_exponents_of_one(tmp_path):
    bank = SharedExponentBank(1)
    alone = {"trace": [step(bank, *pair, applied=index != 4) for index, pair in enumerate(shards())]}
    alone |= bank.state_dict()
    for saved in saved_by_two_ranks(__file__, tmp_path):
        for key, value in alone.items():
            assert torch.equal(torch.as_tensor(saved[key]), torch.as_tensor(value)), key
    assert len(set(alone["trace"])) > 2


if __name__ == "__main__":
    be_a_rank(worker)
