"""Optimizers that wrap another, or step inside a closure: techniques work with them or refuse the first step."""

import pytest
import pytorch_lightning as pl
import torch
from plain_loop import plain_step
from promise_drivers import batches, hf_trainer
from promise_table import make_net, recipe_of, train_examples
from torch.utils.data import DataLoader

from lightning_eff import EffCallback
from lightning_eff.pytorch import LossScalingPrecision
from shared_core import Session, training
from shared_core.errors import CompatibilityError, TrainingError


class SharpnessAware(torch.optim.Optimizer):
    """SAM (Foret et al. 2021, arXiv:2010.01412): steps with the gradients at ``w + rho g / |g|``."""

    def __init__(self, parameters, rho=0.05):
        super().__init__(parameters, {"rho": rho})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def first_step(self):
        held = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.stack([one.grad.norm() for one in held]).norm() + 1e-12
        for one in held:
            self.state[one]["before"] = one.clone()
            one.add_(one.grad, alpha=float(0.05 / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for one, state in self.state.items():
            one.copy_(state["before"])
        self.inner.step()
        self.zero_grad()

    def step(self, closure):
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


class Lookahead(torch.optim.Optimizer):
    """Moves weights half way back to slow ones every fourth step (Zhang et al. 2019, arXiv:1907.08610)."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.01)
        self.param_groups, self.count = self.inner.param_groups, 0
        for one in (one for group in self.param_groups for one in group["params"]):
            self.state[one]["slow_params"] = one.detach().clone()

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.inner.step(closure)
        self.count += 1
        for one, state in self.state.items() if self.count % 4 == 0 else ():
            one.lerp_(state["slow_params"], 0.5)
            state["slow_params"].copy_(one)
        return loss


class Ahead(torch.optim.Optimizer):
    """Computes its gradients in a closure at other weights than it steps from."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure):
        for group in self.param_groups:
            torch._foreach_mul_(group["params"], 0.9)
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            torch._foreach_add_(group["params"], [one.grad for one in group["params"]], alpha=-0.1)
        return loss


class OfDummy(torch.optim.Optimizer):
    """Holds a dummy, and an optimizer for each parameter, which a hook steps: as transformers' layerwise ones."""

    def __init__(self, parameters):
        held = [one for one in parameters if one.requires_grad]
        super().__init__([torch.zeros(1)], {"lr": 0.1})
        self.optimizer_dict = optimizers = {one: torch.optim.SGD([one], lr=0.1) for one in held}

        def step(one):
            optimizers[one].step()
            optimizers[one].zero_grad()

        for one in held:
            one.register_post_accumulate_grad_hook(step)

    def step(self, closure=None):
        return closure() if closure else None


def run_manually(recipe, training_step, net, make=SharpnessAware, plugins=()):
    """Train with manual optimization in Lightning, or without a training step automatically."""

    class Manual(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.automatic_optimization, self.batches = net, training_step is None, 0

        def configure_optimizers(self):
            return make(self.net.parameters())

        def training_step(self, batch, index):
            self.batches += 1
            if training_step is None:
                return self.net(**batch)["loss"]
            return training_step(self, lambda: self.net(**batch)["loss"])

    module = Manual()
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[EffCallback(recipe)], plugins=list(plugins),
    )  # fmt: skip
    try:
        trainer.fit(module, DataLoader(train_examples(), batch_size=8))
    finally:
        run_manually.batches = module.batches
    return net


def two_passes(module, loss):
    module.manual_backward(loss())
    module.optimizers().first_step()
    module.manual_backward(loss())
    module.optimizers().second_step()


def in_closure(module, loss):
    module.manual_backward(loss())
    module.optimizers().step(closure=lambda: module.manual_backward(loss()))


PRUNE = {"prune": {"sparsity": 0.5, "schedule": "one_shot", "begin": 2}}


@pytest.mark.parametrize("key", ["prune", "qat", "average", "lora"])
def test_steps_outside_the_wrapper_are_refused(key):
    recipe = recipe_of(key)
    with pytest.raises(TrainingError, match=r"SGD, which SharpnessAware wraps, .*SharpnessAware.step\(closure\)"):
        run_manually(recipe, two_passes, make_net(recipe=recipe))
    assert run_manually.batches <= 2


def test_so_they_are_in_a_loop_of_the_session():
    model = make_net()
    session = Session(PRUNE)
    session.attach(model)
    optimizer = SharpnessAware(model.parameters())
    session.begin([optimizer], total_steps=4)

    def backward(batch):
        with session.forward():
            loss = session.loss(model(**batch)["loss"])
        loss.backward()

    one, other = batches(1)[:2]
    backward(one)
    optimizer.first_step()
    backward(one)
    optimizer.second_step()
    with pytest.raises(TrainingError, match="which SharpnessAware wraps"):
        backward(other)


def test_a_closure_trains_as_without_and_keeps_zeros():
    pruned, plain = run_manually(PRUNE, in_closure, make_net()), run_manually({}, in_closure, make_net())
    weights = [pruned.conv.weight, pruned.hidden.weight, pruned.head.weight]
    assert sum(int((weight == 0).sum()) for weight in weights) >= sum(weight.numel() for weight in weights) // 2
    at_last = run_manually({"prune": {**PRUNE["prune"], "begin": 8, "end": 8}}, in_closure, make_net()).state_dict()
    for name, value in plain.state_dict().items():
        kept = at_last[name] != 0
        assert torch.equal(at_last[name][kept], value[kept]), name


def test_moments_of_the_wrapped_optimizer_are_pruned_too():
    model = make_net()
    session = Session(PRUNE)
    session.attach(model)
    optimizer = SharpnessAware(model.parameters())
    session.begin([optimizer], total_steps=4)
    for batch in batches(1)[:3]:

        def backward(batch=batch):
            with session.forward():
                loss = session.loss(model(**batch)["loss"])
            loss.backward()

        backward()
        optimizer.step(lambda backward=backward: (backward(), session.before_step()))
        session.after_step()
    for weight in (model.conv.weight, model.hidden.weight, model.head.weight):
        momentum = optimizer.inner.state[weight]["momentum_buffer"]
        assert (momentum[weight == 0] == 0).all()
        assert momentum.any()


def test_slow_weights_start_as_the_shared_values():
    model, alone = make_net(batch_norm=False), make_net(batch_norm=False)
    session = Session({"cluster": {"bits": 3, "begin": 3, "min_size": 64}})
    session.attach(model)
    optimizer = Lookahead(model.parameters())
    session.begin([optimizer], total_steps=4)
    slow = optimizer.state[model.hidden.weight]["slow_params"]
    for step, batch in enumerate(batches(1)[:4], 1):
        plain_step(session, optimizer, model(**batch)["loss"])
        if step == 3:
            assert torch.equal(slow, model.hidden.weight)
    assert len(model.hidden.weight.unique()) <= 8
    assert model.hidden.weight.norm() > 0.9 * alone.hidden.weight.norm()


def test_a_loop_refuses_what_only_looks_like_an_optimizer():
    class LooksAlike:
        def __init__(self, inner):
            self.param_groups, self.state, self.step = inner.param_groups, {}, inner.step

    model = make_net()
    alike = LooksAlike(torch.optim.SGD(model.parameters(), lr=0.1))
    with (
        pytest.raises(CompatibilityError, match=r"must be a torch\.optim\.Optimizer, .* got LooksAlike"),
        training(PRUNE, model, alike, total_steps=4),
    ):
        raise AssertionError("the block must not begin")


def half():
    return make_net(batch_norm=False).bfloat16()


COPIES = {"primary_weights": {"kind": "fp32_copy"}}


@pytest.mark.parametrize("kind", ["fp32_copy", "stochastic_rounding", "kahan"])
def test_float32_copies_refuse_what_they_cannot_reach(kind):
    recipe = {"primary_weights": {"kind": kind}}
    with pytest.raises(CompatibilityError, match="SharpnessAware wraps SGD"):
        run_manually(recipe, in_closure, half())
    with pytest.raises(CompatibilityError, match="Ahead writes the weights before its closure"):
        run_manually(recipe, None, half(), Ahead)

    def twice(module, loss):
        module.manual_backward(loss(), create_graph=True)
        module.optimizers().step()

    with pytest.raises(CompatibilityError, match=r"AdamW would differentiate the gradients \(create_graph=True\)"):
        run_manually(recipe, twice, half(), torch.optim.AdamW)
    assert run_manually.batches <= 1


def test_a_closure_that_only_computes_gradients_steps_copies():
    """Lightning's automatic optimization passes one to every optimizer."""
    net = run_manually(COPIES, None, half(), torch.optim.AdamW)
    assert not torch.equal(net.head.weight, half().head.weight)


def test_a_scaler_refuses_what_cannot_step_without_a_closure():
    scaling = LossScalingPrecision(precision="32-true", kind="dynamic", init_scale=1024.0)
    with pytest.raises(CompatibilityError, match=r"Ahead\.step needs a closure"):
        run_manually({}, None, make_net(), Ahead, [scaling])
    assert run_manually.batches == 1


@pytest.mark.parametrize("key", ["lora", "low_rank"])
def test_layerwise_optimizers_hold_what_replaces_parameters(key, monkeypatch, tmp_path):
    recipe = {"lora": {"rank": 2, "save": "merged"}} if key == "lora" else recipe_of(key)
    trainer = hf_trainer(recipe, tmp_path, batch_norm=False, max_grad_norm=0.0)

    def create(*args):
        trainer.optimizer = trainer.optimizer or OfDummy(trainer.model.parameters())
        return trainer.optimizer

    monkeypatch.setattr(trainer, "create_optimizer", create)
    before = {name: value.clone() for name, value in make_net(batch_norm=False, recipe=recipe).state_dict().items()}
    trainer.train()
    after = trainer.model.state_dict()
    assert not torch.equal(after["hidden.weight"], before["hidden.weight"])


def test_layerwise_optimizers_refuse_copies_by_name():
    model = half()
    session = Session(COPIES)
    session.attach(model)
    with pytest.raises(CompatibilityError, match="OfDummy wraps SGD"):
        session.begin([OfDummy(model.parameters())], total_steps=1)
    session.detach()


class ByNorm(torch.optim.Optimizer):
    """Scales an update by the norm of the weights, as LAMB and LARS do (You et al. 2020, arXiv:1904.00962)."""

    def __init__(self, parameters):
        super().__init__([one for one in parameters if one.requires_grad], {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for one in self.param_groups[0]["params"]:
            one.sub_(0.1 * one.norm() * one.grad / (one.grad.norm() + 1e-12))
        return loss


def test_adapters_that_stay_zero_are_told():
    recipe = {"lora": {"rank": 2, "save": "merged"}}
    with pytest.raises(TrainingError, match="ByNorm has left all adapters at zero for 4 steps"):
        run_manually(recipe, None, make_net(recipe=recipe), ByNorm)
    assert run_manually.batches == 4


def test_a_learning_rate_of_zero_leaves_adapters_at_zero():
    recipe = {"lora": {"rank": 2, "save": "merged"}}

    def frozen(parameters):
        return torch.optim.SGD([one for one in parameters if one.requires_grad], lr=0.0)

    run_manually(recipe, None, make_net(recipe=recipe), frozen)
    assert run_manually.batches == 8
