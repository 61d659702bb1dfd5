"""What a technique works on must stay in the model: a run in which it was replaced ends, with the reason."""

import pytest
import torch
from plain_loop import begun_session, plain_step
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shared_core import Session
from shared_core.errors import TrainingError

RECIPES = {
    "prune": {"sparsity": 0.5, "schedule": "one_shot", "begin": 1},
    "cluster": {"bits": 3, "begin": 1, "min_size": 1},
    "qat": {"scheme": "int8"},
    "lora": {"rank": 2, "base": "none"},
    "low_rank": {"rank": 2, "force": True, "min_size": 1},
    "fp8": {"recipe": "tensorwise"},
    "checkpointing": {"policy": "block", "include": ["*"]},
    "dp": {"noise_multiplier": 1.0},
}


def run(key):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    session = Session({key: RECIPES[key]})
    session.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(torch.ones(20, 16)), batch_size=4)
    if key == "dp":
        data = session.techniques["dp"].loader(data)  # as many rows as are drawn
    session.begin([optimizer], total_steps=9)
    step(session, optimizer, model, next(iter(data))[0])
    return session, optimizer, model


def step(session, optimizer, model, inputs):
    with session.forward():
        loss = session.loss(model(inputs).square().mean())
    loss.backward()
    plain_step(session, optimizer)


def look(session, where):
    if where == "finish":
        session.finish()
    else:
        with session.swapped(where):
            pass


@pytest.mark.parametrize("key", RECIPES)
@pytest.mark.parametrize("where", ["evaluate", "checkpoint", "export", "finish"])
def test_a_layer_that_was_replaced_is_named(key, where):
    session, _, model = run(key)
    with session.swapped("evaluate"), session.swapped("checkpoint"):
        pass
    model[1] = nn.Linear(16, 16)
    with pytest.raises(TrainingError, match=rf"^{key}: 1.* must stay in the model .* replaced by step 1; "):
        look(session, where)
    session.detach()
    assert [type(module) for module in model[2:]] == [nn.Linear] * 2


@pytest.mark.parametrize("key", ["prune", "cluster"])
def test_a_parameter_that_was_replaced_is_named(key):
    session, optimizer, model = run(key)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(values)
    with session.swapped("evaluate"):
        pass
    model.load_state_dict(values, assign=True)
    # Found without a validation or a file, long before the last step.
    with pytest.raises(TrainingError, match=rf"{key}: 0\.weight must stay .* by step 2; .* without assign=True"):
        step(session, optimizer, model, torch.ones(2, 16))


def test_a_validation_after_one_that_failed_is_of_the_average():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    session, optimizer = begun_session({"prune": RECIPES["prune"], "average": {"kind": "ema"}}, model, 9)
    for _ in range(2):
        step(session, optimizer, model, torch.ones(2, 16))
    own, values = model[0].weight, model[0].weight.detach().clone()
    model[0].weight = nn.Parameter(values)
    with pytest.raises(TrainingError), session.swapped("evaluate"):
        pass
    model[0].weight = own
    with session.swapped("evaluate"):
        assert not torch.equal(own, values)
    assert torch.equal(own, values)


@pytest.mark.parametrize("where", ["evaluate", "checkpoint", "export", "finish"])
def test_a_base_that_was_unfrozen_under_adapters_is_named(where):
    session, _, model = run("lora")
    model.requires_grad_(True)
    with pytest.raises(TrainingError, match=r"^lora: .*weight must stay frozen .* unfrozen by step 1; "):
        look(session, where)


def test_an_optimizer_made_anew_in_mid_run_is_refused():
    session, optimizer, model = run("prune")
    step(session, optimizer, model, torch.ones(4, 16))
    anew = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(TrainingError, match="not passed to begin"):
        step(session, anew, model, torch.ones(4, 16))
    session.finish()


def test_steps_of_a_loop_that_makes_its_own_are_not_watched():
    model = nn.Linear(16, 16)
    session, _ = begun_session({"prune": RECIPES["prune"]}, model, 9)
    for _ in range(3):
        session.loss(model(torch.ones(4, 16)).square().mean()).backward()
        session.before_step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
        session.after_step()
        model.zero_grad()
    assert session.step == 3
