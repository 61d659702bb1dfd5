"""Optimizers that step inside backward, or that were replaced: techniques work with them or refuse the first step."""

import itertools

import promise_drivers
import pytest
import torch
from promise_drivers import run_accelerate, run_bare, run_fabric, run_hf, run_lightning
from promise_table import TECHNIQUES, VARIANTS, make_net, recipe_of
from pytorch_lightning import Callback
from torch import nn
from transformers import Trainer, TrainerCallback

from shared_core import Session, training
from shared_core.errors import TrainingError
from shared_core.fp8.technique import Fp8

RUNS = {
    "bare": lambda recipe, folder: run_bare(recipe),
    "hf": run_hf,
    "lightning": run_lightning,
    "accelerate": run_accelerate,
    "fabric": run_fabric,
}


class InBackward(torch.optim.Optimizer):
    """SGD whose updates are made inside backward, as those of LOMO and of layerwise optimizers are."""

    def __init__(self, parameters, lr=0.01):
        parameters = [one for one in parameters if one.requires_grad]
        super().__init__(parameters, {"lr": lr})
        for one in parameters:
            self.register_update(one, lr)

    def step(self, closure=None):
        return closure() if closure else None


class Layerwise(InBackward):
    """An optimizer for each parameter, which a hook steps: as in torch's tutorial and in transformers."""

    def register_update(self, parameter, lr):
        inner = torch.optim.SGD([parameter], lr=lr)

        def step(parameter):
            inner.step()
            inner.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)


class WithoutStep(InBackward):
    """A hook that writes into the weights itself."""

    def register_update(self, parameter, lr):
        def update(parameter):
            parameter.data.add_(parameter.grad.to(parameter.dtype), alpha=-lr)
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(update)


class OwnHook(InBackward):
    """A hook of the optimizer's own, which reads the gradient before it is in `grad`, as LOMO's."""

    def register_update(self, parameter, lr):
        def update(gradient):
            assert self.param_groups
            parameter.data.add_(gradient.to(parameter.dtype), alpha=-lr)

        parameter.register_hook(update)


KINDS = {kind.__name__: kind for kind in (Layerwise, WithoutStep, OwnHook)}


@pytest.fixture
def nets(monkeypatch):
    made = []

    def kept(*args, **kwargs):
        made.append(make_net(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(promise_drivers, "make_net", kept)
    return made


def train_with(monkeypatch, kind):
    def create(trainer, *args):
        if trainer.optimizer is None:
            trainer.optimizer = kind(trainer.model.parameters())
        return trainer.optimizer

    monkeypatch.setattr(promise_drivers, "_optimizer", lambda name, parameters: kind(parameters))
    monkeypatch.setattr(Trainer, "create_optimizer", create)


def refused(run, recipe, folder, kind, nets):
    """Check that a run ends at its first step; return whether no weight has moved by then."""
    with pytest.raises(TrainingError, match=rf"gradients must be complete before .*{kind}.* steps inside backward"):
        run(recipe, folder)
    first = make_net(recipe=recipe, batch_norm=any(isinstance(one, nn.BatchNorm2d) for one in nets[-1].modules()))
    weights = dict(nets[-1].named_parameters())
    return all(torch.equal(weights[name], value) for name, value in first.named_parameters() if name in weights)


@pytest.mark.parametrize(("number", "key"), list(enumerate(key for key in TECHNIQUES | VARIANTS if key != "soup")))
def test_a_step_inside_backward_in_a_bare_loop(number, key, monkeypatch, nets, tmp_path):
    kind = list(KINDS)[number % len(KINDS)]
    train_with(monkeypatch, KINDS[kind])
    recipe = recipe_of(key)
    if (TECHNIQUES | VARIANTS)[key].on_gradients:
        unmoved = refused(RUNS["bare"], recipe, tmp_path, kind, nets)
        assert unmoved or kind == "WithoutStep" or key == "lottery"  # which draws weights anew at the start
        return
    result = run_bare(recipe)
    assert result.receipt["steps"]["applied"] == promise_drivers.NUM_STEPS
    assert result.receipt["unreached"] == {}
    if key == "prune":
        pruned = [result.weights[f"{name}.weight"] for name in ("conv", "hidden", "head")]
        zeros = sum(int((weight == 0).sum()) for weight in pruned)
        assert zeros == round(0.6 * sum(weight.numel() for weight in pruned))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("front_end", RUNS)
def test_noise_comes_too_late_in_every_front_end(front_end, kind, monkeypatch, nets, tmp_path):
    train_with(monkeypatch, KINDS[kind])
    assert refused(RUNS[front_end], recipe_of("dp"), tmp_path, kind, nets) or kind == "WithoutStep"


@pytest.mark.parametrize("key", ["loss_scale", "primary_weights", "prune-taylor", "cluster"])
@pytest.mark.parametrize("front_end", ["hf", "lightning", "accelerate", "fabric"])
def test_a_trainer_refuses_the_first_step(front_end, key, monkeypatch, nets, tmp_path):
    train_with(monkeypatch, Layerwise)
    assert refused(RUNS[front_end], recipe_of(key), tmp_path, "Layerwise", nets)


@pytest.mark.parametrize("kind", ["Layerwise", "OwnHook"])
@pytest.mark.parametrize("policy", ["block", "budget:least"])
def test_blocks_are_recomputed_where_no_gradient_is_left_for_the_step(policy, kind, monkeypatch):
    recipe = {"checkpointing": {"policy": policy, "include": ["*norm", "*dropout", "*hidden"]}}
    after_backward = run_bare(recipe).receipt["techniques"]["checkpointing"]
    train_with(monkeypatch, KINDS[kind])
    inside = run_bare(recipe).receipt["techniques"]["checkpointing"]
    for name in ("policy", "recomputations", "recomputations_per_step", "modules", "never_recomputed"):
        assert inside[name] == after_backward[name], name
    assert inside["recomputations"] > 0


def test_a_step_that_is_made_already_is_not_discarded(monkeypatch, tmp_path):
    train_with(monkeypatch, Layerwise)

    def discard(self, context):
        context.discard_step = True

    monkeypatch.setattr(Fp8, "before_step", discard)
    with pytest.raises(TrainingError, match="SGD of Layerwise stepped inside backward"):
        run_bare(recipe_of("fp8"))


def test_optimizers_that_step_late_or_not_at_first_are_not_taken_for_others(monkeypatch):
    """The weights of a warm-up's first step stay, a layer may write into its weights in forward, hooks may look on."""
    net = make_net()
    seen = []

    def shrink(layer, inputs):
        layer.weight.data.mul_(0.9)

    shrinking = net.hidden.register_forward_pre_hook(shrink)
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: seen.append(one.grad.norm()))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 4, 1.0))
    with training(recipe_of("prune-taylor"), net, optimizer, total_steps=8) as loop:
        for batch in itertools.islice(itertools.cycle(promise_drivers.batches(1)), 8):
            with loop.forward():
                loss = net(**batch)["loss"]
            loop.backward(loss)
            loop.step()
            optimizer.zero_grad()
            warm_up.step()
    shrinking.remove()
    assert loop.session.receipt()["unreached"] == {}
    assert len(seen) == 8 * len(list(net.parameters()))


