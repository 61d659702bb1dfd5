"""User code that fails in mid-training, callbacks that are taken away, a process that is killed: nothing is left."""

import itertools
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from lightning_world import make_trainer
from promise_drivers import difference, hf_trainer, lightning_module, run_hf, run_lightning
from promise_table import EVERYTHING, NUM_STEPS, TOGETHER, DigitsNet, make_net, recipe_of, train_examples
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from two_ranks import ranks_of, start_scripts

import hf_eff
import lightning_eff
from shared_core import Session
from shared_core.errors import ConfigError, TrainingError

PLACES = ("forward", "before_step", "after_step", "save")
EVENTS = {"before_step": "on_pre_optimizer_step", "after_step": "on_step_end", "save": "on_save"}
HOOKS = {"before_step": "on_before_optimizer_step", "after_step": "on_train_batch_end", "save": "on_save_checkpoint"}
RECIPES = [TOGETHER, *((key,) for key in EVERYTHING if key not in TOGETHER)]
AT = 3


class BoomError(Exception):
    pass


class Fuse:
    """What a user's code does at its third call; `trainer` and `model` are those it saw."""

    def __init__(self):
        self.calls = itertools.count(1)
        self.trainer = self.module = None

    def burn(self):
        if next(self.calls) == AT:
            raise BoomError


def callback(place, fuse, house):
    def hf(self, args, state, control, **kwargs):
        fuse.burn()

    def lightning(self, trainer, module, *args):
        fuse.burn()

    def setup(self, trainer, module, stage):
        fuse.trainer, fuse.module = trainer, module

    if house == "hf":
        return type("User", (TrainerCallback,), {EVENTS[place]: hf} if place in EVENTS else {})()
    return type("User", (pl.Callback,), {"setup": setup} | ({HOOKS[place]: lightning} if place in HOOKS else {}))()


def traces(*owners):
    """What a technique could leave on a model, an optimizer or a trainer, and in torch itself."""
    found = {}
    for number, owner in enumerate(owners):
        found[number] = (
            type(owner),
            {name for name, value in vars(owner).items() if callable(value) and name != "step"},
        )
        if isinstance(owner, torch.nn.Module):
            for name, module in owner.named_modules():
                hooks = [
                    name for name, value in vars(module).items() if "hook" in name and isinstance(value, dict) and value
                ]
                own = {name for name, value in vars(module).items() if not name.startswith("_") and callable(value)}
                found[number, name] = (type(module), hooks, own, set(dict(module.named_parameters(recurse=False))))
        if isinstance(owner, torch.optim.Optimizer):
            found[number] += (len(owner._optimizer_step_pre_hooks), len(owner._optimizer_step_post_hooks))
    modes = (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack())
    saved = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found | {"torch": (torch.get_float32_matmul_precision(), torch.is_grad_enabled(), modes, saved)}


def ours_on(owner):
    houses, theirs = ("hf_eff", "lightning_eff"), ("_precision_plugin",)  # the user gave that one
    values = vars(owner).items()
    return [name for name, value in values if name not in theirs and type(value).__module__.startswith(houses)]


def each_at_some_place():
    """Each recipe at one place, other recipes at others; the rest in `make test-all`."""
    for (i, keys), house, place in itertools.product(enumerate(RECIPES), ("hf", "lightning"), range(len(PLACES))):
        marks = [pytest.mark.slow] if place else []
        where = PLACES[(i + place + (house == "hf")) % len(PLACES)]
        yield pytest.param(keys, house, where, id=f"{'+'.join(keys[:2])}-{house}-{where}", marks=marks)


@pytest.mark.parametrize(("keys", "house", "place"), list(each_at_some_place()))
def test_after_an_exception_of_the_user_everything_is_stock_and_trains_again(keys, house, place, tmp_path, monkeypatch):
    fuse, forward = Fuse(), DigitsNet.forward

    def fails(self, x, labels=None):
        if place == "forward" and self.training and torch.is_grad_enabled():
            fuse.burn()
        return forward(self, x, labels)

    monkeypatch.setattr(DigitsNet, "forward", fails)
    recipe, user = recipe_of(*keys), callback(place, fuse, house)
    stock = traces(make_net(recipe=keys))
    if house == "hf":
        trainer = hf_trainer(recipe, tmp_path, save_every=2, callbacks=[user], eval_strategy="steps", eval_steps=2)
        with pytest.raises(BoomError):
            trainer.train()
        model, optimizer = trainer.model, trainer.optimizer.optimizer
        assert trainer.accelerator.scaler is None
    else:
        with pytest.raises(BoomError):
            run_lightning(recipe, tmp_path, save_every=2, callbacks=[user])
        model, optimizer = fuse.module.net, fuse.trainer.optimizers[0]
        for owner in (fuse.module, fuse.trainer, fuse.trainer.strategy, fuse.trainer.fit_loop.epoch_loop):
            assert not ours_on(owner)
    assert traces(model) == stock
    assert type(optimizer) is torch.optim.AdamW
    assert traces(optimizer)[0][1:] == traces(torch.optim.AdamW(model.parameters()))[0][1:]
    if house == "hf":
        trainer.train()
    else:
        data = DataLoader(train_examples(), batch_size=8)
        options = {"callbacks": [lightning_eff.EffCallback(_with_student(recipe))], "enable_checkpointing": True}
        make_trainer(tmp_path, max_steps=NUM_STEPS, **options).fit(fuse.module, data, data)
    assert traces(model) == stock
    assert all(torch.isfinite(weight).all() for weight in model.state_dict().values())


