"""A search on disk: which experiment it is, which of its runs are finished, and who is working on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from shared_core.atomic import clean_strays, make_folder
from shared_core.errors import CheckpointError
from shared_core.journal_file import check_same, locked, read_object, write_object
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
        self.folder = make_folder(folder)
        clean_strays(self.folder)
        file = self.folder / JOURNAL_FILE
        plan = json.loads(json.dumps({"format": _FORMAT, **plan}))
        if file.exists():
            check_same(file, read_object(file), plan, "search")
            return
        if any(self.folder.glob("round-*")):
            raise CheckpointError(
                f"{self.folder}: folder must be new or hold a search, got rounds without {JOURNAL_FILE}"
            )
        write_object(file, plan, private=True)

    def run_folder(self, number: int, control: str) -> Path:
        """Return the folder of a run."""
        return self.folder / (f"round-{number:02d}" + ("" if control == "none" else f"-{control}"))

    def ticket(self, number: int) -> Path:
        """Return the ticket that is trained in a round: the one that the round before found."""
        return self.run_folder(number - 1, "none") / TICKET_FILE

    def result(self, number: int, control: str) -> dict[str, Any] | None:
        """Return the figures of a run, None if it is not finished."""
        file = self.run_folder(number, control) / RESULT_FILE
        return read_object(file) if file.exists() else None

    def locked(self) -> AbstractContextManager[int]:
        """Keep others out, and yield the file descriptor that does: a process that inherits it keeps them out too.

        Raises:
            TrainingError: If somebody works on this search now.
        """
        return locked(self.folder / _LOCK_FILE, "lottery", "search")
