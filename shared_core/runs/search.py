"""Search for small models: candidates cut from a trained model, healed by the user's own training, chosen by Optuna.

A search is a folder: ``search.json`` with every candidate, ``optuna.journal`` with Optuna's trials, and a folder, log,
recipe and receipt per trained candidate. Candidates are trained once, also when Optuna proposes them again.
"""

from __future__ import annotations

import contextlib
import copy
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

from torch import nn

from shared_core.config.options import checked
from shared_core.engine.receipt import VARIABLE as RECEIPT_VARIABLE
from shared_core.engine.recipe import Recipe
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, TrainingError, nearest, require
from shared_core.files.atomic import atomic_folder, make_folder
from shared_core.files.journal import Journal, read_object
from shared_core.front_ends.flags import check_before_imports, recipe_of
from shared_core.libraries import optional
from shared_core.quantization import BitPlan
from shared_core.runs.candidates import BITS, Candidates
from shared_core.runs.command import TrainingCommand, without_secrets
from shared_core.runs.executors import Executor, LocalExecutor
from shared_core.runs.search_table import SearchRow, SearchTable, fits
from shared_core.runs.trained_model import (
    Mode,
    check_bits,
    check_distilled,
    count_parameters,
    find_model,
    is_larger_better,
    model_metrics,
    usual_metric,
    validations,
)

SEARCH_FILE, TRIALS_FILE = "search.json", "optuna.journal"
UNCUT = "uncut"
Sampler = Literal["tpe", "random"]
_RANDOM_TRIALS = 6
_REPEATS = 200
_WATCH_SECONDS = 1.0


@dataclass(frozen=True)
class _Trainings:
    """How to run trainings, and what to call before and after each."""

    executor: Executor
    output: BinaryIO | None
    begin: Callable[[SearchRow], object]
    end: Callable[[SearchRow], object]