def _with_student(recipe):
    return recipe | ({"distill": recipe["distill"] | {"student": "net"}} if "distill" in recipe else {})


class Removes(TrainerCallback):
    """Takes `which` away after a step."""

    def __init__(self, at, which):
        self.at, self.which, self.trainer, self.module = at, which, None, None

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            self.trainer.remove_callback(self.which)


class LightningRemoves(pl.Callback):
    def __init__(self, at, which):
        self.at, self.which = at, which

    def on_train_batch_end(self, trainer, module, *args):
        self.trainer, self.module = trainer, module
        if trainer.global_step == self.at:
            trainer.callbacks.remove(self.which)


@pytest.mark.parametrize("at", [4, NUM_STEPS])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("house", ["hf", "lightning"])
def test_a_callback_that_is_removed_midway_is_a_named_conflict(house, which, at, tmp_path):
    package = {"hf": hf_eff, "lightning": lightning_eff}[house]
    ours = [package.EffCallback(recipe_of(key)) for key in ("prune", "qat")]
    user = (Removes if house == "hf" else LightningRemoves)(at, ours[which])
    message = rf"EffCallback must stay until training ends.* by step {at}; remove it before"
    if house == "hf":
        user.trainer = trainer = hf_trainer({}, tmp_path, plugin=False, callbacks=[*ours, user])
        if at == NUM_STEPS:  # training has ended for those that stay
            trainer.train()
            assert ours[1 - which].session.is_finished
            return
        with pytest.raises(TrainingError, match=message):
            trainer.train()
        model = trainer.model
    else:
        with pytest.raises(TrainingError, match=message):
            run_lightning({}, tmp_path, plugin=False, callbacks=[*ours, user])
        assert not ours_on(user.module)
        assert not ours_on(user.trainer)
        model = user.module.net
    assert traces(model) == traces(make_net())


def test_callbacks_removed_before_training_take_their_techniques_along(tmp_path):
    ours = [hf_eff.EffCallback(recipe_of(key)) for key in ("prune", "qat")]
    trainer = hf_trainer({}, tmp_path / "one", plugin=False, callbacks=ours)
    trainer.remove_callback(ours[1])
    trainer.train()
    assert difference(trainer.model.state_dict(), run_hf(recipe_of("prune"), tmp_path / "prune").weights) is None
    trainer.remove_callback(ours[0])
    trainer.train()
    assert not ours_on(trainer)
    assert not ours_on(trainer.accelerator)
    with pytest.raises(TrainingError, match="attached before train, got a trainer that has trained"):
        trainer.add_callback(ours[0])


def test_a_driver_that_is_removed_midway_is_a_named_conflict(tmp_path):
    user = Removes(4, None)
    user.trainer = trainer = hf_trainer(recipe_of("prune", "qat"), tmp_path, callbacks=[user])
    user.which = trainer.callback_handler.callbacks[0]
    with pytest.raises(TrainingError, match="SessionCallback must stay until training ends"):
        trainer.train()
    assert traces(trainer.model) == traces(make_net())
    user.at = None
    trainer.train()  # as if it had never been there
    assert not ours_on(trainer)


def test_the_module_of_a_lightning_run_is_untouched_by_a_refusal(tmp_path):
    module = lightning_module()
    before = traces(module)
    callbacks = [lightning_eff.EffCallback({"prune": {"sparsity": 0.5, "end": 99}})]
    trainer = make_trainer(tmp_path, max_steps=2, callbacks=callbacks)
    with pytest.raises(ConfigError, match="within the 2 steps"):
        trainer.fit(module, DataLoader(train_examples(), batch_size=8))
    assert traces(module) == before


SECONDS = 60
"""How long the process that is left may wait."""


def train(front_end, folder):
    keys, step = ("prune", "qat", "average", "loss_scale"), Session.before_step

    def fall(self):
        if self.step == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        step(self)

    Session.before_step = fall
    options = {"batch_norm": False, "batch": 4, "optim": "sgd"}
    if front_end == "hf":
        run_hf(recipe_of(*keys), Path(folder), ddp_find_unused_parameters=False, **options)
    else:
        run_lightning(recipe_of(*keys), Path(folder), devices=2, strategy="ddp", **options)


@pytest.mark.parametrize("front_end", ["hf", "lightning"])
def test_the_other_process_ends_with_an_error_in_time(front_end, tmp_path):
    workers, logs = start_scripts(ranks_of(__file__, tmp_path, front_end, tmp_path), tmp_path)
    deadline = None
    try:
        while workers[0].exitcode is None:
            if deadline is None and workers[1].exitcode is not None:
                deadline = time.monotonic() + SECONDS
            assert deadline is None or time.monotonic() < deadline, "the first rank waits for ever"
            time.sleep(0.05)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    log = logs[0].read_text()
    assert workers[1].exitcode == -signal.SIGKILL, log[-2000:]
    assert workers[0].exitcode not in (0, -signal.SIGKILL), log[-2000:]
    assert "Error" in log
    assert not list(tmp_path.glob("**/model.safetensors"))


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2])
