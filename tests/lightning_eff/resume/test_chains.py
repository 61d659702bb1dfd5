"""Runs that are killed again and again end as one that was never stopped: weights, losses, learning rates, counters."""

import pytest
from lightning_chains import chain
from lightning_world import everything, fit, loader, make_module, make_trainer
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint

from lightning_eff import EffCallback

# These ended otherwise before: loaders of two lengths, windows that do not divide an epoch, schedulers on a plateau,
# early stopping, saves in batches, at the ends of epochs and inside validations.
QUICK = (3, 6, 9, 10)
AVERAGE = {"average": {"kind": "swa"}}


@pytest.mark.parametrize(
    "seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12) if seed not in QUICK)]
)
def test_a_chain_of_kills_ends_as_the_run_that_was_never_stopped(seed, tmp_path):
    found = chain(seed, tmp_path)
    assert found["differs"] == {}, found


def test_a_run_killed_at_an_epochs_end_and_again_after_it_takes_no_step_more(tmp_path):
    # 36 steps became 37: what the first resume left of the batches' counts was read as another place by the second
    def run(name, **options):
        checkpoint = ModelCheckpoint(tmp_path / name, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        trainer = make_trainer(tmp_path, callbacks=[EffCallback(AVERAGE), checkpoint], enable_checkpointing=True)
        module = fit(trainer, make_module(seed=len(options)), val=True, **options)
        return trainer, everything(trainer, module)

    whole, expected = run("whole")
    run("first", ckpt_path=tmp_path / "whole" / "step=6.ckpt")
    again, found = run("second", ckpt_path=tmp_path / "first" / "step=8.ckpt")
    assert again.global_step == whole.global_step == 18
    assert all(expected[name].equal(found[name]) for name in expected)


@pytest.mark.parametrize("limit", [{"max_epochs": 2}, {"max_epochs": -1, "max_steps": 9}], ids=["epochs", "steps"])
def test_a_finished_run_that_is_resumed_takes_no_step(limit, tmp_path):
    def run(**options):
        callback, checkpoint = EffCallback(AVERAGE), ModelCheckpoint(tmp_path, save_last=True)
        trainer = make_trainer(tmp_path, callbacks=[callback, checkpoint], enable_checkpointing=True, **limit)
        return trainer, callback, fit(trainer, make_module(seed=len(options)), **options).state_dict()

    whole, _, expected = run()
    again, callback, found = run(ckpt_path=tmp_path / "last.ckpt")
    assert again.global_step == whole.global_step
    assert callback.session.receipt()["steps"]["applied"] == whole.global_step
    assert again.current_epoch == whole.current_epoch
    assert all(expected[name].equal(found[name]) for name in expected)


def test_a_run_that_early_stopping_ended_stays_ended(tmp_path):
    # Lightning (2.6) trains another epoch before it asks
    def run(**options):
        stop = EarlyStopping("val_loss", patience=1, min_delta=9.0, check_on_train_epoch_end=False)
        callback, checkpoint = EffCallback(AVERAGE), ModelCheckpoint(tmp_path, save_last=True)
        trainer = make_trainer(
            tmp_path, callbacks=[callback, stop, checkpoint], enable_checkpointing=True, max_epochs=9
        )
        fit(trainer, make_module(seed=len(options)), val=True, train=loader(), **options)
        return trainer, callback, everything(trainer, trainer.lightning_module)

    whole, _, expected = run()
    again, callback, found = run(ckpt_path=tmp_path / "last.ckpt")
    assert whole.global_step == again.global_step < 54
    assert all(expected[name].equal(found[name]) for name in expected)
    assert any("EarlyStopping had ended this run" in note for note in callback.session.notes)
