"""Primary weights and the parameters of model and optimizer: which are stepped, given back, taken over or refused."""

import copy

import pytest
import torch
from primary_weights_runs import KINDS, OPTIMIZERS, begin, by_session, copies_of, loss_of, net, stepped
from torch import nn

from shared_core import Session
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, MatchError, TrainingError
from shared_core.primary_weights import PrimaryWeightsConfig, replace_parameters_


@pytest.mark.parametrize("kind", KINDS)
def test_float32_and_frozen_parameters_are_left_alone(kind):
    model = net(torch.bfloat16)
    model.hidden.float()
    model.forward = lambda x: model.head(model.hidden(model.embed(x).float() * model.frozen).bfloat16())
    frozen = model.frozen.clone()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    session = begin(model, optimizer, kind)
    loss_of(model, 0).backward()
    session.before_step()
    stepped = set(optimizer.param_groups[0]["params"])
    assert {model.frozen, model.hidden.weight} <= stepped
    assert (model.embed.weight in stepped) == (kind != "fp32_copy")  # widened within the step
    optimizer.step()
    session.after_step()
    report = session.receipt()["techniques"]["primary_weights"]
    assert report["parameters"] == 2
    assert report["elements"] == 72 + 3
    assert report["format"] == "bfloat16"
    assert report["copy_bytes"] == {"fp32_copy": 4, "kahan": 2}.get(kind, 0) * 75
    assert report["left_alone"] == {"float32": 2, "bfloat16, frozen": 1}
    assert report["small_updates_step"] == 1
    assert 0 <= report["small_updates"] <= 1
    assert torch.equal(model.frozen, frozen)


def test_a_copy_takes_over_what_others_changed_and_keeps_the_rest():
    weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    session = begin(nn.ParameterList([weight]), optimizer)

    def step():
        weight.grad = torch.full((4,), 1e-4)
        stepped(session, optimizer)
        return copies_of(session)["0"].clone()

    step()
    weight.data[0] = 0.25  # in a way that no version counter sees
    copy = step()
    torch.testing.assert_close(copy, torch.tensor([0.2499, 0.9998, 0.9998, 0.9998]), rtol=0, atol=1e-7)
    session.context.report_weights_replaced()
    torch.testing.assert_close(copies_of(session)["0"], weight.detach().float(), rtol=0, atol=0)


def test_groups_added_later_and_parameters_unfrozen_later_are_updated_in_float32():
    model = net(torch.bfloat16)
    optimizer = torch.optim.SGD([model.hidden.weight], lr=1e-3)
    session = begin(model, optimizer)
    for step in range(3):
        if step == 1:
            optimizer.add_param_group({"params": [model.embed.weight, model.frozen], "lr": 1e-5})
        if step == 2:
            model.frozen.requires_grad_(True)
        loss_of(model, step).backward()
        stepped(session, optimizer)
        model.zero_grad()
    copies = copies_of(session)
    assert set(copies) == {"hidden.weight", "embed.weight", "frozen"}
    assert not torch.equal(copies["embed.weight"], copies["embed.weight"].bfloat16().float())


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_interrupts_a_step_the_optimizer_gets_its_parameters_back(kind):
    model = net(torch.float16)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    session = begin(model, optimizer, kind)
    loss_of(model, 0).backward()
    stepped(session, optimizer)
    before, keys = copy.deepcopy(model.state_dict()), list(optimizer.state)

    loss_of(model, 1).backward()
    session.before_step()
    session.before_step()  # the first was interrupted, and training went on
    session.detach()
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
    assert list(optimizer.state) == keys
    assert all(key.dtype == torch.float16 for key in keys)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad_dtype == torch.float16 for p in trained)
    assert model.hidden.weight.grad.dtype == torch.float16
    copies = copies_of(session)
    assert len(copies) == (0 if kind == "stochastic_rounding" else 4)
    session.detach()


def test_finish_leaves_a_plain_model():
    model = net(torch.float16)
    session, _ = by_session(model, OPTIMIZERS["adamw"])
    weights = copy.deepcopy(model.state_dict())
    session.finish()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    loss_of(model, 0).backward()
    assert model.hidden.weight.grad.dtype == torch.float16
    assert session.receipt()["techniques"]["primary_weights"]["parameters"] == 4


