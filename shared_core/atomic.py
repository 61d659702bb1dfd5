"""Files that are either the old one or the new one: written aside, flushed to disk, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from shared_core.errors import CheckpointError, EffError

_MARK = ".eff-tmp-"
_DAY = 86400.0
# torch 2.13: of its stream, or of the file that is not as long as it should be when it is closed
_OF_TORCH_SAVE = ("iostream error", "inline_container")


@contextlib.contextmanager
def atomic_write(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path of the same name; on success it takes `path`'s place, on an exception it disappears.

    It lies in a folder of its own beside `path`: a rename from another filesystem is a copy that destroys the old file
    when interrupted, and a library that writes a temporary file of its own leaves it in there when it is killed.

    Raises:
        CheckpointError: If the folder cannot be written or the disk is full; the old file is untouched.

    Example:
        >>> folder = Path(tempfile.mkdtemp())
        >>> with atomic_write(folder / "a.txt") as temporary:
        ...     _ = temporary.write_text("whole")
        >>> [file.name for file in folder.iterdir()]
        ['a.txt']
    """
    path = Path(path)
    with named_failure(path, "nothing was replaced"), _aside(path.parent) as folder:
        temporary = folder / path.name
        yield temporary
        fsync(temporary)
        _replace(temporary, path)


@contextlib.contextmanager
def atomic_folder(path: Path | str) -> Iterator[Path]:
    """Yield a temporary folder beside `path`, which must not exist or be empty; on success it takes its place.

    A link stays one, and the folder that it leads to is written: a folder cannot take the place of a link.

    Raises:
        CheckpointError: If `path` holds something already or cannot be written.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"write: {path} must not exist or be an empty folder; choose another one")
    make_folder(path.parent)
    with named_failure(path, "nothing was written"), _aside(path.parent) as temporary:
        os.chmod(temporary, 0o755)
        yield temporary
        for inner in (*temporary.rglob("*"), temporary):
            fsync(inner)
        _replace(temporary, path)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a folder for temporary files that disappears at the end.

    Raises:
        CheckpointError: If it cannot be written or the disk is full.
    """
    parent = Path(tempfile.gettempdir())
    with named_failure(parent, "nothing was written"), _aside(parent) as folder:
        yield folder


def folder_aside(parent: Path | str) -> Path:
    """Return a new folder in `parent` that is a stray once this process has ended; strays of others disappear now."""
    clean_strays(parent)
    owner = f"{_host()}-{os.getpid()}-{_started(os.getpid())}-"
    return Path(tempfile.mkdtemp(prefix=_MARK + owner, dir=parent))


@contextlib.contextmanager
def _aside(parent: Path) -> Iterator[Path]:
    folder = folder_aside(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_folder(path: Path | str) -> Path:
    """Make a folder and those above it if need be, and return it.

    Raises:
        CheckpointError: If it cannot be made.
    """
    with named_failure(Path(path), "nothing was written"):
        Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)


def check_writable(target: Path, where: str) -> None:
    """Refuse, before the work, a place in whose nearest existing folder no file can be made.

    Raises:
        CheckpointError: If that is so.
    """
    parent = target.absolute().parent
    while not parent.exists():
        parent = parent.parent
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise CheckpointError(f"{where}: {target} must be writable, got {error}; choose another place") from error


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
        raise CheckpointError(
            f"write: {path} must be writable, got {cause}; {what_became}; make room, or choose another place"
        ) from error


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


def _replace(temporary: Path, path: Path) -> None:
    os.replace(temporary, path)
    with named_failure(path.parent, f"{path.name} is in place, but would not survive a loss of power"):
        fsync(path.parent)


def is_stray(path: Path) -> bool:
    """Return whether a path is, or lies in, what is written aside: never a result."""
    return any(part.startswith(_MARK) for part in path.parts)


def clean_strays(folder: Path | str) -> int:
    """Remove what killed writers left in `folder` and return how many there were; they are never results."""
    strays = [stray for stray in Path(folder).glob(f"{_MARK}*") if not _is_alive(stray)]
    for stray in strays:
        if stray.is_dir():
            shutil.rmtree(stray, ignore_errors=True)
        else:
            stray.unlink(missing_ok=True)
    return len(strays)


def _is_alive(stray: Path) -> bool:
    host, owner, started = [*stray.name.removeprefix(_MARK).split("-"), "", ""][:3]
    if host == _host() and _started(os.getpid()):
        return bool(started) and started == _started(owner)
    try:  # of another machine that shares the folder, or where processes cannot be told apart
        return time.time() - stray.stat().st_mtime < _DAY
    except FileNotFoundError:
        return False


def _host() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _started(process: int | str) -> str:
    """Return when a process started, which tells it from a later one of its number; empty if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
