"""A thousand steps with whatever revives weights elsewhere: not one pruned weight comes back, in any of them."""

import copy
import itertools

import bitsandbytes
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shared_core.engine.session import Session
from shared_core.loss_scaling import LossScaler

STEPS = 1000
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "adamw-8bit": lambda p: bitsandbytes.optim.AdamW8bit(p, lr=0.01, weight_decay=0.1, min_8bit_size=64),
}
RECIPES = {
    "cubic": {"sparsity": 0.8, "begin": 0.1, "end": 0.6, "every": 50},
    "2:4": {"sparsity": 0.5, "granularity": "n_m", "sr_ste": 2e-4, "schedule": "one_shot", "end": 0.5},
    "channels": {"sparsity": 0.5, "granularity": "neuron", "begin": 0.1, "end": 0.6, "every": 50},
}


def train(recipe, optimizer, *, scaled=False, compiled=False):
    """Yield after every applied step the parameters, the masks, and the average of the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)
    )
    session = Session({"prune": recipe})
    session.attach(model)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    session.begin([optimizer], total_steps=STEPS)
    scaler = LossScaler("cpu", init_scale=2.0**14, growth_interval=40) if scaled else None
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    network = torch.compile(model, backend="aot_eager") if compiled else model
    generator = torch.Generator().manual_seed(1)
    for step in itertools.count():
        if session.step == STEPS:
            return
        x = torch.randn(8, 16, generator=generator)
        y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
        for part in (slice(0, 4), slice(4, 8)):
            loss = session.loss(nn.functional.cross_entropy(network(x[part]), y[part]) / 2)
            (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.unscale_(optimizer)
            if step % 97 == 50:
                next(model.parameters()).grad[0, 0] = torch.inf
                scaler._found_inf_per_device(optimizer)[torch.device("cpu")].fill_(1.0)
        session.before_step()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = scaler.get_scale() if scaler else 0
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        if scaler and scaler.get_scale() < before:
            session.after_step(applied=False)
            continue
        session.after_step()
        average.update_parameters(model)
        yield dict(model.named_parameters()), session.techniques["prune"]._policy.store.parts, average.module


def check(run):
    steps = since = 0
    for parameters, masks, average in run:  # noqa: B007
        steps += 1
        since = since + 1 if masks else 0
        for name, mask in masks.items():
            pruned = parameters[name].detach()[~mask]
            assert not pruned.view(torch.int32).count_nonzero(), (steps, name)
    for name, mask in masks.items():  # half of what an average held is forgotten in each of 400 steps
        assert not average.get_parameter(name).detach()[~mask].count_nonzero(), name
    assert steps == STEPS
    assert since > STEPS / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "optimizer"),
    [*itertools.product(("2:4", "channels"), ("sgd", "adamw-8bit")), ("cubic", "adamw-fused")],
)
def test_no_weight_comes_back(recipe, optimizer):
    check(train(RECIPES[recipe], optimizer))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw-fused"])
def test_no_weight_comes_back_when_steps_are_skipped(optimizer):
    check(train(RECIPES["cubic"], optimizer, scaled=True))


@pytest.mark.slow
def test_no_weight_comes_back_in_a_compiled_model():
    check(train(RECIPES["cubic"], "sgd", compiled=True))


@pytest.mark.parametrize(("fused", "smallest"), [(False, torch.finfo(torch.float32).tiny), (True, 0.0)])
def test_masked_gradients_train_as_zeros_and_adam_takes_no_roots_of_zeros(fused, smallest):
    torch.manual_seed(0)
    model, rows = nn.Linear(300, 300), torch.randn(8, 300)
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused) for net in (model, plain)]
    session = Session({"prune": {"sparsity": 0.5, "schedule": "one_shot", "begin": 0}})
    session.attach(model)
    session.begin([optimizers[0]], total_steps=5, clips_gradients=True)
    mask = model.weight.detach() != 0
    plain.weight.data.mul_(mask)
    for _ in range(5):
        for net, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            net(rows).square().mean().backward()
            if net is model:
                session.before_step()
            else:
                net.weight.grad.mul_(mask)
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
        session.after_step()
        assert torch.equal(model.weight != 0, mask)
    assert torch.equal(model.weight, plain.weight)
    assert model.weight.grad[~mask].abs().max() <= 1e-13
    assert optimizers[0].state[model.weight]["exp_avg_sq"][~mask].min() >= smallest
