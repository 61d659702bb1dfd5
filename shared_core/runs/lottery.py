"""Iterative magnitude pruning over the user's own training: every round is a fresh run with the ticket so far.

A search is a folder: its settings, its finished runs, and a lock of the process that works on it. Each run saves the
weights of step k, the ticket that it found, and its figures. Their curve shows quality against weights left.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from rich.table import Table

from shared_core.config.options import checked
from shared_core.config.training_time import Position, parse_position
from shared_core.engine.recipe import Recipe
from shared_core.errors import TrainingError, nearest, require
from shared_core.files.atomic import atomic_write, make_folder
from shared_core.files.journal import Journal, read_object
from shared_core.front_ends.flags import check_before_imports, recipe_of
from shared_core.libraries import optional
from shared_core.lottery_ticket.config import RESULT_FILE, TICKET_FILE, LotteryConfig
from shared_core.printing import table
from shared_core.runs.command import TrainingCommand, without_secrets
from shared_core.runs.executors import Executor, LocalExecutor, StartedRun
from shared_core.runs.trained_model import Mode, is_larger_better, usual_metric

_LABELS = {"none": "winning ticket", "random_reinit": "random re-init", "random_mask": "random mask"}


@dataclass(frozen=True)
class CurveRow:
    """One run of a search."""

    round: int
    control: str
    kept: int
    """Remaining weights, of those in scope."""
    left: float
    """Their share."""
    quality: float | None
    """The metric at the end, or the best one; None if nothing was measured."""
    best_step: int | None
    """The step of the best validation, which is where early stopping would end."""
    reached_dense_at: int | None
    """The first validated step that is as good as the dense run's quality; None if there is none."""
    replay: str | None
    """Result of comparing the steps up to k with the dense run's, bit for bit."""
    folder: str
    """Folder of the run, relative to the search's folder."""


