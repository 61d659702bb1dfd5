"""Short runs of a script, with and without each technique of a recipe: two at a time, that take turns."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared_core.engine.recipe import Recipe
from shared_core.errors import ConfigError, TrainingError
from shared_core.files.atomic import make_folder
from shared_core.files.journal import read_object
from shared_core.runs.command import TrainingCommand
from shared_core.runs.executors import LocalExecutor
from shared_core.runs.short_run import RESULT_FILE, VARIABLE

PLAIN, ALL = "plain", "all together"
_WHERE = "eff try"
_CHILD = "from shared_core.runs.short_run import shorten_script; shorten_script()"
_FOLDER = re.compile(r"^(--(?:output|logging|project|default[-_]root)[-_]dir=).*", re.DOTALL)
_BLOCKS = 40
_POLL_SECONDS = 0.5


def without_output(arguments: Sequence[str], folder: str) -> list[str]:
    """Return a script's arguments with another folder in place of the one that it writes to.

    Example:
        >>> without_output(["train.py", "--output_dir", "runs/a", "--lr", "0.1", "--logging-dir=b"], "/tmp/x")
        ['train.py', '--output_dir', '/tmp/x', '--lr', '0.1', '--logging-dir=/tmp/x']
    """
    replaced = [_FOLDER.sub(lambda flag: flag[1] + folder, argument) for argument in arguments]
    for number, (name, value) in enumerate(itertools.pairwise(arguments), 1):
        if "=" not in name and _FOLDER.match(f"{name}=") and not value.startswith("--"):
            replaced[number] = folder
    return replaced


@dataclasses.dataclass(frozen=True)
class Reading:
    """The measurements of one run.

    Args:
        variant: A technique's key, `PLAIN` or `ALL`.
        seed: What was added to the script's seed.
        values: As the process wrote them: ``steps``, ``seconds`` of each block, ``memory``, ``metrics``, ``bytes``,
            ``packed``, ``techniques``; or ``error``.
    """

    variant: str
    seed: int
    values: Mapping[str, Any]

    @property
    def error(self) -> str | None:
        """Why there is nothing else, in a line."""
        return self.values.get("error")


Pair = tuple[Reading, Reading]


class TryOut:
    """Short runs of a script: plain against plain, then plain against each technique and against all of them.

    The two runs of a pair have the same random numbers and take turns of a few steps, so what else the machine does
    slows both alike. Each pair has random numbers of its own.

    Args:
        script: A file, or a module.
        arguments: What it is given.
        recipe: What is tried.
        folder: Logs are kept here; all that the script writes lies in it until the run ends.
        steps: Optimizer steps of a run, at least 8.
        repeats: Pairs of each variant.
        eval_batches: Batches of a validation at most; 0: all.

    Raises:
        ConfigError: If an argument breaks its rule.
    """

    def __init__(
        self,
        script: str,
        arguments: Sequence[str],
        recipe: Recipe,
        folder: Path | str,
        *,
        steps: int = 200,
        repeats: int = 1,
        eval_batches: int = 100,
    ) -> None:
        for name, value, least in (("steps", steps, 8), ("repeats", repeats, 1), ("eval_batches", eval_batches, 0)):
            if value < least:
                raise ConfigError(_WHERE, f"--{name} must be at least {least}, got {value}")
        parts = [script] if script.endswith(".py") else ["-m", script]
        if script.endswith(".py") and not Path(script).is_file():
            raise ConfigError(_WHERE, f"script must be a file, got {script!r}", "check the path")
        self._command = TrainingCommand(_WHERE, (sys.executable,), (*parts, *arguments), {})
        self.folder, self.recipe, self.steps, self._repeats = Path(folder), recipe, steps, repeats
        self._eval_batches = eval_batches
        self.block = max(steps // _BLOCKS, 1)
        self.variants = {key: Recipe({key: recipe[key]}, allow_partial=recipe.allow_partial) for key in recipe}
        if len(recipe) > 1:
            self.variants[ALL] = recipe

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The runs in order, two at a time."""
        return [(PLAIN, name) for _ in range(self._repeats) for name in (PLAIN, *self.variants)]

    def run(
        self,
        progress: Callable[[int, int], object] = lambda done, total: None,
        check: Callable[[Pair], object] = lambda pair: None,
    ) -> list[Pair]:
        """Return what each pair measured.

        Args:
            progress: Called with finished turns, and all turns.
            check: Called with the first pair, of two plain runs; what it raises ends the try.

        Raises:
            TrainingError: If the script does not run without techniques.
        """
        make_folder(self.folder / "logs")
        turns = self.steps // self.block + 2  # what comes before the first step, and behind the last
        total, pairs = len(self.pairs) * 2 * turns, list[Pair]()
        for number, names in enumerate(self.pairs):
            with contextlib.ExitStack() as stack:
                runs = [stack.enter_context(self._started(name, number, place)) for place, name in enumerate(names)]
                for count in _take_turns(runs):
                    progress(min(2 * turns * number + count, 2 * turns * (number + 1)), total)
                first, second = (Reading(name, number, run.result()) for name, run in zip(names, runs, strict=True))
            for reading, run in ((first, runs[0]), (second, runs[1])):
                if reading.variant == PLAIN and reading.error is not None:
                    raise TrainingError(
                        _WHERE,
                        f"the script must run without techniques, got {reading.error}",
                        f"its output: {run.log}; options of eff try stand before the script, its own behind it",
                    )
            pairs.append((first, second))
            if not number:
                check(pairs[0])
        return pairs

    @contextlib.contextmanager
    def _started(self, name: str, number: int, place: int) -> Iterator[_Run]:
        log = self.folder / "logs" / f"{number + 1}-{place}-{name.replace(' ', '-')}.log"
        log.unlink(missing_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="run-", dir=self.folder)).resolve()
        output, (ours, theirs) = str(scratch / "output"), socket.socketpair()
        plan = {
            "steps": self.steps, "block": self.block, "folder": str(scratch), "eval_batches": self._eval_batches,
            "seed": number, "turns": theirs.fileno(),
        }  # fmt: skip
        command = dataclasses.replace(self._command, arguments=tuple(without_output(self._command.arguments, output)))
        executor = LocalExecutor(_WHERE, theirs.fileno(), start_new_session=True)
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, scratch, ignore_errors=True)
            stack.enter_context(ours)
            with theirs:
                recipe = self.variants.get(name, Recipe({}))
                arguments, variables = command.with_recipe(recipe, scratch / "recipe.yaml", {"{out}": output}, _CHILD)
                process = executor.start(arguments, {**variables, VARIABLE: json.dumps(plan)}, log)
            run = _Run(process, ours, scratch, log)
            stack.callback(run.end)
            yield run


