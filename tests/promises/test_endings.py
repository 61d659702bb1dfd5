"""A run beside each callback that the trainers ship ends as its receipt says, or is refused; runs of one folder."""

import importlib.util
import json

import numpy as np
import pytest
import torch
from lightning_world import make_trainer
from promise_drivers import hf_trainer, lightning_module, run_accelerate, run_bare, run_fabric, run_hf, run_lightning
from promise_table import BATCH, NUM_STEPS, TECHNIQUES, eval_examples, recipe_of, train_examples
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from shared_core.config.environments import RUN_ENVIRONMENTS
from shared_core.engine import receipt as receipts
from shared_core.engine.checks.compatibility import refusal
from shared_core.errors import CompatibilityError, EffError, ReceiptError
from shared_core.reports.run_folder import read_run

pl = pytest.importorskip("pytorch_lightning")
from pytorch_lightning import callbacks as shipped  # noqa: E402
from pytorch_lightning.loggers import CSVLogger  # noqa: E402
from pytorch_lightning.plugins.io import TorchCheckpointIO  # noqa: E402
from transformers import EarlyStoppingCallback, PrinterCallback, ProgressCallback, TrainerCallback  # noqa: E402

from lightning_eff import EffCallback  # noqa: E402


class Writer(shipped.BasePredictionWriter):
    """Stands for what users derive from it."""


class Finetuning(shipped.BaseFinetuning):
    """Thaws the head after an epoch, as users' own do."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net.head)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.head, optimizer)


class Digits(pl.LightningDataModule):
    """Batches of a size that a finder may change."""

    batch_size = BATCH

    def train_dataloader(self):
        return DataLoader(train_examples(), self.batch_size)

    def val_dataloader(self):
        return DataLoader(eval_examples(), self.batch_size)


def harmless():
    """Everything that only looks on, in one run."""
    return [
        shipped.LambdaCallback(on_train_epoch_end=lambda *_: None),
        shipped.LearningRateMonitor(),
        shipped.DeviceStatsMonitor(),
        shipped.ThroughputMonitor(batch_size_fn=lambda batch: len(batch["labels"])),
        shipped.Timer("00:01:00:00"),
        shipped.RichProgressBar() if importlib.util.find_spec("rich") else shipped.TQDMProgressBar(),
        shipped.RichModelSummary() if importlib.util.find_spec("rich") else shipped.ModelSummary(),
        shipped.OnExceptionCheckpoint("."),
        shipped.EarlyStopping("eval_loss", patience=100),
        Writer(),
    ]


def onlookers():
    """Everything of transformers' own that only looks on."""
    if importlib.util.find_spec("IPython"):
        from transformers.utils.notebook import NotebookProgressCallback

        return [PrinterCallback(), ProgressCallback(), NotebookProgressCallback()]
    return [PrinterCallback(), ProgressCallback()]


# case → the callbacks, and what a refusal must name
LIGHTNING = {
    "harmless": (harmless, None),
    "ema": (lambda: [shipped.EMAWeightAveraging(decay=0.5)], "averaging_callback"),
    "mean": (lambda: [shipped.WeightAveraging()], "averaging_callback"),
    "swa": (lambda: [shipped.StochasticWeightAveraging(0.01, swa_epoch_start=1)], "averaging_callback"),
    "pruning": (lambda: [shipped.ModelPruning("l1_unstructured", amount=0.5)], "pruning_callback"),
    "finetuning": (lambda: [Finetuning()], None),
    "accumulation": (lambda: [shipped.GradientAccumulationScheduler({0: 1, 1: 2})], None),
    "batch_size": (lambda: [shipped.BatchSizeFinder(steps_per_trial=1, max_trials=1)], None),
    "learning_rate": (lambda: [shipped.LearningRateFinder(num_training_steps=4, max_lr=0.02)], None),
    "early_stop": (lambda: [shipped.EarlyStopping("eval_loss", stopping_threshold=100.0)], None),
    "time": (lambda: [shipped.Timer({"seconds": 0})], None),
}
HF = {
    "harmless": (onlookers, {}),
    "best": (lambda: [], {"load_best_model_at_end": True}),
    "early_stop": (lambda: [EarlyStoppingCallback(1, 100.0)], {"load_best_model_at_end": True}),
}
# where a callback does what a technique cannot go on from: the error names the callback, or what it did
REFUSED = {
    ("lottery", "finetuning"): "must be a ticket of this model's weights",
    ("dp", "finetuning"): "must get its gradient",
    ("dp", "learning_rate"): "LearningRateFinder",
    ("dp", "batch_size"): "BatchSizeFinder",
    ("dp", "accumulation"): "GradientAccumulationScheduler",
}
# of a rank that a weight has not by itself
OPTIONS = {"low_rank": {"low_rank": {"rank": 4, "force": True, "merge": True}}}


