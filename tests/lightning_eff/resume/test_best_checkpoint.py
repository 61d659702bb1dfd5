"""The best checkpoint of a Lightning training is one that holds what was asked for, and early stopping waits for it."""

import pytest
import pytorch_lightning as pl
import torch
from promise_drivers import run_lightning
from promise_table import PRUNE, REACHED_AT
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint

EVERY_STEP = {
    "limit_val_batches": 2,
    "val_check_interval": 1,
    "check_val_every_n_epoch": None,
    "enable_checkpointing": True,
}


class Worsens(pl.Callback):
    """Each validation is worse than the one before: without a rule the first is the best."""

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("worse", float(trainer.global_step))


class StopsAt(pl.Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step >= self.step


def train(recipe, folder, *callbacks, **options):
    options = {**EVERY_STEP, **options}
    return run_lightning(recipe, folder, callbacks=[Worsens(), *callbacks], **options)


def best_of(folder, **options):
    return ModelCheckpoint(folder / "best", monitor="worse", filename="{step}", **options)


def saved(path):
    return torch.load(path, weights_only=True)["state_dict"]


def sparsity(weights):
    return float((weights["net.hidden.weight"] == 0).double().mean())


def steps(folder):
    return sorted(int(path.stem.split("=")[1].split("-")[0]) for path in (folder / "best").glob("step=*.ckpt"))


@REACHED_AT
def test_the_best_is_the_first_that_holds_what_was_asked_for(recipe, first, tmp_path):
    best = best_of(tmp_path, save_last=True)
    last = ModelCheckpoint(tmp_path / "last", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    result = train(recipe, tmp_path, best, last)
    assert steps(tmp_path) == [first]
    assert best.best_model_score == first
    assert len(list((tmp_path / "last").glob("*.ckpt"))) == 4
    assert (tmp_path / "best" / "last.ckpt").is_file()
    assert result.receipt["unreached"] == {}
    assert sum("not a candidate for the best" in note for note in result.receipt["notes"]) == 1
    if "prune" in recipe:
        assert sparsity(saved(best.best_model_path)) == pytest.approx(0.6, abs=0.06)


def test_early_stopping_waits_until_pruning_is_complete(tmp_path):
    stop = EarlyStopping("worse", patience=1, stopping_threshold=2.5)
    result = train(PRUNE, tmp_path, stop, best_of(tmp_path))
    assert result.receipt["steps"]["applied"] == 7
    assert stop.best_score == 6
    assert result.receipt["unreached"] == {}


def test_early_stopping_still_stops_what_diverges(tmp_path):
    result = train(PRUNE, tmp_path, EarlyStopping("worse", divergence_threshold=1.5), best_of(tmp_path))
    assert result.receipt["steps"]["applied"] == 2
    assert result.receipt["unreached"].keys() == {"prune"}


@pytest.mark.parametrize("keep", [1, -1])
def test_a_run_stopped_before_saves_its_last_state_as_the_best(keep, tmp_path):
    best = best_of(tmp_path, save_top_k=keep)
    result = train(PRUNE, tmp_path, StopsAt(4), best)
    assert steps(tmp_path) == ([4] if keep == 1 else [1, 2, 3, 4, 4])
    assert best.best_model_score == 4
    weights = saved(best.best_model_path)
    assert all(torch.equal(weights[f"net.{name}"], value) for name, value in result.weights.items())
    assert 0.3 < sparsity(weights) < 0.45
    receipt = result.receipt
    assert receipt["unreached"].keys() == {"prune"}
    assert any("prune did not reach" in note for note in receipt["notes"])
    assert receipt["final_evaluation"]["worse"] == 4


def test_all_checkpoints_are_kept_and_the_best_holds_what_was_asked_for(tmp_path):
    best = best_of(tmp_path, save_top_k=-1)
    train(PRUNE, tmp_path, best)
    assert steps(tmp_path) == list(range(1, 9))
    assert best.best_model_path.endswith("step=6.ckpt")
    assert sorted(map(float, best.best_k_models.values())) == [6, 7, 8, *[torch.inf] * 5]


def test_an_average_that_was_not_validated_is_evaluated_at_the_end(tmp_path):
    runs = [
        train(
            {"average": {"kind": "ema", "decay": 0.7, "evaluate": evaluate}},
            tmp_path / str(evaluate),
            limit_val_batches=limit,
        )
        for evaluate, limit in ((True, 2), (False, 2), (False, 0))
    ]
    told = [any("evaluated after its last change" in note for note in run.receipt["notes"]) for run in runs]
    assert told == [False, True, False]
    figures = [run.receipt["final_evaluation"].get("eval_loss") for run in runs]
    assert figures[0] == pytest.approx(figures[1], rel=1e-6)
    assert figures[2] is None


@pytest.mark.parametrize("earlier", ["prune", "none"])
def test_the_best_of_another_recipe_is_not_that_of_a_resumed_run(earlier, tmp_path):
    less = {"prune": {**PRUNE["prune"], "sparsity": 0.3, "end": 2}}
    before = best_of(tmp_path, save_last=True)
    train(less, tmp_path, before, EarlyStopping("worse", patience=9), max_steps=4, plugin=earlier == "prune")
    assert before.best_model_score == (2 if earlier == "prune" else 1)
    best = best_of(tmp_path, save_last=True)
    stop = EarlyStopping("worse", patience=9)
    result = train(PRUNE, tmp_path, best, stop, resume=tmp_path / "best" / "last.ckpt", max_steps=12)
    first = 6 if earlier == "prune" else 1 + 6  # Lightning saved its last beside its best, at step 1
    assert best.best_model_score == stop.best_score == first
    assert sparsity(saved(best.best_model_path)) == pytest.approx(0.6, abs=0.06)
    assert any("the comparison starts anew" in note for note in result.receipt["notes"])


def test_a_run_killed_before_anything_competes_goes_on_from_its_last_checkpoint(tmp_path):
    class Killed(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 4:
                raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        train(PRUNE, tmp_path, best_of(tmp_path, save_last=True), Killed())
    assert steps(tmp_path) == [3]
    best = best_of(tmp_path, save_last=True)
    train(PRUNE, tmp_path, best, resume=tmp_path / "best" / "last.ckpt")
    assert steps(tmp_path) == [6]
    assert best.best_model_score == 6