def test_a_discarded_step_changes_nothing():
    model = net(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = begin(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    loss_of(model, 0).backward()
    session.context.discard_step = True
    session.before_step()
    optimizer.step()
    assert not session.after_step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters() if p.requires_grad)


# -- refusals


class Own(torch.optim.AdamW):
    """Of nobody that we know."""


NARROW = {"kind": "kahan", "state_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("model", "make", "options", "error", "words"),
    [
        (nn.Linear(2, 2), torch.optim.SGD, "fp32_copy", MatchError, "must have .*16.*got float32; load it"),
        (nn.Linear(2, 2).half().requires_grad_(False), torch.optim.SGD, "kahan", MatchError, "none that are trainable"),
        (nn.Linear(2, 2).half(), torch.optim.LBFGS, "fp32_copy", CompatibilityError, "LBFGS"),
        (
            nn.Linear(2, 2).bfloat16(),
            Own,
            NARROW,
            CompatibilityError,
            "state_dtype bfloat16 .* got Own; use state_dtype",
        ),
        (nn.Linear(2, 2).half(), torch.optim.AdamW, NARROW, MatchError, "bfloat16 weights, got float16"),
    ],
)
def test_models_and_optimizers_that_cannot_be_are_refused(model, make, options, error, words):
    with pytest.raises(error, match=words):
        begin(model, make(model.parameters()), options)


def test_an_optimizer_without_16_bit_parameters_is_refused():
    model = nn.ModuleList([nn.Linear(2, 2).half(), nn.Linear(2, 2)])
    with pytest.raises(MatchError, match="got float32"):
        begin(model, torch.optim.SGD(model[1].parameters(), lr=0.1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kind": "fp16_copy"},
        {"kind": "fp32_copy", "telemetry_every": -1},
        {"kind": "fp32_copy", "state_dtype": "bfloat16"},
    ],
)
def test_wrong_options_are_refused(options):
    with pytest.raises(ConfigError, match="primary_weights"):
        PrimaryWeightsConfig.from_dict(options)


def ready(kind="fp32_copy"):
    model = nn.Linear(2, 2).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = begin(model, optimizer, kind)
    model(torch.ones(1, 2).half()).sum().backward()
    return model, optimizer, session


def replace_gradient(model, optimizer, session):
    session.before_step()
    model.weight.grad = model.weight.grad * 0.5
    optimizer.step()


def write_past_the_optimizer(model, optimizer, session):
    session.before_step()
    nn.init.ones_(model.weight)


@pytest.mark.parametrize(
    ("kind", "step", "words"),
    [
        ("fp32_copy", lambda model, optimizer, session: optimizer.step(), "stepped without before_step"),
        ("fp32_copy", replace_gradient, "changed in place"),
        ("fp32_copy", write_past_the_optimizer, "must update the tensors in its param_groups"),
        ("stochastic_rounding", write_past_the_optimizer, "must update the tensors in its param_groups"),
    ],
)
def test_a_step_that_the_optimizer_did_not_make_on_its_parameters_is_an_error(kind, step, words):
    model, optimizer, session = ready(kind)
    step(model, optimizer, session)
    with pytest.raises(TrainingError, match=words):
        session.after_step()
    assert optimizer.param_groups[0]["params"][0] is model.weight


@pytest.mark.parametrize("damage", [lambda s: s.pop("copies"), lambda s: s["copies"].update({"weight": torch.ones(3)})])
def test_damaged_state_is_refused(damage):
    model, optimizer, session = ready()
    state = copy.deepcopy(session.state_dict())
    damage(state["techniques"]["primary_weights"])
    session.detach()
    other = Session({"primary_weights": {"kind": "fp32_copy"}})
    other.attach(model)
    with pytest.raises(CheckpointError, match="primary_weights"):
        other.load_state_dict(state)
        other.begin([optimizer], total_steps=1)


def test_replacing_moves_state_and_keeps_the_order():
    weights = [torch.zeros(2, requires_grad=True) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": weights[:1]}, {"params": weights[1:], "lr": 0.5}], lr=0.1, momentum=0.9)
    for weight in weights:
        weight.grad = torch.ones(2)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    other = torch.ones(2)
    replace_parameters_(optimizer, {weights[1]: other})
    assert optimizer.param_groups[1]["params"][0] is other
    assert weights[1] not in optimizer.state
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert list(after["state"]) == list(before["state"])
    replace_parameters_(optimizer, {other: weights[1]})
    assert list(optimizer.state) == weights
    assert other not in optimizer.state