def recipe(key):
    return OPTIONS.get(key) or recipe_of(key)


def some(cases, default):
    """All techniques with all cases in `make test-all`; here those of `default`, and each technique once more."""
    for number, key in enumerate(TECHNIQUES):
        for place, case in enumerate(cases):
            now = (key, case) in default or place == number % len(cases)
            yield pytest.param(key, case, id=f"{key}-{case}", marks=[] if now else [pytest.mark.slow])


def numbers(tensor):
    return tensor.detach().cpu().float().numpy()


def as_said(key, receipt, weights, options):
    """Count in final weights what the receipt says of them."""
    if receipt["steps"]["applied"] == 0:
        assert "before its first step" in " ".join(receipt["notes"])
        return
    told, reached = receipt["techniques"][key], key not in receipt["unreached"]
    if key == "prune":
        zeros = {entry["name"]: int((numbers(weights[entry["name"]]) == 0).sum()) for entry in told["tensors"]}
        assert zeros == {entry["name"]: entry["pruned"] for entry in told["tensors"]}
        assert sum(zeros.values()) == round(options["sparsity"] * told["numel"]) or not reached
    if key == "lottery":
        for entry in told["tensors"]:
            assert np.count_nonzero(numbers(weights[entry["name"]])) == entry["nonzero"] <= entry["kept"]
        assert sum(entry["kept"] for entry in told["tensors"]) < 0.6 * told["numel"]
    if key == "cluster":
        for entry in told["tensors"]:
            found = np.unique(numbers(weights[entry["name"]]))
            assert np.count_nonzero(found) == entry["values"]
            assert np.count_nonzero(found) <= 2 ** options["bits"] or not reached
    if key == "qat" and reached:
        for entry in told["per_layer"]:
            rows = numbers(weights[f"{entry['name']}.weight"])
            rows = rows.reshape(len(rows), -1)
            codes = rows / np.abs(rows).max(axis=1, keepdims=True) * 127
            assert np.abs(codes - codes.round()).max() < 1e-3
    if key == "low_rank":
        factorized = {name: numbers(weights[f"{name}.weight"]) for name in told["structure"]}
        assert all(np.linalg.matrix_rank(rows.reshape(len(rows), -1), tol=1e-5) <= 4 for rows in factorized.values())
    assert not [name for name in weights if "lora" in name or ".first." in name or name.endswith(("_mask", "_orig"))]
    steps = receipt["steps"]
    assert steps["applied"] + steps["skipped"] == steps["planned"] or any(
        "planned" in note for note in receipt["notes"]
    )


def same(first, second):
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name].cpu(), second[name].cpu())] == []


def read(file):
    return torch.load(file, weights_only=True)["state_dict"]


LIGHTNING_NOW = {(key, case) for key in ("prune", "cluster") for case in ("ema", "swa", "mean")} | {
    *((key, "pruning") for key in ("prune", "lottery")),
    *(("prune", case) for case in ("early_stop", "accumulation", "time")),
    ("qat", "swa"),
    ("lora", "ema"),
    ("lora", "finetuning"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("key", "case"), some(LIGHTNING, LIGHTNING_NOW))
def test_beside_lightnings_callbacks(key, case, tmp_path):
    callbacks, surrounding = LIGHTNING[case][0](), LIGHTNING[case][1]
    module = lightning_module(optim="adamw_torch", recipe=(key,))
    module.lr = 0.01
    files = shipped.ModelCheckpoint(tmp_path, save_last=True, every_n_epochs=1, save_top_k=1)
    best = shipped.ModelCheckpoint(tmp_path / "best", monitor="eval_loss")
    plugins = []
    wanted = recipe(key)
    if key == "distill":
        wanted["distill"]["student"] = "net"
    if key == "loss_scale":
        from lightning_eff.pytorch import LossScalingPrecision

        plugins, wanted = [LossScalingPrecision(precision="32-true", **wanted["loss_scale"])], {}
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        callbacks=[EffCallback(wanted), *callbacks, files, best],
        plugins=plugins,
        logger=CSVLogger(tmp_path / "logs"),
        default_root_dir=tmp_path,
        enable_progress_bar=any("Bar" in type(one).__name__ for one in callbacks),
        enable_model_summary=any("Summary" in type(one).__name__ for one in callbacks),
        num_sanity_val_steps=0,
        log_every_n_steps=1,
    )
    if surrounding and refusal(key, surrounding):
        with pytest.raises(CompatibilityError, match=f"{key} cannot be combined with {RUN_ENVIRONMENTS[surrounding]}"):
            trainer.fit(module, Digits())
        return
    if (key, case) in REFUSED:
        with pytest.raises(EffError, match=f"{key}: .*{REFUSED[key, case]}"):
            trainer.fit(module, Digits())
        return
    trainer.fit(module, Digits())
    callback = next(one for one in trainer.callbacks if isinstance(one, EffCallback))
    receipt, options = callback.receipt.values, recipe_of(key)[key]
    as_said(key, receipt, module.state_dict(), options)
    for weights_only in (False, True):
        trainer.save_checkpoint(tmp_path / "after.ckpt", weights_only=weights_only)
        same(read(tmp_path / "after.ckpt"), dict(module.state_dict()))
    if key != "soup":  # whose ingredients these are
        as_said(key, receipt, read(files.last_model_path) if files.last_model_path else module.state_dict(), options)
    if key in ("prune", "cluster", "qat") and case != "time" and key not in receipt["unreached"]:
        as_said(key, receipt, read(best.best_model_path), options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("key", "case"), some(HF, {(key, "best") for key in ("prune", "qat", "cluster")}))
