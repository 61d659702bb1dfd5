"""Copies of parameters that lie together, and optimizers whose parameters are exchanged forth and back."""

import copy

import pytest
import torch
from plain_loop import plain_step
from primary_weights_runs import begin, copies_of
from torch import nn

from shared_core.primary_weights.copies import Copies
from shared_core.primary_weights.optimizer_swap import Exchange

SHAPES = [(3,), (2, 3), (), (4, 3), (5,), (2, 3, 2), (), (0,), (200, 100), (1, 2, 2, 2)]


def parameters(dtype=torch.bfloat16):
    torch.manual_seed(1)
    made = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]
    made.append(nn.Parameter(torch.randn(4, 2, 3, 3, dtype=dtype).to(memory_format=torch.channels_last)))
    made.append(nn.Parameter(torch.randn(3, dtype=torch.float16)))
    return made


def test_copies_equal_their_parameters_whatever_the_shapes():
    ours = parameters()
    copies = Copies(ours)
    for parameter, value in zip(ours, copies.values, strict=True):
        assert value.dtype == torch.float32
        assert value.is_leaf
        assert value.requires_grad
        assert value.stride() == parameter.stride()
        assert torch.equal(value, parameter.float())
    # small ones of one row shape and format lie together
    at = [value.untyped_storage().data_ptr() for value in copies.values]
    assert (at[0], at[1], at[2]) == (at[4], at[3], at[6])
    assert at[0] != at[11]


def test_each_copy_follows_its_own_parameter_and_keeps_what_lies_below_an_ulp():
    ours = parameters()
    copies = Copies(ours)
    below = [torch.full_like(value, 1e-6) * value.abs() for value in copies.values]
    with torch.no_grad():
        for value, small in zip(copies.values, below, strict=True):
            value += small
        expected = [value.clone() for value in copies.values]
        for index in (1, 2, 4, 8, 10):
            if ours[index].dim():
                ours[index].data[-1] = float("nan") if index == 4 else 7.0
                expected[index][-1] = float("nan") if index == 4 else 7.0
            else:
                ours[index].data.fill_(7.0)
                expected[index].fill_(7.0)
    assert copies.follow_()
    assert copies.follow_()  # a NaN is not written again and again
    for value, wanted in zip(copies.values, expected, strict=True):
        torch.testing.assert_close(value.detach(), wanted, rtol=0, atol=0, equal_nan=True)


def test_writing_rounds_each_copy_into_its_parameter():
    ours = parameters()
    copies = Copies(ours)
    with torch.no_grad():
        for value in copies.values:
            value.mul_(1.37)
    copies.write_()
    for parameter, value in zip(ours, copies.values, strict=True):
        assert torch.equal(parameter, value.to(parameter.dtype))


def test_copies_made_anew_keep_the_known_values():
    ours = parameters()
    known = Copies(ours[2:8])
    with torch.no_grad():
        for value in known.values:
            value += 1e-6
    copies = Copies(ours, known.by_parameter)
    for parameter, value in zip(ours, copies.values, strict=True):
        wanted = known.by_parameter.get(parameter, parameter.float())
        assert torch.equal(value, wanted)


@pytest.mark.parametrize("index", [0, 8])
def test_another_format_is_told(index):
    ours = parameters()
    copies = Copies(ours)
    ours[index].data = ours[index].data.float()
    assert not copies.follow_()


def adamw(count=3):
    weights = [nn.Parameter(torch.ones(2)) for _ in range(count)]
    return weights, [nn.Parameter(torch.zeros(2)) for _ in range(count)], torch.optim.AdamW(weights, lr=0.1)


def holds(optimizer, expected):
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return len(held) == len(expected) and all(one is other for one, other in zip(held, expected, strict=True))


def test_state_made_on_either_side_goes_along():
    old, new, optimizer = adamw()
    exchange = Exchange(optimizer, old, new)
    for step in range(1, 5):
        assert exchange.is_current
        exchange.swap_()
        assert holds(optimizer, new)
        for parameter in new if step > 1 else new[:2]:  # the last one's state comes later
            parameter.grad = torch.ones(2)
        optimizer.step()
        exchange.swap_()
        assert holds(optimizer, old)
        assert {id(key) for key in optimizer.state} <= {id(parameter) for parameter in old}
        assert int(optimizer.state[old[0]]["step"]) == step
    assert int(optimizer.state[old[2]]["step"]) == 3


@pytest.mark.parametrize("side", ["old", "new"])
@pytest.mark.parametrize("change", ["load", "clear", "replace", "add", "drop"])
def test_what_others_do_to_an_optimizer_is_kept_on_both_sides(side, change):
    old, new, optimizer = adamw()
    exchange = Exchange(optimizer, old, new)
    for _ in range(2):
        exchange.swap_()
        for parameter in new:
            parameter.grad = torch.ones(2)
        optimizer.step()
        exchange.swap_()
    if side == "new":
        exchange.swap_()
    here, there = (old, new) if side == "old" else (new, old)
    extra = nn.Parameter(torch.ones(2))
    expected = {index: 2 for index in range(3)}
    if change == "load":
        state = copy.deepcopy(optimizer.state_dict())
        for entry in state["state"].values():
            entry["step"] += 5
        optimizer.load_state_dict(state)
        expected = {index: 7 for index in range(3)}
    elif change == "clear":
        optimizer.state.clear()
        expected = {}
    elif change == "replace":
        optimizer.state[here[1]] = {"step": torch.tensor(9.0)}
        expected[1] = 9
    elif change == "add":
        optimizer.add_param_group({"params": [extra]})
    else:
        optimizer.state.pop(optimizer.param_groups[0]["params"].pop())
        del expected[2]
    more, kept = ([extra] if change == "add" else []), (2 if change == "drop" else 3)
    for _ in range(4):
        exchange.swap_()
        here, there = there, here
        assert holds(optimizer, [*here[:kept], *more])
        places = {id(parameter): index for index, parameter in enumerate(here)}
        assert {places[id(key)]: int(value["step"]) for key, value in optimizer.state.items()} == expected


def test_a_model_cast_in_the_middle_of_training_keeps_its_copies():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = begin(model, optimizer)

    def step():
        for parameter in model.parameters():
            parameter.grad = torch.full(parameter.shape, 0.1)
        plain_step(session, optimizer)

    step()
    before = {name: value.clone() for name, value in copies_of(session).items()}
    model[1].half()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    session.before_step()
    session.after_step(applied=False)
    after = copies_of(session)
    for name in ("1.weight", "1.bias"):
        assert torch.equal(after[name].half(), model.get_parameter(name))
        torch.testing.assert_close(after[name], before[name], rtol=2**-8, atol=0)
    for parameter in model[0].parameters():
        parameter.requires_grad_(True)
    step()
    assert copies_of(session).keys() == before.keys()
    assert all(int(state["step"]) == 2 for state in optimizer.state.values())
