"""Optimizers that keep other weights for training than for evaluation train as without techniques, and end once."""

import pytest
import pytorch_lightning as pl
import torch
from plain_loop import plain_step
from promise_drivers import (
    assert_resumes,
    batches,
    difference,
    hf_trainer,
    prepared_loop,
    run_hf,
    run_lightning,
    weights_of,
)
from promise_table import NUM_STEPS, TECHNIQUES, make_net, recipe_of, train_examples
from safetensors.torch import load_file
from schedule_free import ScheduleFree
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from shared_core import Session
from shared_core.engine.checks.optimizer_parameters import attach_with
from shared_core.errors import CompatibilityError

EVERY = 2
RECIPES = {key: recipe_of(key) for key in ("prune", "qat", "cluster", "average", "lora")}
RECIPES["movement"] = {"prune": {"criterion": "movement", "sparsity": 0.5, "begin": 1, "end": 6, "every": 2}}
HOLDING = [key for key in RECIPES if key not in ("average", "lora")]


def fresh(recipe):
    model = make_net(recipe=recipe)
    return model, ScheduleFree(model.parameters())


def evaluate(session, optimizer, model, order):
    """Evaluate as a script may, and return what the model held meanwhile."""
    if order == "around":
        optimizer.eval()
    with session.swapped("evaluate"):
        model.eval()
        if order != "around":
            optimizer.eval()
        seen = weights_of(model)
        seen = {name: value.clone() for name, value in seen.items()}
        model.train()
        if order == "inside":
            optimizer.train()
    if order != "inside":
        optimizer.train()
    return seen


def train(recipe, order="behind", evaluates=True):
    """Train; return the weights of each step, what each evaluation saw, and the session, model and optimizer."""
    session, (model, optimizer) = Session(recipe), fresh(recipe)
    steps, seen = [], []
    attach_with(session, model, [optimizer])
    session.begin([optimizer], total_steps=NUM_STEPS, steps_per_epoch=4)
    for step, batch in enumerate(batches(1) * 2, 1):
        with session.forward():
            loss = session.loss(model(**batch)["loss"])
        loss.backward()
        plain_step(session, optimizer)
        steps.append({name: value.detach().double() for name, value in model.named_parameters()})
        if evaluates and step % EVERY == 0:
            seen.append(evaluate(session, optimizer, model, order))
    return steps, seen, session, model, optimizer


def stays(model, optimizer):
    before = {name: value.clone() for name, value in weights_of(model).items()}
    for switch in (optimizer.eval, optimizer.train, optimizer.eval):
        switch()
        assert difference(before, weights_of(model)) is None


def holds(key, weights):
    """Count in weights what a technique holds from its last step on."""
    weight = weights["hidden.weight"]
    if key == "prune":
        return int((weight == 0).sum()) > 0.5 * weight.numel()
    if key == "movement":
        return int((weight == 0).sum()) > 0.3 * weight.numel()
    if key == "cluster":
        return len(weight.unique()) <= 2 ** TECHNIQUES["cluster"].options["bits"]
    codes = weight / weight.abs().amax(1, keepdim=True) * 127
    return bool((codes - codes.round()).abs().max() < 1e-3)


@pytest.mark.parametrize("order", ["behind", "inside", "around"])
def test_an_average_leaves_training_as_it_was(order):
    recipe = {"average": {"kind": "swa", "begin": 1}}
    plain, _, _, _, alone = train({}, order)
    steps, seen, session, model, optimizer = train(recipe, order)
    assert difference(steps, plain) is None
    assert difference(list(alone.state.values()), list(optimizer.state.values())) is None
    for count, weights in zip(range(EVERY, NUM_STEPS + 1, EVERY), seen, strict=True):
        for name in plain[0]:
            mean = torch.stack([step[name] for step in plain[:count]]).mean(0)
            torch.testing.assert_close(weights[name].double(), mean, atol=1e-6, rtol=0)
    session.finish()
    for name, value in model.named_parameters():
        torch.testing.assert_close(value, seen[-1][name])
    stays(model, optimizer)


@pytest.mark.parametrize("key", HOLDING)
def test_weights_of_evaluation_are_held_and_final_ones_stay(key):
    _, seen, session, model, optimizer = train(RECIPES[key])
    assert holds(key, seen[-1]) or key == "qat"  # latent until the end
    session.finish()
    assert holds(key, weights_of(model))
    stays(model, optimizer)
    # trained on from there
    optimizer.train()
    before = weights_of(model)["head.weight"].clone()
    model(**batches(1)[0])["loss"].backward()
    optimizer.step()
    trained = model.head.weight.detach().clone()
    assert not torch.equal(trained, before)
    optimizer.eval()
    assert not torch.equal(model.head.weight, trained)


def test_what_says_nothing_of_weights_leaves_them_to_the_optimizer():
    recipe = {"matmul": {"precision": "high"}}
    for evaluates in (True, False):
        models = []
        for one in (recipe, {}):
            _, _, session, model, optimizer = train(one, evaluates=evaluates)
            session.finish()
            models.append([weights_of(model), optimizer.eval(), weights_of(model)])
        assert difference(*models) is None