@dataclass(frozen=True)
class TicketCurve:
    """The runs of a search, the dense one first, and their quality."""

    rows: tuple[CurveRow, ...]
    metric: str | None
    larger_is_better: bool

    @property
    def smallest_winning(self) -> CurveRow | None:
        """The sparsest ticket that is as good as the dense run, None if no ticket is."""
        dense = self.rows[0].quality
        good = [
            row for row in self.rows
            if row.control == "none" and row.round > 0 and _is_as_good(row.quality, dense, self.larger_is_better)
        ]  # fmt: skip
        return min(good, key=lambda row: row.left, default=None)

    def table(self) -> Table:
        """Return one row per run."""
        columns = ["round", "run", "weights left", "%", "quality", "best at step", "dense quality at step", "replay"]
        rows = []
        for row in self.rows:
            label = "dense" if row.round == 0 else _LABELS[row.control]
            weights = (f"{row.kept:,}", f"{100 * row.left:.2f}")
            measured = (row.quality, row.best_step, row.reached_dense_at)
            rows.append((row.round, label, *weights, *measured, row.replay or ""))
        return table(f"lottery tickets: {self.metric or 'nothing was measured'}", ("run", "replay"), columns, rows)

    def json(self) -> str:
        """Return the curve as JSON."""
        report = {"metric": self.metric, "larger_is_better": self.larger_is_better}
        return json.dumps({**report, "rows": [asdict(row) for row in self.rows]}, indent=1)

    def csv(self) -> str:
        """Return the rows as CSV, with a heading."""
        text = io.StringIO()
        writer = csv.DictWriter(text, [field.name for field in fields(CurveRow)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in self.rows)
        return text.getvalue()

    def plot(self, file: Path | str) -> Path:
        """Draw quality against weights left, with a line for tickets and each control. Return the file.

        Raises:
            MissingExtraError: If matplotlib is not installed.
        """
        optional("matplotlib", "plots", "lottery plot")
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        axes = figure.subplots()
        dense = self.rows[0]
        if dense.quality is not None:
            axes.axhline(dense.quality, linewidth=1, linestyle="--", color="grey", label=f"dense: {dense.quality:.5g}")
        for control, label in _LABELS.items():
            rows = [row for row in self.rows if row.control == control and row.quality is not None]
            # Tickets start with the dense run, which alone is not a line.
            if len(rows) > (control == "none"):
                points = sorted((100 * row.left, row.quality) for row in rows)
                axes.plot(*zip(*points, strict=True), "o-", markersize=4, label=label)
        axes.set_xscale("log")
        axes.xaxis.set_inverted(True)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("weights left (%)")
        axes.set_ylabel(self.metric or "")
        axes.legend()
        with atomic_write(file) as temporary:
            figure.savefig(temporary)
        return Path(file)


def curve_of(
    results: Sequence[tuple[int, str, Path, dict[str, Any]]],
    *,
    metric: str | None = None,
    mode: Mode = "auto",
    quality: Literal["last", "best"] = "last",
) -> TicketCurve:
    """Return the curve of finished runs.

    Args:
        results: Round, control, folder and contents of its ``round.json``; the dense run first.
        metric: The trainer's name for it. By default ``eval_loss`` or ``val_loss``, or the only one there is.
        mode: ``max`` if larger is better; ``auto`` means smaller for losses and errors.
        quality: The metric of a run's last validation, or of its best one.
    """
    name = _metric(results[0][3], metric)
    larger = name is not None and is_larger_better(name, mode)
    dense = None
    rows: list[CurveRow] = []
    for number, control, folder, result in results:
        history = _history(result, name, larger)
        best = (max if larger else min)(history, key=lambda point: point[1], default=None)
        reached = best if quality == "best" else history[-1] if history else None
        dense = dense if rows else reached
        kept, good = result["kept"], [step for step, it in history if dense and _is_as_good(it, dense[1], larger)]
        row = CurveRow(
            number, control, kept, kept / result["numel"], reached[1] if reached else None, best[0] if best else None,
            good[0] if good else None, result["replay"], folder.name,
        )  # fmt: skip
        rows.append(row)
    return TicketCurve(tuple(rows), name, larger)


def _metric(dense: dict[str, Any], metric: str | None) -> str | None:
    known = sorted({name for entry in dense["history"] for name in entry["metrics"]})
    hint = f" ({dense['unmeasured']})" if dense.get("unmeasured") else nearest(metric or "", known)
    is_known = metric is None or metric in known
    require(is_known, "lottery", f"metric must be one that validation reports, got {metric!r}{hint}")
    metric = metric or usual_metric(known)
    require(metric or not known, "lottery", "metric must be chosen, got none", f"known: {', '.join(known)}")
    return metric


def _history(result: dict[str, Any], metric: str | None, larger: bool) -> list[tuple[int, float]]:
    worst = -math.inf if larger else math.inf
    points = [(int(entry["step"]), float(entry["metrics"][metric])) for entry in result["history"]
              if metric in entry["metrics"]]  # fmt: skip
    # A diverged validation must not count as best, nor as "as good as dense": every comparison with NaN is False.
    return [(step, worst if math.isnan(value) else value) for step, value in points]


def _is_as_good(value: float | None, than: float | None, larger: bool) -> bool:
    if value is None or than is None:
        return False
    return value >= than if larger else value <= than


JOURNAL_FILE, LOG_FILE = "lottery.json", "output.log"
Control = Literal["random_reinit", "random_mask"]
CONTROLS = get_args(Control)
_CHOSEN_HERE = ("out", "ticket", "control")
Quality = Literal["last", "best"]

Launch = Callable[[Recipe, Path, int], StartedRun | None]
"""Trains with a recipe into a folder, under a lock. Returns a run to wait for, or None if it has already trained."""


class LotterySearch:
    """Searches winning tickets: a dense run, then `rounds` runs that each prune `rate` of the remaining weights.

    Every run is the user's own training from its first step, with its seeds and data order. It is replayed up to step k
    (`rewind_to`). Then pruned weights become zero, and the others have their value from the dense run.

    Args:
        rounds: Runs after the dense one.
        rate: Share of the remaining weights that each round prunes; half of it in the output layer.
        rewind_to: Step k: a step, a fraction of the run, or ``"2ep"``. By default 0, the initialization; a third of
            the run for rewind ``learning_rate``.
        controls: ``"random_reinit"`` and ``"random_mask"``: also train these, with each ticket's number of weights.
        control_rounds: Rounds with controls; by default all.
        metric: The curve's metric, by the trainer's name; by default the validation loss.
        mode: ``max`` if larger is better, ``min`` if smaller.
        quality: A run's quality: that of its ``last`` or ``best`` validation.
        options: Further options of `LotteryConfig`: rewind, output_rate, conv_rate, scope, max_layer_sparsity, seed,
            include, skip, min_size.

    Raises:
        ConfigError: If an option breaks its rule.

    Source: Frankle and Carbin 2019, arXiv:1803.03635; late rewinding: Frankle et al. 2020, arXiv:1912.05671; learning
    rate rewinding: Renda, Frankle and Carbin 2020, arXiv:2003.02389.

    Example:
        >>> import tempfile, torch
        >>> from shared_core import Session
        >>> def train(recipe):
        ...     torch.manual_seed(0)
        ...     model, session = torch.nn.Linear(10, 2), Session(recipe)
        ...     session.attach(model)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     session.begin([optimizer], total_steps=3)
        ...     for _ in range(3):
        ...         model(torch.ones(1, 10)).square().sum().backward()
        ...         session.before_step()
        ...         optimizer.step()
        ...         _ = session.after_step()
        ...         optimizer.zero_grad()
        ...     session.evaluated({"loss": float(model(torch.ones(1, 10)).square().sum().detach())})
        ...     session.finish()
        >>> curve = LotterySearch(rounds=2, rate=0.5, rewind_to=1).run(train, tempfile.mkdtemp())
        >>> [(row.kept, row.replay) for row in curve.rows]
        [(20, None), (15, 'bit-equal'), (11, 'bit-equal')]
    """

    def __init__(
        self,
        rounds: int = 10,
        rate: float = 0.2,
        rewind_to: Position | None = None,
        *,
        controls: Sequence[str] = (),
        control_rounds: Sequence[int] = (),
        metric: str | None = None,
        mode: Mode = "auto",
        quality: Quality = "last",
        **options: Any,
    ) -> None:
        self.rounds = rounds = checked(rounds, int, "lottery", "rounds", low=1)
        self.controls = tuple(dict.fromkeys(checked(controls, tuple[Control, ...], "lottery", "controls")))
        among = {"low": 1, "high": rounds}
        self.control_rounds = checked(control_rounds, tuple[int, ...], "lottery", "control_rounds", **among)
        self.mode = checked(mode, Mode, "lottery", "mode")
        self.quality = checked(quality, Quality, "lottery", "quality")
        self.metric = metric
        rule = f"control_rounds {[*control_rounds]} needs controls, got none"
        require(controls or not control_rounds, "lottery", rule, f"add {' or '.join(CONTROLS)}")
        self.control_rounds = self.control_rounds or tuple(range(1, rounds + 1))
        for name in _CHOSEN_HERE:
            require(name not in options, "lottery", f"{name} must not be given: it is chosen for every run")
        # Learning rate rewinding replays the schedule's last two thirds; weight rewinding starts from the
        # initialization.
        if rewind_to is None:
            rewind_to = 1 / 3 if options.get("rewind") == "learning_rate" else 0
        self.config = LotteryConfig.from_dict({"out": "-", "rate": rate, "rewind_to": rewind_to, **options})
        # After so many rounds 1 - (1 - rate)^rounds of the weights are pruned: the cap must allow that.
        most, asked = self.config.max_layer_sparsity, 1 - (1 - self.config.rate) ** rounds
        rule = f"max_layer_sparsity must be at least what {rounds} rounds prune, {asked:.4g}, got {most}"
        require(most is None or most >= asked - 1e-9, "lottery", rule)

    def run(self, train: Callable[[Recipe], object], folder: Path | str) -> TicketCurve:
        """Search with a function that trains once in this process, and return the curve.

        Args:
            train: Builds the model with the same seed every time, and trains it with the given recipe: in
                a `Session`, or a Trainer with ``attach`` or a callback.
            folder: Everything is written here. A search that was stopped resumes from it.

        Raises:
            CheckpointError: If the folder belongs to another search.
            TrainingError: If the training ignored the recipe.
            ConfigError: If no validation reported the metric.
        """

        def launch(recipe: Recipe, out: Path, lock: int) -> None:
            train(recipe)

        return self._search(Path(folder), None, launch)

    def run_command(
        self,
        command: Sequence[str],
        folder: Path | str,
        *,
        output: BinaryIO | None = None,
        progress: Callable[[TicketCurve], object] = lambda curve: None,
        executor: Executor | None = None,
    ) -> TicketCurve:
        """Search with a command that trains once, in a fresh process every time, and return the curve.

        Args:
            command: ``["python", "my_train.py", …]`` runs as under `eff run`: techniques apply to every Hugging Face
                Trainer and Lightning Trainer, and our flags are removed. Any other command must read the recipe
                from the file that ``EFF_RECIPE`` names (Lightning does). In an argument, ``{round}`` is
                the run's name, ``{out}`` its folder, ``{recipe}`` that file.
            folder: Everything is written here. A search that was stopped or killed resumes from it: finished runs
                are not run again.
            output: Stream for the training's output; the run's ``output.log`` always has it.
            progress: Called with the curve so far after every run.
            executor: Starts the runs elsewhere, controls in parallel with later rounds; None: here, one by one.

        Raises:
            CheckpointError: If the folder belongs to another search.
            TrainingError: If the command failed, or did not train with the recipe.
            ConfigError: If no validation reported the metric, or the command is wrong.
            CompatibilityError: If our flags in the command cannot be combined with tickets.
        """
        training, ours = parse_round(command)
        check_before_imports(Recipe({"lottery": self.config}).merged(ours))

        def launch(recipe: Recipe, out: Path, lock: int) -> StartedRun | None:
            make_folder(out)
            signs = {"{round}": out.name, "{out}": str(out.resolve())}
            starter = executor or LocalExecutor("lottery", lock)
            run = training.start(out.name, recipe.merged(ours), out / "recipe.yaml", signs, out / LOG_FILE, starter)
            # Nothing depends on a control, but the next round needs this one's ticket.
            if executor is not None and out.name.endswith(CONTROLS):
                return run
            run.finish(output)
            return None

        return self._search(Path(folder), without_secrets(command), launch, progress)

    def _runs(self) -> Iterator[tuple[int, str]]:
        yield 0, "none"
        for number in range(1, self.rounds + 1):
            yield number, "none"
            if number in self.control_rounds:
                yield from ((number, control) for control in self.controls)

    def _search(
        self,
        folder: Path,
        command: list[str] | None,
        launch: Launch,
        progress: Callable[[TicketCurve], object] = lambda curve: None,
    ) -> TicketCurve:
        # You can later ask for more rounds, further controls or another metric of an existing search.
        plan = {name: value for name, value in self.config.to_dict().items() if name not in _CHOSEN_HERE}
        position = parse_position(self.config.rewind_to)  # 500 and "500" are the same step
        plan |= {"rewind_to": [position.value, position.unit], "command": command}
        journal = Journal(folder / JOURNAL_FILE, "lottery", "search", plan, own="round-*")
        results: dict[tuple[int, str], dict[str, Any]] = {}
        waiting: dict[tuple[int, str], StartedRun] = {}

        def add(run: tuple[int, str]) -> None:
            results[run] = _result(_folder_of(folder, *run))
            # The curve is written after every run, so that a stopped search has its points.
            progress(self._curve(folder, results))

        with journal.locked() as lock, contextlib.ExitStack() as stopping:
            journal.write(**journal.read())
            for run in self._runs():
                out = _folder_of(folder, *run)
                if not (out / RESULT_FILE).exists() and (started := launch(self._recipe(folder, *run), out, lock)):
                    stopping.callback(started.run.kill)
                    waiting[run] = started
                else:
                    add(run)
            for run, started in waiting.items():
                started.finish()
                add(run)
            stopping.pop_all()  # all have ended
        return self._curve(folder, {run: results[run] for run in self._runs()})

    def _recipe(self, folder: Path, number: int, control: str) -> Recipe:
        out = _folder_of(folder, number, control).resolve()
        options = {**self.config.to_dict(), "out": str(out), "control": control}
        if number:  # the ticket that the previous round found
            options["ticket"] = str(_folder_of(folder, number - 1, "none").resolve() / TICKET_FILE)
        return Recipe.from_dict({"lottery": options})

    def _curve(self, folder: Path, results: dict[tuple[int, str], dict[str, Any]]) -> TicketCurve:
        rows = [(*run, _folder_of(folder, *run), result) for run, result in results.items()]
        curve = curve_of(rows, metric=self.metric, mode=self.mode, quality=self.quality)
        for name, text in (("curve.json", curve.json()), ("curve.csv", curve.csv())):
            with atomic_write(folder / name) as temporary:
                temporary.write_text(text, encoding="utf-8")
        with contextlib.suppress(ImportError):
            curve.plot(folder / "curve.png")
        return curve


def parse_round(command: Sequence[str]) -> tuple[TrainingCommand, Recipe]:
    """Return a command that trains once per round, and the recipe of our flags in it."""
    training = TrainingCommand.parse(command, "lottery")
    recipe = recipe_of(dict(training.flags))
    rule = "command must not have flags of ticket, which are chosen for every round"
    require("lottery" not in recipe, "lottery", rule)
    return training, recipe


def _folder_of(folder: Path, number: int, control: str) -> Path:
    return folder / (f"round-{number:02d}" + ("" if control == "none" else f"-{control}"))


def _result(out: Path) -> dict[str, Any]:
    rule = f"{out.name} must train with the given recipe, but left no {RESULT_FILE}"
    remedy = (
        "use the Hugging Face Trainer, Lightning, or a Session that runs to finish() with the recipe in the file that "
        "EFF_RECIPE names"
    )
    require((out / RESULT_FILE).exists(), "lottery", rule, remedy, TrainingError)
    return read_object(out / RESULT_FILE)
