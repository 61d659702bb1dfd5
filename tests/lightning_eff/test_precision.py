"""Lightning's precisions: loss scaling and FP8 by plugin under both names, and models in 16 bit updated in float32."""

import pickle

import pytest
import torch
from lightning_world import (
    BOTH,
    everything,
    fit,
    hook_callback,
    loader,
    make_module,
    make_trainer,
    module_class,
    saver,
)
from promise_drivers import assert_resumes, difference, lightning_module, run_lightning
from promise_table import NUM_STEPS, recipe_of

import lightning_eff
import lightning_eff.lightning
import lightning_eff.pytorch
from lightning_eff import EffCallback, Pruning
from lightning_eff.callbacks import PrimaryWeights
from lightning_eff.precision import precision_class
from lightning_eff.pytorch import Fp8Precision
from shared_core import Session
from shared_core.errors import CompatibilityError, ConfigError

PLUGIN = {BOTH[0]: lightning_eff.pytorch.LossScalingPrecision, BOTH[1]: lightning_eff.lightning.LossScalingPrecision}


@pytest.mark.parametrize("namespace", BOTH)
def test_the_name_without_a_namespace_becomes_that_of_the_trainer(namespace, tmp_path):
    plugin = lightning_eff.LossScalingPrecision(init_scale=8)
    assert isinstance(plugin, (PLUGIN[BOTH[0]], PLUGIN[BOTH[1]]))
    fit(make_trainer(tmp_path, namespace, plugins=plugin, max_steps=1), make_module(namespace))
    assert type(plugin) is PLUGIN[namespace]
    assert plugin.scaler.num_steps == 1


def test_a_class_that_a_user_derived_serves_both(tmp_path):
    class Own(lightning_eff.LossScalingPrecision):
        pass

    for namespace in BOTH:
        plugin = Own(init_scale=8)
        fit(make_trainer(tmp_path, namespace, plugins=plugin, max_steps=1), make_module(namespace))
        assert (type(plugin), plugin.scaler.num_steps) == (Own, 1)


def test_a_plugin_is_pickled():
    plugin = pickle.loads(pickle.dumps(lightning_eff.LossScalingPrecision(init_scale=8)))
    assert (type(plugin).__qualname__, plugin.scaler.get_scale()) == ("LossScalingPrecision", 8.0)


@pytest.mark.parametrize("namespace", BOTH)
def test_it_really_runs_fp16_and_scales_the_gradient(namespace, tmp_path):
    seen = {}

    class Look(module_class(namespace)):
        def forward(self, x):
            logits = self.net(x)
            seen.setdefault("dtype", logits.dtype)
            return logits.float()

    def after_backward(trainer):
        seen.setdefault("scaled", trainer.lightning_module.net[4].bias.grad.clone())

    def before_step(trainer):
        seen.setdefault("unscaled", trainer.lightning_module.net[4].bias.grad.clone())

    look = hook_callback(namespace, on_after_backward=after_backward, on_before_optimizer_step=before_step)
    trainer = make_trainer(tmp_path, namespace, plugins=PLUGIN[namespace](init_scale=1024.0), callbacks=[look])
    fit(trainer, Look())
    assert seen["dtype"] is torch.float16
    torch.testing.assert_close(seen["scaled"], seen["unscaled"] * 1024.0)
    assert (tmp_path / "eff_receipt.json").exists()


@pytest.mark.parametrize("namespace", BOTH)
def test_skipped_steps_move_neither_schedule_nor_learning_rate(namespace, tmp_path):
    plugin = PLUGIN[namespace](init_scale=2.0**24, growth_interval=1000)
    pruning = Pruning(sparsity=0.5, begin=1, end=8, every=1)
    trainer = make_trainer(tmp_path, namespace, plugins=plugin, callbacks=[pruning])
    module = fit(trainer, make_module(namespace))
    steps = pruning.receipt["steps"]
    assert steps["skipped"] > 0
    assert steps["applied"] + steps["skipped"] == trainer.global_step == 18
    assert plugin.scaler.skipped_steps == steps["skipped"]
    assert module.lr_schedulers().last_epoch == steps["applied"]


def test_fp32_with_a_power_of_two_scale_changes_nothing(tmp_path):
    def trained(**options):
        trainer = make_trainer(tmp_path, gradient_clip_val=0.5, accumulate_grad_batches=2, **options)
        return everything(trainer, fit(trainer, make_module()))

    scaled = lightning_eff.LossScalingPrecision(precision="32-true", init_scale=4096.0)
    plain = trained()
    assert difference(plain, trained(plugins=scaled)) is None
    static = EffCallback({"loss_scale": {"kind": "static", "init_scale": 256}})
    assert difference(plain, trained(callbacks=[static])) is None
    assert scaled.scaler.num_steps == 9


