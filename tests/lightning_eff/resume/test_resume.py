import promise_drivers
import pytest
import torch
from lightning_world import (
    BOTH,
    dataset,
    difference,
    everything,
    fit,
    hook_callback,
    loader,
    make_module,
    make_trainer,
    module_class,
    saver,
)
from promise_drivers import run_lightning
from promise_table import FEW_RUNS, NUM_STEPS, recipe_of
from pytorch_lightning.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_eff import EffCallback
from shared_core.engine.receipt import Receipt

RECIPE = {
    "prune": {"sparsity": 0.5, "begin": 0.1, "end": 0.6, "every": 2},
    "qat": {"scheme": "int8", "begin": 0.3, "freeze_observers": 0.9},
}
NAMESPACE = BOTH[0]


def train(
    folder, recipe=None, ckpt_path=None, val=False, seed=0, train=None, namespace=NAMESPACE, callbacks=(), **options
):
    callback = EffCallback(RECIPE if recipe is None else recipe)
    options = {"accumulate_grad_batches": 1, "gradient_clip_val": 1.0, **options}
    trainer = make_trainer(folder, namespace, callbacks=[callback, *callbacks], **options)
    module = make_module(namespace, seed=seed)
    # Other seeds than the first run's: what is not restored would show.
    fit(trainer, module, val=val, seed=5 + seed, ckpt_path=ckpt_path, train=train() if train else None)
    return callback, everything(trainer, module)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("val", [False, True])
@pytest.mark.parametrize(
    ("hook", "points"),
    [
        # Epochs of 6 batches: 5 and 11 are their last ones; with 4 to a step, 0, 4 and 6 lie inside a window.
        ("on_train_batch_end", (0, 3, 4, 5, 6, 11, 13)),
        ("on_train_epoch_end", (0, 1)),
        ("on_train_epoch_start", (0, 1, 2)),
        ("on_train_start", (0,)),
    ],
)
def test_a_resumed_run_is_the_run_that_was_never_stopped(accumulate, val, hook, points, tmp_path):
    options = {"accumulate_grad_batches": accumulate, "val": val}
    callback, whole = train(tmp_path, callbacks=[saver(NAMESPACE, tmp_path, hook)], **options)
    for point in points:
        again, resumed = train(tmp_path, ckpt_path=tmp_path / f"{point}.ckpt", seed=9, **options)
        assert difference(whole, resumed) == [], point
        assert again.session.step == callback.session.step
        for key, technique in callback.session.techniques.items():
            mine, other = technique.state_dict(), again.session.techniques[key].state_dict()
            assert str(mine) == str(other), (point, key)


@pytest.mark.parametrize("criterion", ["wanda", "fisher"])
def test_what_hooks_gather_in_a_window_is_resumed(criterion, tmp_path):
    recipe = {"prune": {"sparsity": 0.5, "criterion": criterion, "begin": 3, "end": 6}}
    options = {"recipe": recipe, "accumulate_grad_batches": 4}
    train(tmp_path, callbacks=[saver(NAMESPACE, tmp_path)], **options)
    again = tmp_path / "again"
    train(tmp_path, ckpt_path=tmp_path / "4.ckpt", seed=9, callbacks=[saver(NAMESPACE, again)], **options)
    first, second = (
        torch.load(path, weights_only=True)["eff_state"]["techniques"]["prune"]["scorer"]
        for path in (tmp_path / "5.ckpt", again / "0.ckpt")
    )
    assert first["counts"] == second["counts"]
    assert difference(first["totals"], second["totals"]) == []


@pytest.mark.parametrize(
    "hook", ["on_validation_start", "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end"]
)
@pytest.mark.parametrize("interval", [2, 1.0])
def test_checkpoints_of_a_validation_that_draws_resume_exactly_too(hook, interval, tmp_path, monkeypatch):
    kind, seen = module_class(NAMESPACE), []
    step = kind.validation_step

    def noisy(self, batch, batch_idx):
        step(self, [batch[0] + torch.rand(8), batch[1]], batch_idx)

    monkeypatch.setattr(
        kind, "validation_step", lambda self, batch, i: step(self, [batch[0] + torch.rand(8), batch[1]], i)
    )

    def trained(*callbacks, **options):
        seen.clear()
        ended = {"on_validation_end": lambda trainer: seen.append(trainer.callback_metrics["val_loss"])}
        callbacks = [hook_callback(NAMESPACE, **ended), *callbacks]
        _, end = train(tmp_path, val=True, val_check_interval=interval, callbacks=callbacks, **options)
        return end, list(seen)

    whole, validations = trained(saver(NAMESPACE, tmp_path, hook))
    for point in (0, 1):
        resumed, again = trained(ckpt_path=tmp_path / f"{point}.ckpt", seed=9)
        assert difference(whole, resumed) == [], point
        if hook in ("on_validation_start", "on_validation_end"):  # once a batch, once a validation
            assert again == validations[point + (hook == "on_validation_end") :]


