"""Models trained in 16 bit in Lightning, updated in float32."""

import pytest
import torch
from lightning_world import BOTH, difference, everything, fit, loader, make_module, make_trainer, saver

from lightning_eff import EffCallback
from lightning_eff.callbacks import PrimaryWeights
from lightning_eff.precision import precision_class
from shared_core.engine.session import Session

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
        assert difference(whole, resumed) == [], point
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
        assert difference(whole, resumed) == [], point


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