class ModelSearch:
    """Searches smaller versions of a trained model that are good for their cost.

    Each candidate is cut with `shrink_to`, written to the folder ``{student}``, and trained by the user's command with
    distillation from the uncut model, and with ``qat`` if it has fewer bits. Optuna's multivariate TPE proposes the
    sizes. It maximizes the quality under the limit as a constraint. The uncut model and uniform cuts come first.
    Candidates above the limit are not trained.

    Args:
        command: ``["python", "my_train.py", …]`` runs as under `eff run`. In an argument, ``{student}`` is the folder
            of the cut model, ``{out}`` the candidate's output folder, ``{teacher}`` the uncut model's folder,
            ``{recipe}`` the file of its recipe.
        folder: Everything is written here. A search that was stopped or killed resumes from it.
        candidates: What to cut, and its cost.
        teacher: The folder of the uncut model; None: it is saved in `folder`.
        limit: Largest cost, as a share of the uncut model's.
        metric: The metric to optimize; by default the validation loss.
        mode: ``max`` if a larger metric is better, ``min`` if smaller.
        options: Options of distillation.
        sampler: ``tpe``, or ``random`` as a baseline.
        stop_early: Stop a training whose validations are in the worst quarter of those at the same step.
        seed: Seed of the sampler.
        trained: A glob for the model under ``{out}``; by default it is searched.
        save: Writes a cut model to a folder; by default its ``save_pretrained``.
        load: Loads a trained file, such as a Lightning ``.ckpt``, into a cut model, which is then saved as a folder.
            None: the front names the file.
        executor: Starts the trainings elsewhere; None: on this machine.

    Raises:
        MissingExtraError: If Optuna is not installed.
        ConfigError: If an option or the command is wrong.
        CheckpointError: If the folder belongs to another search.

    Source: Bergstra et al. 2011 (TPE); Watanabe and Hutter 2023, arXiv:2211.14411 (constraints); Akiba et al. 2019,
    arXiv:1907.10902 (Optuna).
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path | str,
        candidates: Candidates,
        *,
        teacher: Path | None = None,
        limit: float = 0.5,
        metric: str | None = None,
        mode: Mode = "auto",
        options: Mapping[str, Any] | None = None,
        sampler: Sampler = "tpe",
        stop_early: bool = True,
        seed: int = 0,
        trained: str | None = None,
        save: Callable[[Any, Path], object] = lambda model, folder: model.save_pretrained(folder),
        load: Callable[[nn.Module, Path], object] | None = None,
        executor: Executor | None = None,
    ) -> None:
        optional("optuna", "search", "search")
        self.folder, self.candidates, self._executor = Path(folder), candidates, executor
        self._save, self._load = save, load
        self.limit = checked(limit, float, "search", "limit", above=0, high=1)
        self._mode: Mode = checked(mode, Mode, "search", "mode")
        self._sampler: Sampler = checked(sampler, Sampler, "search", "sampler")
        self._stop_early, self._seed, self._trained = stop_early, checked(seed, int, "search", "seed", low=0), trained
        self._command = TrainingCommand.parse(command, "search")
        self._teacher = (teacher or self.folder / UNCUT / "model").resolve()
        self._keeps_teacher = teacher is not None
        self._recipe = _recipe(self._command, options or {}, self._teacher)
        if BITS in candidates.values:
            rule = "qat must not be given, because the search sets it for the bits of each candidate"
            require("qat" not in self._recipe, "search", rule, "leave out --qat_…, and choose --scheme")
            check_before_imports(self._recipe.merged(Recipe.from_dict({"qat": {"scheme": candidates.scheme}})))
        self._asked_metric = metric
        recipe = self._recipe.to_dict()
        recipe["distill"].pop("teacher")  # so that the folder may move
        plan = {
            "command": without_secrets(command), "model": None if teacher is None else str(teacher),
            "weights": sum(weight.numel() for weight in candidates.model.parameters()),
            "sizes": {name: [*of] for name, of in candidates.values.items()},
            "cost": candidates.kind, "scheme": candidates.scheme, "limit": self.limit, "mode": mode, "sampler": sampler,
            "stop_early": stop_early, "seed": seed, "recipe": recipe,
        }  # fmt: skip
        self._journal = Journal(self.folder / SEARCH_FILE, "search", "search", plan, own="[!.]*")
        self._rows: dict[str, SearchRow] = {}
        self._metric: str | None = None
        self._read()

    @property
    def table(self) -> SearchTable:
        """The candidates so far."""
        larger = self._metric is None or is_larger_better(self._metric, self._mode)
        return SearchTable(tuple(self._rows.values()), self.candidates.kind, self.limit, self._metric, larger)

    @property
    def tried(self) -> int:
        """The number of trainings that ended, or were stopped early."""
        return sum(row.state in ("trained", "stopped") for row in self._rows.values())

    def run(
        self,
        trials: int = 20,
        *,
        output: BinaryIO | None = None,
        begin: Callable[[SearchRow], object] = lambda row: None,
        end: Callable[[SearchRow], object] = lambda row: None,
    ) -> SearchTable:
        """Search until this many candidates have been trained, or no new one is left, and return all of them.

        Args:
            trials: Number of trainings, including those of earlier runs of this search.
            output: Stream for the training's output; the candidate's log always has it.
            begin: Called with a candidate before its training.
            end: Called with every new candidate after its training, or if it is not trained.

        Raises:
            RunError: If a training failed. The same call continues there.
            TrainingError: If a run did not train or distill the candidate, or did not log the metric.
            CheckpointError: If a run left no model, or the journal is damaged.
        """
        checked(trials, int, "search", "trials", low=1)
        with self._journal.locked() as lock, _quiet_optuna() as optuna:
            self._read()  # again under the lock
            self._write()
            trainings = _Trainings(self._executor or LocalExecutor("search", lock), output, begin, end)
            if not self._keeps_teacher and not self._teacher.exists():
                self._write_model(self.candidates.model, self._teacher)
            study = None
            repeats = 0
            while self.tried < trials and self._seen < self.candidates.count and repeats < _REPEATS:
                # The direction of the study is known once the uncut model was trained, which needs no proposal.
                if (uncut := self._row(self.candidates.uncut)).state == "cut":
                    self._finish(uncut, trainings, None)
                    continue
                study = study or self._study(optuna)
                is_new = self._trial(optuna, study, trainings)
                repeats = 0 if is_new else repeats + 1
        return self.table

    @property
    def _seen(self) -> int:
        return sum(row.state != "cut" for row in self._rows.values())

    def _study(self, optuna: Any) -> Any:
        """Return the study in the journal file, without its unfinished trials."""
        file = self.folder / TRIALS_FILE
        cut_to_whole_lines(file)
        file.with_name(f"{file.name}.lock").unlink(missing_ok=True)  # of a killed search: we hold the folder's lock
        try:
            storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(file)))
            direction = "maximize" if self.table.larger_is_better else "minimize"
            study = optuna.create_study(
                study_name="search", storage=storage, direction=direction, load_if_exists=True, sampler=None,
                pruner=optuna.pruners.PercentilePruner(75.0, n_startup_trials=4)
                if self._stop_early else optuna.pruners.NopPruner(),
            )  # fmt: skip
        except (ValueError, KeyError) as error:
            remedy = f"remove it: the candidates in {SEARCH_FILE} are not trained again"
            raise CheckpointError(file, f"Optuna cannot read the file: {error}", remedy) from error
        for trial in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        return study

    def _trial(self, optuna: Any, study: Any, trainings: _Trainings) -> bool:
        """Ask Optuna for a candidate, finish it, and tell its result. Return False if it was known before."""
        states = optuna.trial.TrialState
        finished = study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED))
        study.sampler = self._sampler_of(optuna, len(finished))
        recipes, values = [self.candidates.uncut, *self.candidates.uniform()], self.candidates.values
        if len(finished) < len(recipes) and not study.get_trials(deepcopy=False, states=(states.WAITING,)):
            known = recipes[len(finished)]
            study.enqueue_trial({name: values[name].index(value) for name, value in known.items()})
        # Places in the ascending list of values: TPE then knows their order.
        spaces = {name: optuna.distributions.IntDistribution(0, len(of) - 1) for name, of in values.items()}
        trial = study.ask(spaces)
        sizes = {name: values[name][place] for name, place in trial.params.items()}
        row = self._row(sizes)
        is_new = row.state == "cut"
        row = self._finish(row, trainings, trial) if is_new else row
        reported = study.get_trials(deepcopy=False)[trial.number].intermediate_values
        for step, value in row.validations if row.name != UNCUT else ():
            if step not in reported:
                trial.report(value, step)
        trial.set_constraint("cost", 1.0 if row.share is None else row.share + row.noise - self.limit)
        if row.state == "trained" and row.quality is not None:
            study.tell(trial, row.quality)
        else:
            study.tell(trial, state=states.PRUNED)
        return is_new

    def _sampler_of(self, optuna: Any, position: int) -> Any:
        """Return the sampler for the next trial. A seed per trial makes a resumed search propose the same."""
        import numpy as np

        seed = int(np.random.SeedSequence([self._seed, position]).generate_state(1)[0])
        if self._sampler == "random":
            return optuna.samplers.RandomSampler(seed=seed)
        return optuna.samplers.TPESampler(multivariate=True, n_startup_trials=_RANDOM_TRIALS, seed=seed)

    def _row(self, sizes: Mapping[str, int]) -> SearchRow:
        """Return the candidate of these sizes, a new one if there is none."""
        name = f"candidate-{len(self._rows):02d}" if self._rows else UNCUT
        return next((row for row in self._rows.values() if row.sizes == sizes), SearchRow(name, sizes, "cut"))

    def _finish(self, row: SearchRow, trainings: _Trainings, trial: Any) -> SearchRow:
        """Cut, measure and train a candidate, as far as it makes sense, and note it."""
        name, student, model = row.name, self._teacher, self.candidates.model
        if name != UNCUT:
            try:
                model = self.candidates.cut(row.sizes)
            except (CompatibilityError, ConfigError) as error:
                row = replace(row, state="impossible", note=str(error).removeprefix("shrink: "))
                return self._note(row, trainings.end)
        plan = self.candidates.plan(model, row.sizes)
        if row.share is None:  # a killed search has measured it: latency would differ the second time
            cost = self.candidates.cost(model, plan)
            row = replace(row, cost=cost.value, share=cost.share, noise=cost.noise)
            self._note(row)
        if name != UNCUT:
            if not fits(row, self.limit):
                return self._note(replace(row, state="too costly"), trainings.end)
            student = self.folder / ".students" / name
            shutil.rmtree(student, ignore_errors=True)
            self._write_model(model, student)
        trainings.begin(row)
        row = self._train(row, model, plan, student, trainings, trial)
        if name != UNCUT:
            shutil.rmtree(student)
        return self._note(row, trainings.end)

    def _train(
        self, row: SearchRow, model: nn.Module, plan: BitPlan | None, student: Path, trainings: _Trainings, trial: Any
    ) -> SearchRow:
        out = self.folder / row.name / "run" if row.name == UNCUT else self.folder / row.name
        log, file, receipt = (self.folder / f"{row.name}.{end}" for end in ("log", "yaml", "receipt.json"))
        for old in (log, receipt):
            old.unlink(missing_ok=True)
        shutil.rmtree(out, ignore_errors=True)
        make_folder(out)
        signs = {"{student}": student.resolve(), "{out}": out.resolve(), "{teacher}": self._teacher}
        started = time.monotonic()
        qat = {} if plan is None else {"qat": plan.qat_options(self.candidates.scheme)}
        recipe = self._recipe.merged(Recipe.from_dict(qat))
        run = self._command.start(
            row.name, recipe, file, {sign: str(path) for sign, path in signs.items()}, log,
            trainings.executor,
            {RECEIPT_VARIABLE: str(receipt.resolve())},
        )  # fmt: skip
        watch = _Watch(out, self._metric, trial) if self._metric and trial and self._stop_early else None
        has_ended = run.finish(trainings.output, watch or (lambda: False))
        row = replace(row, seconds=round(time.monotonic() - started, 1))
        if not has_ended:
            seen = [point for point in watch.seen if math.isfinite(point[1])] if watch else []
            return replace(row, state="stopped", validations=tuple(seen))
        report = read_object(receipt) if receipt.is_file() else {}
        check_distilled(report, "search", row.name)
        if plan is not None:
            check_bits(report, {layer: plan.bits[layer] for layer in plan.quantized}, "search", row.name)
        found = find_model(out, self._trained, "search", "--trained")
        student_part = getattr(self._recipe["distill"], "student", None)
        parameters, given = count_parameters(found, student_part), count_parameters(student)
        wrong = f"{row.name} must be trained from {{student}}, which has {given:,} parameters, got {parameters:,}"
        remedy = "the script must load its model from that folder, and save all of it"
        require(parameters == given, "search", wrong, remedy, TrainingError)
        metrics = model_metrics(out, found, report)
        self._choose_metric(metrics, row.name)
        metrics = {key: value for key, value in metrics.items() if math.isfinite(value)}
        seen = [point for point in validations(out, str(self._metric)) if math.isfinite(point[1])]
        if self._load is not None and not (found / "config.json").is_file():
            whole = copy.deepcopy(model)
            self._load(whole, found)
            found = out / "plain"
            self._write_model(whole, found)
        return replace(
            row, state="trained", parameters=parameters, metrics=metrics, quality=metrics.get(str(self._metric)),
            validations=tuple(seen), model=str(found.relative_to(self.folder)),
        )  # fmt: skip

    def _write_model(self, model: nn.Module, folder: Path) -> None:
        with atomic_folder(folder) as temporary:
            self._save(model, temporary)

    def _choose_metric(self, metrics: Mapping[str, float], name: str) -> None:
        """Choose the metric after the first training, or check that a later one has it."""
        metric = self._metric or self._asked_metric
        known = [one for one in metrics if one.startswith(("eval_", "val_"))]
        chosen = metric or usual_metric(known)
        rule = f"metric must be chosen, got none; known: {', '.join(known) or 'none, the training validates nothing'}"
        require(chosen, "search", rule, "run it again with --metric", TrainingError)
        rule = f"metric must be one that {name} logged, got {chosen!r}{nearest(str(chosen), metrics)}"
        require(chosen in metrics, "search", rule, "run it again with that name", TrainingError)
        self._metric = chosen

    def _note(self, row: SearchRow, end: Callable[[SearchRow], object] = lambda row: None) -> SearchRow:
        self._rows[row.name] = row
        self._write()
        end(row)
        return row

    def _read(self) -> None:
        noted = self._journal.read("metric", "front", "rows", "larger_is_better")
        file = self._journal.file
        try:
            rows = [
                SearchRow(**{**row, "validations": tuple(map(tuple, row["validations"]))})
                for row in noted.get("rows") or ()
            ]
        except (TypeError, KeyError) as error:
            raise CheckpointError(file, "file must hold the rows of a search", "it is damaged, remove it") from error
        self._rows, self._metric = {row.name: row for row in rows}, noted.get("metric")
        rule = f"metric must be {self._metric}, as in the search so far, got {self._asked_metric}"
        is_same = self._metric is None or self._asked_metric in (None, self._metric)
        require(is_same, "search", rule, "leave it out, or choose another folder", CheckpointError)
        for row in self.table.front:
            rule = f"the model of {row.name} is missing: {self.folder / str(row.model)}"
            is_there = (self.folder / str(row.model)).exists()
            require(is_there, file, rule, "restore it, or choose another folder", CheckpointError)

    def _write(self) -> None:
        found = self.table
        self._journal.write(
            metric=self._metric, larger_is_better=found.larger_is_better, front=[row.name for row in found.front],
            rows=[asdict(row) for row in found.rows],
        )  # fmt: skip


class _Watch:
    """Reports a running training's validations to Optuna, and returns True once it is hopeless."""

    def __init__(self, out: Path, metric: str, trial: Any) -> None:
        self._out, self._metric, self._trial = out, metric, trial
        self.seen: list[tuple[int, float]] = []
        self._next = 0.0

    def __call__(self) -> bool:
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + _WATCH_SECONDS
        for step, value in validations(self._out, self._metric)[len(self.seen) :]:
            self.seen.append((step, value))
            if math.isnan(value):
                return True
            self._trial.report(value, step)
            if self._trial.should_prune():
                return True
        return False


