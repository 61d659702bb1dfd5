"""Resumable work: a JSON journal with the plan and results so far, and a lock on it.

Also the list of files in a folder that another library writes. It is started first and finished last, so it shows
whether the folder is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from shared_core.errors import CheckpointError, TrainingError, require
from shared_core.files.atomic import atomic_write, clean_strays, fsync, is_stray, make_folder, named_failure
from shared_core.files.json_yaml import parse_json


def read_object(file: Path, advice: str = "remove it") -> dict[str, Any]:
    """Return the object in a JSON file."""
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(file, f"cannot read the file: {error.strerror}", advice) from error
    except ValueError as error:
        raise CheckpointError(file, f"file must be JSON, got {error}", f"it is damaged, {advice}") from error
    if not isinstance(content, dict):
        raise CheckpointError(file, f"file must hold a JSON object, got {type(content).__name__}", advice)
    return content


def write_object(file: Path, values: Mapping[str, Any], *, private: bool = False) -> None:
    """Write a JSON file atomically. Only its owner can read a private one."""
    with atomic_write(file, private=private) as temporary:
        temporary.write_text(json.dumps(values, indent=1), encoding="utf-8")


def check_same(file: Path, known: Mapping[str, Any], plan: Mapping[str, Any], what: str) -> None:
    """Refuse to continue with a journal of different work."""
    odd = next((name for name in sorted({*known, *plan}) if known.get(name) != plan.get(name)), None)
    if odd is not None:
        got = f"its {odd} is {known.get(odd)!r}, now {plan.get(odd)!r}"
        remedy = "give another folder, or the same options"
        raise CheckpointError(file, f"the folder belongs to another {what}: {got}", remedy)


@contextlib.contextmanager
def locked(file: Path, where: str, what: str) -> Iterator[int]:
    """Lock a file and yield its descriptor. A process that inherits the descriptor keeps the lock.

    So killed work cannot be restarted while its training still runs.
    """
    busy = (
        f"{where}: {file.parent} is in use by another {what}, or by a training that a killed one left running; wait "
        "for it, or stop it"
    )
    with named_failure(file, "nothing was written"):
        opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    with exclusive(opened, busy) as descriptor:
        yield descriptor


@contextlib.contextmanager
def exclusive(descriptor: int, busy: str) -> Iterator[int]:
    """Lock an open file exclusively, and close the descriptor at the end.

    The lock is released when the last process with the descriptor ends, even if it is killed.
    """
    try:
        try:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # Windows has no such locks
            pass
        except OSError:
            raise TrainingError(busy) from None
        yield descriptor
    finally:
        os.close(descriptor)


LIST_FILE = "eff_files.json"
_BLOCK = 2**22


def begin_list(folder: Path) -> None:
    """Mark a folder as incomplete, on disk before anything in it changes."""
    clean_strays(make_folder(folder))
    for litter in folder.glob(".tmp??????"):  # from a killed safetensors (0.8)
        litter.unlink()
    write_object(folder / LIST_FILE, {"complete": False})


def finish_list(folder: Path) -> None:
    """Flush a folder to disk, then list every file with its size and checksum.

    One thread computes checksums while another waits for the disk, so they take no extra time.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.name != LIST_FILE and not is_stray(path)]
    files = [path for path in paths if path.is_file()]
    with ThreadPoolExecutor(1) as other:
        checksums = other.map(_checksum, files)
        # Flush folders too: their lists of names must also be on disk.
        for path in (*paths, folder):
            fsync(path)
        listed = {
            file.relative_to(folder).as_posix(): [file.stat().st_size, checksum]
            for file, checksum in zip(files, checksums, strict=True)
        }
    write_object(folder / LIST_FILE, {"complete": True, "files": listed})


def is_unfinished(folder: Path) -> bool:
    """Return True if writing a folder began but did not finish."""
    return (folder / LIST_FILE).exists() and read_object(folder / LIST_FILE).get("complete") is not True


def damage_by_list(folder: Path, replaced: Callable[[str], bool] = lambda name: False) -> str | None:
    """Return how a folder differs from its list of files; None if it matches or has no list."""
    if is_unfinished(folder):
        return "it was not saved completely"
    known = read_object(folder / LIST_FILE) if (folder / LIST_FILE).exists() else {}
    files = known.get("files", {})
    if not isinstance(files, dict):
        return f"{LIST_FILE} is damaged"
    for name, expected in files.items():
        file = folder / name
        # Bound the length that an error may quote: the list is not trusted.
        if len(name) > 1000 or not file.is_file():
            if replaced(name):
                continue
            return f"{name} is missing"
        if [file.stat().st_size, _checksum(file)] != expected:
            return (
                f"{name} is damaged or from another checkpoint: its size or checksum differs from {LIST_FILE}. Remove "
                "that list if you changed the file on purpose"
            )
    return None


def _checksum(file: Path) -> str:
    """Return the 64-bit XXH3 hash of a whole file: at 10 GB/s, reading the file is the bottleneck."""
    digest, block = xxhash.xxh3_64(), bytearray(_BLOCK)
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(block):
            digest.update(memoryview(block)[:count])
    return digest.hexdigest()


class Journal:
    """A JSON file in the work's folder, readable only by its owner, with the plan and recorded results."""

    def __init__(self, file: Path, where: str, what: str, plan: Mapping[str, Any], own: str) -> None:
        self.file, self._where, self._what, self._own = file, where, what, own
        # Round trip through JSON: a tuple would differ from the list in the file.
        self._plan = json.loads(json.dumps({"format": 1, **plan}))

    def read(self, *noted: str) -> dict[str, Any]:
        """Return the values recorded under these names, empty in a new folder."""
        folder = self.file.parent
        if self.file.exists():
            known = read_object(self.file)
            found = {name: known.pop(name, None) for name in noted}
            check_same(self.file, known, self._plan, self._what)
            return found
        is_file = folder.exists() and not folder.is_dir()
        require(not is_file, self._where, f"out must be a folder, got the file {folder}", error=CheckpointError)
        odd = min((path.name for path in folder.glob(self._own)), default=None)
        rule = f"out must be a new folder or hold a {self._what}, but {folder} has {odd!r} and no {self.file.name}"
        require(odd is None, self._where, rule, "give another folder", CheckpointError)
        return {}

    def write(self, **noted: Any) -> None:
        """Write the plan and the given results."""
        write_object(self.file, {**self._plan, **noted}, private=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Create and lock the folder, and yield the lock's descriptor. Runs that inherit it keep the lock."""
        clean_strays(make_folder(self.file.parent))
        with locked(self.file.with_name(f".{self.file.stem}.lock"), self._where, self._what) as descriptor:
            yield descriptor
