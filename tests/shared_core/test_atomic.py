"""Files and folders that are the old ones or the new ones, never a half of either."""

import os

import pytest

from shared_core.atomic import atomic_folder, atomic_write, clean_strays, folder_aside, is_stray
from shared_core.errors import CheckpointError


def test_atomic_write_keeps_the_old_file_when_the_writer_fails(tmp_path):
    target = tmp_path / "file"
    target.write_text("old")
    with pytest.raises(RuntimeError, match="midway"), atomic_write(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError("midway")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_atomic_folder_refuses_a_full_folder_and_leaves_nothing_on_failure(tmp_path):
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("whole")
    assert (tmp_path / "out" / "a").read_text() == "whole"
    with (
        pytest.raises(CheckpointError, match="must not exist or be an empty folder"),
        atomic_folder(tmp_path / "out"),
    ):
        pass


@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_is_written_through_a_link(tmp_path, exists):
    if exists:
        (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    with atomic_folder(tmp_path / "link") as folder:
        (folder / "a").write_text("whole")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "a").read_text() == "whole"


def test_strays_are_those_of_ended_processes(tmp_path):
    alive = folder_aside(tmp_path)
    mark, host, process, started, _ = alive.name.rsplit("-", 4)
    # a later process has the number of the one that was killed
    reused = tmp_path / f"{mark}-{host}-{process}-{int(started) - 1}-x"
    foreign, forgotten = tmp_path / f"{mark}-0-{process}-{started}-x", tmp_path / f"{mark}-1-{process}-{started}-x"
    for folder in (reused, foreign, forgotten):
        folder.mkdir()
    os.utime(forgotten, (0, 0))
    assert clean_strays(tmp_path) == 2
    assert sorted(tmp_path.iterdir()) == sorted([alive, foreign])
    assert is_stray(alive / "a.ckpt")
