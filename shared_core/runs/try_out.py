"""Short runs of a script with and without each technique of a recipe, in pairs that take turns, and their results."""

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
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared_core.config.options import checked
from shared_core.engine.checks.compatibility import check
from shared_core.engine.recipe import Recipe
from shared_core.errors import CompatibilityError, TrainingError, nearest, require
from shared_core.files.atomic import make_folder
from shared_core.files.journal import read_object
from shared_core.runs.command import TrainingCommand
from shared_core.runs.executors import LocalExecutor
from shared_core.runs.trained_model import is_larger_better

VARIABLE = "EFF_SHORT_RUN"
"""The options of a short run, as JSON, for the process that runs it."""
RESULT_FILE = "result.json"
PLAIN, ALL = "plain", "all together"
_WHERE = "eff try"
_CHILD = "from shared_core.runs.short_run import shorten_script; shorten_script()"
_FOLDER = re.compile(r"^(--(?:output|logging|project|default[-_]root)[-_]dir=).*", re.DOTALL)
_BLOCKS = 40
_POLL_SECONDS = 0.5


def without_output(arguments: Sequence[str], folder: str) -> list[str]:
    """Return a script's arguments with its output folder replaced.

    Example:
        >>> without_output(["train.py", "--output_dir", "runs/a", "--lr", "0.1", "--logging-dir=b"], "/tmp/x")
        ['train.py', '--output_dir', '/tmp/x', '--lr', '0.1', '--logging-dir=/tmp/x']
    """
    replaced = [_FOLDER.sub(lambda flag: flag[1] + folder, argument) for argument in arguments]
    for number, (name, value) in enumerate(itertools.pairwise(arguments), 1):
        if "=" not in name and _FOLDER.match(f"{name}=") and not value.startswith("--"):
            replaced[number] = folder
    return replaced


def _refusal(recipe: Recipe) -> str | None:
    """Return why techniques cannot be combined, None if they can."""
    try:
        check(recipe)
    except CompatibilityError as error:
        return " ".join(str(error).split())
    return None


@dataclasses.dataclass(frozen=True)
class Reading:
    """The measurements of one run.

    Args:
        variant: A technique's key, `PLAIN` or `ALL`.
        seed: Number added to the script's seed.
        values: As the process wrote them: ``steps``, ``seconds`` of each block, ``memory``, ``metrics``, ``bytes``,
            ``packed``, ``techniques``; or ``error``.
    """

    variant: str
    seed: int
    values: Mapping[str, Any]

    @property
    def error(self) -> str | None:
        """Why there are no measurements, in one line."""
        return self.values.get("error")


Pair = tuple[Reading, Reading]