def test_shared_values_move_as_parameters_of_their_own():
    recipe = {"cluster": {"bits": 2, "begin": 3, "min_size": 1}}
    torch.manual_seed(0)
    model, inputs = torch.nn.Linear(6, 4, bias=False), torch.randn(NUM_STEPS, 5, 6)
    optimizer, session = ScheduleFree(model.parameters()), Session(recipe)
    attach_with(session, model, [optimizer])
    session.begin([optimizer], total_steps=NUM_STEPS)
    for step, x in enumerate(inputs, 1):
        plain_step(session, optimizer, model(x).square().mean() + model(x).sin().mean())
        if step == 3:
            values, codes = model.weight.detach().unique(return_inverse=True)
            shared = torch.nn.Parameter(values)
            twin = ScheduleFree([shared])
            twin.param_groups[0]["k"] = 3
        elif step > 3:
            y = x @ shared[codes].T
            (y.square().mean() + y.sin().mean()).backward()
            twin.step()
            twin.zero_grad()
        torch.testing.assert_close(model.weight, model.weight if step < 3 else shared[codes])
        if step % EVERY == 0:
            optimizer.eval()
            if step > 3:
                twin.eval()
                torch.testing.assert_close(model.weight, shared[codes])
                twin.train()
            optimizer.train()
    session.finish()
    twin.eval()
    torch.testing.assert_close(model.weight, shared[codes])


class Switches(pl.Callback):
    """Switches the optimizer where a module would, through Lightning's wrapper of it."""

    def on_validation_start(self, trainer, module):
        module.optimizers().eval()

    def on_validation_end(self, trainer, module):
        module.optimizers().train()

    def on_fit_end(self, trainer, module):
        stays(module, module.optimizers())


@pytest.mark.parametrize("key", RECIPES)
def test_trainers_end_as_a_loop_does(key, tmp_path):
    recipe = RECIPES[key]
    _, _, session, model, _ = train(recipe)
    session.finish()
    options = {"limit_val_batches": 1, "val_check_interval": EVERY, "gradient_clip_val": None}
    lightning = run_lightning(recipe, tmp_path / "pl", optim="schedule_free", callbacks=[Switches()], **options)
    assert difference(lightning.weights, weights_of(model)) is None
    more = {"eval_strategy": "steps", "eval_steps": EVERY, "save_every": EVERY, "max_grad_norm": 0.0, "seed": 0}
    trainer = hf_trainer(recipe, tmp_path / "hf", optim="schedule_free", **more)
    trainer.train()
    trained = {name: value.clone() for name, value in weights_of(trainer.model).items()}
    for name, value in weights_of(model).items():
        torch.testing.assert_close(trained[name], value, atol=1e-6, rtol=0)  # it leaves the mode once more
    trainer.evaluate()
    trainer.save_model(tmp_path / "final")
    assert difference(trained, weights_of(trainer.model)) is None


@pytest.mark.parametrize("key", ["cluster", "average"])
def test_a_trainer_resumes_bit_for_bit(key, tmp_path):
    options = {"optim": "schedule_free", "eval_strategy": "steps", "eval_steps": EVERY}
    assert_resumes(run_hf, lambda: RECIPES[key], tmp_path, (3, 6), **options)


class SwitchesBack(TrainerCallback):
    """Switches the optimizer back once a model is evaluated."""

    def on_evaluate(self, args, state, control, optimizer=None, **more):
        optimizer.train()


def test_the_best_model_of_a_trainer_stays_as_its_checkpoint(tmp_path):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    options = {"eval_strategy": "steps", "eval_steps": EVERY, "save_every": EVERY, "max_steps": NUM_STEPS - 1, **best}
    recipe = {"cluster": {"bits": 3, "begin": 1, "min_size": 64}}
    trainer = hf_trainer(recipe, tmp_path, optim="schedule_free", callbacks=[SwitchesBack()], **options)
    trainer.train()
    file = tmp_path / f"checkpoint-{trainer.state.best_global_step}" / "model.safetensors"
    assert trainer.state.best_global_step < NUM_STEPS - 1
    trainer.evaluate()
    assert difference(dict(sorted(load_file(file).items())), dict(sorted(weights_of(trainer.model).items()))) is None


def loop(kind, recipe, folder, order):
    """Train in a loop of Accelerate or Fabric that evaluates and switches, the model first or last."""
    model, optimizer = fresh(recipe)
    parts = model, optimizer, DataLoader(train_examples(), batch_size=8)
    driver, wrapped, switched, loader = prepared_loop(kind, recipe, folder, parts)
    wrapped.train()
    for step, batch in enumerate([*loader, *loader], 1):
        driver.backward(wrapped(**batch)["loss"])
        switched.step()
        switched.zero_grad()
        if step % EVERY == 0 and step < NUM_STEPS:
            parts = (wrapped, switched) if order == "model first" else (switched, wrapped)
            for part in parts:
                part.eval()
            for part in parts:
                part.train()
    if kind == "accelerate":
        model = driver.unwrap_model(wrapped)
    stays(model, switched)
    return weights_of(model)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("kind", ["accelerate", "fabric"])
def test_loops_of_accelerate_and_fabric_end_as_a_plain_one(kind, order, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for key in ("average", "cluster"):
        _, _, session, model, _ = train(RECIPES[key])
        session.finish()
        for name, value in loop(kind, RECIPES[key], tmp_path, order).items():
            torch.testing.assert_close(value, weights_of(model)[name], atol=1e-6, rtol=0)


def test_what_trains_in_16_bits_refuses_them():
    recipe = {"primary_weights": {"kind": "fp32_copy"}}
    model, optimizer = fresh(recipe)
    session = Session(recipe)
    attach_with(session, model, [optimizer])
    with pytest.raises(CompatibilityError, match=r"ScheduleFree .* weights in its train"):
        session.begin([optimizer], total_steps=1)
    session.detach()
