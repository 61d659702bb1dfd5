"""R1: a writer killed at any moment leaves the old version or the new one, and nothing that the next start keeps."""

import tempfile
from pathlib import Path

import pytest
from fault_points import ALL_POINTS, QUICK_POINTS, SLOW, count_moments, dice, killed, moments
from fault_writers import WRITERS, OnlyNew

from shared_core.files.atomic import clean_strays, is_stray

POINTS = [QUICK_POINTS, pytest.param(ALL_POINTS, marks=SLOW)]


def files(folder):
    return {file.relative_to(folder) for file in folder.rglob("*")}


@pytest.mark.parametrize("points", POINTS)
@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW if name == "plot" else ()) for name in WRITERS])
def test_a_killed_writer_leaves_old_or_new(name, points, tmp_path, monkeypatch):
    writer, chance = WRITERS[name], dice()
    whole = tmp_path / "whole"
    whole.mkdir()
    writer.prepare(whole)
    calls, size = count_moments(lambda: writer.write(whole, 1), whole)
    assert writer.version(whole) == 1
    seen, deaths = set(), 0
    for number, (how, at) in enumerate(moments(calls, size, points, chance)):
        folder = tmp_path / str(number)
        folder.mkdir()
        # what libraries write aside may lie on another filesystem, where a rename is a copy
        monkeypatch.setattr(tempfile, "tempdir", "/dev/shm" if number % 2 and Path("/dev/shm").is_dir() else None)
        writer.prepare(folder)
        deaths += killed(lambda folder=folder: writer.write(folder, 1), how, at, folder)
        # nothing that `runs/*` or a search for "*.ckpt" takes for a result
        assert all(file.is_dir() for file in folder.iterdir() if is_stray(file)), (how, at)
        seen.add(writer.version(folder))
        if writer.version(folder) == 0 or not isinstance(writer, OnlyNew):
            writer.write(folder, 1)
        else:
            clean_strays(folder)
        assert files(folder) == files(whole), (how, at)
        assert writer.version(folder) == 1
    assert deaths >= points // 2
    assert points < ALL_POINTS or seen == {0, 1}