def seeded(workers):
    return lambda: loader(generator=torch.Generator().manual_seed(3), num_workers=workers)


@pytest.mark.parametrize(
    ("options", "points"),
    [
        pytest.param({"train": seeded(0), "max_epochs": 2}, (2, 5, 8), id="a loader's own generator"),
        pytest.param({"train": seeded(1), "max_epochs": 2}, (2, 5), id="and workers"),
        pytest.param({}, (17,), id="at the very end, where the model is baked"),
        pytest.param({"precision": "64-true", "max_epochs": 2}, (7,), id="64 bits"),
    ],
)
def test_a_run_goes_on_exactly(options, points, tmp_path):
    _, whole = train(tmp_path, callbacks=[saver(NAMESPACE, tmp_path)], **options)
    assert whole["net.0.weight"].dtype == (torch.float64 if "precision" in options else torch.float32)
    for point in points:
        _, resumed = train(tmp_path, ckpt_path=tmp_path / f"{point}.ckpt", seed=9, **options)
        assert difference(whole, resumed) == [], point


@pytest.mark.parametrize(
    "keys", [FEW_RUNS[0], *(pytest.param(keys, marks=pytest.mark.slow) for keys in FEW_RUNS[1:])], ids="+".join
)
def test_a_run_resumed_after_its_last_step_ends_as_the_whole_one(keys, tmp_path):
    # a soup needs the checkpoints in the folder of the whole run
    recipe = recipe_of(*(key for key in keys if key != "soup"))
    whole = run_lightning(recipe, tmp_path / "whole", save_at_batches=(NUM_STEPS,))
    point = whole.checkpoints[NUM_STEPS]
    resumed = run_lightning(recipe, tmp_path / "again", resume=point)
    assert promise_drivers.difference(whole.weights, resumed.weights) is None
    receipt = Receipt.read(tmp_path / "again")
    assert receipt["finished"]
    assert receipt["unreached"] == {}
    assert receipt["steps"]["applied"] == whole.receipt["steps"]["applied"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_run_resumed_on_fewer_data_takes_all_its_steps(is_stream, tmp_path):
    def shorter():
        rows = [dataset()[row] for row in range(8)]
        return DataLoader(Stream(rows) if is_stream else rows, 4)

    train(tmp_path, callbacks=[saver(NAMESPACE, tmp_path)], max_epochs=-1, max_steps=8)
    again, _ = train(tmp_path, ckpt_path=tmp_path / "3.ckpt", train=shorter, max_epochs=-1, max_steps=8)
    assert again.session.step == 8


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def test_a_loader_with_workers_resumes_inside_an_epoch(tmp_path, monkeypatch):
    kind = module_class(NAMESPACE)
    configured = kind.configure_optimizers

    def asks_for_the_length(self):
        # makes the loader and its iterator before fit starts
        return configured(self) if self.trainer.estimated_stepping_batches else None

    monkeypatch.setattr(kind, "configure_optimizers", asks_for_the_length)

    def workers():
        return loader(num_workers=1, persistent_workers=True)

    _, whole = train(tmp_path, callbacks=[saver(NAMESPACE, tmp_path)], train=workers, max_epochs=2)
    for point in (2, 8):
        _, resumed = train(tmp_path, ckpt_path=tmp_path / f"{point}.ckpt", seed=9, train=workers, max_epochs=2)
        assert difference(whole, resumed) == [], point


class Noisy(torch.utils.data.Dataset):
    """Rows to which each fetch adds noise, drawn where it is made."""

    def __len__(self):
        return 24

    def __getitem__(self, row):
        features, label = dataset()[row]
        return features + torch.randn(8), label


@pytest.mark.parametrize("lives_on", [False, True])
def test_what_workers_draw_is_resumed_or_a_note_says_that_it_is_not(lives_on, tmp_path):
    def noisy():
        return DataLoader(Noisy(), 4, shuffle=True, num_workers=1, persistent_workers=lives_on)

    _, whole = train(tmp_path, callbacks=[saver(NAMESPACE, tmp_path)], train=noisy, max_epochs=2)
    for point in (2, 5, 8):  # within the first epoch, at its end, within the second
        again, resumed = train(tmp_path, ckpt_path=tmp_path / f"{point}.ckpt", seed=9, train=noisy, max_epochs=2)
        noted = [note for note in again.session.notes if "persistent workers" in note]
        assert bool(noted) is (lives_on and point > 2)
        assert noted or difference(whole, resumed) == [], point


def test_the_other_namespace_and_a_loss_scale_resume(tmp_path):
    recipe = {**RECIPE, "loss_scale": {"kind": "dynamic", "init_scale": 2.0**130 / 8, "growth_interval": 3}}
    options = {"namespace": BOTH[1], "recipe": recipe, "accumulate_grad_batches": 2}
    callback, whole = train(tmp_path, callbacks=[saver(BOTH[1], tmp_path)], **options)
    for point in (2, 7):
        again, resumed = train(tmp_path, ckpt_path=tmp_path / f"{point}.ckpt", seed=9, **options)
        assert difference(whole, resumed) == [], point
        scalers = [each.session.techniques["loss_scale"].scaler.state_dict() for each in (callback, again)]
        assert scalers[0] == scalers[1]


def test_a_resume_without_this_callback_is_not_exact(tmp_path):
    # The control: were Lightning exact by itself, the tests above would prove nothing.
    def plain(ckpt_path=None, callbacks=(), seed=0):
        trainer = make_trainer(tmp_path, callbacks=list(callbacks))
        module = fit(trainer, make_module(seed=seed), seed=5 + seed, ckpt_path=ckpt_path)
        return everything(trainer, module)

    whole = plain(callbacks=[saver(NAMESPACE, tmp_path)])
    assert difference(whole, plain(tmp_path / "7.ckpt", seed=9)) != []


def test_a_checkpoint_without_techniques_is_resumed_with_a_note(tmp_path):
    trainer = make_trainer(tmp_path, callbacks=[saver(NAMESPACE, tmp_path)])
    fit(trainer, make_module())
    callback, _ = train(tmp_path, ckpt_path=tmp_path / "7.ckpt")
    assert callback.session.step == 10
    assert any("saved without these techniques" in note for note in callback.receipt["notes"])


def test_a_loader_that_keeps_its_own_state_is_left_to_lightning(tmp_path):
    class Stateful(torch.utils.data.DataLoader):
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            self.loaded = True

    plain = loader()
    made = Stateful(plain.dataset, batch_size=4, shuffle=True)
    fetched = []
    trainer = make_trainer(tmp_path, callbacks=[EffCallback(RECIPE), saver(NAMESPACE, tmp_path)], max_epochs=1)
    fit(trainer, make_module(), train=made)
    count = hook_callback(NAMESPACE, on_train_batch_start=lambda trainer: fetched.append(1))
    trainer = make_trainer(tmp_path, callbacks=[EffCallback(RECIPE), count], max_epochs=1)
    fit(trainer, make_module(), train=made, ckpt_path=tmp_path / "2.ckpt")
    assert made.loaded
    assert len(fetched) == 3


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


class PartlyFrozen(module_class(NAMESPACE)):
    def configure_optimizers(self):
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=0.01)


