"""A loop of Fabric: what its methods mean for the techniques, what its files hold, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision
from lightning_fabric.strategies import FSDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff import Pruning, setup
from shared_core import Session
from shared_core.engine.receipt import Receipt
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, ReceiptError, TrainingError

pytestmark = pytest.mark.matrix

PRUNE = {"prune": {"sparsity": 0.5, "end": 2}}
STEPS = 4


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


class Loop:
    def __init__(self, recipe, plugins=(), rate=0.01, total_steps=STEPS, callbacks=(), **options):
        self.fabric = Fabric(accelerator="cpu", devices=1, plugins=list(plugins), callbacks=list(callbacks))
        self.plain = net()
        optimizer = torch.optim.AdamW(self.plain.parameters(), lr=rate)
        options |= {"recipe": recipe, "total_steps": total_steps}
        self.model, self.optimizer = setup(self.fabric, self.plain, optimizer, **options)

    def gradients(self, factor=1.0):
        loss = self.model(torch.ones(8, 16)).square().mean() * factor
        self.fabric.backward(loss)
        return self

    def steps(self, count=STEPS, factor=1.0, clips=True, **clipping):
        for _ in range(count):
            self.gradients(factor)
            if clips:
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0, **clipping)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def save(self, name="state.ckpt"):
        self.fabric.save(name, {"model": self.model, "optimizer": self.optimizer})


def half(scale):
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale))


SCALED = {**PRUNE, "loss_scale": {"kind": "dynamic", "init_scale": 8.0}}


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize(
    ("recipe", "plugins"), [(PRUNE, [half(1024.0)]), (SCALED, [half(1024.0)]), (SCALED, [])], ids=["own", "16", "32"]
)
def test_gradients_are_shown_once_a_step_unscaled_and_not_clipped(monkeypatch, recipe, plugins, clips):
    seen = []
    show = Session.before_step
    monkeypatch.setattr(
        Session,
        "before_step",
        lambda self: (seen.append(self.context.model[2].weight.grad.norm().item()), show(self)),
    )
    Loop(recipe, plugins, rate=0.0).steps(factor=100.0, clips=clips)
    assert [plugin.scaler.get_scale() for plugin in plugins] == [1024.0] * len(plugins)  # Fabric's own is back
    model = net()
    (model(torch.ones(8, 16)).square().mean() * 100).backward()
    assert len(seen) == STEPS
    assert seen[0] == pytest.approx(model[2].weight.grad.norm().item(), rel=0.05)  # in float16, but for that


@pytest.mark.parametrize(
    ("recipe", "plugins", "clipping"),
    [(PRUNE, [half(8.0)], {"error_if_nonfinite": False}), (SCALED, [half(8.0)], {}), (SCALED, [], {})],
    ids=["own", "16", "32"],
)
def test_a_step_that_the_scaler_skips_counts_as_skipped(recipe, plugins, clipping, tmp_path):
    loop = Loop(recipe, plugins).steps(1, factor=float("inf"), **clipping).steps(STEPS - 1, **clipping)
    loop.save()
    receipt = json.loads((tmp_path / "eff_receipt.json").read_text())
    assert receipt["steps"] == {"applied": STEPS - 1, "skipped": 1, "planned": STEPS}
    if "loss_scale" in recipe:
        told = receipt["techniques"]["loss_scale"]
        assert (told["skipped_steps"], told["highest_scale"], told["scale"]) == (1, 8.0, 4.0)


@pytest.mark.parametrize("recipe", [PRUNE, {"qat": {"scheme": "int8"}}, {"lora": {"rank": 2, "base": "none"}}], ids=str)
def test_the_model_is_plain_behind_its_last_step_and_so_is_its_file(recipe, tmp_path):
    loop = Loop(recipe).steps()
    loop.save()
    saved = torch.load("state.ckpt", weights_only=True)
    net().load_state_dict(saved["model"])
    assert "eff" not in saved
    assert [type(module) for module in loop.plain.modules()] == [type(module) for module in net().modules()]
    assert not {"backward", "clip_gradients"} & vars(loop.fabric).keys()
    assert json.loads((tmp_path / "eff_receipt.json").read_text())["front_end"] == "fabric"
    if "prune" in recipe:
        weights = torch.cat([value.flatten() for name, value in saved["model"].items() if value.dim() > 1])
        assert float((weights == 0).double().mean()) == pytest.approx(0.5, abs=0.01)


def test_ranges_of_an_average_without_batches_are_refused_at_the_start():
    with pytest.raises(CompatibilityError, match=r"qat: needs training batches .*; pass calibration= to setup"):
        Loop({"qat": {"scheme": "int8"}, "average": {"kind": "ema"}}).steps(1)


def test_weights_that_are_not_as_the_receipt_says_are_told_when_they_are_saved():
    loop = Loop(PRUNE).steps()
    with torch.no_grad():
        loop.plain[0].weight.fill_(1.0)
    with pytest.raises(ReceiptError, match=r"state\.ckpt"):
        loop.save()


def test_a_file_of_other_layers_or_without_the_state_is_refused():
    Loop({"low_rank": {"rank": 2, "force": True, "merge": True, "min_size": 1, "skip": []}}).steps(2).save()
    loop = Loop(PRUNE)
    state = {"model": loop.model, "optimizer": loop.optimizer}
    with pytest.raises(CheckpointError, match="low_rank"):
        loop.fabric.load("state.ckpt", state)
    stock = torch.optim.AdamW(net().parameters()).state_dict()
    loop.fabric.save("plain.ckpt", {"model": net().state_dict(), "optimizer": stock})
    for strict in (True, False):
        with pytest.raises(CheckpointError, match="techniques' state under 'eff', got a file without"):
            loop.fabric.load("plain.ckpt", state, strict=strict)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (lambda loop: loop.optimizer.step(), "must follow fabric.backward"),
        (lambda loop: loop.gradients().gradients(), "2 backward calls, but distill expects at most 1"),
        (lambda loop: loop.optimizer.step(lambda: None), "got a closure"),
    ],
)
def test_a_loop_that_would_train_otherwise_than_told_is_stopped(train, message):
    loop = Loop({"distill": {"teacher": net()}})
    with pytest.raises(TrainingError, match=message):
        train(loop)


@pytest.mark.parametrize("again", ["the same model", "another model", "without techniques", "a plain setup"])
def test_a_loop_that_was_left_by_an_error_leaves_nothing_to_the_next(again, tmp_path):
    loop = Loop(PRUNE).steps(1).gradients()
    loop.fabric.clip_gradients(loop.model, loop.optimizer, max_norm=1.0)  # Ctrl-C here
    model = loop.plain if again == "the same model" else net()
    optimizer, recipe = torch.optim.SGD(model.parameters(), lr=0.1), {} if again == "without techniques" else PRUNE
    fabric = Fabric(accelerator="cpu", devices=1) if again == "the same model" else loop.fabric
    old = loop.optimizer
    if again == "a plain setup":
        loop.model, loop.optimizer = fabric.setup(model, optimizer)
    else:
        loop.model, loop.optimizer = setup(fabric, model, optimizer, recipe=recipe, total_steps=3)
    loop.fabric = fabric
    loop.steps(3)
    for stepping in (old, *([loop.optimizer] if recipe and "plain" not in again else [])):
        with pytest.raises(TrainingError, match="after the end of its run"):
            stepping.step()
    assert ((model[0].weight == 0).float().mean() > 0.4) == (again in ("the same model", "another model"))
    assert Receipt.read(tmp_path)["steps"]["applied"] == 1  # the later run has saved nothing yet


@pytest.mark.parametrize("clip", [{"max_norm": 1.0}, {"clip_val": 0.1}])
def test_clipping_another_model_neither_ends_nor_skips_a_step(clip):
    loop = Loop(PRUNE)
    other, optimizer = loop.fabric.setup(critic := net(), torch.optim.SGD(critic.parameters(), lr=0.1))
    for _ in range(STEPS):
        loop.fabric.backward(other(torch.ones(2, 16)).square().mean())
        loop.fabric.clip_gradients(other, optimizer, **clip)
        optimizer.step()
        loop.optimizer.zero_grad()
        loop.steps(1)
    loop.save()
    receipt = Receipt.read(Path.cwd())
    assert receipt["steps"] == {"applied": STEPS, "skipped": 0, "planned": STEPS}
    assert receipt["finished"]


def test_a_second_model_is_refused_before_the_first_was_trained():
    loop, other = Loop(PRUNE), net()
    with pytest.raises(ConfigError, match="must train one model with techniques at a time"):
        setup(loop.fabric, other, torch.optim.SGD(other.parameters(), lr=0.1), recipe=PRUNE, total_steps=1)


def test_gradients_that_are_dropped_after_clipping_are_a_skipped_step():
    loop = Loop(PRUNE).gradients()
    loop.fabric.clip_gradients(loop.model, loop.optimizer, clip_val=1.0)
    loop.optimizer.zero_grad()
    loop.steps(STEPS - 1).save()
    with open("eff_receipt.json") as file:
        assert json.load(file)["steps"] == {"applied": STEPS - 1, "skipped": 1, "planned": STEPS}


def test_a_window_whose_gradients_fsdp2_keeps_to_itself_is_told_of(capsys):
    loop = Loop(PRUNE).gradients()
    loop.save("before.ckpt")
    assert "not saved" not in capsys.readouterr().out
    for weight in loop.plain.parameters():
        weight.device_mesh, weight.grad = "as a part has one", None
    loop.save()
    assert "gradients of an unfinished window" in capsys.readouterr().out


def test_a_private_loop_trains_on_drawn_batches_and_says_what_was_not_checked():
    recipe = {"dp": {"noise_multiplier": 1.0, "delta": 1e-3, "seed": 1}}
    loop, data = Loop(recipe), TensorDataset(torch.randn(24, 16))
    others = loop.fabric.setup_dataloaders(DataLoader(data, batch_size=6), DataLoader(data, batch_size=3))
    assert [len(loader) for loader in others] == [4, 8]
    assert {len(batch[0]) for batch in others[1]} == {3}
    for (batch,) in others[0]:
        loop.fabric.backward(loop.model(batch).square().mean())
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    loop.save()
    receipt = Receipt.read(Path.cwd())
    assert receipt["techniques"]["dp"]["steps"] == STEPS
    assert any("the model does not return it" in note for note in receipt["notes"])
    with pytest.raises(TrainingError, match=r"fabric\.setup_dataloaders"):
        Loop(recipe).gradients()


def test_lbfgs_is_refused_before_training():
    model, fabric = net(), Fabric(accelerator="cpu", devices=1)
    with pytest.raises(CompatibilityError, match="LBFGS"):
        setup(fabric, model, torch.optim.LBFGS(model.parameters()), recipe={"average": {"kind": "ema"}}, total_steps=2)


def test_what_cannot_run_is_refused_and_leaves_the_model_alone(monkeypatch):
    bf16 = [MixedPrecision("bf16-mixed", "cpu")]
    for recipe, error, message in (
        ({"loss_scale": {"kind": "dynamic"}}, CompatibilityError, "bf16 has fp32's exponent range"),
        ({"soup": {"kind": "uniform"}}, CompatibilityError, "eff soup"),
        ({"prune": {"sparsity": 0.5, "begin": 9}}, ConfigError, "begin"),
    ):
        with pytest.raises(error, match=message):
            Loop(recipe, bf16)
    with pytest.raises(ConfigError, match="total_steps must be a whole number of at least 1, got 0"):
        Loop(PRUNE, total_steps=0)
    with pytest.raises(CompatibilityError, match=r"lightning\.setup"):
        Loop({}, callbacks=[Pruning(sparsity=0.5)])
    monkeypatch.setattr(Fabric, "strategy", FSDPStrategy())  # Fabric itself makes it on GPUs alone
    with pytest.raises(CompatibilityError, match=r"strategy must be one of .*, got FSDPStrategy"):
        Loop(PRUNE)


SCRIPT = """
import sys, torch
from torch import nn
from {namespace} import Fabric
fabric = Fabric(accelerator="cpu", devices=1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer = {setup}
for step in range(4):
    fabric.backward(model(torch.ones(2, 16)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
fabric.save("run/last.ckpt", {{"model": model}})
"""
SETUPS = {
    "stock": "fabric.setup(model, optimizer)",
    "apart": "fabric.setup(model), fabric.setup_optimizers(optimizer)",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("namespace", "setup", "flags", "told"),
    [
        ("lightning_fabric", "stock", ("--eff_total_steps", "4"), ""),
        ("lightning.fabric", "stock", ("--eff_total_steps", "4"), ""),
        ("lightning.fabric", "stock", (), "must be given for a Fabric loop, as --eff_total_steps"),
        ("lightning.fabric", "apart", ("--eff_total_steps", "4"), "an optimizer stepped before any of them"),
    ],
)
def test_eff_run_prunes_the_loop_of_an_unedited_script_or_stops_it(namespace, setup, flags, told, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.format(namespace=namespace, setup=SETUPS[setup]))
    command = [sys.executable, "-m", "efftrain", "run", "train.py", "--prune_sparsity", "0.5", *flags]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert told in run.stderr
    assert (run.returncode == 0) == (not told), run.stderr
    assert (tmp_path / "run" / "last.ckpt").exists() == (not told)
    if not told:
        weights = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["model"]
        assert sum(int((weights[name] == 0).sum()) for name in ("0.weight", "2.weight")) == (256 + 64) // 2
        assert json.loads((tmp_path / "run" / "eff_receipt.json").read_text())["finished"]