def test_beside_transformers_callbacks(key, case, tmp_path):
    callbacks, options = HF[case]
    more = {"eval_strategy": "steps", "eval_steps": 1, **options} if options else {}
    trainer = hf_trainer(recipe(key), tmp_path, save_every=1, callbacks=callbacks(), **more)
    trainer.train()
    receipt = json.loads((tmp_path / "eff_receipt.json").read_text())
    assert receipt["steps"]["applied"] <= NUM_STEPS
    model = dict(trainer.model.state_dict())
    as_said(key, receipt, model, recipe_of(key)[key])
    trainer.save_model(tmp_path / "final")
    same(load_file(tmp_path / "final" / "model.safetensors"), model)


class Undoes(TrainerCallback, pl.Callback):
    """Puts weights of its own into the finished model, as an average does that ends after the techniques."""

    def on_train_end(self, args, state, control=None, model=None, **more):
        fill(state if model is None else model)


class Late(pl.Callback):
    """The same at the very last event."""

    def teardown(self, trainer, module, stage):
        fill(module)


class Dense(pl.Callback):
    """Writes other weights into files than the module has."""

    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["state_dict"] = {name: value + 1e-3 for name, value in checkpoint["state_dict"].items()}


class Bare(TorchCheckpointIO):
    """Leaves the module's own prefix out of files, for scripts that load the net without Lightning."""

    def __init__(self, more=0):
        self.more = more

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        state = {name.removeprefix("net."): value + self.more for name, value in checkpoint["state_dict"].items()}
        super().save_checkpoint({**checkpoint, "state_dict": state}, path, storage_options)


def fill(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-3


def fitted(folder, *callbacks, key="prune", **more):
    module = lightning_module(recipe=(key,))
    options = {"devices": 1, "max_epochs": 2, "enable_checkpointing": True, **more}
    trainer = make_trainer(folder, callbacks=[EffCallback(recipe(key)), *callbacks], **options)
    return trainer, module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("callback", "what"), [(Undoes, "module"), (Late, "module"), (Dense, r"epoch=1-step=8\.ckpt")])
def test_a_callback_that_undoes_it_in_lightning_is_named(callback, what, tmp_path):
    trainer, module = fitted(tmp_path, callback())
    with pytest.raises(ReceiptError, match=rf"{what}: .* pruned weights are not 0.*{callback.__name__}"):
        trainer.fit(module, Digits())
    notes = json.loads((tmp_path / "eff_receipt.json").read_text())["notes"]
    assert [note for note in notes if "differ from this receipt" in note]


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_without_the_modules_prefix_is_counted(tmp_path):
    trainer, module = fitted(tmp_path, plugins=[Bare()])
    trainer.fit(module, Digits())
    notes = json.loads((tmp_path / "eff_receipt.json").read_text())["notes"]
    assert not [note for note in notes if "not checked against the receipt" in note]
    trainer, module = fitted(tmp_path / "wrong", plugins=[Bare(1e-3)])
    with pytest.raises(ReceiptError, match=r"epoch=1-step=8\.ckpt: .*prune: net\..* pruned weights are not 0"):
        trainer.fit(module, Digits())


def test_a_callback_that_undoes_it_in_transformers_is_named(tmp_path):
    trainer = hf_trainer(recipe("prune"), tmp_path, callbacks=[Undoes()])
    with pytest.raises(ReceiptError, match=r"the trained model: .* pruned weights are not 0.*Undoes"):
        trainer.train()
    notes = json.loads((tmp_path / "eff_receipt.json").read_text())["notes"]
    assert [note for note in notes if "differ from this receipt" in note]
    with pytest.raises(ReceiptError, match=r"final: .* pruned weights are not 0"):
        trainer.save_model(tmp_path / "final")