def test_a_fused_optimizer_is_unscaled_clipped_and_skipped(tmp_path):
    class Fused(module_class(BOTH[0])):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)

    plugin = lightning_eff.LossScalingPrecision(init_scale=2.0**24)
    trainer = make_trainer(tmp_path, plugins=plugin, gradient_clip_val=0.5)
    module = fit(trainer, Fused())
    assert 0 < plugin.scaler.skipped_steps < plugin.scaler.num_steps == 18
    assert float(trainer.optimizers[0].state[module.net[0].weight]["step"]) == 18 - plugin.scaler.skipped_steps


def test_the_recipe_alone_replaces_the_trainers_precision_for_one_fit(tmp_path):
    callback = EffCallback({"loss_scale": {"kind": "dynamic", "init_scale": 1024}})
    trainer = make_trainer(tmp_path, callbacks=[callback])
    stock, used = trainer.precision_plugin, []
    trainer.callbacks.append(
        hook_callback(BOTH[0], on_train_start=lambda trainer: used.append(trainer.precision_plugin))
    )
    fit(trainer, make_module())
    assert type(used[0]) is lightning_eff.pytorch.LossScalingPrecision
    assert trainer.precision_plugin is stock
    assert callback.receipt["techniques"]["loss_scale"]["steps"] == 18


@pytest.mark.parametrize(
    ("precision", "match"),
    [("bf16-mixed", "plain bf16 mixed precision"), ("16-true", "add primary_weights"), ("64-true", "or 16-true, got")],
)
def test_other_precisions_are_refused_by_name(precision, match, tmp_path):
    trainer = make_trainer(tmp_path, callbacks=[EffCallback({"loss_scale": {"kind": "dynamic"}})], precision=precision)
    module = make_module()
    with pytest.raises(CompatibilityError, match=match):
        fit(trainer, module)
    assert "training_step" not in vars(module)


def test_bad_options():
    with pytest.raises(ConfigError, match="precision must be one of"):
        lightning_eff.LossScalingPrecision(precision="16")
    with pytest.raises(ConfigError, match="growth_factor"):
        lightning_eff.LossScalingPrecision(growth_factor=0.5)
    with pytest.raises(ConfigError, match="did you mean 'init_scale'"):
        lightning_eff.LossScalingPrecision(initscale=8)


def test_the_plugin_alone_resumes_its_scale(tmp_path):
    from lightning_world import saver

    def trained(ckpt_path=None, seed=0, callbacks=()):
        plugin = lightning_eff.LossScalingPrecision(init_scale=2.0**24, growth_interval=2)
        trainer = make_trainer(tmp_path, plugins=plugin, callbacks=list(callbacks))
        module = fit(trainer, make_module(seed=seed), seed=5 + seed, ckpt_path=ckpt_path)
        return everything(trainer, module), plugin.scaler.state_dict()

    whole, scaler = trained(callbacks=[saver(BOTH[0], tmp_path)])
    resumed, again = trained(tmp_path / "8.ckpt", seed=9)
    assert difference(whole, resumed) is None
    assert scaler == again


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_fp8_with_narrow_gradients_is_scaled_under_bf16_too(precision, alone, tmp_path):
    seen = {}

    class Look(module_class(BOTH[0])):
        def forward(self, x):
            logits = self.net(x)
            seen["dtype"] = logits.dtype
            return logits

    def after_backward(trainer):
        seen.setdefault("scaled", trainer.lightning_module.net[4].bias.grad.clone())

    def before_step(trainer):
        seen.setdefault("unscaled", trainer.lightning_module.net[4].bias.grad.clone())

    recipe = {"fp8": {"recipe": "tensorwise", "include": ["net.3"]}}
    scaling = {"init_scale": 1024.0, "format": "fp8_e5m2"}
    options = {"precision": precision}
    if alone:  # the plugin instead of `precision`
        options = {"plugins": lightning_eff.LossScalingPrecision(precision=precision, **scaling)}
    else:
        recipe["loss_scale"] = {"kind": "dynamic", **scaling}
    look = hook_callback(BOTH[0], on_after_backward=after_backward, on_before_optimizer_step=before_step)
    callback = EffCallback(recipe)
    module = Look(width=16)
    module.net[3] = torch.nn.Linear(16, 16)  # of a size that FP8 has
    fit(make_trainer(tmp_path, callbacks=[callback, look], **options), module)
    assert seen["dtype"] is (torch.bfloat16 if precision == "bf16-mixed" else torch.float32)
    torch.testing.assert_close(seen["scaled"], seen["unscaled"] * 1024.0)
    told = callback.receipt["techniques"]["loss_scale"]
    assert (told["steps"], told["format"], told["loss_dtype"]) == (18, "fp8_e5m2", "float32")


