"""Files that are either the old one or the new one: written aside, flushed to disk, then renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from shared_core.errors import CheckpointError, EffError

_MARK = ".eff-tmp-"
_DAY = 86400.0
_PRIVATE = 0o600
_locks: dict[Path, int] = {}
"""Descriptors of folders that this process writes."""
# torch 2.13: of its stream, or of the file that is not as long as it should be when it is closed
_OF_TORCH_SAVE = ("iostream error", "inline_container")


@contextlib.contextmanager
def atomic_write(path: Path | str, *, private: bool = False) -> Iterator[Path]:
    """Yield a temporary path of the same name; on success it takes `path`'s place, on an exception it disappears.

    It lies in a folder of its own beside `path`: a rename from another filesystem is a copy that destroys the old file
    when interrupted, and a library that writes a temporary file of its own leaves it in there when it is killed.

    Example:
        >>> folder = Path(tempfile.mkdtemp())
        >>> with atomic_write(folder / "a.txt") as temporary:
        ...     _ = temporary.write_text("whole")
        >>> [file.name for file in folder.iterdir()]
        ['a.txt']
    """
    path = Path(os.path.realpath(path))  # what a link leads to is written
    with named_failure(path, "nothing was replaced"), _aside(path.parent) as folder:
        # The mode of a new file: what is written aside may have been made by a library with another one.
        temporary, mode = folder / path.name, _mode_of_new_file(folder)
        yield temporary
        temporary.chmod(_PRIVATE if private else mode)
        # On disk before it is renamed: a rename alone may survive a loss of power with an empty file.
        fsync(temporary)
        _replace(temporary, path, keeps_mode=not private)


@contextlib.contextmanager
def atomic_folder(path: Path | str) -> Iterator[Path]:
    """Yield a temporary folder beside `path`, which must be free (`is_free`); on success it takes its place.

    A link stays one, and the folder that it leads to is written: a folder cannot take the place of a link.
    """
    path = Path(os.path.realpath(path))
    if not is_free(path):
        raise CheckpointError("write", f"{path} must not exist or be an empty folder", "choose another one")
    make_folder(path.parent)
    with named_failure(path, "nothing was written"), _aside(path.parent) as folder:
        temporary, mode = folder / path.name, _mode_of_new_file(folder)
        temporary.mkdir()
        yield temporary
        # Contents first, then the folder that lists them.
        for inner in (*temporary.rglob("*"), temporary):
            if inner.is_file():
                inner.chmod(mode)
            fsync(inner)
        old = folder / "old"
        if path.exists() and any(path.iterdir()):
            os.replace(path, old)
        try:
            _replace(temporary, path)
        except BaseException:
            if old.exists() and not path.exists():
                os.replace(old, path)
            raise


_replaceable: set[Path] = set()
"""Files and folders that a user allows to replace."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[None]:
    """Allow that what lies at `path` is replaced while the block runs."""
    real = Path(os.path.realpath(path))
    _replaceable.add(real)
    try:
        yield
    finally:
        _replaceable.discard(real)


def is_free(path: Path) -> bool:
    """Return True if nothing lies at `path`, or an empty folder, or what `replacing` allows to replace."""
    is_new = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    return is_new or Path(os.path.realpath(path)) in _replaceable


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a folder for temporary files that disappears at the end."""
    parent = Path(tempfile.gettempdir())
    with named_failure(parent, "nothing was written"), _aside(parent) as folder:
        yield folder


def folder_aside(parent: Path | str) -> Path:
    """Return a new folder in `parent` that is a stray once this process has ended; strays of others disappear now.

    The process holds a lock on the folder, which the kernel releases when it ends: so it is known as alive from another
    container too, where its number says nothing.
    """
    clean_strays(parent)
    while True:
        # The kernel's name is in the folder's: locks tell only of processes under the same one.
        folder = Path(tempfile.mkdtemp(prefix=f"{_MARK}{_kernel()}-", dir=parent))
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # somebody took it for a stray before it was locked
            continue
        with contextlib.suppress(OSError):  # a file system without locks: see `_is_alive`
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # It may have been removed between open and lock: then another try.
        if os.fstat(descriptor).st_nlink and folder.exists():
            _locks[folder] = descriptor
            return folder
        os.close(descriptor)


@contextlib.contextmanager
def _aside(parent: Path) -> Iterator[Path]:
    folder = folder_aside(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(_locks.pop(folder))


def make_folder(path: Path | str) -> Path:
    """Make a folder and those above it if need be, and return it."""
    with named_failure(Path(path), "nothing was written"):
        Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)


def check_writable(target: Path, where: str) -> None:
    """Refuse, before the work, a place in whose nearest existing folder no file can be made."""
    parent = target.absolute().parent
    while not parent.exists():
        parent = parent.parent
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise CheckpointError(where, f"{target} must be writable, got {error}", "choose another place") from error


@contextlib.contextmanager
def named_failure(path: Path, what_became: str) -> Iterator[None]:
    """Turn a failure to write below a path, whichever library tells it, into a `CheckpointError`."""
    try:
        yield
    except EffError:
        raise
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(text in str(error) for text in _OF_TORCH_SAVE):
            raise
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        remedy = f"{what_became}; make room, or choose another place"
        raise CheckpointError("write", f"{path} must be writable, got {cause}", remedy) from error


def fsync(path: Path) -> None:
    """Return when a file, or what a folder lists, is on disk; some file systems cannot tell that of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def _mode_of_new_file(folder: Path) -> int:
    """Return the mode that the umask gives a file: safetensors (0.8) writes what its owner alone can read."""
    probe = folder / ".mode"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    return mode


def _replace(temporary: Path, path: Path, *, keeps_mode: bool = True) -> None:
    if keeps_mode and path.exists():
        # A file that is replaced keeps its permissions.
        os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
    os.replace(temporary, path)
    with named_failure(path.parent, f"{path.name} is in place, but would not survive a loss of power"):
        fsync(path.parent)


def is_stray(path: Path) -> bool:
    """Return True if a path is, or lies in, what is written aside: never a result."""
    return any(part.startswith(_MARK) for part in path.parts)


def clean_strays(folder: Path | str) -> int:
    """Remove what killed writers left in `folder` and return how many there were; they are never results."""
    return sum(map(_removed, Path(folder).glob(f"{_MARK}*")))


def _removed(stray: Path) -> bool:
    """Remove a stray unless its writer may be alive; return whether it was removed."""
    try:
        descriptor = os.open(stray, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if _is_alive(stray, descriptor):
            return False
        shutil.rmtree(stray, ignore_errors=True) if stray.is_dir() else stray.unlink(missing_ok=True)
        return True
    finally:
        os.close(descriptor)


def _is_alive(stray: Path, descriptor: int) -> bool:
    """Return True if a stray's writer may be alive; if not, hold its lock, so that no writer takes the folder now."""
    try:
        # Locked by a living writer: the lock is refused. Free: its writer is gone.
        if stray.name.removeprefix(_MARK).split("-")[0] == _kernel():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        pass
    # of another machine that shares the folder, or of this one before it was started again
    return time.time() - os.fstat(descriptor).st_mtime < _DAY


@functools.cache
def _kernel() -> str:
    """Return a name for the running kernel, within which locks of files hold: containers share it, machines do not."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    except OSError:
        return f"{uuid.getnode():x}"
