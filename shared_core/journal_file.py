"""The journal of work that goes on where it was stopped: a JSON file, and the lock of who works on it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shared_core.atomic import atomic_write, named_failure
from shared_core.errors import CheckpointError, TrainingError
from shared_core.parsing import parse_json


def read_object(file: Path, advice: str = "remove it") -> dict[str, Any]:
    """Return the object in a JSON file.

    Args:
        file: Of one JSON object.
        advice: What an error tells to do.

    Raises:
        CheckpointError: If it cannot be read or holds something else.
    """
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}: file must be readable, got {error.strerror}; {advice}") from error
    except ValueError as error:
        raise CheckpointError(f"{file}: file must be JSON, got {error}; it is damaged, {advice}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: file must hold a JSON object, got {type(content).__name__}; {advice}")
    return content


def write_object(file: Path, values: Mapping[str, Any], *, private: bool = False) -> None:
    """Write a JSON file, whole or not at all; a private one can be read by its owner alone."""
    if private and file.exists():
        file.chmod(0o600)  # the file that takes its place has its mode
    with atomic_write(file) as temporary:
        temporary.write_text(json.dumps(values, indent=1), encoding="utf-8")
        if private:
            temporary.chmod(0o600)


def check_same(file: Path, known: Mapping[str, Any], plan: Mapping[str, Any], what: str) -> None:
    """Refuse to go on with a journal of other work.

    Raises:
        CheckpointError: If `plan` is not what the file has; names the first difference.
    """
    odd = next((name for name in sorted({*known, *plan}) if known.get(name) != plan.get(name)), None)
    if odd is not None:
        raise CheckpointError(
            f"{file}: folder must be of this {what}, got that of one whose {odd} is {known.get(odd)!r}, now "
            f"{plan.get(odd)!r}; give another folder, or the same options"
        )


@contextlib.contextmanager
def locked(file: Path, where: str, what: str) -> Iterator[int]:
    """Keep others out, and yield the file descriptor that does: a process that inherits it keeps them out too.

    So work that is killed cannot be started again while its training still runs.

    Raises:
        TrainingError: If somebody works in the file's folder now.
        CheckpointError: If the folder cannot be written.
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

    Raises:
        TrainingError: With the text `busy`, if somebody else has the lock.
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
