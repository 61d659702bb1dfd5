"""A run of the user's command: started, its output shown as it comes, and what is told when it fails."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from shared_core.engine.recipe import Recipe
from shared_core.errors import TrainingError
from shared_core.runs.command import TrainingCommand
from shared_core.runs.executors import Executor

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


class StartedRun:
    """A run that was started.

    Args:
        name: Of the run, for errors.
        command: The training.
        recipe: What it trains with.
        file: Where the recipe is written to.
        stands_for: What signs in the command stand for.
        log: The file that its output is added to.
        executor: Starts it.
        variables: Further ones of its environment.
    """

    def __init__(
        self,
        name: str,
        command: TrainingCommand,
        recipe: Recipe,
        file: Path,
        stands_for: Mapping[str, str],
        log: Path,
        executor: Executor,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._name, self._command, self._log = name, command, log
        self._seen = log.stat().st_size if log.exists() else 0
        arguments, needed = command.with_recipe(recipe, file, stands_for)
        self._run = executor.start(arguments, {**(variables or {}), **needed}, log)

    def stop(self) -> None:
        """Stop it."""
        self._run.kill()

    def finish(self, output: BinaryIO | None = None) -> None:
        """Wait for its end, and show what it writes into its log meanwhile.

        Raises:
            RunError: If it failed.
        """
        try:
            code = self._follow(output)
        except BaseException:
            self.stop()
            raise
        if code:
            raise RunError(
                f"{self._command.where}: {self._name} must end well, but `{shlex.join(self._command.arguments)}` ended "
                f"with exit code {code}; see {self._log}. Started again, it goes on from here. The last lines:\n"
                f"{_last_lines(self._log)}",
                code if code > 0 else 128 - code,
            )

    def _follow(self, output: BinaryIO | None) -> int:
        while True:
            code = self._run.poll()  # before reading: what was written last must be shown
            if output is not None and self._log.exists():
                with self._log.open("rb") as log:
                    log.seek(self._seen)
                    output.write(log.read())
                    output.flush()
                    self._seen = log.tell()
            if code is not None:
                return code
            try:
                self._run.wait(_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                continue


def _last_lines(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = [line for line in text.replace("\r", "\n").splitlines() if line.strip()]
    return "\n".join(f"  {line}" for line in lines[-_LAST_LINES:])
