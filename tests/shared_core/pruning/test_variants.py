"""Every criterion, granularity and dynamic of pruning in a whole run: exact counts, zeros that stay, exact resume."""

import copy

import pytest
import torch
from torch import nn

from shared_core.engine.session import Session

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
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "session": self.session.state_dict(),
            "taken": self.taken,
        }
        return copy.deepcopy(state)

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


@pytest.mark.parametrize("kind", [torch.optim.AdamW, lambda p, **o: torch.optim.SGD(p, momentum=0.9, **o)])
@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_pruned_is_exactly_zero_after_every_step_and_as_much_as_asked(name, kind):
    options = VARIANTS[name]
    run = Run(options, kind)
    technique = run.session.techniques["prune"]
    for _ in range(STEPS):
        run.step()
        for tensor, mask in technique._policy.store.parts.items():
            pruned = dict(run.model.named_parameters())[tensor].detach()[~mask]
            assert not pruned.view(torch.int32).any(), "pruned weights must be +0.0"
    run.session.finish()
    report = run.session.receipt()["techniques"]["prune"]
    if name in OF_UNITS:
        units, gone = (sum(group[key] for group in report["units"]) for key in ("units", "pruned"))
        assert gone == round(options["sparsity"] * units) > 0
    elif name not in ("threshold", "wanda", "erdos_renyi", "rigl", "block"):
        assert report["pruned"] == round(options["sparsity"] * report["numel"]) > 0
    else:
        assert (
            0.3 * options["sparsity"] * report["numel"]
            < report["pruned"]
            <= 1.05 * options["sparsity"] * report["numel"]
        )


@pytest.mark.parametrize("name", VARIANTS)
def test_a_skipped_step_changes_nothing(name):
    run = Run(VARIANTS[name])
    for _ in range(5):
        run.step()
    before = run.weights()
    run.step(skip=True)
    after = run.weights()
    assert same({n: v for n, v in before.items() if "norm." not in n}, after)


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in LEARNS_UNDER_MASKS and name != "rigl"])
def test_pruned_weights_never_come_back(name, clips):
    # where nothing is clipped their gradients are left to the optimizer, which moves them before masks are made anew
    run = Run(VARIANTS[name], clips=clips)
    masks = {}
    for _ in range(STEPS):
        run.step()
        now = {tensor: mask.clone() for tensor, mask in run.session.techniques["prune"]._policy.store.parts.items()}
        for tensor, mask in masks.items():
            assert not (now[tensor] & ~mask).any()
        masks = now


@pytest.mark.parametrize("name", [*LEARNS_UNDER_MASKS, "rigl"])
def test_weights_do_come_back_where_that_is_asked_for(name):
    run = Run(VARIANTS[name])
    masks, came_back = {}, 0
    for _ in range(STEPS):
        run.step()
        now = {tensor: mask.clone() for tensor, mask in run.session.techniques["prune"]._policy.store.parts.items()}
        came_back += sum(int((now[tensor] & ~mask).sum()) for tensor, mask in masks.items())
        masks = now
    assert came_back > 0