def test_the_plugin_alone_is_refused_with_plain_bf16(tmp_path):
    plugin = lightning_eff.LossScalingPrecision(precision="bf16-mixed", format="fp8_e5m2")
    with pytest.raises(CompatibilityError, match="plain bf16 mixed precision"):
        fit(make_trainer(tmp_path, plugins=plugin), make_module())


def test_histograms_of_one_micro_batch(tmp_path):
    callback = EffCallback({"loss_scale": {"kind": "static", "init_scale": 8, "histogram_every": 4}})
    fit(make_trainer(tmp_path, callbacks=[callback], accumulate_grad_batches=2), make_module())
    told = callback.receipt["techniques"]["loss_scale"]["histograms"]
    assert told["measured_step"] == 8
    assert told["activations"]["layers"]["net.4"]["elements"] == 4 * 4  # rows of one micro-batch, classes
    assert told["activation_gradients"]["layers"]["net.4"]["elements"] == 4 * 4
    assert told["updates"]["elements"] == told["gradients"]["elements"] == 8 * 16 + 16 + 32 + 16 * 4 + 4


OPTIONS = recipe_of("fp8")["fp8"]


@pytest.mark.parametrize("with_callback", [False, True])
def test_the_plugin_trains_as_the_callback_does(with_callback, tmp_path):
    recipe = recipe_of("prune") if with_callback else {}
    plugin = Fp8Precision(precision="32-true", **OPTIONS)
    by_plugin = run_lightning(recipe, tmp_path / "plugin", plugin=with_callback, plugins=[plugin])
    by_callback = run_lightning(recipe | {"fp8": OPTIONS}, tmp_path / "callback")
    assert difference(by_plugin.weights, by_callback.weights) is None
    told = by_plugin.receipt["techniques"]["fp8"]
    assert (told["layers"], told["recipe"]) == (1, "delayed")
    assert by_plugin.receipt["steps"]["applied"] == NUM_STEPS


def test_it_resumes_bit_for_bit(tmp_path):
    def run(recipe, folder, **options):
        return run_lightning(recipe, folder, plugin=False, plugins=[Fp8Precision(**OPTIONS)], shuffle=True, **options)

    assert_resumes(run, dict, tmp_path, [2], save_every=2)


def test_bf16_autocast_is_on_by_default(tmp_path):
    seen = []
    module = lightning_module()
    module.net.head.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    loader = torch.utils.data.DataLoader([{"x": torch.randn(1, 8, 8), "labels": torch.tensor(1)}] * 4, batch_size=2)
    trainer = make_trainer(tmp_path, max_steps=1, plugins=Fp8Precision(include=["hidden"]))
    with pytest.raises(Exception, match="include pattern 'hidden' matches no module"):
        trainer.fit(module, loader)
    trainer = make_trainer(tmp_path, max_steps=1, plugins=Fp8Precision(include=["net.hidden"]))
    trainer.fit(module, loader)
    assert seen == [torch.bfloat16]


def test_refusals(tmp_path):
    with pytest.raises(ConfigError, match="precision must be one of bf16-mixed, 32-true, got '16-mixed'"):
        Fp8Precision(precision="16-mixed")
    with pytest.raises(ConfigError, match="fp8 must be given once, got it in a callback and in Fp8Precision"):
        run_lightning({"fp8": {"recipe": "rowwise", "include": ["first"]}}, tmp_path, plugins=[Fp8Precision(**OPTIONS)])
    assert lightning_eff.Fp8Precision is not None


COPY = {"primary_weights": {"kind": "fp32_copy", "telemetry_every": 4}}
DRAWN = {"primary_weights": {"kind": "stochastic_rounding"}}
NARROW = {"primary_weights": {"kind": "kahan", "state_dtype": "bfloat16"}}
SCALED = {**COPY, "loss_scale": {"kind": "dynamic", "init_scale": 2.0**20, "growth_interval": 4}}
PRUNE = {"prune": {"sparsity": 0.5, "begin": 0.1, "end": 0.6, "every": 2}}


