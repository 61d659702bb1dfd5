"""The folder of one run: the weights of step k, the ticket that it found, and last its figures, which end the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from shared_core.errors import CheckpointError
from shared_core.files.journal import write_object
from shared_core.lottery_ticket.ticket import Ticket, read_ticket, write_ticket

TICKET_FILE, REWIND_FILE, RESULT_FILE = "ticket.safetensors", "rewind.safetensors", "round.json"


class RunFolder:
    """The folder of one run. Only the main process writes; `RESULT_FILE` comes last and ends the run."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)

    def make(self) -> None:
        """Make the folder."""
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError("lottery", f"out must be a folder that can be made, got {error}") from error

    def check_unfinished(self) -> None:
        """Refuse to train into the folder of a run that is finished."""
        if (self._path / RESULT_FILE).exists():
            raise CheckpointError(
                "lottery",
                f"out must not hold a finished run, got {self._path / RESULT_FILE}",
                "choose another folder or remove it; a script that trains twice must give the recipe to one of its "
                "trainings only",
            )

    def keep(self, ticket: Ticket) -> None:
        """Keep the weights of step k until the run ends."""
        write_ticket(self._path / REWIND_FILE, ticket)

    def kept_weights(self) -> Mapping[str, Tensor] | None:
        """Return the weights of step k that a dense run kept, None if it did not get so far."""
        files = [self._path / name for name in (REWIND_FILE, TICKET_FILE)]
        return next((read_ticket(file).weights for file in files if file.is_file()), None)

    def check_kept(self, digest: str, step: int) -> None:
        """Refuse to resume a dense run beyond step k without the weights that it kept there."""
        weights = self.kept_weights()
        if weights is None:
            raise CheckpointError(
                "lottery",
                f"{self._path} must hold {REWIND_FILE}, which the run that is resumed wrote at step {step}",
                "resume with the same out, or start again",
            )
        if Ticket({}, weights, step).digest() != digest:
            raise CheckpointError(
                "lottery",
                f"{self._path} must hold weights of the run that is resumed, got those of another",
                "start again",
            )

    def finish(self, result: Mapping[str, Any], found: Ticket | None) -> None:
        """Write the ticket, if one was found, and then the figures."""
        if found is not None:
            write_ticket(self._path / TICKET_FILE, found)
            # The rewinding weights are in the ticket now; the result comes last, as its file marks the run as
            # finished.
            (self._path / REWIND_FILE).unlink(missing_ok=True)
        write_object(self._path / RESULT_FILE, result)
