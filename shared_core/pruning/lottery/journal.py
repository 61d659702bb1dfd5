"""A search on disk: which experiment it is, which of its runs are finished, and who is working on it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shared_core.atomic import atomic_write, clean_strays
from shared_core.errors import CheckpointError, TrainingError
from shared_core.pruning.lottery.run_folder import RESULT_FILE, TICKET_FILE

JOURNAL_FILE = "lottery.json"
_LOCK_FILE = ".lottery.lock"
_FORMAT = 1


class Journal:
    """The folder of a search. A run is finished when its figures are there, and they are written last.

    Args:
        folder: Made if need be.
        plan: What must be the same when the search goes on: options and command, as plain values.

    Raises:
        CheckpointError: If the folder holds another search, or is damaged.
    """

    def __init__(self, folder: Path | str, plan: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        clean_strays(self.folder)
        file = self.folder / JOURNAL_FILE
        plan = json.loads(json.dumps({"format": _FORMAT, **plan}))
        if file.exists():
            known = _read(file)
            odd = next((name for name in sorted({*known, *plan}) if known.get(name) != plan.get(name)), None)
            if odd is not None:
                raise CheckpointError(
                    f"{file}: folder must be of this search, got that of one whose {odd} is {known.get(odd)!r}, now "
                    f"{plan.get(odd)!r}; give another folder, or the same options"
                )
            return
        if any(self.folder.glob("round-*")):
            raise CheckpointError(
                f"{self.folder}: folder must be new or hold a search, got rounds without {JOURNAL_FILE}"
            )
        with atomic_write(file) as temporary:
            temporary.write_text(json.dumps(plan, indent=1), encoding="utf-8")

    def run_folder(self, number: int, control: str) -> Path:
        """Return the folder of a run."""
        return self.folder / (f"round-{number:02d}" + ("" if control == "none" else f"-{control}"))

    def ticket(self, number: int) -> Path:
        """Return the ticket that is trained in a round: the one that the round before found."""
        return self.run_folder(number - 1, "none") / TICKET_FILE

    def result(self, number: int, control: str) -> dict[str, Any] | None:
        """Return the figures of a run, None if it is not finished."""
        file = self.run_folder(number, control) / RESULT_FILE
        return _read(file) if file.exists() else None

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Keep others out, and yield the file descriptor that does: a process that inherits it keeps them out too.

        So a search that is killed cannot be started again while its training still runs.

        Raises:
            TrainingError: If somebody works on this search now.
        """
        descriptor = os.open(self.folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                import fcntl

                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except ImportError:  # no such locks on Windows
                pass
            except OSError:
                raise TrainingError(
                    f"lottery: {self.folder} must be free, but a search, or a training that a killed one left behind, "
                    "is working on it; wait for it, or stop it"
                ) from None
            yield descriptor
        finally:
            os.close(descriptor)


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: file must be JSON, got {error}; it is damaged, remove it") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: file must hold a JSON object, got {type(content).__name__}; remove it")
    return content
