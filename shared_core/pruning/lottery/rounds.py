"""Iterative magnitude pruning over the user's own training: every round a fresh run of it, with the ticket so far."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from shared_core.atomic import atomic_write
from shared_core.compatibility import check
from shared_core.errors import ConfigError, TrainingError
from shared_core.positions import Position, parse_position
from shared_core.pruning.lottery.commands import RoundCommand
from shared_core.pruning.lottery.config import TicketConfig
from shared_core.pruning.lottery.curve import TicketCurve, curve_of
from shared_core.pruning.lottery.journal import Journal
from shared_core.pruning.lottery.run_folder import RESULT_FILE
from shared_core.recipe import Recipe
from shared_core.training_command import without_secrets

CONTROLS = ("random_reinit", "random_mask")
_CHOSEN_HERE = ("out", "ticket", "control")

Launch = Callable[[Recipe, Path, int], object]


class LotteryTicket:
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
        options: Further ones of `TicketConfig`: rewind, output_rate, conv_rate, scope, max_layer_sparsity, seed,
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
        ...         session.before_optimizer_step()
        ...         optimizer.step()
        ...         _ = session.after_optimizer_step()
        ...         optimizer.zero_grad()
        ...     session.evaluated({"loss": float(model(torch.ones(1, 10)).square().sum().detach())})
        ...     session.finish()
        >>> curve = LotteryTicket(rounds=2, rate=0.5, rewind_to=1).run(train, tempfile.mkdtemp())
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
            raise ConfigError(f"lottery: rounds must be a whole number of at least 1, got {rounds!r}")
        if isinstance(controls, str):
            raise ConfigError(f"lottery: controls must be a list, got {controls!r}; write [{controls!r}]")
        for control in controls:
            if control not in CONTROLS:
                raise ConfigError(f"lottery: controls must be of {', '.join(CONTROLS)}, got {control!r}")
        for number in control_rounds:
            if not 1 <= number <= rounds:
                raise ConfigError(f"lottery: control_rounds must be rounds from 1 to {rounds}, got {number!r}")
        if control_rounds and not controls:
            raise ConfigError(f"lottery: control_rounds must come with controls, got {[*control_rounds]} without; "
                              f"add {' or '.join(CONTROLS)}")  # fmt: skip
        if mode not in ("auto", "max", "min"):
            raise ConfigError(f"lottery: mode must be auto, max or min, got {mode!r}")
        if quality not in ("last", "best"):
            raise ConfigError(f"lottery: quality must be last or best, got {quality!r}")
        for name in _CHOSEN_HERE:
            if name in options:
                raise ConfigError(f"lottery: {name} must not be given, it is chosen for every run")
        if rewind_to is None:
            rewind_to = 1 / 3 if options.get("rewind") == "learning_rate" else 0
        self.config = TicketConfig.from_dict({"out": "-", "rate": rate, "rewind_to": rewind_to, **options})
        most, asked = self.config.max_layer_sparsity, 1 - (1 - self.config.rate) ** rounds
        if most is not None and most < asked - 1e-9:
            raise ConfigError(
                f"lottery: max_layer_sparsity must be at least what {rounds} rounds prune, {asked:.4g}, got {most}"
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

        Raises:
            CheckpointError: If the folder is of another search.
            TrainingError: If the command failed, or did not train with the recipe.
            ConfigError: If no validation reported the metric, or the command is wrong.
            CompatibilityError: If flags of ours in the command cannot be combined with tickets.
        """
        training = RoundCommand(command)
        check(Recipe({"ticket": self.config}).merged(training.recipe))

        def launch(recipe: Recipe, out: Path, lock: int) -> None:
            training.run(recipe, out, lock, stdout)

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
        with journal.locked() as lock:
            for number, control in self._runs():
                out = journal.run_folder(number, control)
                result = journal.result(number, control)
                if result is None:
                    launch(self._recipe(journal, number, control), out, lock)
                    result = journal.result(number, control)
                    if result is None:
                        raise TrainingError(
                            f"lottery: {out.name} must train with the recipe it was given, but left no {RESULT_FILE}; "
                            "use Hugging Face's Trainer or Lightning, or a Session with the recipe (of the file that "
                            "EFF_RECIPE names) that is finished"
                        )
                results.append((number, control, out, result))
                curve = curve_of(results, metric=self.metric, mode=self.mode, quality=self.quality)
                self._write(journal.folder, curve)
                if progress is not None:
                    progress(curve)
        return curve

    def _recipe(self, journal: Journal, number: int, control: str) -> Recipe:
        options = {
            **self.config.to_dict(),
            "out": str(journal.run_folder(number, control).resolve()),
            "control": control,
        }
        if number:
            options["ticket"] = str(journal.ticket(number).resolve())
        return Recipe.from_dict({"ticket": options})

    def _write(self, folder: Path, curve: TicketCurve) -> None:
        for name, text in (("curve.json", curve.json()), ("curve.csv", curve.csv())):
            with atomic_write(folder / name) as temporary:
                temporary.write_text(text, encoding="utf-8")
        with contextlib.suppress(ImportError):
            curve.plot(folder / "curve.png")