class TryOut:
    """Short runs of a script: plain against plain, then plain against each technique and against all of them.

    The two runs of a pair have the same random numbers and take turns of a few steps, so other load on the machine
    slows both alike. Each pair has different random numbers.

    Args:
        script: A file or a module.
        arguments: The script's arguments.
        recipe: The techniques to try.
        folder: Logs are kept here. The script's own files are here too until the run ends.
        steps: Optimizer steps per run, at least 8.
        repeats: Pairs per variant.
        eval_batches: Maximum number of validation batches; 0: all.

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
        for name, value, least in (("steps", steps, 8), ("repeats", repeats, 1), ("eval-batches", eval_batches, 0)):
            checked(value, int, _WHERE, f"--{name}", low=least)
        parts = [script] if script.endswith(".py") else ["-m", script]
        is_there = Path(script).is_file() or not script.endswith(".py")
        require(is_there, _WHERE, f"script must be a file, got {script!r}", "check the path")
        self._command = TrainingCommand(_WHERE, (sys.executable,), (*parts, *arguments), {})
        self.folder, self.recipe, self.steps, self._repeats = Path(folder), recipe, steps, repeats
        self._eval_batches = eval_batches
        self.block = max(steps // _BLOCKS, 1)
        self.variants = {key: Recipe({key: recipe[key]}, allow_partial=recipe.allow_partial) for key in recipe}
        if len(recipe) > 1:
            self.variants[ALL] = recipe
        for config in recipe.values():
            config.check_files()
        # why some combinations are not run
        self.refused = {name: reason for name, tried in self.variants.items() if (reason := _refusal(tried))}

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The runs in order, two at a time."""
        return [(PLAIN, name) for _ in range(self._repeats) for name in (PLAIN, *self.variants)]

    def run(
        self,
        progress: Callable[[int, int], object] = lambda done, total: None,
        check: Callable[[Pair], object] = lambda pair: None,
    ) -> list[Pair]:
        """Run all pairs and return their measurements.

        Args:
            progress: Called with the number of finished turns and of all turns.
            check: Called with the first pair, of two plain runs. An error in it ends the trial.

        Raises:
            TrainingError: If the script fails without techniques.
        """
        make_folder(self.folder / "logs")
        turns = self.steps // self.block + 2  # one before the first step, one after the last
        total, pairs = len(self.pairs) * 2 * turns, list[Pair]()
        for number, names in enumerate(self.pairs):
            if (reason := self.refused.get(names[1])) is not None:
                refused = Reading(names[1], number, {"error": reason})
                pairs.append((refused, refused))
                continue
            with contextlib.ExitStack() as stack:
                runs = [stack.enter_context(self._started(name, number, place)) for place, name in enumerate(names)]
                for count in _take_turns(runs):
                    progress(min(2 * turns * number + count, 2 * turns * (number + 1)), total)
                first, second = (Reading(name, number, run.result()) for name, run in zip(names, runs, strict=True))
            for reading, run in ((first, runs[0]), (second, runs[1])):
                rule = f"the script failed without techniques: {reading.error}"
                remedy = f"its output: {run.log}; put options of eff try before the script, its own after it"
                is_sound = reading.variant != PLAIN or reading.error is None
                require(is_sound, _WHERE, rule, remedy, TrainingError)
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
        executor = LocalExecutor(_WHERE, theirs.fileno())
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
        """Wait for the end of the turn. Return False if the process has ended."""
        while True:
            try:
                return bool(self._turns.recv(1))
            except TimeoutError:
                # not only its end of the socket: a loader's workers hold that too
                if self._process.poll() is not None:
                    return False
            except ConnectionError:
                return False

    def go(self) -> None:
        """Begin its next turn."""
        with contextlib.suppress(ConnectionError):
            self._turns.send(b".")

    def result(self) -> dict[str, Any]:
        """Return the process's result, or how it ended."""
        code = self._process.wait()
        file = self._scratch / RESULT_FILE
        if not file.is_file():
            lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
            return {"error": f"exit code {code if code >= 0 else 128 - code}: {last}"}
        values = read_object(file)
        if "error" in values:
            return {"error": " ".join(str(values["error"]).split())}
        # non-finite numbers are null in JSON
        for figures in filter(None, (values["metrics"], values["learning"])):
            figures.update({name: math.nan for name, value in figures.items() if value is None})
        return values

    def end(self) -> None:
        """End the process and its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _take_turns(runs: list[_Run]) -> Iterator[int]:
    """Let each run reach its first step, then take turns until all have ended. Yield the turns so far."""
    count, live = 0, []
    for run in runs:
        count += 1
        if run.wait():
            live.append(run)
        yield count
    while live:
        # alternate who goes first, so that rising or falling load affects both alike
        live.reverse()
        for run in list(live):
            run.go()
            count += 1
            if not run.wait():
                live.remove(run)
            yield count


FLOORS = {"time": 0.02, "memory": 0.02, "bytes": 0.001, "packed": 0.01, "metric": 0.005}
"""Smaller relative differences are called noise, however alike the plain runs were."""
TRIMMED = 0.1
_MEASURED = ("memory", "metric", "bytes", "packed")
_USUAL = ("eval_loss", "val_loss", "train_loss")
# two-sided 95 % quantiles of Student's t by degrees of freedom; from 30 on the normal distribution's 2
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


@dataclasses.dataclass(frozen=True)
class Figure:
    """A variant's figure compared with the plain runs'.

    Args:
        plain: Their mean; 1 for the time of a step.
        value: The variant's.
        noise: The largest difference that noise explains.
        is_smaller_better: True if smaller is better.
    """

    plain: float
    value: float
    noise: float
    is_smaller_better: bool = True

    @property
    def verdict(self) -> str:
        """``better``, ``worse``, ``same`` or ``noise``; non-finite is worse."""
        if self.value == self.plain:
            return "same"
        if not math.isfinite(self.value):
            return "worse"
        gain = self.plain - self.value if self.is_smaller_better else self.value - self.plain
        return "noise" if abs(gain) <= self.noise else "better" if gain > 0 else "worse"


@dataclasses.dataclass(frozen=True)
class Row:
    """A variant.

    Args:
        name: A technique's key, or the key of all together.
        figures: The measured ones of ``time``, ``memory``, ``bytes``, ``packed`` and ``metric``.
        metrics: The means of all figures that validation and training reported.
        happened: The receipt's summary of each technique.
        error: Why there are no figures, in one line.
        is_judged: True if the plain runs learned something. Otherwise no technique can be judged.
    """

    name: str
    figures: Mapping[str, Figure] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    happened: Mapping[str, str] = dataclasses.field(default_factory=dict)
    error: str | None = None
    is_judged: bool = True

    @property
    def advice(self) -> str:
        """The advice, and its reason."""
        if self.error is not None:
            return f"failed: {self.error}"
        if not self.is_judged:
            return "no verdict: the plain run learned nothing yet"
        found = {kind: [_WORDS[name] for name, one in self.figures.items() if one.verdict == kind] for kind in _KINDS}
        good, bad = found["better"], found["worse"]
        if not good:
            return f"leave out: worse {_and(bad)}, nothing better" if bad else "no difference seen in so few steps"
        if _WORDS["metric"] in bad:
            return f"your choice: better {_and(good)}, but worse {_and(bad)}"
        return f"keep: better {_and(good)}" + (f", but worse {_and(bad)}" if bad else "")


_KINDS = ("better", "worse")
_WORDS = {"time": "step time", "memory": "memory", "bytes": "file", "packed": "packed file", "metric": "metric"}


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


@dataclasses.dataclass(frozen=True)
class Findings:
    """The comparison of all runs.

    Args:
        metric: Name of the metric that measures quality, None if nothing was logged.
        is_smaller_better: True if a smaller metric is better.
        plain: Means of the plain runs: ``seconds`` per step, ``memory``, ``bytes``, ``packed``, ``metric``.
        num_plain: Number of plain runs.
        plain_metrics: The means of all their figures.
        rows: The variants.
        notes: Caveats that the figures do not show.
    """

    metric: str | None
    is_smaller_better: bool
    plain: Mapping[str, float]
    num_plain: int
    plain_metrics: Mapping[str, float]
    rows: Sequence[Row]
    notes: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, including verdicts and advice."""
        values = dataclasses.asdict(self)
        for row, written in zip(self.rows, values["rows"], strict=True):
            written["advice"] = row.advice
            for name, figure in row.figures.items():
                written["figures"][name]["verdict"] = figure.verdict
        return values