def train(folder, recipe, namespace=BOTH[0], ckpt_path=None, seed=0, callbacks=(), module=None, **options):
    callback = EffCallback(recipe)
    options = {"accumulate_grad_batches": 1, "gradient_clip_val": 0.5, **options}
    trainer = make_trainer(folder, namespace, callbacks=[callback, *callbacks], **options)
    module = make_module(namespace, seed=seed) if module is None else module
    fit(trainer, module, seed=5 + seed, ckpt_path=ckpt_path)
    return callback, everything(trainer, module)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize(
    ("recipe", "precision"),
    [
        (COPY, "bf16-true"),
        (DRAWN, "bf16-true"),
        (NARROW, "bf16-true"),
        ({**COPY, **PRUNE}, "bf16-true"),
        (COPY, "16-true"),
        (SCALED, "16-true"),
    ],
)
def test_a_resumed_run_is_the_run_that_was_never_stopped(recipe, precision, accumulate, tmp_path):
    options = {"accumulate_grad_batches": accumulate, "precision": precision}
    callback, whole = train(tmp_path, recipe, callbacks=[saver(BOTH[0], tmp_path)], **options)
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float16
    assert whole["net.0.weight"].dtype == dtype
    assert whole["optimizer.0.exp_avg"].dtype == (torch.bfloat16 if recipe is NARROW else torch.float32)
    mine = callback.session.techniques["primary_weights"].state_dict()
    for point in (0, 6, 11):  # with 4 to a step, the first two lie inside a window
        again, resumed = train(tmp_path, recipe, ckpt_path=tmp_path / f"{point}.ckpt", seed=9, **options)
        assert difference(whole, resumed) is None, point
        assert again.session.step == callback.session.step
        assert str(again.session.techniques["primary_weights"].state_dict()) == str(mine), point


def test_fp16_weights_with_a_loss_scale(tmp_path):
    def run(**options):
        plugin = precision_class(BOTH[0])(kind="dynamic", init_scale=2.0**24, growth_interval=4)
        module = make_module(seed=0).half()
        return train(tmp_path, COPY, module=module, plugins=plugin, **options)

    callback, whole = run(callbacks=[saver(BOTH[0], tmp_path)])
    assert callback.session.skipped > 0
    assert whole["net.0.weight"].dtype == torch.float16
    for point in (2, 7):
        _, resumed = run(ckpt_path=tmp_path / f"{point}.ckpt", seed=9)
        assert difference(whole, resumed) is None, point


@pytest.mark.parametrize("namespace", BOTH)
def test_16_true_with_a_loss_scale_is_the_bare_loop(namespace, tmp_path):
    module = make_module(namespace, seed=0, dropout=0.0)
    callback, found = train(tmp_path, SCALED, namespace, module=module, precision="16-true", gradient_clip_val=None)

    model = make_module(namespace, seed=0, dropout=0.0).half()
    session = Session(SCALED)
    session.attach(model)
    optimizer, schedule = (made := model.configure_optimizers())["optimizer"], made["lr_scheduler"]["scheduler"]
    scaler = session.techniques["loss_scale"].make_scaler("cpu")
    session.begin([optimizer], total_steps=18)
    torch.manual_seed(5)
    data, batches = loader(), []
    for _ in range(3):
        batches += list(data)
    for x, y in batches:
        loss = session.loss(torch.nn.functional.cross_entropy(model(x.half()), y))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        session.before_step()
        scaler.step(optimizer)
        scaler.update()
        if scaler.last_step_skipped:
            session.after_step(applied=False)
        elif session.after_step():
            schedule.step()
    assert callback.session.skipped > 0
    assert callback.session.skipped == session.skipped
    session.finish()
    for name, value in model.state_dict().items():
        assert torch.equal(value, found[name]), name
    plain = callback.receipt["techniques"]["loss_scale"]
    assert plain["scale"] == scaler.get_scale()


@pytest.mark.parametrize("by", ["value", "norm"])
def test_clipping_reaches_the_step(by, tmp_path):
    class Module(type(make_module())):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    module = Module().bfloat16()
    before = {name: value.detach().float() for name, value in module.named_parameters()}
    clip = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": by}
    callback, _ = train(tmp_path, COPY, module=module, precision="bf16-true", max_steps=1, **clip)
    copies = callback.session.techniques["primary_weights"].state_dict()["copies"]
    moved = torch.cat([(copies[name] - before[name]).flatten() for name in copies])
    largest = moved.abs().max() if by == "value" else moved.norm()
    assert largest.item() == pytest.approx(1e-3, rel=1e-2)


def test_an_exception_leaves_the_optimizer_and_the_model_plain(tmp_path):
    class Module(type(make_module())):
        def on_before_optimizer_step(self, optimizer):
            if self.global_step == 2:
                raise RuntimeError("mine")

    module = Module().bfloat16()
    trainer = make_trainer(tmp_path, callbacks=[PrimaryWeights(kind="fp32_copy")], precision="bf16-true")
    with pytest.raises(RuntimeError, match="mine"):
        fit(trainer, module)
    optimizer = trainer.optimizers[0]
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], module.parameters(), strict=True))
    assert all(p.grad_dtype == torch.bfloat16 for p in module.parameters())
