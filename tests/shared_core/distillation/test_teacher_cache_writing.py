"""Writing a cache, by one process or several: stopped, gone on with, damaged, hostile; its mass and its rounding."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
from cached_teacher import SETTINGS, Teacher, batches, contents
from safetensors.torch import load_file, save_file
from together import together
from torch import nn

from shared_core.distillation.teacher_cache import Manifest, TeacherCache, top_k_targets, write_teacher_cache
from shared_core.distillation.teacher_cache.format import MANIFEST_FILE, Index, shard_name, write_index
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, EffError, TrainingError


@pytest.fixture
def whole(tmp_path):
    write_teacher_cache(Teacher(), batches(), tmp_path / "whole", **SETTINGS)
    return tmp_path / "whole"


class Killed(BaseException):
    """What no handler takes."""


@pytest.mark.parametrize("how", ["before", "after"])
def test_stopped_at_any_rename_and_gone_on_with_it_is_the_same_to_the_bit(tmp_path, whole, monkeypatch, how):
    rename, files = os.replace, len(contents(whole))
    assert files > 6
    for stop_at in range(1, files + 2):  # the manifest is written twice
        folder, done = tmp_path / f"{how}{stop_at}", []

        def stopping(source, target, done=done, stop_at=stop_at):
            done.append(target)
            if how == "after" or len(done) < stop_at:
                rename(source, target)
            if len(done) == stop_at:
                raise Killed

        monkeypatch.setattr(os, "replace", stopping)
        with pytest.raises(Killed):
            write_teacher_cache(Teacher(), batches(), folder, **SETTINGS)
        monkeypatch.setattr(os, "replace", rename)
        if how == "before" or stop_at < files + 1:
            with pytest.raises(CheckpointError, match=r"interrupted|eff cache-teacher"):
                TeacherCache.open(folder)
        teacher = Teacher()
        write_teacher_cache(teacher, batches(), folder, **SETTINGS, resume=True)
        assert contents(folder) == contents(whole)
        if stop_at > 5:
            assert teacher.calls < 12  # what was there was not asked again


def test_going_on_with_a_finished_one_asks_nothing_and_new_examples_are_added(tmp_path, whole):
    before, teacher = contents(whole), Teacher()
    old = TeacherCache.open(whole)
    write_teacher_cache(teacher, batches(), whole, **SETTINGS, resume=True)
    assert teacher.calls == 0
    assert contents(whole) == before
    more = [{"input_ids": torch.tensor([[30, 31], [32, 33]])}]
    manifest = write_teacher_cache(teacher, more, whole, **SETTINGS, resume=True)
    assert manifest.examples == len(old) + 2
    cache = TeacherCache.open(whole)
    assert cache.lookup(more[0]).mask.all()
    assert sum(name.startswith("index") for name in contents(whole)) == 1
    # one that was opened before reads on
    assert old.missing(more[0]).all()
    for batch in batches():
        assert torch.equal(old.lookup(batch).log_probs, cache.lookup(batch).log_probs)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"temperature": 3.0}, "temperature must be 2.0, .* got 3.0"),
        ({"top_k": 4}, "top_k must be 3, .* got 4"),
        ({"dtype": "float32"}, "dtype must be"),
        ({"fields": ["attention_mask"]}, "fields must be"),
        ({"fingerprints": {"tokenizer": "x"}}, "tokenizer must be"),
        ({"fingerprints": {"template": "x"}}, "template must be"),
        ({"vocabulary": 19}, "vocabulary must be"),
        ({"labeled": True}, "labeled must be"),
    ],
)
def test_going_on_with_other_settings_is_refused(whole, changed, match):
    before = contents(whole)
    with pytest.raises(CheckpointError, match=match):
        write_teacher_cache(Teacher(), batches(), whole, **{**SETTINGS, **changed}, resume=True)
    with pytest.raises(CheckpointError, match="teacher must be"):
        write_teacher_cache(Teacher(seed=1), batches(), whole, **SETTINGS, resume=True)
    assert contents(whole) == before


def test_a_folder_that_holds_something_is_left_alone(tmp_path, whole):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    for resume in (False, True):
        with pytest.raises(CheckpointError, match=r"new or empty folder|hold a cache"):
            write_teacher_cache(Teacher(), batches(), tmp_path / "full", resume=resume)
    with pytest.raises(CheckpointError, match="new or empty"):
        write_teacher_cache(Teacher(), batches(), whole)
    assert (tmp_path / "full" / "thesis.tex").read_text() == "x"


def test_two_writers_do_not_meet(tmp_path):
    def asking():
        yield batches()[0]
        with pytest.raises(TrainingError, match="another process writes"):
            write_teacher_cache(Teacher(), batches(), tmp_path / "c", resume=True)

    assert write_teacher_cache(Teacher(), asking(), tmp_path / "c").complete


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k must be a whole number from 1"),
        ({"dtype": "int8"}, "dtype must be float16 or float32"),
        ({"fields": "input_ids"}, "fields must be a list"),
        ({"vocabulary": 21}, "at most the teacher's 20 classes, got 21"),
        ({"shard_bytes": 0}, "shard_bytes"),
        ({"fingerprints": {"x": "y"}}, "fingerprints must be of"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(tmp_path, arguments, match):
    with pytest.raises(ConfigError, match=match):
        write_teacher_cache(Teacher(), batches(), tmp_path / "c", **arguments)
    assert not (tmp_path / "c").exists() or not contents(tmp_path / "c")


def test_no_examples_no_tensors_and_no_classes_are_refused(tmp_path):
    for name, data, match in [
        ("a", [], "at least one example"),
        ("b", [{"text": "x"}], "tensors"),
        ("c", [torch.randn(3, 1)], "two classes at least"),
        ("d", [torch.randn(2, 3, 4, 5)], "must have shape"),
        ("e", [torch.randn(2, 5), torch.randn(2, 6)], "must have 5 classes"),
    ]:
        with pytest.raises(ConfigError, match=match):
            write_teacher_cache(nn.Identity(), data, tmp_path / name)


def test_the_discarded_mass_is_that_of_a_float64_sum(tmp_path):
    # sharp rows, whose tail is far below float32's epsilon beside 1, and flat ones
    logits = torch.randn(300, 100, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1.7, 300)[:, None]
    manifest = write_teacher_cache(nn.Identity(), logits.split(64), tmp_path / "c", temperature=1.5, top_k=9)
    p = torch.softmax(logits.double() / 1.5, -1).sort(descending=True).values
    tails = p[:, 9:].sum(-1)
    assert manifest.tail_mass_mean == pytest.approx(tails.mean().item(), rel=1e-6)
    assert manifest.tail_mass_max == pytest.approx(tails.max().item(), rel=1e-6)
    stored = top_k_targets(logits, temperature=1.5, top_k=9).tail_log_mass.double()
    assert tails.min() < 1e-12
    assert torch.allclose(stored, tails.log(), atol=1e-5)


def test_float16_keeps_its_bound_and_sums_to_one(tmp_path):
    logits = torch.randn(500, 60, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 2, 500)[:, None]
    write_teacher_cache(nn.Identity(), [logits], tmp_path / "c", temperature=2.0, top_k=20)
    targets = TeacherCache.open(tmp_path / "c").lookup(logits)
    log_p = torch.log_softmax(logits.double() / 2, -1)
    entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
    want = log_p.gather(-1, targets.indices)
    error = (targets.log_probs.double() - want).abs()
    assert (error <= 2**-11 * (want.abs() + entropy) + 1e-6).all()
    assert error.max() > 2**-11  # float16 it is
    total = targets.log_probs.double().exp().sum(-1) + targets.tail_mass.double()
    assert torch.allclose(total, torch.ones(500, dtype=torch.float64), atol=1e-6)


def test_wide_and_narrow_vocabularies(tmp_path):
    for classes, dtype in [(2**16, torch.uint16), (2**16 + 1, torch.int32)]:
        logits = torch.zeros(2, classes)
        logits[:, -1], logits[:, 7] = 5.0, 4.0
        folder = tmp_path / str(classes)
        write_teacher_cache(nn.Identity(), [logits], folder, top_k=2)
        assert load_file(folder / "shard-000000.safetensors")["indices"].dtype == dtype
        assert TeacherCache.open(folder).lookup(logits).indices.tolist() == [[classes - 1, 7]] * 2


def test_keys_that_share_their_first_half_are_told_apart(tmp_path):
    class Twins:
        keys = np.array([[5, 9], [5, 2], [1, 3], [5, 4]], dtype=np.uint64)

        def __len__(self):
            return 4

    write_index(tmp_path / "index.safetensors", [Twins()])
    index = Index(tmp_path / "index.safetensors")

    def key(high, low):
        return high.to_bytes(8, "big") + low.to_bytes(8, "big")

    asked = [(5, 4), (5, 2), (5, 9), (1, 3), (5, 3), (0, 0), (9, 9)]
    assert index.find([key(*words) for words in asked]) == [(0, 3), (0, 1), (0, 0), (0, 2), None, None, None]


MANIFESTS = [
    ("temperature", "2", "temperature"),
    ("temperature", float("nan"), "temperature"),
    ("temperature", -1, "temperature"),
    ("vocabulary", True, "vocabulary"),
    ("vocabulary", 2**40, "vocabulary"),
    ("top_k", 0, "top_k"),
    ("top_k", 25, "top_k"),
    ("top_k", 2, "complete file"),
    ("dtype", "pickle", "dtype"),
    ("dtype", ["float16"], "dtype"),
    ("fields", [], "fields"),
    ("fields", "input_ids", "fields"),
    ("positions", "../x", "positions"),
    ("fingerprints", {}, "fingerprints"),
    ("shards", [-1], "shards"),
    ("shards", [10**9], "examples"),
    ("shards", None, "shards"),
    ("format", 0, "format"),
    ("format", 99, "newer efftrain"),
    ("examples", 1, "examples"),
    ("complete", 1, "complete"),
    ("complete", False, "interrupted"),
    ("extra", 1, "unknown 'extra'"),
]


@pytest.mark.parametrize(("name", "value", "match"), MANIFESTS)
def test_a_hostile_manifest_is_refused(whole, name, value, match):
    content = json.loads((whole / MANIFEST_FILE).read_text())
    content[name] = value
    (whole / MANIFEST_FILE).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=match):
        TeacherCache.open(whole).lookup(batches()[0])


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"format": 1}', "\x00\xff"])
def test_a_damaged_manifest_is_refused(whole, text):
    (whole / MANIFEST_FILE).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match="complete manifest"):
        Manifest.read(whole)


@pytest.mark.parametrize("name", ["shard-000000.safetensors", "index"])
def test_a_truncated_or_missing_file_is_refused(whole, name):
    file = next(file for file in sorted(whole.iterdir()) if file.name.startswith(name))
    data = file.read_bytes()
    for size in (0, 5, 100, len(data) - 1):
        file.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match="complete file"):
            TeacherCache.open(whole).lookup(batches()[0])
    file.unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        TeacherCache.open(whole).lookup(batches()[0])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("indices", lambda value: value.to(torch.int32).fill_(60000).to(torch.uint16)),
        ("starts", lambda value: value * 1000),
        ("starts", lambda value: -value),
        ("starts", lambda value: value[:-1]),
        ("where", lambda value: value + 1000),
        ("where", lambda value: value * 0 - 1),
        ("lengths", lambda value: value + 1),
        ("log_probs", lambda value: value[:-1]),
        ("log_probs", lambda value: value.float()),
        ("keys", lambda value: value[:, :1].contiguous()),
        ("keys", None),
        ("extra", lambda value: torch.ones(3)),
    ],
)
def test_a_shard_that_lies_is_refused(whole, name, change):
    for file in whole.glob("shard-*"):
        tensors = load_file(file)
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change(tensors.get(name))
        save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"complete file|its keys"):
        TeacherCache.open(whole).lookup(batches()[0])


@pytest.mark.parametrize("name", ["shard", "row"])
def test_an_index_that_lies_is_refused(whole, name):
    file = next(whole.glob("index-*"))
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name] + 1000}, file)
    with pytest.raises(CheckpointError, match=r"no shard|no example"):
        TeacherCache.open(whole).lookup(batches()[0])


def test_a_store_may_be_moved(tmp_path, whole):
    want = TeacherCache.open(whole).lookup(batches()[0])
    shutil.move(whole, tmp_path / "elsewhere")
    got = TeacherCache.open(tmp_path / "elsewhere").lookup(batches()[0])
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def write(folder, data=batches, teacher=Teacher, **options):
    """Return what a process does that writes into this folder, each with a teacher of its own."""
    return lambda job: write_teacher_cache(teacher(), data(), folder, job=job, **{**SETTINGS, **options})


def labeled():
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
    "labels": {"data": labeled, "labeled": True, "causal": True},
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
    assert "shard-000002.safetensors does not hold" in str(error)


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
    assert all(f"must be the same in every process, but the {when}" in str(error) for error in errors)


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
