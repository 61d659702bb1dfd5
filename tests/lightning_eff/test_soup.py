"""Soups at the end of Lightning runs: of whole modules, and of PEFT adapters beside their base in a checkpoint."""

import argparse
import copy
import importlib
import os

import pytest
import torch
from lightning_world import BOTH, dataset, difference, fit, hook_callback, loader, make_module, make_trainer
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader

from lightning_eff import EffCallback, ModelSoup
from shared_core.checkpoint_formats import open_ingredient
from shared_core.errors import CompatibilityError, ConfigError
from shared_core.soup import logged_metrics, rank_by_logged, save_soup, uniform_soup


def run(folder, recipe, namespace=BOTH[0], val=True, callbacks=(), **checkpoint):
    saving = importlib.import_module(namespace).callbacks.ModelCheckpoint(
        dirpath=folder, filename="{step}", **{"save_top_k": -1, "monitor": "val_loss", **checkpoint}
    )
    callback = EffCallback(recipe)
    trainer = make_trainer(
        folder, namespace, callbacks=[callback, *callbacks, saving], enable_checkpointing=True, max_epochs=4
    )
    return callback, trainer, fit(trainer, make_module(namespace), val=val)


@pytest.mark.parametrize("namespace", BOTH)
def test_the_greedy_soup_is_what_the_trainer_would_measure(namespace, tmp_path):
    saved, validations = [], []
    watch = hook_callback(
        namespace,
        on_save_checkpoint=lambda trainer: saved.append(trainer.global_step),
        on_validation_end=lambda trainer: validations.append(trainer.global_step),
    )
    recipe = {"soup": {"kind": "greedy", "metric": "val_loss"}, "prune": {"sparsity": 0.5, "begin": 0, "end": 6}}
    callback, _trainer, module = run(tmp_path, recipe, namespace, callbacks=[watch])
    told = callback.receipt["techniques"]["soup"]
    assert told["candidates"] == len(saved) == len(validations) == 4
    again = make_trainer(tmp_path, namespace)
    (measured,) = again.validate(module, loader(shuffle=False), verbose=False)
    assert measured["val_loss"] == pytest.approx(told["score"], rel=1e-6)
    assert told["score"] <= told["best_single"]
    assert sum(int((module.net[index].weight == 0).sum()) for index in (0, 4)) == 96


@pytest.mark.parametrize("ours", [True, False])
def test_checkpoints_are_ranked_by_what_was_logged(tmp_path, ours):
    run(tmp_path, {"soup": {"kind": "uniform"}} if ours else {})
    paths = sorted(tmp_path.glob("*.ckpt"))
    for path in paths:
        assert logged_metrics(open_ingredient(path)).keys() >= {"val_loss", *(["val_acc"] if ours else [])}
    ranked, losses = rank_by_logged(paths, "val_loss")
    again, module = make_trainer(tmp_path, BOTH[0]), make_module(BOTH[0])
    for item, loss in zip(ranked, losses, strict=True):
        module.load_state_dict({name: item.tensor(name) for name in item.specs})
        (measured,) = again.validate(module, loader(shuffle=False), verbose=False)
        assert measured["val_loss"] == pytest.approx(loss, rel=1e-6)
    assert losses == sorted(losses)


def test_a_uniform_soup_is_the_mean_of_the_latent_weights(tmp_path):
    _callback, _, module = run(tmp_path, {"soup": {"kind": "uniform"}}, val=False, monitor=None, every_n_epochs=1)
    weights = [torch.load(path, weights_only=True)["state_dict"]["net.0.weight"] for path in tmp_path.glob("*.ckpt")]
    assert len(weights) == 4
    torch.testing.assert_close(module.net[0].weight.detach(), torch.stack(weights).mean(0))


EMA = {"kind": "ema", "decay": 0.5}


@pytest.mark.parametrize("namespace", BOTH)
@pytest.mark.parametrize(
    ("recipe", "every", "is_saved"),
    [
        ({"soup": {"kind": "uniform"}}, 6, True),
        ({"soup": {"kind": "greedy", "metric": "val_loss"}, "prune": {"sparsity": 0.5, "begin": 0, "end": 3}}, 5, True),
        ({"soup": {"kind": "uniform"}, "average": EMA}, 6, True),
        ({"average": EMA, "qat": {"scheme": "int8"}}, 6, True),  # ranges are estimated anew at the end
        ({"average": EMA}, 5, True),  # not saved at the last step
        ({"average": EMA}, 6, False),
        ({"prune": {"sparsity": 0.5}}, 6, False),
    ],
)
def test_weights_that_replace_those_of_training_are_in_a_file(tmp_path, namespace, recipe, every, is_saved):
    options = {"monitor": None, "every_n_train_steps": every}
    callback, _, module = run(tmp_path, recipe, namespace, **options)
    final = {name: value.clone() for name, value in module.state_dict().items()}
    told = [note for note in callback.receipt["notes"] if "the final model is saved in" in note]
    held = [*(tmp_path / "final").glob("*"), *(() if is_saved else [tmp_path / "step=24.ckpt"])]
    assert [path.name for path in held] == ["final.ckpt" if is_saved else "step=24.ckpt"]
    assert bool(told) == is_saved
    assert not is_saved or str(held[0]) in told[0]
    loaded = type(module).load_from_checkpoint(held[0], weights_only=True, map_location="cpu")
    assert difference(final, dict(loaded.state_dict())) == []


