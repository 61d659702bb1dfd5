"""Score candidates. A journal stores every score, so that a killed search can continue.

Ingredients can be ranked without an evaluation, by metrics that a trainer logged, or evaluated in parallel processes.
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
    """A file of scores, each under a key that names its members. It is rewritten after each evaluation."""

    def __init__(self, path: str | Path | None, ingredients: Sequence[Ingredient], search: Mapping[str, Any]) -> None:
        self._path = None if path is None else Path(path)
        self._scores: dict[str, float] = {}
        if self._path is None:
            return
        self._search = {
            "format": _FORMAT,
            **search,
            # Digests instead of paths: a journal must not be used after a checkpoint was overwritten.
            "ingredients": [[item.name, item.digest()] for item in ingredients],
        }
        if self._path.exists():
            self._read(self._path)
        else:
            self._write()

    def _read(self, path: Path) -> None:
        content, remedy = read_json(path), "remove the file to start again, or use another"
        try:
            search = {**content["search"]}
            self._scores = {str(members): float(score) for members, score in content["scores"].items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(path, f"journal is not one that a soup search wrote: {error!r}", remedy) from error
        # Keys of both, because an option that only one has is a difference too. The format comes first.
        name = next((name for name in self._search | search if search.get(name) != self._search.get(name)), None)
        if name is not None:
            mine, theirs = self._search.get(name), search.get(name)
            got = "others" if name == "ingredients" else f"{theirs!r}, now {mine!r}"
            rule = f"be of this search, but its {name} were {got}"
            if name == "format":
                rule = f"have format {_FORMAT}, got {theirs!r} of another version of efftrain"
            raise CheckpointError(path, f"journal must {rule}", remedy)

    def _write(self) -> None:
        if self._path is not None:
            # repr round-trips exactly, and supports NaN and infinity, unlike JSON.
            scores = {members: repr(score) for members, score in self._scores.items()}
            with atomic_write(self._path) as temporary:
                temporary.write_text(json.dumps({"search": self._search, "scores": scores}, indent=1), encoding="utf-8")

    def score(self, key: str) -> float | None:
        """Return the score stored under a key, or None."""
        return self._scores.get(key)

    def record(self, key: str, score: float) -> None:
        """Store a score, on disk before this returns."""
        self._scores[key] = score
        # The whole file, atomically: a kill leaves either the old or the new journal.
        self._write()


def rank_by_logged(
    ingredients: Sequence[Source], metric: str, mode: Literal["auto", "max", "min"] = "auto"
) -> tuple[list[Ingredient], list[float]]:
    """Return the ingredients, best first by a metric that their trainers logged, and these metrics.

    Use it with ``greedy_soup(..., order="given")``, which then evaluates only the first alone, and averages.

    Args:
        ingredients: Checkpoints of either trainer.
        metric: Name that the trainer logged, such as ``eval_accuracy``.
        mode: ``"max"``, ``"min"``, or ``"auto"``: smaller is better for names of losses and errors.

    Raises:
        CheckpointError: If an ingredient was saved without this metric, or with a non-finite one.
    """
    opened = open_ingredients(ingredients)
    found = []
    for item in opened:
        logged = logged_metrics(item)
        if not math.isfinite(logged.get(metric, math.nan)):
            names = f"{', '.join(sorted(logged)) or 'no metric of its step'}{nearest(metric, logged)}"
            got = f"got {logged.get(metric, names)}"
            rule = f"{item.name} must be saved with {metric!r} as a finite number, to be ranked by it, {got}"
            raise CheckpointError("soup", rule, "leave it out, or rank with --eval")
        found.append(logged[metric])
    sign = -1.0 if mode == "max" or (mode == "auto" and larger_is_better(metric)) else 1.0
    order = sorted(range(len(opened)), key=lambda number: sign * found[number])
    return [opened[number] for number in order], [found[number] for number in order]


def logged_metrics(ingredient: Ingredient) -> dict[str, float]:
    """Return the metrics that an ingredient's checkpoint holds of its own step, empty if none.

    Reads ``trainer_state.json`` of the Hugging Face Trainer. In a Lightning checkpoint, reads what our callbacks wrote
    and the scores that ModelCheckpoint stores by file name.

    Args:
        ingredient: From `open_ingredient`. One without a file has no metrics.
    """
    if ingredient.path is None:
        return {}
    if ingredient.path.is_dir():
        state = ingredient.path / "trainer_state.json"
        return _of_trainer_state(read_json(state)) if state.is_file() else {}
    return _of_lightning(load_checkpoint(ingredient.path), ingredient.path) if ingredient.kind == LIGHTNING else {}


def _of_trainer_state(state: Mapping[str, Any]) -> dict[str, float]:
    # A log entry of an earlier step belongs to other weights, even if it is the last one.
    entries = [entry for entry in state.get("log_history", ()) if entry.get("step") == state.get("global_step")]
    merged = {name: value for entry in entries for name, value in entry.items()}
    return _numbers({name: value for name, value in merged.items() if name not in ("step", "epoch")})


def _of_lightning(checkpoint: Mapping[str, Any], path: Path) -> dict[str, float]:
    found = {}
    for name, state in _mapping(checkpoint.get("callbacks")).items():
        if not (isinstance(name, str) and name.startswith("ModelCheckpoint") and isinstance(state, Mapping)):
            continue
        # `current_score` is not used, because in last.ckpt it may belong to an earlier validation.
        scores = {
            Path(saved).name: score
            for saved, score in _mapping(state.get("best_k_models")).items()
            if isinstance(saved, str)
        }
        # best_k_models maps files to their scores. Only this file's counts.
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
    """Yield the number of each ingredient and its metric, in the order they finish. Non-finite ingredients are skipped.

    Each process is spawned, holds one ingredient at a time, and uses as many threads as this one would, so that metrics
    are equal to the last bit. Set OMP_NUM_THREADS to share the cores.
    """
    # A process opens its ingredient by path, and would see the file's own names.
    odd = next((item for _, item in items if item.path is None or item.is_renamed), None)
    if odd is not None:
        got = f"{odd.name} in memory" if odd.path is None else f"other names in {odd.name}"
        rule = f"ingredients must be files of the same names for jobs above 1, got {got}"
        raise ConfigError("soup", rule, "save them in one format")
    # Tested before the pool starts: a pickling error inside it shows as a broken pool without a reason.
    try:
        pickle.dumps((evaluate, after_average))
    except Exception as error:  # pickling runs the object's own methods
        rule = f"evaluate must be a function that another process can import for jobs above 1, got {error}"
        raise ConfigError("soup", rule, "define it at the top of a module") from error
    pool = ProcessPoolExecutor(
        min(jobs, len(items)),
        # spawn: a forked child would inherit an unusable CUDA context, and locks of threads
        multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(evaluate, after_average),
    )
    try:
        # Only paths are sent to the processes, not weights. `evaluate` is pickled once per process, by the initializer.
        futures = {pool.submit(_score, item.path): number for number, item in items if item.path is not None}
        for future in as_completed(futures):
            if (score := future.result()) is not None:
                yield futures[future], score
    except BrokenProcessPool as error:
        raise EffError(
            "soup", f"an evaluation process died ({error})", "use fewer jobs, as memory may have run out"
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
    """Evaluates candidates and stores their scores."""

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
        """Return the score stored under `key`, or evaluate what `write` writes into the candidate."""
        known = self._journal.score(key)
        # Written only if the score is unknown, so a resumed search reads no weights for known scores.
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
        """Evaluate numbered ingredients without a score, each alone, in several processes."""
        checked(jobs, int, "soup", "jobs", low=1)
        left = [(position, item) for position, item in items if self._journal.score(str(position)) is None]
        if jobs > 1 and left:
            for position, score in scores_in_processes(left, self._evaluate, after_average, jobs):
                self._keep(str(position), number(score))

    def in_job(self, items: Sequence[tuple[int, Ingredient]], job: Job) -> None:
        """Evaluate numbered ingredients without a score, each alone, together with processes in `score_share`."""
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
        """Store the scores that have arrived, on disk at once."""
        for ticket in [ticket for ticket in waiting if job.has(f"score {ticket}")]:
            position, _ = waiting.pop(ticket)
            if score := job.get(f"score {ticket}"):
                self._keep(str(position), float(score))

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
    """Evaluate single ingredients for the main process of a job, which calls `greedy_soup` or `diagnose` with it."""
    opened = open_ingredients(ingredients)
    candidate = candidate_for(opened, None, after_average, None)
    left = json.loads(job.get("left"))
    for ticket in job.tickets("scores", len(left)):
        # One with NaN or infinity has no score. The main process reports it.
        bad = candidate.write_single(opened[left[ticket]])
        job.set(f"score {ticket}", b"" if bad else repr(number(evaluate(candidate.state_dict))).encode())


def not_finite(tensor: str) -> str:
    """Return the reason to leave out an ingredient with NaN or infinity in this tensor."""
    return f"left out: {tensor!r} contains NaN or infinity"


def number(score: Any) -> float:
    """Return the result of an evaluation as a float."""
    try:
        return float(score)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError for a tensor of several numbers
        raise ConfigError("soup", f"evaluate must return a number, got {score!r:.80}") from None
