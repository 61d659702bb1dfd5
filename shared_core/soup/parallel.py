"""Ingredients evaluated alone in parallel processes."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from torch import Tensor

from shared_core.errors import ConfigError, EffError
from shared_core.soup.candidates import candidate_for
from shared_core.soup.sources import Ingredient, open_ingredient

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

    Args:
        items: Numbered ingredients that lie on disk.
        evaluate: Returns the metric of a state dict; a function of a module, or another object that pickles.
        after_average: Called before `evaluate`; pickles too.
        jobs: How many processes.

    Raises:
        ConfigError: If an ingredient is in memory, or what is called cannot be imported by another process.
        EffError: If a process died.
    """
    inside = next((item for _, item in items if item.path is None), None)
    if inside is not None:
        raise ConfigError(f"soup: ingredients must be files for jobs above 1, got {inside.name} in memory; save it")
    renamed = next((item for _, item in items if item.is_renamed), None)
    if renamed is not None:
        raise ConfigError(
            f"soup: ingredients must share their names for jobs above 1, got others in {renamed.name}; take one format"
        )
    try:
        pickle.dumps((evaluate, after_average))
    except Exception as error:  # pickle raises what the object's own methods raise
        raise ConfigError(
            f"soup: evaluate must be a function that another process can import for jobs above 1, got {error}; define "
            "it at the top of a module"
        ) from error
    pool = ProcessPoolExecutor(
        min(jobs, len(items)),
        multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(evaluate, after_average),
    )
    try:
        futures = {pool.submit(_score, item.path): number for number, item in items if item.path is not None}
        for future in as_completed(futures):
            if (score := future.result()) is not None:
                yield futures[future], score
    except BrokenProcessPool as error:
        raise EffError(f"soup: processes must live, got a dead one ({error}); try fewer, for want of memory") from error
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