def cut_to_whole_lines(file: Path) -> None:
    """Cut a file after its last line end: Optuna would append to half a line, and never read the file again."""
    content = file.read_bytes() if file.exists() else b""
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with file.open("r+b") as opened:
            opened.truncate(whole)


@contextlib.contextmanager
def _quiet_optuna() -> Iterator[Any]:
    """Yield Optuna, without its messages about studies and trials."""
    optuna = optional("optuna", "search", "search")
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield optuna
    finally:
        optuna.logging.set_verbosity(before)


def _recipe(command: TrainingCommand, options: Mapping[str, Any], teacher: Path) -> Recipe:
    """Return the recipe of every candidate, checked."""
    remedies = {
        "{student}": "write it where the script takes the model: --model_name_or_path {student}",
        "{out}": "write it where the script takes its output folder: --output_dir {out}",
    }
    for sign, remedy in remedies.items():
        require(command.uses(sign), "search", f"command must contain {sign}, got none", remedy)
    own = {f"distill_{name}": value for name, value in options.items()}
    is_own = "distill_teacher" in own or "distill_teacher" in command.flags
    rule = "distill_teacher must not be given: the uncut model teaches every candidate"
    require(not is_own, "search", rule)
    twice = next((name for name in own if name in command.flags), None)
    require(twice is None, "search", f"{twice} must be given once, got it before and after --")
    require("," not in str(teacher), "search", f"the path of the model must have no comma, got {teacher}")
    rule = "eff_recipe must have no distill section"
    is_free = "distill" not in recipe_of({k: v for k, v in command.flags.items() if not k.startswith("distill_")})
    require(is_free, "search", rule, "pass its options as flags, --distill_…")
    # The folder of the uncut model may not exist yet.
    check_before_imports(recipe_of({**command.flags, **own, "distill_teacher": UNCUT}))
    return recipe_of({**command.flags, **own, "distill_teacher": str(teacher)})
