"""Stochastic rounding widens a few parameters at a time: the same numbers, in less memory, whoever calls the step."""

from itertools import accumulate

import pytest
import torch
from primary_weights_runs import STEPS, begin, loss_of, net, stepped
from torch import nn
from transformers.optimization import Adafactor

from shared_core.activation_checkpointing.profiler import LiveBytes
from shared_core.primary_weights import optimizer_swap, technique

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1e-1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "adafactor_of_transformers": lambda p: Adafactor(p, scale_parameter=True, relative_step=True),
}


def groups(model):
    """Return two groups, not in the model's order, one of which holds a float32 parameter too."""
    model.extra = nn.Parameter(torch.ones(2))
    trained = [p for p in model.parameters() if p.requires_grad]
    return [{"params": trained[::-2], "lr": 2e-3}, {"params": trained[-2::-2]}]


def steps(model, optimizer, session, count=STEPS, first=0, closure=False):
    for step in range(first, first + count):

        @torch.enable_grad()  # transformers' Adafactor runs closures without
        def backward(step=step):
            loss = loss_of(model, step) + model.extra.square().sum()
            loss.backward()
            session.before_step()
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            return loss

        if closure:
            assert optimizer.step(backward).item() > 0
        else:
            backward()
            assert optimizer.step() is None
        session.after_step()
        optimizer.zero_grad()


def run(name, **options):
    model = net(torch.bfloat16)
    optimizer = OPTIMIZERS[name](groups(model))
    session = begin(model, optimizer, "stochastic_rounding")
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    steps(model, optimizer, session, **options)
    return model, optimizer, session


def assert_same(one, other):
    for first, second in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert torch.equal(first, second)
    states = [pair[1].state_dict() for pair in (one, other)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert states[0]["state"].keys() == states[1]["state"].keys()
    for index, state in states[0]["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(value, states[1]["state"][index][key], rtol=0, atol=0)
    assert one[2].figures() == other[2].figures()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slices_step_to_the_bits_of_a_step_on_all_at_once(name, monkeypatch):
    monkeypatch.setattr(optimizer_swap, "_ON_CPU", 50)
    sliced = run(name)
    assert sliced[2].techniques["primary_weights"].report()["widened_bytes_at_once"] == 4 * 12 * 6
    assert_same(run(name, closure=True), sliced)
    monkeypatch.setattr(technique, "updates_each_by_itself", lambda optimizer: False)
    whole = run(name)
    assert whole[2].techniques["primary_weights"].report()["widened_bytes_at_once"] == 4 * (12 * 6 + 6 * 6 + 6 + 3)
    assert_same(sliced, whole)


@pytest.mark.parametrize("name", ["sgd", "adamw", "adamw_foreach", "adamw_fused", "adafactor"])
def test_a_step_never_holds_the_widened_weights_at_once(name):
    count, size = 20, 1 << 18
    model = nn.ParameterList([nn.Parameter(torch.ones(size // 64, 64, dtype=torch.bfloat16)) for _ in range(count)])
    optimizer = OPTIMIZERS[name](model.parameters())
    session = begin(model, optimizer, "stochastic_rounding")
    peaks = []
    for _ in range(2):
        for parameter in model:
            parameter.grad = torch.full(parameter.shape, 1e-3)
        with LiveBytes("cpu") as live:
            stepped(session, optimizer)
        peaks.append(max(accumulate(change for change, _ in live.events)))
    # the first step makes the moments; then one tensor, what the optimizer needs for it, and its rounding
    assert peaks[1] < 0.4 * 4 * count * size
    assert session.techniques["primary_weights"].report()["widened_bytes_at_once"] == 4 * size
    with LiveBytes("cpu") as live:
        session.prepare_optimizers([optimizer])
    assert sum(live.sizes) < 64 * count  # no values, formats


def test_hooks_of_others_run_once_and_see_the_whole_optimizer():
    model = net(torch.bfloat16)
    optimizer = OPTIMIZERS["adamw"](groups(model))
    seen = []
    hook = lambda optimizer, args, kwargs: seen.append([len(group["params"]) for group in optimizer.param_groups])  # noqa: E731
    handles = optimizer.register_step_pre_hook(hook), optimizer.register_step_post_hook(hook)
    session = begin(model, optimizer, "stochastic_rounding")
    steps(model, optimizer, session, count=1)
    assert seen == [[3, 2]] * 2
    session.finish()
    for handle in handles:
        handle.remove()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_slice_that_fails_leaves_the_optimizer_whole():
    model = net(torch.bfloat16)
    optimizer = OPTIMIZERS["adamw"](groups(model))
    session = begin(model, optimizer, "stochastic_rounding")
    steps(model, optimizer, session, count=1)
    kept, state = [[*group["params"]] for group in optimizer.param_groups], optimizer.state
    loss_of(model, 1).backward()
    session.before_step()
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    assert [group["params"] for group in optimizer.param_groups] == kept
    assert optimizer.state is state


def test_an_optimizer_that_needs_all_parameters_steps_on_all_at_once():
    class Joint(torch.optim.SGD):
        """Divides by the norm over all parameters."""

    model = net(torch.bfloat16)
    optimizer = Joint(model.parameters(), lr=0.1)
    assert not optimizer_swap.updates_each_by_itself(optimizer)
    session = begin(model, optimizer, "stochastic_rounding")
    loss_of(model, 0).backward()
    session.before_step()
    assert model.embed.weight not in set(optimizer.param_groups[0]["params"])
    optimizer.step()
    session.after_step()