def findings(pairs: Sequence[Pair], *, metric: str | None = None, mode: str = "auto") -> Findings:
    """Return the comparison of pairs of runs.

    Time: for each pair and block ``log(t / t_plain)``, with a tenth trimmed at each end. The ratio is the
    exponential of the mean m over all blocks. It is noise if ``|m| <= max(2 s / √n, |m_0| + 2 s_0 / √n_0, 0.02)``
    with s of these n logarithms, and m_0, s_0, n_0 from pairs of two plain runs.
    Others: noise if a difference to the mean of n plain runs is at most ``t s √(1/r + 1/n)``, with s of the plain runs,
    r of the variant's and t of Student's distribution with n - 1 degrees of freedom (95 %): the prediction interval.

    Args:
        pairs: From `TryOut.run`, including pairs of two plain runs.
        metric: By the trainer's name; by default the validation loss, or the training loss.
        mode: ``min`` or ``max``; ``auto``: smaller is better for a loss or an error.

    Raises:
        ConfigError: If no plain run reported the metric.
    """
    plain = [one.values for pair in pairs for one in pair if one.variant == PLAIN]
    metric, smaller = chosen_metric(pairs[0], metric, mode)
    still = _log_ratios([pair for pair in pairs if pair[1].variant == PLAIN])
    learning = _learning(plain)
    has_learned = learning is None or learning.verdict == "better"
    rows = []
    for name in dict.fromkeys(pair[1].variant for pair in pairs if pair[1].variant != PLAIN):
        mine = [pair for pair in pairs if pair[1].variant == name]
        good = [pair for pair in mine if pair[1].error is None]
        if not good:
            rows.append(Row(name, error=mine[0][1].error))
            continue
        results = [pair[1].values for pair in good]
        found = {"time": _time(_log_ratios(good), still)}
        for what in _MEASURED:
            values, others = (_values(some, what, metric) for some in (results, plain))
            if values and others:
                found[what] = _compared(values, others, FLOORS[what], smaller if what == "metric" else True)
        rows.append(Row(name, found, _means(results), results[0]["techniques"], is_judged=has_learned))
    means = {"seconds": statistics.median(second for values in plain for second in values["seconds"])}
    means |= {what: statistics.fmean(values) for what in _MEASURED if (values := _values(plain, what, metric))}
    return Findings(metric, smaller, means, len(plain), _means(plain), rows, _notes(plain, metric, learning))


