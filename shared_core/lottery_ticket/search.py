"""Iterative magnitude pruning over the user's own training: every round is a fresh run with the ticket so far.

A search is a folder: which experiment it is, which runs are finished, and which process works on it. Each run leaves
the weights of step k, the ticket that it found, and its figures.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from shared_core.config.training_time import Position, parse_position
from shared_core.engine.compatibility import check
from shared_core.engine.recipe import Recipe
from shared_core.errors import CheckpointError, ConfigError, TrainingError
from shared_core.files.atomic import atomic_write, clean_strays, make_folder
from shared_core.files.journal import check_same, locked, read_object, write_object
from shared_core.front_ends.executors import Executor, Run
from shared_core.front_ends.training_command import TrainingCommand, without_secrets
from shared_core.lottery_ticket.config import LotteryConfig
from shared_core.lottery_ticket.curve import TicketCurve, curve_of
from shared_core.lottery_ticket.ticket import Ticket, read_ticket, write_ticket


class RoundCommand:
    """A command that trains once, in a round.

    ``{round}`` in an argument stands for the run's name, ``{out}`` for its folder, ``{recipe}`` for the file of its
    recipe.

    Args:
        command: As the user writes it.

    Raises:
        ConfigError: If it is empty, its script does not exist, or a flag of ours is wrong.
    """

    def __init__(self, command: Sequence[str]) -> None:
        from shared_core.front_ends.flags import recipe_of

        self.command = TrainingCommand.parse(command, "lottery")
        self.recipe = recipe_of(dict(self.command.flags))
        if "lottery" in self.recipe:
            raise ConfigError("lottery", "command must not have flags of ticket, which are chosen for every round")

    def start(
        self, recipe: Recipe, out: Path, lock: int, stdout: int | None = None, executor: Executor | None = None
    ) -> StartedRun:
        """Start a training in a fresh process.

        Args:
            recipe: What to train with; our flags of the command are added.
            out: The folder of the run, where the recipe is written to as well.
            lock: A file descriptor to pass on.
            stdout: Where the command prints; None: where this process does.
            executor: Starts it elsewhere; its output goes into `LOG_FILE` then.
        """
        make_folder(out)
        stands_for = {"{round}": out.name, "{out}": str(out.resolve())}
        recipe, log = recipe.merged(self.recipe), out / LOG_FILE
        run = self.command.start(
            recipe, out / "recipe.yaml", stands_for, lock, executor=executor, log=log, stdout=stdout
        )
        command = shlex.join(self.command.arguments)
        return StartedRun(out.name, command, run, "its output above" if executor is None else str(log))


@dataclass(frozen=True)
class StartedRun:
    """A training that was started: the run's name, its command, and where its output is."""

    name: str
    command: str
    run: Run
    output: str

    def finish(self) -> None:
        """Wait for its end.

        Raises:
            TrainingError: If it failed.
        """
        with self.run as run:
            try:
                code = run.wait()
            except BaseException:
                run.kill()
                raise
        if code:
            raise TrainingError(
                "lottery",
                f"{self.name} must end well, but `{self.command}` ended with exit code {code}",
                f"see {self.output}. Started again, the search goes on from here",
            )


TICKET_FILE, REWIND_FILE, RESULT_FILE = "ticket.safetensors", "rewind.safetensors", "round.json"
LOG_FILE = "output.log"


