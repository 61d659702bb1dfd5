"""A step that a technique discards changes nothing, in a bare loop and in both trainers."""

import itertools

import pytest
import torch
from promise_drivers import run_hf, run_lightning
from promise_table import NUM_STEPS, recipe_of
from pytorch_lightning import Callback
from transformers import TrainerCallback

from shared_core.engine.session import Session
from shared_core.pruning import Pruning

AT = 3


@pytest.fixture
def discards_the_third_step(monkeypatch):
    seen = []
    original = Pruning.before_step

    def before_step(self, context):
        original(self, context)
        seen.append(context.step)
        context.discard_step = len(seen) == AT

    monkeypatch.setattr(Pruning, "before_step", before_step)
    return seen


def test_weights_moments_and_step_stay(discards_the_third_step):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    session = Session({"prune": {"sparsity": 0.5, "schedule": "one_shot", "begin": 1}})
    session.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    session.begin([optimizer], total_steps=10)
    for number in range(1, 6):
        before = model.weight.detach().clone()
        moments = {key: value.clone() for key, value in optimizer.state[model.weight].items()}
        session.loss(model(torch.randn(3, 6)).square().mean()).backward()
        session.before_step()
        optimizer.step()
        assert session.after_step() is (number != AT)
        if number == AT:
            assert torch.equal(model.weight, before)
            assert all(torch.equal(value, moments[key]) for key, value in optimizer.state[model.weight].items())
        optimizer.zero_grad()
    assert (session.step, session.skipped) == (4, 1)
    assert not session.context.discard_step


def test_hugging_face_holds_the_learning_rate(discards_the_third_step, tmp_path):
    rates = []

    class Rates(TrainerCallback):
        def on_step_end(self, args, state, control, lr_scheduler=None, **kwargs):
            rates.append(lr_scheduler.get_last_lr()[0])

    result = run_hf(recipe_of("prune"), tmp_path, lr_scheduler_type="linear", callbacks=[Rates()])
    assert (result.receipt["steps"]["applied"], result.receipt["steps"]["skipped"]) == (NUM_STEPS - 1, 1)
    falls = [before > after for before, after in itertools.pairwise(rates)]
    assert falls == [number != AT for number in range(2, NUM_STEPS + 1)]


def test_hugging_face_counts_an_overflow_right_behind_it(discards_the_third_step, tmp_path):
    class Overflow(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == AT:
                self.hook = model.register_forward_hook(lambda _, inputs, out: {**out, "loss": out["loss"] * torch.inf})
            elif state.global_step == AT + 1:
                self.hook.remove()

    recipe = recipe_of("prune") | {"loss_scale": {"kind": "dynamic", "init_scale": 1024.0}}
    steps = run_hf(recipe, tmp_path, callbacks=[Overflow()]).receipt["steps"]
    assert (steps["applied"], steps["skipped"]) == (NUM_STEPS - 2, 2)


def test_lightning_counts_it_once(discards_the_third_step, tmp_path):
    states = []

    class Steps(Callback):
        def on_train_batch_end(self, trainer, module, *args):
            states.append(max(int(value["step"]) for value in trainer.optimizers[0].state.values()))

    result = run_lightning(recipe_of("prune"), tmp_path, callbacks=[Steps()])
    assert (result.receipt["steps"]["applied"], result.receipt["steps"]["skipped"]) == (NUM_STEPS - 1, 1)
    assert states[AT - 1] == states[AT - 2] == AT - 1