def chosen_metric(plain: Pair, metric: str | None, mode: str) -> tuple[str | None, bool]:
    """Return the metric that measures quality (None if nothing was logged), and True if smaller is better.

    Args:
        plain: Two plain runs.
        metric: As for `findings`.
        mode: As for `findings`.

    Raises:
        ConfigError: If they did not report it.
    """
    known = set(plain[0].values["metrics"])
    rule = f"--metric must be one that the script reports, got {metric!r}{nearest(metric or '', known)}"
    require(metric is None or metric in known, _WHERE, rule)
    metric = metric or next((name for name in _USUAL if name in known), None)
    return metric, metric is not None and not is_larger_better(metric, mode)


def _values(results: Sequence[Mapping[str, Any]], what: str, metric: str | None) -> list[float]:
    """Return a figure of every run, empty if one lacks it."""
    values = [result["metrics"].get(metric) if what == "metric" else result[what] for result in results]
    return [] if None in values else values


def _means(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = [name for name in results[0]["metrics"] if all(name in result["metrics"] for result in results)]
    return {name: statistics.fmean(result["metrics"][name] for result in results) for name in names}


def _log_ratios(pairs: Sequence[Pair]) -> list[float]:
    """Return the logarithms of time over the plain run's per block, without the first and the trimmed ones."""
    kept: list[float] = []
    for plain, other in pairs:
        blocks = zip(plain.values["seconds"][1:], other.values["seconds"][1:], strict=False)
        logs = sorted(math.log(second / first) for first, second in blocks if first > 0 and second > 0)
        out = int(TRIMMED * len(logs))
        kept += logs[out : len(logs) - out]
    return kept


def _time(logs: Sequence[float], still: Sequence[float]) -> Figure:
    mean, error = _mean_and_error(logs)
    still_mean, still_error = _mean_and_error(still)
    noise = max(2 * error, abs(still_mean) + 2 * still_error, FLOORS["time"])
    # reported as a ratio: noise is anything within a factor e^noise of 1
    return Figure(1.0, math.exp(mean), abs(math.exp(math.copysign(noise, mean)) - 1))


def _mean_and_error(logs: Sequence[float]) -> tuple[float, float]:
    if len(logs) < 2:
        return (logs[0] if logs else 0.0), math.inf
    return statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))


def _compared(values: Sequence[float], plain: Sequence[float], floor: float, smaller: bool) -> Figure:
    center = statistics.fmean(plain)
    spread = statistics.stdev(plain) if len(plain) > 1 else math.inf
    quantile = _T[len(plain) - 2] if 2 <= len(plain) <= len(_T) + 1 else 2.1
    interval = quantile * spread * math.sqrt(1 / len(values) + 1 / len(plain)) if spread else 0.0
    return Figure(center, statistics.fmean(values), max(interval, floor * abs(center)), smaller)


def _learning(plain: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Return the plain runs' training loss: last quarter against first; None if there was none."""
    lines = [values["learning"] for values in plain if values.get("learning")]
    if not lines:
        return None
    first, last = (statistics.fmean(one[name] for one in lines) for name in ("first", "last"))
    # standard error of the mean of independent runs
    error = math.sqrt(math.fsum(one["error"] ** 2 for one in lines)) / len(lines)
    return Figure(first, last, max(2 * error, FLOORS["metric"] * abs(first)))


def _notes(plain: Sequence[Mapping[str, Any]], metric: str | None, learning: Figure | None) -> list[str]:
    notes = []
    if learning is not None and learning.verdict != "better":
        notes.append(
            f"the training loss of the plain runs did not fall in these steps ({learning.plain:.4g} in their first "
            f"quarter, {learning.value:.4g} in their last): use more --steps"
        )
    if metric is None:
        notes.append("no loss and no metric was logged, so quality is not compared")
    elif len({*_values(plain, "metric", metric)}) == 1:
        notes.append(
            f"{metric} was the same in all plain runs, although their random numbers differ: a change of "
            f"{100 * FLOORS['metric']:g} % counts as noise, which is an assumption, not a measurement"
        )
    if metric == "train_loss":
        text = "the mean over the last quarter of the steps, per micro-batch, before techniques add to it"
        notes.append(f"train_loss is {text}")
    return notes
