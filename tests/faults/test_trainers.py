"""R1 to R3 in both trainers: a save is killed, or the disk is full, and the run goes on from a whole checkpoint."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from fault_points import ALL_POINTS, QUICK_POINTS, SLOW, count_moments, dice, killed, longest_file, moments, recorded
from promise_drivers import difference, hf_trainer, run_hf, run_lightning
from promise_table import NUM_STEPS, recipe_of
from pytorch_lightning import Callback
from transformers import TrainerCallback

from hf_eff._checkpoints import clean_run, newest_whole
from lightning_eff import _checkpoints as _whole_files
from shared_core.errors import CheckpointError
from shared_core.files.atomic import clean_strays, is_stray
from shared_core.files.journal import LIST_FILE

POINTS = [QUICK_POINTS, pytest.param(ALL_POINTS, marks=SLOW)]
RECIPE = recipe_of("prune")


def hf_kills(folder, points, chance):
    """Yield the moments of a checkpoint's writing and what is left, in the middle of a training."""
    seen = []

    class Kills(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step != 3:
                return
            trainer.args.save_total_limit = 1
            run = Path(args.output_dir)
            shutil.copytree(run, folder / "before")

            def save():
                trainer._save_checkpoint(trainer.model, None)

            calls, size = count_moments(save, run)
            for number, (how, at) in enumerate(moments(calls, size, points, chance)):
                shutil.rmtree(run)
                shutil.copytree(folder / "before", run)
                elsewhere(number)
                killed(save, how, at, run)
                newest, _ = newest_whole(run)
                assert newest.name in ("checkpoint-2", "checkpoint-3"), (how, at)
                seen.append(newest.name)
                clean_run(run)
                assert not any(is_stray(path) for path in run.rglob("*")), (how, at)
            shutil.rmtree(run)
            shutil.copytree(folder / "before", run)
            trainer.args.save_total_limit = None
            control.should_training_stop = True

    trainer = hf_trainer(RECIPE, folder / "run", save_every=2, callbacks=[Kills()])
    trainer.train()
    return seen


def elsewhere(number):
    tempfile.tempdir = "/dev/shm" if number % 2 and Path("/dev/shm").is_dir() else None


def lightning_kills(folder, points, chance):
    """As `hf_kills`, of a file that is written over."""
    seen, run = [], folder / "run"

    class Kills(Callback):
        def on_train_batch_end(self, trainer, module, *args):
            if trainer.global_step != 3:
                return
            last = run / "last.ckpt"
            trainer.save_checkpoint(last)
            before = last.read_bytes()

            def save():
                module.net.conv.weight.data.fill_(7.0)
                trainer.save_checkpoint(last)

            calls, size = count_moments(save, run)
            for number, (how, at) in enumerate(moments(calls, size, points, chance)):
                last.write_bytes(before)
                elsewhere(number)
                killed(save, how, at, run)
                assert _whole_files.damage(last) is None, (how, at)
                seen.append(bool(torch.load(last)["state_dict"]["net.conv.weight"].max() == 7.0))
                assert not any(path.is_file() for path in run.glob(".*")), (how, at)
                clean_strays(run)
                assert [path.name for path in run.iterdir()] == ["last.ckpt"]
            last.write_bytes(before)  # a save that came to its end holds weights that the receipt denies
            trainer.should_stop = True

    run_lightning(RECIPE, run, callbacks=[Kills()])
    return seen


@pytest.mark.parametrize("points", POINTS)
@pytest.mark.parametrize("kills", [hf_kills, lightning_kills])
def test_a_killed_save_leaves_a_whole_checkpoint(kills, points, tmp_path):
    try:
        seen = kills(tmp_path, points, dice())
    finally:
        tempfile.tempdir = None
    assert len(seen) == points
    assert points < ALL_POINTS or len(set(seen)) == 2


class KilledInASave(TrainerCallback):
    """The third step's save is killed half way, with the process."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            run = Path(args.output_dir)
            calls, _ = count_moments(lambda: self.trainer._save_checkpoint(self.trainer.model, None), run)
            shutil.rmtree(run / "checkpoint-3")
            assert killed(lambda: self.trainer._save_checkpoint(self.trainer.model, None), "call", calls // 2, run)
            assert (run / "checkpoint-3").is_dir()
            raise KeyboardInterrupt


def test_a_restart_after_a_killed_save_goes_on_from_the_last_whole_checkpoint_and_says_so(tmp_path):
    whole, kills = run_hf(RECIPE, tmp_path / "whole"), KilledInASave()
    kills.trainer = hf_trainer(RECIPE, tmp_path / "run", save_every=2, callbacks=[kills])
    with pytest.raises(KeyboardInterrupt):
        kills.trainer.train()
    again = run_hf(RECIPE, tmp_path / "run", resume=True, save_every=2)
    (note,) = [note for note in again.receipt["notes"] if "checkpoint-3" in note]
    assert "not saved completely; resumed from" in note
    assert "checkpoint-2 instead" in note
    assert difference(whole.weights, again.weights) is None


def test_an_older_checkpoint_goes_when_the_new_one_is_on_disk(tmp_path):
    with recorded() as events:
        run_hf(RECIPE, tmp_path, save_every=4, save_total_limit=1)
    new, deleted = tmp_path / f"checkpoint-{NUM_STEPS}", tmp_path / "checkpoint-4"
    listed = max(number for number, event in enumerate(events) if event[-1] == new / LIST_FILE)
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"):
        assert ("fsync", new / name) in events[:listed]
    assert not deleted.exists()
    assert not any(event[0] == "rmdir" and event[1].name == deleted.name for event in events[:listed])


class Full(Callback, TrainerCallback):
    """The disk is full from the fourth step on."""

    def __init__(self):
        self.limit = longest_file(12_000)  # also for what is printed, which goes into a file

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            self.limit.__enter__()

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == 3:
            self.limit.__enter__()


@pytest.mark.parametrize("run", [run_hf, run_lightning])
def test_a_full_disk_is_told_and_the_run_goes_on_from_before(run, tmp_path):
    whole, full = run(RECIPE, tmp_path / "whole"), Full()
    try:
        with pytest.raises(CheckpointError, match="free disk space"):
            run(RECIPE, tmp_path / "run", save_every=2, callbacks=[full])
    finally:
        full.limit.__exit__(None, None, None)
    left = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert left == (["checkpoint-2"] if run is run_hf else ["step=2.ckpt"])
    again = run(RECIPE, tmp_path / "run", resume=tmp_path / "run" / left[0], save_every=2)
    assert difference(whole.weights, again.weights) is None
