"""Weights without a float32 copy: what Kahan's sum keeps, what chance keeps of moments, and the bytes of a step."""

import copy
from itertools import accumulate

import bitsandbytes
import pytest
import torch
from plain_loop import plain_step
from primary_weights_runs import KINDS, STEPS, begin, loss_of, net, stepped
from torch import nn
from transformers.optimization import Adafactor

from shared_core.activation_checkpointing.profiler import LiveBytes
from shared_core.primary_weights import optimizer_swap
from shared_core.primary_weights.copies import compensated, round_compensated_

COPY, DRAWN, KAHAN = ({"kind": kind} for kind in KINDS)
NARROW = [{**options, "state_dtype": "bfloat16"} for options in (KAHAN, DRAWN)]


def steps(model, optimizer, session, indices, accumulate=2):
    for index in indices:
        for micro in range(accumulate):
            (loss_of(model, accumulate * index + micro) / accumulate).backward()
        session.before_step()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        session.after_step()
        optimizer.zero_grad()


# -- Kahan's sum


def published(weight, lost, update):
    """Zamirai et al. 2020, every operation rounded to the weight's format."""
    lost = lost + update
    moved = weight + lost
    return moved, lost + (weight - moved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sum_of_small_updates_is_that_of_float64(dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2000, generator=generator).to(dtype)
    lost = torch.zeros(2000, dtype=torch.bfloat16)
    naive, theirs, their_lost, exact = weight.clone(), weight.clone(), torch.zeros_like(weight), weight.double()
    for _ in range(300):
        update = 1e-4 * torch.randn(2000, generator=generator) + 1e-4
        exact += update
        naive += update.to(dtype)
        theirs, their_lost = published(theirs, their_lost, update.to(dtype))
        round_compensated_(weight, lost, compensated(weight, lost) + update)
    ulp = torch.finfo(dtype).eps * exact.abs().clamp(min=0.1)
    assert ((weight.double() - exact).abs() <= 0.6 * ulp).all()
    error, their_error = ((one - exact).abs().mean() for one in (weight.double() + lost, theirs.double() + their_lost))
    assert error < 0.02 * (naive - exact).abs().mean()
    if (
        dtype == torch.bfloat16
    ):  # beside a large fp16 weight, fp16 would hold more of what is lost; beside a small, less
        assert error <= 1.02 * their_error


def test_what_is_lost_stays_below_an_ulp_and_infinite_weights_lose_nothing():
    values = torch.tensor([1.001, -3e-39, 0.0, float("inf"), 3.4e38, float("nan")])
    weight, lost = (torch.zeros(6, dtype=torch.bfloat16) for _ in range(2))
    round_compensated_(weight, lost, values)
    torch.testing.assert_close(weight, values.bfloat16(), equal_nan=True)
    assert lost[2:].tolist() == [0.0] * 4
    torch.testing.assert_close(compensated(weight, lost)[:2], values[:2], rtol=2.0**-16, atol=1e-40)


def test_a_weight_that_others_wrote_counts_alone():
    weight, lost = (torch.zeros(5, dtype=torch.bfloat16) for _ in range(2))
    round_compensated_(weight, lost, torch.full((5,), 1 + 2.0**-8 - 2.0**-14))
    assert (lost > 0).all()
    weight[1:] = torch.tensor([0.0, -0.0, 1e-3, 0.125])  # a mask, a mask, a clamp
    values = compensated(weight, lost)
    assert values[0] > 1
    assert torch.equal(values[1:], weight[1:].float())


@pytest.mark.parametrize("options", [KAHAN, *NARROW])
def test_parts_of_any_size_step_alike(options, monkeypatch):
    runs = []
    for room in (1, 1 << 18):
        monkeypatch.setattr(optimizer_swap, "_ON_CPU", room)
        monkeypatch.setattr(optimizer_swap.math, "gcd", lambda *_: 64)  # single rows
        model = net(torch.bfloat16)
        optimizer = torch.optim.AdamW([*model.parameters()][:: -1 if room > 1 else 1], lr=1e-3)
        session = begin(model, optimizer, options)
        steps(model, optimizer, session, range(STEPS))
        widened = session.receipt()["techniques"]["primary_weights"]["widened_bytes_at_once"]
        runs.append((model, {id(p): optimizer.state[p] for p in model.parameters()}, widened))
    (one, one_state, rows), (other, other_state, whole) = runs
    assert rows == 4 * 6 < whole
    for first, second in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(first, second)
        for key, value in one_state[id(first)].items():
            assert torch.equal(value, other_state[id(second)][key])


# -- moments in bfloat16


def test_moments_that_are_drawn_have_the_mean_of_float64():
    count, gradients = 20_000, [1.0, *[0.3] * 60]
    weight = nn.Parameter(torch.ones(count, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([weight], lr=1e-4, weight_decay=0.0)
    session = begin(nn.ParameterList([weight]), optimizer, NARROW[1], total_steps=len(gradients))
    exact, variance, nearest = 0.0, 0.0, torch.zeros((), dtype=torch.bfloat16)
    for gradient in gradients:
        gradient = torch.tensor(gradient).bfloat16().item()
        exact = 0.999 * exact + 0.001 * gradient**2
        nearest = nearest * 0.999 + 0.001 * gradient**2
        variance = 0.999**2 * variance + (2.0**-7 * exact) ** 2 / 4  # at most that of a coin between neighbors
        weight.grad = torch.full((count,), gradient, dtype=torch.bfloat16)
        stepped(session, optimizer)
    second = optimizer.state[weight]["exp_avg_sq"]
    assert second.dtype == torch.bfloat16
    bound = 5 * (variance / count) ** 0.5
    assert abs(second.double().mean().item() - exact) < bound
    assert abs(nearest.item() - exact) > 5 * bound  # rounded to nearest it stands still
    assert optimizer.state[weight]["step"].item() == len(gradients)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),  # makes its state before the first step
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "adafactor_of_transformers": lambda p: Adafactor(p, scale_parameter=True, relative_step=True),
    "bitsandbytes": lambda p: bitsandbytes.optim.AdamW8bit(p, lr=1e-3, min_8bit_size=32),
}


@pytest.mark.parametrize("options", [COPY, KAHAN, DRAWN, *NARROW], ids=lambda options: "-".join(options.values()))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stopped_run_goes_on_bit_for_bit(name, options):
    model = net(torch.bfloat16)
    optimizer = OPTIMIZERS[name](model.parameters())
    session = begin(model, optimizer, options)
    steps(model, optimizer, session, range(3))
    state = copy.deepcopy((optimizer.state_dict(), session.state_dict()))
    again = net(torch.bfloat16, seed=1)
    again.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
    other = OPTIMIZERS[name](again.parameters())
    resumed = begin(again, other, options, state)
    for one in ((model, optimizer, session), (again, other, resumed)):
        steps(*one, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    states = [{key: dict(value) for key, value in each.state_dict()["state"].items()} for each in (optimizer, other)]
    assert str(states[0]) == str(states[1])
    kept = [each.state_dict()["techniques"]["primary_weights"] for each in (session, resumed)]
    assert str(kept[0]) == str(kept[1])
    if name == "adamw" and "state_dtype" in options:
        assert {value.dtype for one in optimizer.state.values() for value in one.values() if value.dim()} == {
            torch.bfloat16
        }


@pytest.mark.parametrize("kinds", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_run_can_go_on_with_moments_in_the_other_format(kinds):
    model = net(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = None
    for place, kind in enumerate(kinds):
        session = begin(model, optimizer, {**KAHAN, "state_dtype": kind}, state)
        steps(model, optimizer, session, range(2 * place, 2 * place + 2))
        moments = [value for one in optimizer.state.values() for value in one.values() if value.dim()]
        assert {str(value.dtype) for value in moments} == {f"torch.{kind}"}
        state = copy.deepcopy((optimizer.state_dict(), session.state_dict()))
        session.detach()


# -- bytes


def peak(make, options):
    """Return the most bytes a parameter of weights, gradients and state over three steps, from nothing."""
    size, count = 1 << 20, 8
    with LiveBytes("cpu") as live:
        weights = [torch.ones(size // 512, 512, dtype=torch.bfloat16) for _ in range(count)]
        model = nn.ParameterList([nn.Parameter(weight) for weight in weights])
        optimizer = make(model.parameters())
        session = begin(model, optimizer, options) if options else None
        for _ in range(3):
            sum(parameter.sum() for parameter in model).backward()
            stepped(session, optimizer) if session else optimizer.step()
            optimizer.zero_grad()
    return max(accumulate(change for change, _ in live.events)) / (size * count)


@pytest.mark.slow
def test_the_peak_is_that_of_plain_training_in_bfloat16():
    fused = lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True)  # noqa: E731
    plain = peak(fused, None)
    assert 8.0 <= plain < 8.3  # weights, gradients, two moments
    kahan, drawn = (peak(fused, options) for options in NARROW)
    # 2 bytes of what was lost; and four or so float32 values of 2^18 elements
    assert drawn <= 1.1 * plain + 4 * 4 * (1 << 18) / (1 << 23)
    assert kahan <= drawn + 2.05


class Own(torch.optim.AdamW):
    """Of nobody that we know."""


def test_kahan_works_with_an_optimizer_of_nobody_that_we_know():
    models = []
    for make in (torch.optim.AdamW, Own):
        model = net(torch.bfloat16)
        optimizer = make(model.parameters(), lr=1e-3)
        steps(model, optimizer, begin(model, optimizer, KAHAN), range(STEPS))
        models.append(model)
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))


# -- optimizers with 8-bit state


RECIPES = {
    "prune": {"prune": {"sparsity": 0.75, "begin": 2, "end": 6, "every": 2}},
    "cluster": {"cluster": {"bits": 3, "begin": 2, "min_size": 1}},
    "qat": {"qat": {"scheme": "int4_weight", "group_size": 64, "begin": 2, "skip": ["0"]}},
}


def wide_net(dtype, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).to(dtype)


def train_wide(model, optimizer, session, indices):
    for index in indices:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(8, 16, generator=generator).to(model[0].weight.dtype)
        with session.forward():
            loss = nn.functional.cross_entropy(model(x).float(), torch.randint(8, (8,), generator=generator))
        plain_step(session, optimizer, loss)


def check(name, weight, session):
    if name == "prune":
        masks = session.techniques["prune"].report()["tensors"]
        assert sum(entry["pruned"] for entry in masks) >= 0.74 * sum(entry["numel"] for entry in masks)
        assert (weight == 0).float().mean() > 0.6
    elif name == "cluster":
        assert len(weight.unique()) <= 8
    else:
        assert max(len(row.unique()) for row in weight) <= 16  # of 64, on a grid of their own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_weights_stay_what_they_are_beside_eight_bit_state_and_a_stopped_run_goes_on(name, dtype):
    def begun(model, state=None):
        optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-2, weight_decay=0.1, min_8bit_size=64)
        options = NARROW[1] if dtype == torch.bfloat16 else None
        return model, optimizer, begin(model, optimizer, options, state, 10, **RECIPES[name])

    first = begun(wide_net(dtype))
    train_wide(*first, range(5))
    model, optimizer, session = first
    again = wide_net(dtype, seed=1)
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    second = begun(again, copy.deepcopy((optimizer.state_dict(), session.state_dict())))
    for one in (first, second):
        train_wide(*one, range(5, 10))
        one[2].finish()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    check(name, model[2].weight.detach(), session)