def bare_replaced():
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with training(recipe_of("prune"), net, optimizer, total_steps=8) as loop:
        optimizer = torch.optim.Adam(net.parameters())
        loop.backward(net(**promise_drivers.batches(1)[0])["loss"])
        loop.step(optimizer.step)


def hf_replaced(folder):
    class Replace(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                trainer.optimizer = torch.optim.Adam(trainer.model.parameters())

    trainer = promise_drivers.hf_trainer(recipe_of("prune"), folder, callbacks=[Replace()])
    trainer.train()


def lightning_replaced(folder):
    class Replace(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if trainer.global_step == 2:
                trainer.optimizers = [torch.optim.Adam(module.parameters())]

    run_lightning(recipe_of("prune"), folder, callbacks=[Replace()])


def loop_replaced(run, folder, monkeypatch):
    """Have the third step of a loop made by an optimizer that was never prepared."""
    count, held = itertools.count(), []
    backward = torch.Tensor.backward

    def then_step(self, *args, **kwargs):
        backward(self, *args, **kwargs)
        if next(count) == 2:
            torch.optim.Adam(held).step()

    def made(name, parameters):
        held.extend(parameters)
        return torch.optim.AdamW(held, lr=0.01)

    monkeypatch.setattr(promise_drivers, "_optimizer", made)
    monkeypatch.setattr(torch.Tensor, "backward", then_step)
    run(recipe_of("prune"), folder)


@pytest.mark.parametrize("front_end", RUNS)
def test_another_optimizer_in_the_place_of_the_first_is_refused_at_its_first_step(front_end, monkeypatch, tmp_path):
    applied = []
    after = Session.after_step
    monkeypatch.setattr(Session, "after_step", lambda self, **how: applied.append(after(self, **how)) or applied[-1])
    runs = {"hf": hf_replaced, "lightning": lightning_replaced, "bare": lambda folder: bare_replaced()}
    with pytest.raises(TrainingError, match="another Adam"):
        if front_end in runs:
            runs[front_end](tmp_path)
        else:
            loop_replaced(RUNS[front_end], tmp_path, monkeypatch)
    assert len(applied) == (0 if front_end == "bare" else 2)
