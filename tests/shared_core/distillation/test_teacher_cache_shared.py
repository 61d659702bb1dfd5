"""A teacher's cache written by several processes: the files of one, stopped and gone on with, and what is refused."""

import shutil

import pytest
import torch
from cached_teacher import SETTINGS, Teacher, batches, contents
from together import together
from torch import nn

from shared_core.distillation.teacher_cache import write_teacher_cache
from shared_core.distillation.teacher_cache.format import shard_name
from shared_core.errors import CheckpointError, CompatibilityError, EffError, TrainingError


def write(folder, data=batches, teacher=Teacher, **options):
    """Return what a process does that writes into this folder, each with a teacher of its own."""
    return lambda job: write_teacher_cache(teacher(), data(), folder, job=job, **{**SETTINGS, **options})


def labelled():
    made = [{"input_ids": batch["input_ids"] + 5 * number} for number, batch in enumerate(batches(7))]
    return [{**batch, "labels": torch.where(batch["input_ids"] % 5 > 2, 1, -100)} for batch in made]


def pairs():
    return list(torch.randn(64, 6, generator=torch.Generator().manual_seed(1)).split(4))


def classifier():
    net = nn.Linear(6, 5)  # not by the global seed, which threads share
    net.weight.data = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    net.bias.data.zero_()
    return net


CASES = {
    "positions": {},
    "labels": {"data": labelled, "labelled": True, "causal": True},
    "examples": {"data": pairs, "teacher": classifier, "dtype": "float32"},
    "one shard": {"shard_bytes": 2**20},
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_files_are_those_of_one_process(tmp_path, case, size):
    options = CASES[case]
    (one,) = together(write(tmp_path / "one", **options), 1)
    made = together(write(tmp_path / "many", **options), size)
    assert made == [one] * size
    assert contents(tmp_path / "many") == contents(tmp_path / "one")
    assert (case == "one shard") == (len(one.shards) == 1)


def test_each_process_runs_the_teacher_for_its_own_shards_only(tmp_path):
    teachers = [Teacher(), Teacher(), Teacher()]
    write_teacher_cache(teachers[2], batches(), tmp_path / "one", **SETTINGS)
    together(lambda job: write_teacher_cache(teachers[job.rank], batches(), tmp_path / "two", job=job, **SETTINGS))
    # the first batch tells all of them how large a row is
    assert teachers[0].calls + teachers[1].calls in (teachers[2].calls, teachers[2].calls + 1)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("left", [[0, 2], [0, 1, 3], [1], []])
def test_stopped_with_some_shards_and_gone_on_with_the_bytes_are_the_same(tmp_path, left, size):
    (one,) = together(write(tmp_path / "one"), 1)
    assert len(one.shards) > 4
    # as a killed writer leaves it: a manifest that says that more is to come, and shards with a gap
    folder = tmp_path / "stopped"
    stopped = together(write(folder, data=_killed_after_the_first_batch), 1)
    assert isinstance(stopped[0], KeyboardInterrupt)
    for number in left:
        shutil.copy(tmp_path / "one" / shard_name(number), folder)
    teachers = [Teacher() for _ in range(size)]
    made = together(
        lambda job: write_teacher_cache(teachers[job.rank], batches(), folder, job=job, resume=True, **SETTINGS), size
    )
    assert made == [one] * size
    assert contents(folder) == contents(tmp_path / "one")
    whole = Teacher()
    write_teacher_cache(whole, batches(), tmp_path / "again", **SETTINGS)
    if left:
        assert sum(teacher.calls for teacher in teachers) < whole.calls


def _killed_after_the_first_batch():
    yield batches()[0]
    raise KeyboardInterrupt


def test_a_shard_beyond_a_gap_must_hold_what_comes_next(tmp_path):
    folder = tmp_path / "stopped"
    together(write(tmp_path / "one"), 1)
    together(write(folder, data=_killed_after_the_first_batch), 1)
    shutil.copy(tmp_path / "one" / shard_name(3), folder / shard_name(2))
    (error,) = together(write(folder, resume=True), 1)
    assert isinstance(error, CheckpointError)
    assert "shard-000002.safetensors must hold the examples that come next, got others; remove it" in str(error)


@pytest.mark.parametrize(("when", "first"), [("first batch", 0), ("end", 1)])
def test_other_data_in_another_process_is_an_error_of_all(tmp_path, when, first):
    def work(job):
        data = batches()
        if job.rank:
            data[first:] = batches(seed=job.rank)[first:]
        return write_teacher_cache(Teacher(), data, tmp_path / "c", job=job, **SETTINGS)

    errors = together(work)
    assert any(isinstance(error, TrainingError) for error in errors)
    assert all(isinstance(error, EffError) for error in errors)
    assert all(f"must be the same in every process, got others by the {when}" in str(error) for error in errors)


def test_another_teacher_in_another_process_is_an_error_of_all(tmp_path):
    errors = together(lambda job: write_teacher_cache(Teacher(job.rank), batches(), tmp_path / "c", job=job))
    assert all("must be the same in every process" in str(error) for error in errors)


class Free(nn.Module):
    """Has three outputs an example, which follow no input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6))

    def forward(self, x):
        return (x @ self.weight).view(len(x), 3, 2)


def test_outputs_of_a_number_that_only_the_teacher_knows_need_one_process(tmp_path):
    (made,) = together(write(tmp_path / "one", data=pairs, teacher=Free), 1)
    assert made.rows == 192
    errors = together(write(tmp_path / "two", data=pairs, teacher=Free))
    assert any(isinstance(error, CompatibilityError) for error in errors)
    assert all("write the cache in one process" in str(error) for error in errors)


def test_a_folder_that_holds_something_is_refused_by_all(tmp_path):
    (tmp_path / "mine.txt").write_text("")
    errors = together(write(tmp_path))
    assert all("must be a new or empty folder" in str(error) for error in errors)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