@pytest.mark.filterwarnings("ignore")
def test_the_pruned_model_is_lightnings_average(tmp_path):
    average = shipped.EMAWeightAveraging(decay=0.5)
    seen = []
    average.on_train_end = lambda trainer, module: (
        seen.append({name: value.clone() for name, value in average._average_model.module.named_parameters()}),
        type(average).on_train_end(average, trainer, module),
    )
    trainer, module = fitted(tmp_path, average, enable_checkpointing=False)
    trainer.fit(module, Digits())
    for name, value in module.named_parameters():
        torch.testing.assert_close(value, torch.where(value == 0, 0, seen[0][name]), rtol=0, atol=0)
        assert torch.equal(value, average._average_model.module.get_parameter(name))


@pytest.mark.filterwarnings("ignore")
def test_weights_of_a_checkpoint_that_is_tested_are_not_those_of_the_receipt(tmp_path):
    trainer, module = fitted(tmp_path, key="average")
    module.test_step = module.validation_step
    trainer.fit(module, Digits())
    saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
    plain = {"state_dict": {name: value + 1 for name, value in module.state_dict().items()}}
    torch.save(saved | plain, tmp_path / "o.ckpt")
    trainer.test(module, DataLoader(eval_examples(), BATCH), ckpt_path=tmp_path / "o.ckpt", verbose=False)
    trainer.save_checkpoint(tmp_path / "later.ckpt")
    assert torch.equal(read(tmp_path / "later.ckpt")["net.head.bias"], plain["state_dict"]["net.head.bias"])


RUNS = {"hf": run_hf, "lightning": run_lightning, "accelerate": run_accelerate, "fabric": run_fabric}


def receipts_recipe(sparsity):
    return {"prune": {"sparsity": sparsity, "schedule": "one_shot", "begin": 1}}


@pytest.mark.parametrize("front_end", RUNS)
def test_a_later_run_keeps_the_receipts_of_earlier_ones(front_end, tmp_path):
    for sparsity in (0.25, 0.5, 0.75):
        RUNS[front_end](receipts_recipe(sparsity), tmp_path)
    files = {"eff_receipt-1.json": 0.25, "eff_receipt-2.json": 0.5, "eff_receipt.json": 0.75}
    assert {file.name for file in tmp_path.glob("eff_receipt*")} == files.keys()
    for name, sparsity in files.items():
        assert json.loads((tmp_path / name).read_text())["recipe"]["prune"]["sparsity"] == sparsity
        assert read_run(tmp_path / name).receipt["recipe"]["prune"]["sparsity"] == sparsity
    whole = read_run(tmp_path)
    assert whole.receipt["recipe"]["prune"]["sparsity"] == 0.75
    assert whole.notes[0].endswith("eff_receipt-1.json, eff_receipt-2.json")


@pytest.mark.parametrize("front_end", RUNS)
def test_a_resumed_run_replaces_its_own_receipt_and_keeps_that_of_another_process(front_end, tmp_path, monkeypatch):
    half, run = NUM_STEPS // 2, RUNS[front_end]
    first = run(receipts_recipe(0.25), tmp_path, save_every=half)
    monkeypatch.setattr(receipts, "_WRITTEN", {})  # as in another process
    run(receipts_recipe(0.25), tmp_path, resume=first.checkpoints[half])
    assert [file.name for file in tmp_path.glob("eff_receipt*")] == ["eff_receipt.json"]
    monkeypatch.setattr(receipts, "_WRITTEN", {})
    run(receipts_recipe(0.5), tmp_path, resume=first.checkpoints[half])
    kept = {"eff_receipt-1.json": 0.25, "eff_receipt.json": 0.5}
    assert {file.name for file in tmp_path.glob("eff_receipt*")} == kept.keys()
    for name, sparsity in kept.items():
        assert json.loads((tmp_path / name).read_text())["recipe"]["prune"]["sparsity"] == sparsity


def test_one_run_writes_its_receipt_again_and_keeps_what_is_not_its_own(tmp_path, monkeypatch):
    values = run_bare(receipts_recipe(0.25)).receipt
    for _ in range(2):
        receipts.Receipt(values, run=receipts, is_resumed=True).write(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["eff_receipt.json"]
    monkeypatch.setattr(receipts, "_WRITTEN", {})
    receipts.Receipt(values, run=object()).write(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"eff_receipt.json", "eff_receipt-1.json"}
    (tmp_path / "eff_receipt.json").write_text("{")
    monkeypatch.setattr(receipts, "_WRITTEN", {})
    receipts.Receipt(values, run=object(), is_resumed=True).write(tmp_path)
    assert (tmp_path / "eff_receipt-2.json").read_text() == "{"
