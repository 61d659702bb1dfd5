"""Files that are either the old one or the new one: written aside, flushed to disk, then renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shared_core.errors import CheckpointError

_MARK = ".eff-tmp-"


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_write(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it takes `path`'s place, on an exception it disappears.

    It lies in the same folder, because a rename from another filesystem is a copy that destroys the old file when
    interrupted.

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
    temporary = path.with_name(f"{_MARK}{os.getpid()}-{path.name}")
    try:
        yield temporary
        _fsync(temporary)
        os.replace(temporary, path)
        _fsync(path.parent)
    except OSError as error:
        raise CheckpointError(f"write: {path} must be writable, got {error}; nothing was replaced") from error
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path | str) -> Iterator[Path]:
    """Yield a temporary folder beside `path`, which must not exist or be empty; on success it takes its place.

    Raises:
        CheckpointError: If `path` holds something already or cannot be written.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"write: {path} must not exist or be an empty folder; choose another one")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=_MARK, dir=path.parent))
    except OSError as error:
        raise CheckpointError(f"write: {path.parent} must be writable, got {error}") from error
    try:
        os.chmod(temporary, 0o755)
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                _fsync(file)
        os.replace(temporary, path)
        _fsync(path.parent)
    except OSError as error:
        raise CheckpointError(f"write: {path} must be writable, got {error}; nothing was written") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def clean_strays(folder: Path | str) -> int:
    """Remove what a killed writer left in `folder` and return how many there were; they are never results."""
    strays = [stray for stray in Path(folder).glob(f"{_MARK}*") if not _is_alive(stray)]
    for stray in strays:
        if stray.is_dir():
            shutil.rmtree(stray, ignore_errors=True)
        else:
            stray.unlink(missing_ok=True)
    return len(strays)


def _is_alive(stray: Path) -> bool:
    owner = stray.name.removeprefix(_MARK).split("-", 1)[0]
    return owner.isdigit() and Path(f"/proc/{owner}").exists()