def test_a_saved_soup_is_no_ingredient_when_the_run_goes_on(tmp_path):
    options = {"monitor": None, "every_n_train_steps": 6}
    callback, trainer, module = run(tmp_path, {"soup": {"kind": "uniform"}}, **options)
    trainer.fit_loop.max_epochs += 1
    fit(trainer, module, val=True)
    assert callback.receipt["techniques"]["soup"]["candidates"] == len(list(tmp_path.glob("*.ckpt"))) == 5
    assert sorted(path.name for path in (tmp_path / "final").glob("*")) == ["final-v1.ckpt", "final.ckpt"]


def test_a_run_that_stops_before_its_first_checkpoint_keeps_its_last_weights(tmp_path):
    weights = []

    def stop(trainer):
        trainer.should_stop = trainer.global_step == 2
        weights.append(trainer.lightning_module.net[0].weight.detach().clone())

    watch = hook_callback(BOTH[0], on_train_batch_end=stop)
    options = {"monitor": None, "every_n_train_steps": 6, "callbacks": [watch]}
    callback, trainer, module = run(tmp_path, {"soup": {"kind": "uniform"}}, **options)
    assert trainer.global_step == 2
    assert torch.equal(module.net[0].weight, weights[-1])
    assert any("soup was not made: the run saved no checkpoint" in note for note in callback.receipt["notes"])
    assert callback.receipt["techniques"]["soup"]["ingredients"] == []
    loaded = type(module).load_from_checkpoint(tmp_path / "final" / "final.ckpt", weights_only=True)
    assert torch.equal(loaded.net[0].weight, weights[-1])


def test_checkpoints_of_other_runs_are_no_ingredients(tmp_path):
    run(tmp_path, {"soup": {"kind": "uniform"}})
    callback, _, _ = run(tmp_path, {"soup": {"kind": "uniform"}})
    assert callback.receipt["techniques"]["soup"]["candidates"] == 4


def test_qat_ranges_are_estimated_anew_and_random_numbers_left_alone(tmp_path):
    recipe = {"soup": {"kind": "greedy", "metric": "val_acc", "bn_batches": 3}, "qat": {"scheme": "int8"}}
    callback, _, module = run(tmp_path, recipe)
    assert callback.receipt["techniques"]["qat"]["without_range"] == []
    assert int(module.net[1].num_batches_tracked) == 3


def test_what_a_soup_needs_is_said_at_the_start(tmp_path):
    with pytest.raises(CompatibilityError, match="ModelCheckpoint"):
        trainer = make_trainer(tmp_path, callbacks=[ModelSoup(kind="uniform")])
        fit(trainer, make_module(), val=True)
    with pytest.raises(CompatibilityError, match="validation_step"):
        run(tmp_path / "no", {"soup": {"kind": "greedy"}}, val=False, monitor=None, every_n_epochs=1)
    for data in ([], DataLoader(dataset(0), batch_size=4)):
        trainer = make_trainer(tmp_path / "no", callbacks=[ModelSoup(kind="greedy")], enable_checkpointing=True)
        with pytest.raises(CompatibilityError, match="must have validation batches"):
            trainer.fit(make_module(), loader(), data)
    assert not list(tmp_path.glob("no/*.ckpt"))
    with pytest.raises(ConfigError, match="did you mean 'val_acc'"):
        run(tmp_path, {"soup": {"kind": "greedy", "metric": "val_accc"}})


def test_a_dev_run_saves_nothing_and_makes_no_soup(tmp_path, capsys):
    callback = EffCallback({"soup": {"kind": "uniform"}, "prune": {"sparsity": 0.5}})
    trainer = make_trainer(tmp_path, callbacks=[callback], enable_checkpointing=True, fast_dev_run=2)
    fit(trainer, make_module(), val=True)
    assert "soup is left out: fast_dev_run saves no checkpoints" in capsys.readouterr().out
    assert callback.receipt["techniques"].keys() == {"prune"}


class Located(type(make_module())):
    def __init__(self, width=16, **options):
        super().__init__(width=width)
        self.save_hyperparameters()