class RunFolder:
    """The folder of one run. Only the main process writes; `RESULT_FILE` comes last and ends the run.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)

    def make(self) -> None:
        """Make the folder.

        Raises:
            CheckpointError: If that cannot be.
        """
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError("lottery", f"out must be a folder that can be made, got {error}") from error

    def check_unfinished(self) -> None:
        """Refuse to train into the folder of a run that is finished.

        Raises:
            CheckpointError: If it is.
        """
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
        """Refuse to resume a dense run beyond step k without the weights that it kept there.

        Raises:
            CheckpointError: If there are none, or those of another run.
        """
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
        with atomic_write(self._path / RESULT_FILE) as temporary:
            temporary.write_text(json.dumps(result, indent=1), encoding="utf-8")


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
        # Through JSON and back: a tuple compares unequal to the list that the file holds.
        plan = json.loads(json.dumps({"format": _FORMAT, **plan}))
        if file.exists():
            check_same(file, read_object(file), plan, "search")
            return
        if any(self.folder.glob("round-*")):
            raise CheckpointError(
                self.folder, f"folder must be new or hold a search, got rounds without {JOURNAL_FILE}"
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


CONTROLS = ("random_reinit", "random_mask")
_CHOSEN_HERE = ("out", "ticket", "control")

Launch = Callable[[Recipe, Path, int], object]


class LotterySearch:
    """Searches winning tickets: a dense run, then `rounds` runs, each with `rate` fewer of the weights left.

    Every run is the user's own training from its first step, with its seeds and data order. It is replayed up to step k
    (`rewind_to`); there what is pruned becomes zero, and what is left has the value that it had in the dense run.

    Args:
        rounds: Runs after the dense one.
        rate: Share of the weights left that each round prunes; half of it in the output layer.
        rewind_to: Step k: a step, a fraction of the run, or ``"2ep"``. By default 0, the initialisation; a third of
            the run for rewind ``learning_rate``.
        controls: Of ``"random_reinit"`` and ``"random_mask"``: also train these, with each ticket's number of weights.
        control_rounds: In these rounds only; by default in all.
        metric: What the curve shows, as the trainer names it; by default the validation loss.
        mode: Whether it is better when larger (``max``) or smaller (``min``).
        quality: Of a run: that of its ``last`` validation or of its ``best``.
        options: Further ones of `LotteryConfig`: rewind, output_rate, conv_rate, scope, max_layer_sparsity, seed,
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
        mode: Literal["auto", "max", "min"] = "auto",
        quality: Literal["last", "best"] = "last",
        **options: Any,
    ) -> None:
        if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
            raise ConfigError("lottery", f"rounds must be a whole number of at least 1, got {rounds!r}")
        if isinstance(controls, str):
            raise ConfigError("lottery", f"controls must be a list, got {controls!r}", f"write [{controls!r}]")
        for control in controls:
            if control not in CONTROLS:
                raise ConfigError("lottery", f"controls must be of {', '.join(CONTROLS)}, got {control!r}")
        for number in control_rounds:
            if not 1 <= number <= rounds:
                raise ConfigError("lottery", f"control_rounds must be rounds from 1 to {rounds}, got {number!r}")
        if control_rounds and not controls:
            raise ConfigError(
                "lottery",
                f"control_rounds must come with controls, got {[*control_rounds]} without",
                f"add {' or '.join(CONTROLS)}",
            )
        if mode not in ("auto", "max", "min"):
            raise ConfigError("lottery", f"mode must be auto, max or min, got {mode!r}")
        if quality not in ("last", "best"):
            raise ConfigError("lottery", f"quality must be last or best, got {quality!r}")
        for name in _CHOSEN_HERE:
            if name in options:
                raise ConfigError("lottery", f"{name} must not be given, it is chosen for every run")
        # Learning rate rewinding replays the schedule's last two thirds; weight rewinding starts from the
        # initialisation.
        if rewind_to is None:
            rewind_to = 1 / 3 if options.get("rewind") == "learning_rate" else 0
        self.config = LotteryConfig.from_dict({"out": "-", "rate": rate, "rewind_to": rewind_to, **options})
        # After so many rounds 1 - (1 - rate)^rounds of the weights are gone: the cap must leave room for that.
        most, asked = self.config.max_layer_sparsity, 1 - (1 - self.config.rate) ** rounds
        if most is not None and most < asked - 1e-9:
            raise ConfigError(
                "lottery", f"max_layer_sparsity must be at least what {rounds} rounds prune, {asked:.4g}, got {most}"
            )
        self.rounds, self.controls = rounds, tuple(dict.fromkeys(controls))
        self.control_rounds = tuple(control_rounds) or tuple(range(1, rounds + 1))
        self.metric, self.mode, self.quality = metric, mode, quality

    def run(self, train: Callable[[Recipe], object], folder: Path | str) -> TicketCurve:
        """Search with a function that trains once, in this process, and return the curve.

        A training of several processes (torchrun) belongs into `run_command`.

        Args:
            train: Builds the model, seeded the same way every time, and trains it with the recipe that it is given: in
                a `Session`, or a Trainer with ``attach`` or a callback.
            folder: Everything is written into it. A search that was stopped goes on from it.

        Raises:
            CheckpointError: If the folder is of another search.
            TrainingError: If the recipe was not trained with.
            ConfigError: If no validation reported the metric.
        """
        return self._search(folder, None, lambda recipe, out, lock: train(recipe))

    def run_command(
        self,
        command: Sequence[str],
        folder: Path | str,
        *,
        stdout: int | None = None,
        progress: Callable[[TicketCurve], None] | None = None,
        executor: Executor | None = None,
    ) -> TicketCurve:
        """Search with a command that trains once, in a fresh process every time, and return the curve.

        Args:
            command: ``["python", "my_train.py", …]`` runs as under `eff run`: techniques reach every Hugging Face
                Trainer and Lightning Trainer, flags of ours in it are taken out. Any other command must take the recipe
                itself from the file that ``EFF_RECIPE`` names (Lightning does). ``{round}`` in an argument stands for
                the run's name, ``{out}`` for its folder, ``{recipe}`` for that file.
            folder: Everything is written into it. A search that was stopped, or killed, goes on from it: finished runs
                are not run again.
            stdout: Where the command prints; None: where this process does.
            progress: Called with the curve so far after every run.
            executor: Starts the runs elsewhere, controls beside the rounds after theirs; None: here, one by one.

        Raises:
            CheckpointError: If the folder is of another search.
            TrainingError: If the command failed, or did not train with the recipe.
            ConfigError: If no validation reported the metric, or the command is wrong.
            CompatibilityError: If flags of ours in the command cannot be combined with tickets.
        """
        training = RoundCommand(command)
        check(Recipe({"lottery": self.config}).merged(training.recipe))

        def launch(recipe: Recipe, out: Path, lock: int) -> StartedRun | None:
            started = training.start(recipe, out, lock, stdout, executor)
            if executor is not None:
                return started
            started.finish()
            return None

        return self._search(folder, without_secrets(command), launch, progress)

    def _runs(self) -> Iterator[tuple[int, str]]:
        yield 0, "none"
        for number in range(1, self.rounds + 1):
            yield number, "none"
            if number in self.control_rounds:
                yield from ((number, control) for control in self.controls)

    def _search(
        self,
        folder: Path | str,
        command: list[str] | None,
        launch: Launch,
        progress: Callable[[TicketCurve], None] | None = None,
    ) -> TicketCurve:
        # More rounds, further controls or another metric may be asked of a search that is there already.
        plan = {name: value for name, value in self.config.to_dict().items() if name not in _CHOSEN_HERE}
        position = parse_position(self.config.rewind_to)  # 500 and "500" are one step
        journal = Journal(folder, {**plan, "rewind_to": [position.value, position.unit], "command": command})
        results: list[tuple[int, str, Path, dict[str, Any]]] = []
        waiting: list[tuple[int, str, StartedRun]] = []

        def add(number: int, control: str) -> None:
            out = journal.run_folder(number, control)
            result = journal.result(number, control)
            if result is None:
                raise TrainingError(
                    "lottery",
                    f"{out.name} must train with the recipe it was given, but left no {RESULT_FILE}",
                    "use Hugging Face's Trainer or Lightning, or a Session with the recipe (of the file that "
                    "EFF_RECIPE names) that is finished",
                )
            # The curve is written after every run, so that a search that is stopped has its points.
            results.append((number, control, out, result))
            curve = self._write(journal.folder, results)
            if progress is not None:
                progress(curve)

        with journal.locked() as lock, _stopping(waiting):
            for number, control in self._runs():
                if journal.result(number, control) is None:
                    recipe = self._recipe(journal, number, control)
                    started = launch(recipe, journal.run_folder(number, control), lock)
                    # nothing else needs what a control finds, and the next round needs this one's ticket
                    if isinstance(started, StartedRun) and control != "none":
                        waiting.append((number, control, started))
                        continue
                    if isinstance(started, StartedRun):
                        started.finish()
                add(number, control)
            while waiting:
                number, control, started = waiting.pop(0)
                started.finish()
                add(number, control)
        order = list(self._runs())
        return self._write(journal.folder, sorted(results, key=lambda row: order.index(row[:2])))

    def _recipe(self, journal: Journal, number: int, control: str) -> Recipe:
        options = {
            **self.config.to_dict(),
            "out": str(journal.run_folder(number, control).resolve()),
            "control": control,
        }
        if number:
            options["ticket"] = str(journal.ticket(number).resolve())
        return Recipe.from_dict({"lottery": options})

    def _write(self, folder: Path, results: Sequence[tuple[int, str, Path, dict[str, Any]]]) -> TicketCurve:
        curve = curve_of(results, metric=self.metric, mode=self.mode, quality=self.quality)
        for name, text in (("curve.json", curve.json()), ("curve.csv", curve.csv())):
            with atomic_write(folder / name) as temporary:
                temporary.write_text(text, encoding="utf-8")
        with contextlib.suppress(ImportError):
            curve.plot(folder / "curve.png")
        return curve


@contextlib.contextmanager
def _stopping(waiting: list[tuple[int, str, StartedRun]]) -> Iterator[None]:
    """Stop what was started and not waited for, if the block is left by an error."""
    try:
        yield
    except BaseException:
        for *_, started in waiting:
            started.run.kill()
        raise