class _Run:
    """A process that trains when it is its turn."""

    def __init__(self, process: subprocess.Popen[bytes], turns: socket.socket, scratch: Path, log: Path) -> None:
        self._process, self._turns, self._scratch, self.log = process, turns, scratch, log
        turns.settimeout(_POLL_SECONDS)

    def wait(self) -> bool:
        """Return whether the turn ended and another may follow, once it has; else the process has ended."""
        while True:
            try:
                return bool(self._turns.recv(1))
            except TimeoutError:
                # not its end of the socket alone: workers of a loader hold that too
                if self._process.poll() is not None:
                    return False
            except ConnectionError:
                return False

    def go(self) -> None:
        """Begin its next turn."""
        with contextlib.suppress(ConnectionError):
            self._turns.send(b".")

    def result(self) -> dict[str, Any]:
        """Return what the process wrote, or how it ended."""
        code = self._process.wait()
        file = self._scratch / RESULT_FILE
        if not file.is_file():
            lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
            return {"error": f"exit code {code if code >= 0 else 128 - code}: {last}"}
        values = read_object(file)
        if "error" in values:
            return {"error": " ".join(str(values["error"]).split())}
        # what is not finite is null in JSON
        metrics = {name: math.nan if value is None else value for name, value in values["metrics"].items()}
        return {**values, "metrics": metrics}

    def end(self) -> None:
        """End the process and those that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _take_turns(runs: list[_Run]) -> Iterator[int]:
    """Let each run reach its first step, then each have its turn until all have ended; yield the turns so far."""
    count, live = 0, []
    for run in runs:
        count += 1
        if run.wait():
            live.append(run)
        yield count
    while live:
        # who goes first changes, so that a load that grows or falls hits both alike
        live.reverse()
        for run in list(live):
            run.go()
            count += 1
            if not run.wait():
                live.remove(run)
            yield count
