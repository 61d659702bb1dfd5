"""Work that goes on where it was stopped: its journal, a JSON file with what is planned and known, and who works on it.

The list of files in a folder that another library writes: begun first, finished last, it tells if all are there.
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
        raise CheckpointError(file, f"file must be readable, got {error.strerror}", advice) from error
    except ValueError as error:
        raise CheckpointError(file, f"file must be JSON, got {error}", f"it is damaged, {advice}") from error
    if not isinstance(content, dict):
        raise CheckpointError(file, f"file must hold a JSON object, got {type(content).__name__}", advice)
    return content


def write_object(file: Path, values: Mapping[str, Any], *, private: bool = False) -> None:
    """Write a JSON file, whole or not at all; a private one can be read by its owner alone."""
    with atomic_write(file, private=private) as temporary:
        temporary.write_text(json.dumps(values, indent=1), encoding="utf-8")


def check_same(file: Path, known: Mapping[str, Any], plan: Mapping[str, Any], what: str) -> None:
    """Refuse to go on with a journal of other work."""
    odd = next((name for name in sorted({*known, *plan}) if known.get(name) != plan.get(name)), None)
    if odd is not None:
        got = f"that of one whose {odd} is {known.get(odd)!r}, now {plan.get(odd)!r}"
        remedy = "give another folder, or the same options"
        raise CheckpointError(file, f"folder must be of this {what}, got {got}", remedy)


@contextlib.contextmanager
def locked(file: Path, where: str, what: str) -> Iterator[int]:
    """Keep others out, and yield the file descriptor that does: a process that inherits it keeps them out too.

    So work that is killed cannot be started again while its training still runs.
    """
    busy = (
        f"{where}: {file.parent} must be free, but a {what}, or a training that a killed one left behind, is working "
        "on it; wait for it, or stop it"
    )
    with named_failure(file, "nothing was written"):
        opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    with exclusive(opened, busy) as descriptor:
        yield descriptor


@contextlib.contextmanager
def exclusive(descriptor: int, busy: str) -> Iterator[int]:
    """Keep others out of what a file descriptor is open on, and close it at the end.

    The lock goes with the last process that has the descriptor, killed or not.
    """
    try:
        try:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # no such locks on Windows
            pass
        except OSError:
            raise TrainingError(busy) from None
        yield descriptor
    finally:
        os.close(descriptor)


LIST_FILE = "eff_files.json"
_BLOCK = 2**22


def begin_list(folder: Path) -> None:
    """Say that a folder is being written, on disk before anything in it changes."""
    clean_strays(make_folder(folder))
    for litter in folder.glob(".tmp??????"):  # of safetensors (0.8), killed
        litter.unlink()
    write_object(folder / LIST_FILE, {"complete": False})


def finish_list(folder: Path) -> None:
    """Bring a folder to disk, then list every file in it with its size and the checksum of all its bytes.

    A checksum is computed by one thread while another waits for the disk, so that it costs no time of its own.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.name != LIST_FILE and not is_stray(path)]
    files = [path for path in paths if path.is_file()]
    # Hashes of files in another thread, while this one waits for the disk.
    with ThreadPoolExecutor(1) as other:
        checksums = other.map(_checksum, files)
        # Files and folders: a folder's own list of names must be on disk too.
        for path in (*paths, folder):
            fsync(path)
        listed = {
            file.relative_to(folder).as_posix(): [file.stat().st_size, checksum]
            for file, checksum in zip(files, checksums, strict=True)
        }
    write_object(folder / LIST_FILE, {"complete": True, "files": listed})


def is_unfinished(folder: Path) -> bool:
    """Return True if what began to write a folder did not come to its end."""
    return (folder / LIST_FILE).exists() and read_object(folder / LIST_FILE).get("complete") is not True


def damage_by_list(folder: Path, replaced: Callable[[str], bool] = lambda name: False) -> str | None:
    """Return what a folder lacks of its list, None if nothing, or if it has none."""
    if is_unfinished(folder):
        return "it was not saved completely"
    known = read_object(folder / LIST_FILE) if (folder / LIST_FILE).exists() else {}
    files = known.get("files", {})
    if not isinstance(files, dict):
        return f"{LIST_FILE} is damaged"
    for name, expected in files.items():
        file = folder / name
        # The length bounds what an error may quote; a list is not trusted.
        if len(name) > 1000 or not file.is_file():
            if replaced(name):
                continue
            return f"{name} is missing"
        if [file.stat().st_size, _checksum(file)] != expected:
            return (
                f"{name} is damaged or of another checkpoint: size or checksum are not those in {LIST_FILE}, which "
                "must be removed if the change was meant"
            )
    return None


def _checksum(file: Path) -> str:
    """Return the XXH3 hash, 64 bits, of a whole file: 10 GB/s, so that reading the file is what takes time."""
    digest, block = xxhash.xxh3_64(), bytearray(_BLOCK)
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(block):
            digest.update(memoryview(block)[:count])
    return digest.hexdigest()


class Journal:
    """A JSON file of the folder, which its owner alone can read: it holds the plan, and what is noted beside it."""

    def __init__(self, file: Path, where: str, what: str, plan: Mapping[str, Any], own: str) -> None:
        self.file, self._where, self._what, self._own = file, where, what, own
        # Through JSON and back: a tuple compares unequal to the list that the file holds.
        self._plan = json.loads(json.dumps({"format": 1, **plan}))

    def read(self, *noted: str) -> dict[str, Any]:
        """Return what was noted under these names, nothing in a new folder."""
        folder = self.file.parent
        if self.file.exists():
            known = read_object(self.file)
            found = {name: known.pop(name, None) for name in noted}
            check_same(self.file, known, self._plan, self._what)
            return found
        is_file = folder.exists() and not folder.is_dir()
        require(not is_file, self._where, f"out must be a folder, got the file {folder}", error=CheckpointError)
        odd = min((path.name for path in folder.glob(self._own)), default=None)
        told = f"out must be new or hold a {self._what}, got {folder} with {odd!r} and no {self.file.name}"
        require(odd is None, self._where, told, "give another folder", CheckpointError)
        return {}

    def write(self, **noted: Any) -> None:
        """Write the plan, and what is noted beside it."""
        write_object(self.file, {**self._plan, **noted}, private=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Make the folder, keep others out, and yield the descriptor that does: runs that inherit it do so too."""
        clean_strays(make_folder(self.file.parent))
        with locked(self.file.with_name(f".{self.file.stem}.lock"), self._where, self._what) as descriptor:
            yield descriptor
