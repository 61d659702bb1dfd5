"""Checkpoint files that are written whole, and a resume that passes over one that is not.

Lightning (2.6) writes into TMPDIR and moves the file: from another filesystem that is a copy over the old checkpoint,
which a crash leaves half-written, and nothing waits for the disk.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_eff._wrapped import Wrapped
from shared_core.atomic import atomic_write, make_folder
from shared_core.errors import CheckpointError


def whole_files(trainer: Any, note: Callable[[str], None]) -> list[Wrapped]:
    """Surround the Trainer's own writing and reading of checkpoint files, and return what undoes it.

    Args:
        trainer: Before it resumes. A CheckpointIO of the user's own is left to write as it does.
        note: Tells the user one line.
    """
    wrapped = [Wrapped(trainer._checkpoint_connector, "resume_start", functools.partial(_resume, trainer, note))]
    writer = trainer.strategy.checkpoint_io
    if type(writer).__name__ == "TorchCheckpointIO":
        wrapped.append(Wrapped(writer, "save_checkpoint", _save))
    return wrapped


def _save(original: Callable[..., None], checkpoint: Any, path: Any, storage_options: Any = None) -> None:
    if storage_options is not None or "://" in str(path):
        original(checkpoint, path, storage_options)
        return
    make_folder(Path(path).parent)
    with atomic_write(path) as temporary:
        torch.save(checkpoint, temporary)


def damage(file: Path) -> str | None:
    """Return what is wrong with a checkpoint file, None if nothing is; torch keeps a checksum of each tensor in it."""
    try:
        with zipfile.ZipFile(file) as archive:
            # without this option of torch the checksums are not computed
            wrong = archive.testzip() if torch.serialization.get_crc32_options() else None
        with contextlib.suppress(pickle.UnpicklingError):  # of a class that the user may allow
            torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # both raise whatever the damage makes it
        return f"it is truncated or no checkpoint ({error})"
    return None if wrong is None else f"{wrong} in it is damaged"


def _resume(
    trainer: Any, note: Callable[[str], None], original: Callable[..., None], path: Any = None, *args: Any, **more: Any
) -> None:
    file = Path(str(path or ""))
    reason = damage(file) if file.is_file() else None
    if reason is None:
        original(path, *args, **more)
        return
    others = [other for other in file.parent.glob("*.ckpt") if other.is_file() and other != file]
    others.sort(key=lambda other: other.stat().st_mtime, reverse=True)
    whole = next((other for other in others if damage(other) is None), None)
    if whole is None or file.absolute() not in _found_by_lightning(trainer):
        advice = f"pass {whole}, which is" if whole else "none beside it is; start again"
        raise CheckpointError(f"resume: {file} must be a whole checkpoint, but {reason}; {advice}")
    note(f"not resumed from {file}, because {reason}; resumed from {whole} instead")
    original(str(whole), *args, **more)


def _found_by_lightning(trainer: Any) -> set[Path]:
    """Return what `fit` looks for itself: ``ckpt_path`` "last" and "hpc"."""
    found = {trainer._checkpoint_connector._hpc_resume_path}
    for callback in trainer.callbacks:
        if hasattr(callback, "_find_last_checkpoints"):
            found |= callback._find_last_checkpoints(trainer)
        elif type(callback).__name__ == "OnExceptionCheckpoint":
            found.add(callback.ckpt_path)
    return {Path(path).absolute() for path in found if path}
