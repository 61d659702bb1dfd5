"""The list of files in a folder that another library writes: begun first, finished last, it tells if all are there."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from shared_core.atomic import clean_strays, fsync, is_stray, make_folder
from shared_core.journal_file import read_object, write_object

LIST_FILE = "eff_files.json"
_BLOCK = 2**22


def begin_list(folder: Path) -> None:
    """Say that a folder is being written, on disk before anything in it changes.

    Raises:
        CheckpointError: If it cannot be written.
    """
    clean_strays(make_folder(folder))
    for litter in folder.glob(".tmp??????"):  # of safetensors (0.8), killed
        litter.unlink()
    write_object(folder / LIST_FILE, {"complete": False})


def finish_list(folder: Path) -> None:
    """Bring a folder to disk, then list every file in it with its size and the checksum of all its bytes.

    A checksum is computed by one thread while another waits for the disk, so that it costs no time of its own.

    Args:
        folder: Which `begin_list` was called for.

    Raises:
        CheckpointError: If a file cannot be written.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.name != LIST_FILE and not is_stray(path)]
    files = [path for path in paths if path.is_file()]
    with ThreadPoolExecutor(1) as other:
        checksums = other.map(_checksum, files)
        for path in (*paths, folder):
            fsync(path)
        listed = {
            file.relative_to(folder).as_posix(): [file.stat().st_size, checksum]
            for file, checksum in zip(files, checksums, strict=True)
        }
    write_object(folder / LIST_FILE, {"complete": True, "files": listed})


def is_unfinished(folder: Path) -> bool:
    """Return whether what began to write a folder did not come to its end.

    Raises:
        CheckpointError: If the list is damaged.
    """
    return (folder / LIST_FILE).exists() and read_object(folder / LIST_FILE).get("complete") is not True


def damage_by_list(folder: Path, replaced: Callable[[str], bool] = lambda name: False) -> str | None:
    """Return what a folder lacks of its list, None if nothing, or if it has none.

    Args:
        folder: What was written.
        replaced: Whether a file may be missing, as others have taken its place.

    Raises:
        CheckpointError: If the list is damaged.
    """
    if is_unfinished(folder):
        return "it was not saved completely"
    known = read_object(folder / LIST_FILE) if (folder / LIST_FILE).exists() else {}
    files = known.get("files", {})
    if not isinstance(files, dict):
        return f"{LIST_FILE} is damaged"
    for name, expected in files.items():
        file = folder / name
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
