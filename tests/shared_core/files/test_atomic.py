"""Files and folders that are the old ones or the new ones, never a half of either."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from shared_core.errors import CheckpointError
from shared_core.files.atomic import atomic_folder, atomic_write, clean_strays, folder_aside, is_stray


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
        pytest.raises(CheckpointError, match="already exists and is not an empty folder"),
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


def test_strays_are_those_of_ended_writers_whatever_their_process_numbers(tmp_path):
    alive = folder_aside(tmp_path)
    mark, _, _ = alive.name.rpartition("-")
    ended, foreign, forgotten = tmp_path / f"{mark}-x", tmp_path / ".eff-tmp-0-x", tmp_path / ".eff-tmp-1-x"
    for folder in (ended, foreign, forgotten):
        folder.mkdir()
    os.utime(forgotten, (0, 0))
    os.utime(alive, (0, 0))
    assert clean_strays(tmp_path) == 2
    assert sorted(tmp_path.iterdir()) == sorted([alive, foreign])
    assert is_stray(alive / "a.ckpt")


def test_a_writer_in_another_container_is_alive(tmp_path):
    # its process has a number that means another one here, or none
    code = (
        "import sys, time; from shared_core.files.atomic import atomic_folder\n"
        "with atomic_folder(sys.argv[1]) as folder:\n"
        "    (folder / 'a').write_text('whole'); print('ready', flush=True); sys.stdin.readline()"
    )
    new_namespace = ["unshare", "--pid", "--fork", "--mount-proc"]
    if not shutil.which("unshare") or subprocess.run([*new_namespace, "true"], capture_output=True).returncode:
        new_namespace = []  # not allowed here: another process at least
    with subprocess.Popen(
        [*new_namespace, sys.executable, "-P", "-c", code, str(tmp_path / "out")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as writer:  # fmt: skip
        assert writer.stdout.readline() == "ready\n"
        assert clean_strays(tmp_path) == 0
        writer.communicate("\n")
    assert (tmp_path / "out" / "a").read_text() == "whole"


def test_what_a_killed_writer_left_disappears_at_once(tmp_path):
    if not (child := os.fork()):
        folder_aside(tmp_path)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert clean_strays(tmp_path) == 1
    assert not any(tmp_path.iterdir())
