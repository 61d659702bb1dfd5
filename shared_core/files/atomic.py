"""Atomic file replacement: write to a temporary folder, flush to disk, then rename."""

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
"""Lock descriptors of the temporary folders of this process."""
# torch 2.13: errors of its stream, or of a file that is too short when it is closed
_OF_TORCH_SAVE = ("iostream error", "inline_container")


@contextlib.contextmanager
def atomic_write(path: Path | str, *, private: bool = False) -> Iterator[Path]:
    """Yield a temporary path with the same name. On success it replaces `path`, on an exception it is removed.

    It is in a new folder next to `path`: a rename from another filesystem would be a copy, which destroys the old file
    when interrupted. And temporary files of a killed library stay in that folder.

    Example:
        >>> folder = Path(tempfile.mkdtemp())
        >>> with atomic_write(folder / "a.txt") as temporary:
        ...     _ = temporary.write_text("whole")
        >>> [file.name for file in folder.iterdir()]
        ['a.txt']
    """
    path = Path(os.path.realpath(path))  # write to the target of a link
    with named_failure(path, "nothing was replaced"), _aside(path.parent) as folder:
        # Set the mode of a new file: a library may have created the temporary file with another one.
        temporary, mode = folder / path.name, _mode_of_new_file(folder)
        yield temporary
        temporary.chmod(_PRIVATE if private else mode)
        # Flush before renaming: after a power loss, a rename alone may leave an empty file.
        fsync(temporary)
        _replace(temporary, path, keeps_mode=not private)


@contextlib.contextmanager
def atomic_folder(path: Path | str) -> Iterator[Path]:
    """Yield a temporary folder next to `path`, which must be free (`is_free`). On success it replaces `path`.

    If `path` is a link, its target is written, since a folder cannot replace a link.
    """
    path = Path(os.path.realpath(path))
    if not is_free(path):
        raise CheckpointError("write", f"{path} already exists and is not an empty folder", "choose another one")
    make_folder(path.parent)
    with named_failure(path, "nothing was written"), _aside(path.parent) as folder:
        temporary, mode = folder / path.name, _mode_of_new_file(folder)
        temporary.mkdir()
        yield temporary
        # Flush the contents first, then the folder.
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
"""Files and folders that the user allows to replace."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[None]:
    """Allow replacing `path` while the block runs."""
    real = Path(os.path.realpath(path))
    _replaceable.add(real)
    try:
        yield
    finally:
        _replaceable.discard(real)


def is_free(path: Path) -> bool:
    """Return True if `path` does not exist, is an empty folder, or may be replaced (`replacing`)."""
    is_new = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    return is_new or Path(os.path.realpath(path)) in _replaceable


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a folder for temporary files, which is removed at the end."""
    parent = Path(tempfile.gettempdir())
    with named_failure(parent, "nothing was written"), _aside(parent) as folder:
        yield folder


def folder_aside(parent: Path | str) -> Path:
    """Return a new temporary folder in `parent`, and remove those of processes that have ended.

    The process holds a lock on the folder, which the kernel releases when the process ends. So other containers, where
    its PID means nothing, can also tell if it is alive.
    """
    clean_strays(parent)
    while True:
        # The folder's name contains the kernel's, since locks only work between processes of the same kernel.
        folder = Path(tempfile.mkdtemp(prefix=f"{_MARK}{_kernel()}-", dir=parent))
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # another process removed it as a stray before it was locked
            continue
        with contextlib.suppress(OSError):  # file system without locks, see `_is_alive`
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # It may have been removed between open and lock: then try again.
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
    """Create a folder and its parents if needed, and return it."""
    with named_failure(Path(path), "nothing was written"):
        Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)


def check_writable(target: Path, where: str) -> None:
    """Check before the work that a file can be created in the nearest existing parent folder."""
    parent = target.absolute().parent
    while not parent.exists():
        parent = parent.parent
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise CheckpointError(where, f"cannot write to {target}: {error}", "choose another place") from error


@contextlib.contextmanager
def named_failure(path: Path, what_became: str) -> Iterator[None]:
    """Convert a write error of any library below a path into a `CheckpointError`."""
    try:
        yield
    except EffError:
        raise
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(text in str(error) for text in _OF_TORCH_SAVE):
            raise
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        remedy = f"{what_became}; free disk space, or choose another place"
        raise CheckpointError("write", f"cannot write to {path}: {cause}", remedy) from error


def fsync(path: Path) -> None:
    """Flush a file or folder to disk. Some file systems do not support this for folders."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def _mode_of_new_file(folder: Path) -> int:
    """Return the umask's mode for a new file: safetensors (0.8) writes files that only their owner can read."""
    probe = folder / ".mode"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    return mode


def _replace(temporary: Path, path: Path, *, keeps_mode: bool = True) -> None:
    if keeps_mode and path.exists():
        # Keep the permissions of a replaced file.
        os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
    os.replace(temporary, path)
    with named_failure(path.parent, f"{path.name} is written, but may not survive a power loss"):
        fsync(path.parent)


def is_stray(path: Path) -> bool:
    """Return True if a path is a temporary folder or inside one, so never a result."""
    return any(part.startswith(_MARK) for part in path.parts)


def clean_strays(folder: Path | str) -> int:
    """Remove temporary folders of killed writers from `folder` and return their number."""
    return sum(map(_removed, Path(folder).glob(f"{_MARK}*")))


def _removed(stray: Path) -> bool:
    """Remove a stray unless its writer may be alive. Return True if it was removed."""
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
    """Return True if a stray's writer may be alive. If not, hold its lock so that no writer takes the folder."""
    try:
        # If the writer is alive, it holds the lock and this fails.
        if stray.name.removeprefix(_MARK).split("-")[0] == _kernel():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:  # file system without locks
        pass
    # From another machine that shares the folder, or from this one before a reboot: go by age.
    return time.time() - os.fstat(descriptor).st_mtime < _DAY


@functools.cache
def _kernel() -> str:
    """Return a name for the running kernel, the scope of file locks: containers share it, machines do not."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    except OSError:
        return f"{uuid.getnode():x}"
