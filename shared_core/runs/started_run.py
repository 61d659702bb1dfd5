"""A run of the user's command: started, its output shown as it comes, and what is told when it fails."""

from __future__ import annotations

import contextlib
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shared_core.errors import TrainingError
from shared_core.runs.executors import Run

_LAST_LINES = 15
_POLL_SECONDS = 0.1


class RunError(TrainingError):
    """A run's training failed.

    Args:
        message: What happened, with the last lines of the run's log.
        exit_code: Of the training, as a shell would tell it.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.args = (message, exit_code)  # what unpickling calls it with
        self.exit_code = exit_code


@dataclass
class StartedRun:
    """A run that was started."""

    name: str
    """Of who asks and of the run, for errors."""
    command: str
    """What trains, for errors."""
    run: Run
    log: Path
    """The file that its output is added to."""
    shown: int
    """Bytes of the log that were shown, or are of an earlier try."""

    def finish(self, output: BinaryIO | None = None) -> None:
        """Wait for its end, and show what it writes into its log meanwhile."""
        try:
            while (code := self.run.poll()) is None:
                self._show(output)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.run.wait(_POLL_SECONDS)
            self._show(output)
        except BaseException:
            self.run.kill()
            raise
        if code:
            text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
            lines = [line for line in text.replace("\r", "\n").splitlines() if line.strip()]
            raise RunError(
                f"{self.name} must end well, but `{self.command}` ended with exit code {code}; see {self.log}. "
                "Started again, it goes on from here. The last lines:\n"
                + "\n".join(f"  {line}" for line in lines[-_LAST_LINES:]),
                code if code > 0 else 128 - code,
            )

    def _show(self, output: BinaryIO | None) -> None:
        if output is not None and self.log.exists():
            with self.log.open("rb") as log:
                log.seek(self.shown)
                output.write(log.read())
                output.flush()
                self.shown = log.tell()
