"""A session without a block, as a callback of another library drives it: same weights, and an honest receipt."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from shared_core import Session, training
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, MatchError

STEPS = 6


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))


def batch(step):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


RECIPES = {
    "prune": {"prune": {"sparsity": 0.5, "end": 3}},
    "qat": {"qat": {"scheme": "int8", "begin": 2}},
    "distill": {"distill": {"teacher": net(1)}},
    "lora": {"lora": {"rank": 2, "save": "merged"}},
    "average": {"average": {"kind": "ema"}},
    "activations": {"activations": {"pack": "exact", "min_size": 1}},
    "prune-qat": {"prune": {"sparsity": 0.5, "end": 3}, "qat": {"scheme": "int8_weight"}},
}


class Trainer:
    """Stands for another library's trainer, which calls `session` at its events."""

    def __init__(self, recipe, state=None, accumulate=1):
        self.model, self.session, self.step, self.accumulate = net(), Session(recipe), 0, accumulate
        resumed = None
        if state is not None:
            self.model.load_state_dict(state["model"])
            resumed, self.step = state["session"], state["step"]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.session.start(self.model, self.optimizer, total_steps=STEPS, resumed=resumed)
        if state is not None:
            self.optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["random"])
        else:
            torch.manual_seed(3)

    def state(self):
        with self.session.swapped("checkpoint"):
            weights = copy.deepcopy(self.model.state_dict())
        state = {"model": weights, "session": self.session.state_dict(), "step": self.step}
        return copy.deepcopy(state | {"optimizer": self.optimizer.state_dict(), "random": torch.get_rng_state()})

    def train(self, steps):
        for _ in range(steps):
            for number in range(self.accumulate):
                loss = self.model(batch(self.step * self.accumulate + number)).square().mean()
                (self.session.loss(loss) / self.accumulate).backward()
            self.session.before_step()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.session.after_step()
            self.optimizer.zero_grad()
            self.step += 1
        return self

    def finished(self):
        self.train(STEPS - self.step).session.finish()
        return self.model.state_dict()


def in_a_block(recipe, accumulate):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with training(recipe, model, optimizer, total_steps=STEPS, accumulate=accumulate) as loop:
        torch.manual_seed(3)
        for step in range(STEPS):
            for number in range(accumulate):
                with loop.forward():
                    loss = model(batch(step * accumulate + number)).square().mean()
                loop.backward(loss / accumulate)
            loop.complete()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            loop.step()
            loop.zero_grad()
    return model.state_dict()


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", RECIPES)
def test_the_weights_are_those_of_the_block(name, accumulate):
    recipe = RECIPES[name]
    same(Trainer(recipe, accumulate=accumulate).finished(), in_a_block(recipe, accumulate))


@pytest.mark.parametrize("name", RECIPES)
def test_a_resumed_run_ends_like_the_one_that_was_not_stopped(name):
    first = Trainer(RECIPES[name]).train(3)
    state = first.state()
    expected = first.finished()
    same(Trainer(RECIPES[name], state).finished(), expected)


def test_an_error_leaves_no_receipt_of_a_success_and_the_session_may_start_again():
    run = Trainer(RECIPES["prune"]).train(2)
    assert not run.session.receipt()["finished"]  # where an error ended training
    before = [type(one) for one in net().modules()]
    run.session.detach()
    assert [type(one) for one in run.model.modules()] == before
    receipt = run.session.receipt()
    assert not receipt["finished"]
    assert any("cut short" in note for note in receipt["notes"])
    run.session.start(run.model, torch.optim.SGD(run.model.parameters(), 0.1), total_steps=4)
    run.optimizer = run.session.context.optimizers[0]
    run.session.start(run.model, run.optimizer, total_steps=4)  # after another error, without detach
    run.train(4).session.finish()
    assert run.session.receipt()["finished"]
    assert sum(int((run.model[at].weight == 0).sum()) for at in (0, 3)) == (256 + 64) // 2


def test_a_block_that_raises_leaves_no_receipt_of_a_success():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ZeroDivisionError), training(RECIPES["qat"], model, optimizer, total_steps=2) as loop:
        loop.backward(model(batch(0)).square().mean())
        loop.step()
        raise ZeroDivisionError
    assert not loop.session.receipt()["finished"]


@pytest.mark.parametrize(
    ("recipe", "error", "told"),
    [
        ({"loss_scale": {"kind": "dynamic"}}, CompatibilityError, r"loss_scale: .*efftrain\.training"),
        ({"prune": {"sparsity": 0.5, "end": 99}}, ConfigError, "99"),
        ({"prune": {"sparsity": 0.5, "include": ["nothing"]}}, MatchError, "prune"),
    ],
)
def test_what_cannot_run_is_refused_and_leaves_the_model_alone(recipe, error, told):
    model = net()
    before = [type(one) for one in model.modules()], [*model.parameters()]
    with pytest.raises(error, match=told):
        Session(recipe).start(model, torch.optim.SGD(model.parameters(), 0.1), total_steps=4)
    assert ([type(one) for one in model.modules()], [*model.parameters()]) == before
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    with pytest.raises(CheckpointError):
        Session(RECIPES["prune"]).start(
            model, torch.optim.SGD(model.parameters(), 0.1), total_steps=4, resumed={"step": 1}
        )
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


def test_a_model_that_nobody_finished_is_told_at_exit():
    code = """
import torch
from shared_core import Session
model, session = torch.nn.Linear(4, 4), Session({"prune": {"sparsity": 0.5}})
session.start(model, torch.optim.SGD(model.parameters(), 0.1), total_steps=2)
"""
    for more, told in (("", True), ("session.detach()", False), ("session.finish()", False)):
        run = subprocess.run([sys.executable, "-c", code + more], capture_output=True, text=True, check=True)
        assert ("the model was not finished" in run.stdout) == told, run.stdout + run.stderr