@pytest.mark.parametrize("point", [3, 8, 14])
def test_layers_unfrozen_in_mid_run_stay_unfrozen(point, tmp_path):
    # Lightning's own callback (2.6) freezes them again, and unfreezes them only in the epoch that is over
    def trained(callbacks=(), **options):
        torch.manual_seed(0)
        module = PartlyFrozen()
        trainer = make_trainer(
            tmp_path, NAMESPACE, callbacks=[EffCallback({"qat": RECIPE["qat"]}), Unfreezes(), *callbacks]
        )
        fit(trainer, module, val=True, **options)
        return everything(trainer, module)

    whole = trained([saver(NAMESPACE, tmp_path)])
    assert difference(whole, trained(ckpt_path=tmp_path / f"{point}.ckpt")) == []


@pytest.mark.parametrize("point", [5, 7, 9])
def test_accumulation_that_changed_between_epochs_goes_on(point, tmp_path):
    # Lightning (2.6) goes on within an epoch, or after the last batch of one, as if no schedule were there
    def scheduled(*callbacks, **options):
        return train(tmp_path, callbacks=[GradientAccumulationScheduler({0: 1, 1: 3}), *callbacks], **options)

    callback, whole = scheduled(saver(NAMESPACE, tmp_path), max_epochs=2)
    again, resumed = scheduled(ckpt_path=tmp_path / f"{point}.ckpt", max_epochs=2)
    assert difference(whole, resumed) == []
    assert callback.session.step == again.session.step == 6 + 2


