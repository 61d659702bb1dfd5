"""Every criterion, granularity and dynamic of pruning in a whole run: exact counts, zeros that stay, exact resume.

A thousand steps with whatever revives weights elsewhere bring not one pruned weight back.
"""

import copy
import itertools

import bitsandbytes
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shared_core import Session
from shared_core.loss_scaling import LossScaler

STEPS = 12
GROWING = {"begin": 1, "end": 9, "every": 3}
VARIANTS = {
    "cosine": {"sparsity": 0.6, "schedule": "cosine", **GROWING},
    "exponential": {"sparsity": 0.6, "schedule": "exponential", "scope": "local", **GROWING},
    "iterative": {"sparsity": 0.6, "schedule": "iterative", **GROWING},
    "erdos_renyi": {"sparsity": 0.6, "scope": "erdos_renyi_kernel", **GROWING},
    "random": {"sparsity": 0.6, "criterion": "random", **GROWING},
    "threshold": {"sparsity": 0.9, "criterion": "threshold", "threshold": 0.05, **GROWING},
    "taylor": {"sparsity": 0.6, "criterion": "taylor", **GROWING},
    "movement": {"sparsity": 0.6, "criterion": "movement", **GROWING},
    "fisher": {"sparsity": 0.6, "criterion": "fisher", **GROWING},
    "wanda": {"sparsity": 0.6, "criterion": "wanda", **GROWING},
    "flops": {"sparsity": 0.6, "cost": "flops", **GROWING},
    "n_m": {"sparsity": 0.5, "granularity": "n_m", "schedule": "one_shot", "begin": 2},
    "sr_ste": {"sparsity": 0.5, "granularity": "n_m", "sr_ste": 2e-4, "schedule": "one_shot", **GROWING},
    "block": {"sparsity": 0.5, "granularity": "block", "block": "2x3", **GROWING},
    "recompute": {"sparsity": 0.6, "dynamic": "recompute", **GROWING},
    "throughout": {"sparsity": 0.6, "dynamic": "recompute", "begin": 0, "end": 1.0, "every": 1},
    "rigl": {"sparsity": 0.8, "dynamic": "rigl", "schedule": "one_shot", "scope": "erdos_renyi", **GROWING},
    "filter": {"sparsity": 0.5, "granularity": "filter", "criterion": "l2_norm", "scope": "local", **GROWING},
    "geometric": {"sparsity": 0.5, "granularity": "channel", "criterion": "geometric_median", **GROWING},
    "bn_scale": {"sparsity": 0.5, "granularity": "channel", "criterion": "bn_scale", "regularizer": "bn_l1", **GROWING},
    "neuron": {"sparsity": 0.5, "granularity": "neuron", "criterion": "taylor", **GROWING},
    "neuron_taylor": {"sparsity": 0.5, "granularity": "neuron", "criterion": "neuron_taylor", **GROWING},
    "unit_fisher": {"sparsity": 0.5, "granularity": "channel", "criterion": "fisher", "cost": "energy", **GROWING},
    "unit_random": {"sparsity": 0.5, "granularity": "channel", "criterion": "random", **GROWING},
    "shapley": {"sparsity": 0.5, "granularity": "channel", "criterion": "shapley", "permutations": 2, **GROWING},
    "layer": {"sparsity": 0.3, "granularity": "layer", **GROWING},
    "l1": {"sparsity": 0.6, "regularizer": "l1", **GROWING},
    "group_lasso": {"sparsity": 0.6, "regularizer": "group_lasso", **GROWING},
    "weight_decay": {"sparsity": 0.6, "regularizer": "weight_decay", "regularizer_strength": 0.1, **GROWING},
}
LEARNS_UNDER_MASKS = ("movement", "sr_ste", "recompute", "throughout")
OF_UNITS = (
    "filter", "geometric", "bn_scale", "neuron", "neuron_taylor", "unit_fisher", "unit_random", "layer", "shapley",
)  # fmt: skip


