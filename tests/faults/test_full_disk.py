"""R3: a full disk, or one with errors, at any write: our error, the old version is there, nothing else is left."""

import ctypes
import os

import pytest
from fault_points import ERRORS, SLOW, dice, failing_call, in_child, longest_file
from fault_writers import SIZE, WRITERS, tensors

from shared_core.engine.saving.state_file import save_state
from shared_core.errors import CheckpointError

NAMES = [pytest.param(name, marks=SLOW if name == "plot" else ()) for name in WRITERS if name != "listed folder"]


def files(folder):
    return {file.relative_to(folder) for file in folder.rglob("*")}


def fails(writer, folder):
    """Return whether a write failed, having looked at what it left."""
    try:
        writer.write(folder, 1)
    except CheckpointError as error:
        told = str(error)
    else:
        return False
    assert "cannot write to" in told
    assert writer.version(folder) == 0 or "is written" in told
    assert not any(part.startswith(".") for file in files(folder) for part in file.parts)
    return True


@pytest.fixture
def folders(tmp_path):
    """New folders with the old version of a writer."""

    def made(name):
        numbers = iter(range(1000))
        while True:
            folder = tmp_path / str(next(numbers))
            folder.mkdir()
            WRITERS[name].prepare(folder)
            yield folder

    return made


@pytest.mark.parametrize("sizes", [2, pytest.param(30, marks=SLOW)])
@pytest.mark.parametrize("name", NAMES)
def test_a_write_that_fails(name, sizes, folders):
    writer, chance = WRITERS[name], dice()
    whole, *others = (folder for _, folder in zip(range(sizes + 1), folders(name), strict=False))
    writer.write(whole, 1)
    largest = max(file.stat().st_size for file in whole.rglob("*") if file.is_file())
    for folder in others:
        at = chance.randrange(1, largest)
        with longest_file(at):
            assert fails(writer, folder), at
        writer.write(folder, 1)
        assert (writer.version(folder), files(folder)) == (1, files(whole))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("code", ERRORS, ids=os.strerror)
def test_a_call_that_fails(code, name, folders):
    writer = WRITERS[name]
    for number, folder in enumerate(folders(name), 1):
        with failing_call(number, code) as calls:
            failed = fails(writer, folder)
        if len(calls) < number:
            break
        # an old version's litter, a scratch folder: what may fail without harm
        assert failed or writer.version(folder) == 1, calls[-1]
    assert number > 3


def test_a_real_full_disk(tmp_path):
    """Nothing is patched here: a tmpfs of 48 KiB."""

    def within():
        libc = ctypes.CDLL(None, use_errno=True)
        new_namespace, private = 0x20000, (1 << 18) | (1 << 14)
        if libc.unshare(new_namespace) or libc.mount(b"none", b"/", None, private, None):
            os._exit(77)
        if libc.mount(b"none", os.fsencode(tmp_path), b"tmpfs", 0, b"size=48k"):
            os._exit(77)
        for name in ("state", "ticket", "compressed file", "receipt", "peers", "soup journal", "deployment"):
            folder = tmp_path / name
            folder.mkdir()
            WRITERS[name].prepare(folder)
            failed = fails(WRITERS[name], folder)
            assert failed == (name != "soup journal"), name

    assert SIZE * 4 > 48 * 1024
    code = in_child(within)
    if code == 77:
        pytest.skip("file systems cannot be mounted here")
    assert code == 0


def test_a_session_goes_on_after_a_failed_save(tmp_path):
    state = {"step": 3, **tensors(1)}
    with longest_file(1000), pytest.raises(CheckpointError, match="free disk space"):
        save_state(tmp_path, state)
    assert not list(tmp_path.iterdir())
    assert save_state(tmp_path, state).is_file()
