"""R5: the newest checkpoint is damaged: the run goes on from the newest whole one, and says which and why."""

import random
import shutil

import pytest
import torch
from promise_drivers import difference, run_hf, run_lightning
from promise_table import NUM_STEPS, recipe_of
from pytorch_lightning.callbacks import ModelCheckpoint

from hf_eff._checkpoints import damage, newest_whole
from lightning_eff import _checkpoints as _whole_files
from lightning_eff._services import LightningServices
from shared_core.checkpoint_formats import RUN_KEY, open_ingredient
from shared_core.errors import CheckpointError
from shared_core.files.journal import begin_list, damage_by_list, finish_list

RECIPE = recipe_of("prune")
DAMAGE = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "empty": lambda file: file.write_bytes(b""),
    "zero-filled": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "one bit": lambda file: file.write_bytes(_flipped(file.read_bytes())),
    "missing": lambda file: file.unlink(),
}


def _flipped(content):
    place = len(content) // 2  # among the values, where no reader of the format looks
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.fixture(scope="module")
def hf_run(tmp_path_factory):
    return run_hf(RECIPE, tmp_path_factory.mktemp("hf"), save_every=4)


@pytest.mark.parametrize("how", DAMAGE)
def test_a_folder_is_passed_over_for_any_of_its_files(how, hf_run, tmp_path):
    first, newest = hf_run.checkpoints[4], hf_run.checkpoints[NUM_STEPS]
    states = ("eff_state.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")
    for name in ("model.safetensors", *states):
        run = tmp_path / name
        shutil.copytree(first, run / first.name)
        shutil.copytree(newest, run / newest.name)
        DAMAGE[how](run / newest.name / name)
        found, damaged = newest_whole(run)
        assert found == run / first.name, name
        assert name in damaged[run / newest.name]


def test_a_folder_is_passed_over_for_the_state_of_another_step(hf_run, tmp_path):
    first, newest = hf_run.checkpoints[4], hf_run.checkpoints[NUM_STEPS]
    shutil.copytree(first, tmp_path / first.name)
    other = shutil.copytree(newest, tmp_path / newest.name)
    shutil.copy(first / "eff_state.safetensors", other)
    found, damaged = newest_whole(tmp_path)
    assert found.name == first.name
    assert "another checkpoint" in damaged[other]
    shutil.rmtree(tmp_path / first.name)
    with pytest.raises(CheckpointError, match="another checkpoint"):
        newest_whole(tmp_path)


def test_any_bit_of_a_large_file_is_found(tmp_path):
    chance, content = random.Random(0), random.Random(1).randbytes(10 * 2**20)
    begin_list(tmp_path)
    (tmp_path / "shard").mkdir()
    file = tmp_path / "shard" / "model.safetensors"
    file.write_bytes(content)
    finish_list(tmp_path)
    assert damage_by_list(tmp_path) is None
    for place in (chance.randrange(len(content)) for _ in range(60)):
        with file.open("r+b") as opened:
            for value in (content[place] ^ 1 << chance.randrange(8), content[place]):
                opened.seek(place)
                opened.write(bytes([value]))
                opened.flush()
                assert (damage_by_list(tmp_path) is None) == (value == content[place]), place


def test_a_folder_that_was_not_finished_is_no_ingredient_of_a_soup(hf_run, tmp_path):
    folder = shutil.copytree(hf_run.checkpoints[4], tmp_path / "checkpoint-4")
    open_ingredient(folder).close()
    begin_list(folder)
    assert damage(folder) == "it was not saved completely"
    with pytest.raises(CheckpointError, match="is incomplete"):
        open_ingredient(folder)


def test_a_file_of_lightning_is_checked(tmp_path):
    file = tmp_path / "a.ckpt"
    for how, does in DAMAGE.items():
        torch.save({"state_dict": {"w": torch.randn(5000)}}, file)
        assert _whole_files.damage(file) is None
        does(file)
        assert how == "missing" or _whole_files.damage(file) is not None, how


def test_any_bit_of_a_lightning_file_is_found_or_changes_nothing(tmp_path):
    file, chance = tmp_path / "a.ckpt", random.Random(0)
    weight = torch.randn(100)
    torch.save({"state_dict": {"w": weight}}, file)
    content = file.read_bytes()
    for _ in range(300):
        place = chance.randrange(len(content))
        file.write_bytes(content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :])
        assert _whole_files.damage(file) or torch.equal(torch.load(file)["state_dict"]["w"], weight), place


def test_a_damaged_file_does_not_end_a_run_that_makes_a_soup(tmp_path, capsys):
    file = tmp_path / "a.ckpt"
    torch.save({RUN_KEY: {"id": "run", "step": 3, "metrics": {}}}, file)
    services = LightningServices(None, "run")
    assert services._saved_by_this_run(file).step == 3
    DAMAGE["truncated"](file)
    assert services._saved_by_this_run(file) is None
    assert f"checkpoint skipped: {file}" in capsys.readouterr().out


def test_lightning_goes_on_from_the_newest_whole_file(tmp_path, capsys):
    def saver(every):
        return ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=every, save_top_k=-1, save_last=True)

    whole = run_lightning(RECIPE, tmp_path, callbacks=[saver(2)], enable_checkpointing=True)
    last = tmp_path / "last.ckpt"
    DAMAGE["one bit"](last)
    DAMAGE["truncated"](whole.checkpoints[NUM_STEPS])
    again = run_lightning(RECIPE, tmp_path, callbacks=[saver(99)], enable_checkpointing=True, resume="last")
    assert difference(whole.weights, again.weights) is None
    told = capsys.readouterr().out
    assert f"not resumed from {last}: last/data/" in told
    assert "step=6.ckpt instead" in told
    with pytest.raises(CheckpointError, match="it is truncated"):
        DAMAGE["truncated"](whole.checkpoints[4])
        run_lightning(RECIPE, tmp_path / "other", resume=whole.checkpoints[4])