class Net(nn.Module):
    """A convolution with batch norm, and two linear layers, all sizes multiples of 4."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 4, 16)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        return self.out(torch.relu(self.fc(torch.relu(self.norm(self.conv(x))).mean(-1).flatten(1))))


class Run:
    """A hand-written loop with one session, clipping or not, momentum and weight decay."""

    def __init__(self, options, kind=torch.optim.AdamW, state=None, clips=True):
        torch.manual_seed(0)
        self.model = Net()
        self.session = Session({"prune": options}, seed=3)
        self.session.attach(self.model)
        self.optimizer = kind(self.model.parameters(), lr=0.01, weight_decay=0.1)
        self.taken, self.clips = 0, clips
        if state:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.session.load_state_dict(state["session"])
            self.taken = state["taken"]
        self.session.begin([self.optimizer], total_steps=STEPS, clips_gradients=clips)

    def step(self, skip=False):
        generator = torch.Generator().manual_seed(self.taken)
        x, y = torch.randn(6, 4, 4, 4, generator=generator), torch.randint(3, (6,), generator=generator)
        for part in (slice(0, 3), slice(3, 6)):
            loss = nn.functional.cross_entropy(self.model(x[part]), y[part]) / 2
            self.session.loss(loss).backward()
        self.session.before_step()
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if skip:
            self.session.after_step(applied=False)
        else:
            self.optimizer.step()
            self.session.after_step()
        self.optimizer.zero_grad()
        self.taken += 1

    def state(self):
        parts = {"model": self.model, "optimizer": self.optimizer, "session": self.session}
        return copy.deepcopy({name: part.state_dict() for name, part in parts.items()} | {"taken": self.taken})

    def weights(self):
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def finish(run):
    while run.taken < STEPS:
        run.step()
    run.session.finish()
    return run


def same(first, second):
    return all(
        torch.equal(first[n].reshape(-1).view(torch.uint8), second[n].reshape(-1).view(torch.uint8)) for n in first
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_stopped_anywhere_and_resumed_is_the_run_never_stopped(name):
    whole = Run(VARIANTS[name])
    states = []
    for _ in range(STEPS):
        states.append(whole.state())
        whole.step()
    whole.session.finish()
    for state in states[1::3]:
        resumed = finish(Run(VARIANTS[name], state=state))
        assert same(whole.weights(), resumed.weights()), state["taken"]


OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": lambda p, **options: torch.optim.SGD(p, momentum=0.9, **options)}


@pytest.mark.parametrize(("kind", "clips"), [("adamw", True), ("sgd", True), ("adamw", False)])
@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_pruned_is_exactly_zero_after_every_step_and_as_much_as_asked(name, kind, clips):
    # where nothing is clipped gradients are left to the optimizer, which moves weights before masks are made anew
    options = VARIANTS[name]
    run = Run(options, OPTIMIZERS[kind], clips=clips)
    technique = run.session.techniques["prune"]
    masks, came_back = {}, 0
    for _ in range(STEPS):
        run.step()
        now = {tensor: mask.clone() for tensor, mask in technique._policy.store.parts.items()}
        for tensor, mask in now.items():
            pruned = run.model.get_parameter(tensor).detach()[~mask]
            assert not pruned.view(torch.int32).any(), "pruned weights must be +0.0"
            came_back += int((mask & ~masks.get(tensor, mask)).sum())
        masks = now
    if kind == "adamw" and clips:
        assert bool(came_back) == (name in (*LEARNS_UNDER_MASKS, "rigl"))
    assert not came_back or name in (*LEARNS_UNDER_MASKS, "rigl")
    run.session.finish()
    report = run.session.receipt()["techniques"]["prune"]
    asked = options["sparsity"] * report["numel"]
    if name in OF_UNITS:
        units, gone = (sum(group[key] for group in report["units"]) for key in ("units", "pruned"))
        assert gone == round(options["sparsity"] * units) > 0
    elif name not in ("threshold", "wanda", "erdos_renyi", "rigl", "block"):
        assert report["pruned"] == round(asked) > 0
    else:
        assert 0.3 * asked < report["pruned"] <= 1.05 * asked


@pytest.mark.parametrize("name", VARIANTS)
def test_a_skipped_step_changes_nothing(name):
    run = Run(VARIANTS[name])
    for _ in range(5):
        run.step()
    before = run.weights()
    run.step(skip=True)
    after = run.weights()
    assert same({n: v for n, v in before.items() if "norm." not in n}, after)


LONG = 400
LONG_OPTIMIZERS = {
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
    optimizer = LONG_OPTIMIZERS[optimizer](model.parameters())
    session.begin([optimizer], total_steps=LONG)
    scaler = LossScaler("cpu", init_scale=2.0**14, growth_interval=40) if scaled else None
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    network = torch.compile(model, backend="aot_eager") if compiled else model
    generator = torch.Generator().manual_seed(1)
    for step in itertools.count():
        if session.step == LONG:
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "optimizer", "how"),
    [
        *((recipe, optimizer, {}) for recipe in ("2:4", "channels") for optimizer in ("sgd", "adamw-8bit")),
        ("cubic", "adamw-fused", {}),
        ("cubic", "sgd", {"scaled": True}),
        ("cubic", "adamw-fused", {"scaled": True}),
        ("cubic", "sgd", {"compiled": True}),
    ],
)
def test_no_weight_comes_back(recipe, optimizer, how):
    steps = since = 0
    for parameters, masks, average in train(RECIPES[recipe], optimizer, **how):  # noqa: B007
        steps += 1
        since = since + 1 if masks else 0
        for name, mask in masks.items():
            pruned = parameters[name].detach()[~mask]
            assert not pruned.view(torch.int32).count_nonzero(), (steps, name)
    for name, mask in masks.items():  # half of what an average held is forgotten in each step
        assert not average.get_parameter(name).detach()[~mask].count_nonzero(), name
    assert steps == LONG
    assert since > LONG / 2


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