@pytest.mark.parametrize("kind", ["uniform", "greedy"])
def test_hyperparameters_may_be_objects_of_any_class(tmp_path, kind):
    options = {"folder": tmp_path, "arguments": argparse.Namespace(seed=3)}
    saving = importlib.import_module(BOTH[0]).callbacks.ModelCheckpoint(
        dirpath=tmp_path, filename="{step}", save_top_k=-1, monitor="val_loss"
    )
    soup = {"kind": kind, **({"metric": "val_loss"} if kind == "greedy" else {})}
    recipe = {"soup": soup, "prune": {"sparsity": 0.5, "begin": 0, "end": 3}}
    callback = EffCallback(recipe)
    trainer = make_trainer(tmp_path, callbacks=[callback, saving], enable_checkpointing=True)
    module = fit(trainer, Located(width=8, **options), val=True)
    assert callback.receipt["techniques"]["soup"]["candidates"] == 3
    trainer.save_checkpoint(tmp_path / "final.ckpt")
    assert not [note for note in callback.receipt["notes"] if "not checked against the receipt" in note]
    paths = sorted(tmp_path.glob("step=*.ckpt"))
    told = []
    save_soup(uniform_soup(paths), open_ingredient(paths[0]), tmp_path / "soup.ckpt", say=told.append)
    assert "folder (pathlib.PosixPath), arguments (argparse.Namespace)" in told[0]
    loaded = Located.load_from_checkpoint(tmp_path / "soup.ckpt", weights_only=True, **options)
    assert loaded.hparams["width"] == 8
    assert loaded.net[0].weight.shape == module.net[0].weight.shape


def test_checkpoints_that_a_soup_could_not_read_are_refused_when_the_first_is_saved(tmp_path):
    trainer = make_trainer(tmp_path, callbacks=[ModelSoup(kind="uniform")], enable_checkpointing=True)
    with pytest.raises(CompatibilityError, match=r"contains posix\.getcwd, which runs code.*ignore="):
        fit(trainer, Located(where=os.getcwd), val=True)
    assert trainer.global_step == 6


def module_with_adapters():
    module = make_module(BOTH[0])
    module.head = torch.nn.Linear(4, 4)  # outside, and trained as a whole
    module.net = get_peft_model(module.net, LoraConfig(r=2, lora_alpha=4, target_modules=["0", "4"]))
    module.forward = lambda x: module.head(module.net(x))
    return module


def adapters_run(folder, module, **options):
    from pytorch_lightning.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(dirpath=folder, filename="{step}", save_top_k=-1, monitor="val_loss")
    callback = EffCallback({"soup": options})
    trainer = make_trainer(folder, BOTH[0], callbacks=[callback, saving], enable_checkpointing=True, max_epochs=3)
    fit(trainer, module, val=True)
    return callback.receipt["techniques"]["soup"]


@pytest.mark.parametrize("rank", [None, 2])
def test_what_adapters_add_is_averaged_and_the_rest_as_in_a_model(tmp_path, rank):
    module = module_with_adapters()
    told = adapters_run(tmp_path, module, kind="uniform", rank=rank)
    assert told["adapter"]["r"] == (rank or 6)
    ends = [torch.load(path, weights_only=True)["state_dict"] for path in tmp_path.glob("*.ckpt")]
    got = module.state_dict()
    for name in ("head.weight", "net.base_model.model.1.running_mean"):
        torch.testing.assert_close(got[name], torch.stack([end[name] for end in ends]).mean(0))
    a, b = (f"net.base_model.model.0.lora_{side}.default.weight" for side in "AB")
    expected = sum(2 * end[b] @ end[a] for end in ends) / len(ends)
    layer = module.net.base_model.model[0]
    error = (layer.scaling["default"] * got[b] @ got[a] - expected).norm() / expected.norm()
    if rank is None:
        assert error < 1e-6
    else:  # a module that is built again takes what `rank` left
        assert error == pytest.approx(told["rank_errors"]["0"], rel=1e-4)
        module_with_adapters().load_state_dict(got)
        assert layer.scaling["default"] == pytest.approx(2)


def test_the_greedy_soup_is_what_the_trainer_measures(tmp_path):
    module = module_with_adapters()
    told = adapters_run(tmp_path, module, kind="greedy", metric="val_loss")
    (measured,) = make_trainer(tmp_path, BOTH[0]).validate(copy.copy(module), loader(shuffle=False), verbose=False)
    assert measured["val_loss"] == pytest.approx(told["score"], rel=1e-5)


def test_two_adapted_models_are_refused_at_the_start(tmp_path):
    module = module_with_adapters()
    module.other = get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(r=2, target_modules=["0"]))
    with pytest.raises(CompatibilityError, match="must hold one PeftModel, got 'net', 'other'"):
        adapters_run(tmp_path, module, kind="uniform")
    assert not list(tmp_path.glob("*.ckpt"))
