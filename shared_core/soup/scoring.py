"""Score candidates: each is evaluated once, or its score is read from a journal, so that a killed search can go on.

Metrics that a trainer logged at a checkpoint rank ingredients without an evaluation; others are evaluated in parallel
processes.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from shared_core.checkpoint_formats import LIGHTNING, RUN_KEY, Ingredient, load_checkpoint, open_ingredient, read_json
from shared_core.config.options import checked
from shared_core.distributed.job import Job
from shared_core.errors import CheckpointError, ConfigError, EffError, nearest
from shared_core.files.atomic import atomic_write
from shared_core.soup.adapters import AdapterCandidate, candidate_for
from shared_core.soup.averaging import Candidate, non_finite_tensor
from shared_core.soup.config import larger_is_better
from shared_core.soup.ingredients import Source, open_ingredients

_FORMAT = 2


class Journal:
    """A file of scores, each under a key that names its members, written whole after each evaluation."""

    def __init__(self, path: str | Path | None, ingredients: Sequence[Ingredient], search: Mapping[str, Any]) -> None:
        self._path = None if path is None else Path(path)
        self._scores: dict[str, float] = {}
        if self._path is None:
            return
        self._search = {
            "format": _FORMAT,
            **search,
            # Digests, not paths: a journal must not be used after a checkpoint was written anew under its name.
            "ingredients": [[item.name, item.digest()] for item in ingredients],
        }
        if self._path.exists():
            self._read(self._path)
        else:
            self._write()

    def _read(self, path: Path) -> None:
        content, remedy = read_json(path), "remove the file to start again, or give another"
        try:
            search = {**content["search"]}
            self._scores = {str(members): float(score) for members, score in content["scores"].items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                path, f"journal must be one that a soup search wrote, got {error!r}", remedy
            ) from error
        # Keys of both: an option that only one of them has is a difference too. That of the format comes first.
        name = next((name for name in self._search | search if search.get(name) != self._search.get(name)), None)
        if name is not None:
            mine, theirs = self._search.get(name), search.get(name)
            got = "others" if name == "ingredients" else f"{theirs!r}, now {mine!r}"
            rule = f"be of this search, got one of another: its {name} were {got}"
            if name == "format":
                rule = f"have format {_FORMAT}, got {theirs!r} of another version of efftrain"
            raise CheckpointError(path, f"journal must {rule}", remedy)

    def _write(self) -> None:
        if self._path is not None:
            # repr reads back to the same bits, and names NaN and infinity, which JSON cannot
            scores = {members: repr(score) for members, score in self._scores.items()}
            with atomic_write(self._path) as temporary:
                temporary.write_text(json.dumps({"search": self._search, "scores": scores}, indent=1), encoding="utf-8")

    def score(self, key: str) -> float | None:
        """Return the score kept under a key, None if there is none yet."""
        return self._scores.get(key)

    def record(self, key: str, score: float) -> None:
        """Keep a score, on disk before this returns."""
        self._scores[key] = score
        # The whole file, atomically: a kill between two evaluations leaves the old journal or the new one.
        self._write()


def rank_by_logged(
    ingredients: Sequence[Source], metric: str, mode: Literal["auto", "max", "min"] = "auto"
) -> tuple[list[Ingredient], list[float]]:
    """Return the ingredients, best first by a metric that their trainers logged, and these metrics.

    For ``greedy_soup(..., order="given")``, which then evaluates only the first alone, and averages.

    Args:
        ingredients: Checkpoints of either trainer.
        metric: As the trainer logged it, such as ``eval_accuracy``.
        mode: Whether it is better when larger or smaller; ``"auto"``: smaller for losses and errors by their names.

    Raises:
        CheckpointError: If an ingredient was saved without this metric, or with one that is not finite.
    """
    opened = open_ingredients(ingredients)
    found = []
    for item in opened:
        logged = logged_metrics(item)
        if not math.isfinite(logged.get(metric, math.nan)):
            names = f"{', '.join(sorted(logged)) or 'no metric of its step'}{nearest(metric, logged)}"
            got = f"got {logged.get(metric, names)}"
            rule = f"{item.name} must be saved with {metric!r} as a finite number, to be ranked by it, {got}"
            raise CheckpointError("soup", rule, "leave it out, or let --eval rank")
        found.append(logged[metric])
    sign = -1.0 if mode == "max" or (mode == "auto" and larger_is_better(metric)) else 1.0
    order = sorted(range(len(opened)), key=lambda number: sign * found[number])
    return [opened[number] for number in order], [found[number] for number in order]


def logged_metrics(ingredient: Ingredient) -> dict[str, float]:
    """Return the metrics of an ingredient's own step that lie in its checkpoint; empty if none do.

    Read are ``trainer_state.json`` of the Hugging Face Trainer, and in a Lightning checkpoint what our callbacks wrote
    and the scores that ModelCheckpoint keeps by file name.

    Args:
        ingredient: As `open_ingredient` returns it; one that lies in no file has none.
    """
    if ingredient.path is None:
        return {}
    if ingredient.path.is_dir():
        state = ingredient.path / "trainer_state.json"
        return _of_trainer_state(read_json(state)) if state.is_file() else {}
    return _of_lightning(load_checkpoint(ingredient.path), ingredient.path) if ingredient.kind == LIGHTNING else {}


def _of_trainer_state(state: Mapping[str, Any]) -> dict[str, float]:
    # a log entry of an earlier step is of other weights, even where it is the last one
    entries = [entry for entry in state.get("log_history", ()) if entry.get("step") == state.get("global_step")]
    merged = {name: value for entry in entries for name, value in entry.items()}
    return _numbers({name: value for name, value in merged.items() if name not in ("step", "epoch")})


def _of_lightning(checkpoint: Mapping[str, Any], path: Path) -> dict[str, float]:
    found = {}
    for name, state in _mapping(checkpoint.get("callbacks")).items():
        if not (isinstance(name, str) and name.startswith("ModelCheckpoint") and isinstance(state, Mapping)):
            continue
        # `current_score` is not read: in last.ckpt it may be that of an earlier validation
        scores = {
            Path(saved).name: score
            for saved, score in _mapping(state.get("best_k_models")).items()
            if isinstance(saved, str)
        }
        # best_k_models maps files to their own scores; only this file's counts.
        if state.get("monitor") is not None and path.name in scores:
            found[state["monitor"]] = scores[path.name]
    return _numbers({**found, **_mapping(_mapping(checkpoint.get(RUN_KEY)).get("metrics"))})


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) and all(isinstance(name, str) for name in value) else {}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for name, value in values.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):  # a text, a list, a tensor of several numbers
            continue
    return found


_POLL_SECONDS = 0.05
_job: tuple[Any, Any] = (None, None)


def scores_in_processes(
    items: Sequence[tuple[int, Ingredient]],
    evaluate: Callable[[dict[str, Tensor]], Any],
    after_average: Callable[[dict[str, Tensor]], None] | None,
    jobs: int,
) -> Iterator[tuple[int, Any]]:
    """Yield the number of each ingredient and its metric, in the order they are done; non-finite ones are skipped.

    Each process is spawned, holds one ingredient at a time, and computes with as many threads as this one would, so
    that metrics are the same to the last bit; set OMP_NUM_THREADS to share out the cores.
    """
    # A process opens its ingredient by path, and would see the names that are in the file.
    odd = next((item for _, item in items if item.path is None or item.is_renamed), None)
    if odd is not None:
        got = f"{odd.name} in memory" if odd.path is None else f"other names in {odd.name}"
        rule = f"ingredients must be files of the same names for jobs above 1, got {got}"
        raise ConfigError("soup", rule, "save them in one format")
    # Tried before the pool starts: a failure to pickle inside it shows as a broken pool without a reason.
    try:
        pickle.dumps((evaluate, after_average))
    except Exception as error:  # pickle raises what the object's own methods raise
        rule = f"evaluate must be a function that another process can import for jobs above 1, got {error}"
        raise ConfigError("soup", rule, "define it at the top of a module") from error
    pool = ProcessPoolExecutor(
        min(jobs, len(items)),
        # spawn: a forked child would inherit a CUDA context that it cannot use, and locks of threads
        multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(evaluate, after_average),
    )
    try:
        # Paths cross to the processes, weights do not. Evaluate is pickled once a process, by the initializer.
        futures = {pool.submit(_score, item.path): number for number, item in items if item.path is not None}
        for future in as_completed(futures):
            if (score := future.result()) is not None:
                yield futures[future], score
    except BrokenProcessPool as error:
        raise EffError(
            "soup", f"processes must live, got a dead one ({error})", "try fewer, for want of memory"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(evaluate: Any, after_average: Any) -> None:
    global _job
    _job = evaluate, after_average


def _score(path: Path) -> Any:
    evaluate, after_average = _job
    item = open_ingredient(path)
    candidate = candidate_for([item], None, after_average, None)
    return None if candidate.write_single(item) else evaluate(candidate.state_dict)


Evaluate = Callable[[dict[str, Tensor]], float]


class Scoring:
    """Evaluates candidates and keeps their scores."""

    def __init__(
        self,
        evaluate: Evaluate,
        candidate: Candidate | AdapterCandidate,
        journal: Journal,
        progress: Callable[[], object] | None = None,
    ) -> None:
        self._evaluate, self._candidate, self._journal = evaluate, candidate, journal
        self._progress = progress or (lambda: None)

    def score(self, key: str, write: Callable[[], Any]) -> float:
        """Return the score kept under `key`, or that of what `write` writes into the candidate."""
        known = self._journal.score(key)
        # The candidate is written only when its score is not known: a resumed search reads no weights for known ones.
        if known is None:
            write()
            known = number(self._evaluate(self._candidate.state_dict))
            self._keep(key, known)
        return known

    def _keep(self, key: str, score: float) -> None:
        self._journal.record(key, score)
        self._progress()

    def in_processes(
        self,
        items: Sequence[tuple[int, Ingredient]],
        jobs: int,
        after_average: Callable[[dict[str, Tensor]], None] | None,
    ) -> None:
        """Evaluate numbered ingredients alone, those that have no score yet, in so many processes."""
        checked(jobs, int, "soup", "jobs", low=1)
        left = [(position, item) for position, item in items if self._journal.score(str(position)) is None]
        if jobs > 1 and left:
            for position, score in scores_in_processes(left, self._evaluate, after_average, jobs):
                self._keep(str(position), number(score))

    def in_job(self, items: Sequence[tuple[int, Ingredient]], job: Job) -> None:
        """Evaluate numbered ingredients alone, those that have no score yet, together with who calls `score_share`."""
        if job.size == 1:
            return
        left = [(position, item) for position, item in items if self._journal.score(str(position)) is None]
        job.set("left", json.dumps([position for position, _ in left]).encode())
        waiting = dict(enumerate(left))
        for ticket in job.tickets("scores", len(left)):
            position, item = waiting.pop(ticket)
            if not self._candidate.write_single(item):
                self.score(str(position), lambda: None)
            self._take_in(waiting, job)
        while waiting:
            time.sleep(_POLL_SECONDS)
            self._take_in(waiting, job)

    def _take_in(self, waiting: dict[int, tuple[int, Ingredient]], job: Job) -> None:
        """Keep the scores that have come, on disk at once."""
        for ticket in [ticket for ticket in waiting if job.has(f"score {ticket}")]:
            position, _ = waiting.pop(ticket)
            if told := job.get(f"score {ticket}"):
                self._keep(str(position), float(told))

    def alone(self, position: int, item: Ingredient, known: float | None = None) -> tuple[float | None, str]:
        """Return the score of one ingredient and ``""``, or None and why it is left out."""
        key = str(position)
        known = self._journal.score(key) if known is None else known
        # With a known score nothing is evaluated, but NaNs must still be found: the mean is to be made of it.
        bad = non_finite_tensor(item) if known is not None else self._candidate.write_single(item)
        if bad:
            return None, not_finite(bad)
        # `write_single` has written it: only the evaluation is left.
        known = self.score(key, lambda: None) if known is None else known
        return (known, "") if math.isfinite(known) else (None, f"left out: its metric is {known}")


def score_share(
    ingredients: Sequence[Source],
    evaluate: Evaluate,
    job: Job,
    after_average: Callable[[dict[str, Tensor]], None] | None = None,
) -> None:
    """Evaluate ingredients alone for the main process of a job, which calls `greedy_soup` or `diagnose` with it."""
    opened = open_ingredients(ingredients)
    candidate = candidate_for(opened, None, after_average, None)
    left = json.loads(job.get("left"))
    for ticket in job.tickets("scores", len(left)):
        # one with a NaN or an infinity has no score: the main process says which
        bad = candidate.write_single(opened[left[ticket]])
        job.set(f"score {ticket}", b"" if bad else repr(number(evaluate(candidate.state_dict))).encode())


def not_finite(tensor: str) -> str:
    """Return why an ingredient with a NaN or an infinity in this tensor is not used."""
    return f"left out: {tensor!r} holds a NaN or an infinity"


def number(score: Any) -> float:
    """Return what an evaluation returned as a float."""
    try:
        return float(score)
    except (TypeError, ValueError, RuntimeError):  # the last of a tensor of several
        raise ConfigError("soup", f"evaluate must return a number, got {score!r:.80}") from None