class Unsized(torch.utils.data.IterableDataset):
    def __iter__(self):
        return (dataset()[row] for row in torch.randperm(24).tolist())


@pytest.mark.parametrize(
    ("options", "train_loader", "callback"),
    [
        ({"check_val_every_n_epoch": 2}, None, None),
        ({"reload_dataloaders_every_n_epochs": 1}, None, None),
        ({"reload_dataloaders_every_n_epochs": 2}, None, None),
        ({"max_steps": 18}, lambda: torch.utils.data.DataLoader(Unsized(), batch_size=4), None),
        ({}, lambda: loader(num_workers=1, persistent_workers=True), None),
        ({}, None, lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1)),
        ({}, None, lambda: EarlyStopping("mean_loss", check_on_train_epoch_end=True)),
    ],
    ids=["validation", "reload", "reload2", "unsized", "workers", "averaging", "early_stopping"],
)
def test_an_epoch_saved_after_its_last_batch_ends_as_it_would_have(
    options, train_loader, callback, tmp_path, monkeypatch
):
    # Lightning (2.6) leaves out validation and end of that epoch, and the start of the next
    kind, seen = module_class(NAMESPACE), []
    step = kind.training_step

    def logs_a_mean(self, batch, batch_idx):
        loss = step(self, batch, batch_idx)
        self.log("mean_loss", loss, on_step=False, on_epoch=True)
        return loss

    def trained(callbacks=(), **more):
        seen.clear()

        def told(event):
            return lambda trainer: seen.append((event, trainer.current_epoch, *losses(trainer)))

        def losses(trainer):
            return [trainer.callback_metrics.get("mean_loss")] if trainer.validating else []

        hooks = {name: told(name) for name in ("on_train_epoch_start", "on_validation_end", "on_train_epoch_end")}
        others = [hook_callback(NAMESPACE, **hooks), *([callback()] if callback else []), *callbacks]
        recipe = {"activations": {"pack": "exact", "min_size": 1}} if "Averaging" in str(others) else None
        _, end = train(tmp_path, recipe, val=True, train=train_loader, callbacks=others, **options, **more)
        return end, list(seen)

    monkeypatch.setattr(kind, "training_step", logs_a_mean)
    whole, events = trained([saver(NAMESPACE, tmp_path)])
    resumed, again = trained(ckpt_path=tmp_path / "11.ckpt", seed=9)
    assert difference(whole, resumed) == []
    assert str(again) == str(events[-len(again) :])
    assert again[0][:2] == ("on_validation_end", 1)


def test_a_buffer_that_no_state_dict_holds_is_resumed(tmp_path):
    class Centered(module_class(NAMESPACE)):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(8), persistent=False)

        def training_step(self, batch, batch_idx):
            self.mean.lerp_(batch[0].mean(0), 0.1)
            return super().training_step([batch[0] - self.mean, batch[1]], batch_idx)

    def trained(*callbacks, **options):
        torch.manual_seed(0)
        trainer, module = make_trainer(tmp_path, callbacks=[EffCallback(RECIPE), *callbacks]), Centered()
        return everything(trainer, fit(trainer, module, **options))

    whole = trained(saver(NAMESPACE, tmp_path))
    assert difference(whole, trained(ckpt_path=tmp_path / "7.ckpt")) == []


@pytest.mark.parametrize(("mode", "point"), [("max_size_cycle", 7), ("max_size_cycle", 13), ("min_size", 4)])
@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_of_several_lengths_resume(mode, point, workers, tmp_path, monkeypatch):
    # the shorter one is shuffled anew inside of an epoch, at the fetch in which it begins again
    def loaders():
        options = {"shuffle": True, "num_workers": workers, "persistent_workers": bool(workers)}
        return CombinedLoader([DataLoader(dataset(rows), 4, **options) for rows in (24, 60)], mode)

    kind = module_class(NAMESPACE)
    step = kind.training_step
    monkeypatch.setattr(kind, "training_step", lambda self, parts, i: sum(step(self, part, i) for part in parts))
    _, whole = train(tmp_path, callbacks=[saver(NAMESPACE, tmp_path)], train=loaders, max_epochs=1)
    _, resumed = train(tmp_path, ckpt_path=tmp_path / f"{point}.ckpt", seed=9, train=loaders, max_epochs=1)
    assert difference(whole, resumed) == []
