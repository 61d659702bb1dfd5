"""The list of files in a folder that another library writes: begun first, finished last, it tells if all are there."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path

from shared_core.atomic import clean_strays, fsync, make_folder
from shared_core.journal_file import read_object, write_object

LIST_FILE = "eff_files.json"
_BLOCK, _BLOCKS = 2**16, 16


def begin_list(folder: Path) -> None:
    """Say that a folder is being written, on disk before anything in it changes.

    Raises:
        CheckpointError: If it cannot be written.
    """
    clean_strays(make_folder(folder))
    for litter in folder.glob(".tmp??????"):  # of safetensors (0.8), killed
        litter.unlink()
    write_object(folder / LIST_FILE, {"complete": False})


def finish_list(folder: Path, patterns: Iterable[str]) -> None:
    """Bring a folder to disk, then say that it is complete, and of some files how long they are and what is in them.

    Args:
        folder: Which `begin_list` was called for.
        patterns: Of the names of files that nobody changes later, as globs.

    Raises:
        CheckpointError: If a file cannot be written.
    """
    for path in (*folder.rglob("*"), folder):
        fsync(path)
    files = sorted(file for pattern in patterns for file in folder.rglob(pattern))
    listed = {file.relative_to(folder).as_posix(): [file.stat().st_size, _checksum(file)] for file in files}
    write_object(folder / LIST_FILE, {"complete": True, "files": listed})


def is_unfinished(folder: Path) -> bool:
    """Return whether what began to write a folder did not come to its end.

    Raises:
        CheckpointError: If the list is damaged.
    """
    return (folder / LIST_FILE).exists() and read_object(folder / LIST_FILE).get("complete") is not True


def damage_by_list(folder: Path) -> str | None:
    """Return what a folder lacks of its list, None if nothing, or if it has none.

    Raises:
        CheckpointError: If the list is damaged.
    """
    if is_unfinished(folder):
        return "it was not saved completely"
    known = read_object(folder / LIST_FILE) if (folder / LIST_FILE).exists() else {}
    for name, expected in known.get("files", {}).items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if [file.stat().st_size, _checksum(file)] != expected:
            return (
                f"{name} is damaged or of another checkpoint: size or checksum are not those in {LIST_FILE}, which "
                "must be removed if the change was meant"
            )
    return None


def _checksum(file: Path) -> int:
    """Return the CRC-32 of 16 blocks of 64 KiB from the first to the last one; of smaller files, of everything."""
    size, found = file.stat().st_size, 0
    with file.open("rb") as opened:
        for block in range(_BLOCKS):
            if size > _BLOCK * _BLOCKS:
                opened.seek((size - _BLOCK) * block // (_BLOCKS - 1))
            found = zlib.crc32(opened.read(_BLOCK), found)
    return found
