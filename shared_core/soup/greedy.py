"""Greedy soup: add an ingredient if the held-out metric does not get worse. Also its path as table, JSON and plot."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from shared_core.checkpoint_formats import Ingredient
from shared_core.config.options import checked
from shared_core.distributed.job import Job
from shared_core.errors import ConfigError
from shared_core.files.atomic import atomic_write
from shared_core.libraries import optional
from shared_core.printing import counted, table
from shared_core.soup.adapters import AdapterCandidate, AdapterWeights, candidate_for
from shared_core.soup.averaging import Candidate, non_finite_tensor
from shared_core.soup.ingredients import Source, check_able, check_number_of, open_ingredients
from shared_core.soup.scoring import Evaluate, Journal, Scoring, not_finite

if TYPE_CHECKING:
    from rich.table import Table

Mode = Literal["max", "min"]
Order = Literal["metric", "random", "given"]


@dataclass(frozen=True)
class SoupResult:
    """A soup and how it was found."""

    state_dict: dict[str, Tensor]
    ingredients: list[str]
    """Names of the members in the order they were added."""
    score: float
    """The metric of the soup. Never worse than its first member's, which is the best one in order of metric."""
    history: list[dict[str, Any]]
    """One row per ingredient, in the order tried: order, name, single, score, accepted, reason."""
    repeat: tuple[float, float] | None = None
    """The metric of the first member, evaluated twice. Different numbers show noise in the evaluation."""


@dataclass(eq=False)
class _Row:
    number: int
    item: Ingredient
    single: float | None
    reason: str = ""
    score: float | None = None
    accepted: bool = False

    def to_dict(self, order: int) -> dict[str, Any]:
        """Return the row of the history at this place."""
        return {
            "order": order, "name": self.item.name, "single": self.single, "score": self.score,
            "accepted": self.accepted, "reason": self.reason,
        }  # fmt: skip


def greedy_soup(
    ingredients: Sequence[Source],
    evaluate: Evaluate,
    *,
    mode: Mode = "max",
    strict: bool = False,
    min_delta: float = 0.0,
    order: Order = "metric",
    seed: int = 0,
    repeat: bool = False,
    jobs: int = 1,
    progress: Callable[[], object] | None = None,
    journal: str | Path | None = None,
    about: Mapping[str, Any] | None = None,
    scores: Sequence[float | None] | None = None,
    max_ingredients: int | None = None,
    after_average: Callable[[dict[str, Tensor]], None] | None = None,
    into: dict[str, Tensor] | None = None,
    rank: int | None = None,
    job: Job | None = None,
) -> SoupResult:
    r"""Return the greedy soup of checkpoints of one architecture.

    Each ingredient is evaluated alone. Then, best first, each is added to the running mean
    ``m += (x - m) / (k + 1)`` (in float32, for any dtype) if the metric of the average does not get worse.
    In other orders only the first is evaluated alone, and the soup is never worse than that one.
    Every call of `evaluate` gets the same dict with new values, so copy what you keep. Integers and booleans come from
    the best ingredient, tied weights are averaged once, and equal ingredients give equal bits. Memory is one model, for
    any number of ingredients. The mean is in an unnamed file in ``TMPDIR``.

    Args:
        ingredients: Paths (see `open_ingredient`) or state dicts. Equal metrics keep this order.
        evaluate: Returns the held-out metric of a state dict (of adapters: `AdapterWeights`, whose rank varies between
            calls). Report the final quality on other data.
        mode: ``"max"`` if the metric is better when larger, otherwise ``"min"``.
        strict: Accept only averages that improve the metric (the authors' code), not equal ones (the paper).
        min_delta: An average must be better than the previous soup by at least this, with `strict` by more; >= 0.
        order: Best first (``"metric"``), shuffled (``"random"``), or as given (``"given"``).
        seed: Seed of the shuffle.
        repeat: Evaluate the first member again, to see if equal weights get equal metrics.
        jobs: Number of processes that evaluate single ingredients. Ingredients must be files, and functions importable.
        progress: Called after each evaluation.
        journal: A JSON file that records every score at once. A killed search that is restarted with it repeats no
            evaluation and ends with the same bits.
        about: What else distinguishes this search from others in the journal, such as the evaluator's name.
        scores: Known metrics of single ingredients. None where unknown.
        max_ingredients: Stop when the soup has this many members.
        after_average: Called with every candidate before it is evaluated, including single ones and the result, to
            change it in place (masks, BatchNorm).
        into: Tensors to write candidates into, such as ``model.state_dict()``. By default new ones.
        rank: Cut averages of adapters to this rank by SVD. A single adapter is not cut. See `AdapterWeights.errors`.
        job: Other processes that also evaluate single ingredients, by calling `score_share`.

    Returns:
        `SoupResult`. An ingredient with a non-finite metric or weight is left out, with the reason in its history row.

    Raises:
        CheckpointError: If an ingredient cannot be read or does not match the others, all are left out, or the journal
            belongs to another search.
        ConfigError: If an argument is out of range, or `evaluate` does not return a number.

    Source: Wortsman et al., 2022, Model soups, arXiv:2203.05482, recipe 1.

    Example:
        >>> import torch
        >>> runs = [{"w": torch.tensor([value])} for value in (0.0, 4.0, 9.0)]
        >>> result = greedy_soup(runs, lambda weights: -abs(float(weights["w"]) - 2.5))
        >>> result.state_dict["w"], result.ingredients, result.score
        (tensor([2.]), ['ingredient 1', 'ingredient 0'], -0.5)
    """
    checked(mode, Mode, "soup", "mode")
    checked(max_ingredients, int | None, "soup", "max_ingredients", low=1)
    checked(min_delta, float, "soup", "min_delta", low=0)
    checked(order, Order, "soup", "order")
    if jobs > 1 and order != "metric":
        rule = f"jobs must be 1 for order {order}, got {jobs}: only one ingredient is evaluated alone"
        raise ConfigError("soup", rule)
    opened = open_ingredients(ingredients)
    check_number_of("scores", scores, len(opened))
    options = {
        "kind": "greedy", "mode": mode, "strict": strict, "min_delta": min_delta, "order": order, "rank": rank,
    }  # fmt: skip
    if order == "random":
        options["seed"] = seed
    candidate = candidate_for(opened, into, after_average, rank)
    scoring = Scoring(evaluate, candidate, Journal(journal, opened, {**options, **(about or {})}), progress)
    sign = 1.0 if mode == "max" else -1.0

    # Numbers follow the given order instead of the order tried, because the journal names members by them.
    rows = [_Row(number, item, None if scores is None else scores[number]) for number, item in enumerate(opened)]
    if order == "random":
        random.Random(seed).shuffle(rows)
    # Single scores are independent, so they can run in parallel. Each average depends on what was accepted.
    scoring.in_processes([(row.number, row.item) for row in rows if row.single is None], jobs, after_average)
    scoring.in_job([(row.number, row.item) for row in rows if row.single is None], job or Job())
    able = _able(rows, scoring, by_metric=order == "metric", sign=sign)
    best = able[0]
    # Equal weights twice: a difference is evaluation noise. The journal stores it under a separate key.
    again = scoring.score(f"{best.number} again", lambda: candidate.write_single(best.item)) if repeat else None
    members = _grown(able, scoring, candidate, sign, (strict, min_delta), max_ingredients)
    history = [row.to_dict(place) for place, row in enumerate([*able, *(row for row in rows if row not in able)])]
    return SoupResult(
        candidate.state_dict,
        [row.item.name for row in members],
        float(members[-1].score or 0.0),
        history,
        None if again is None else (float(best.single or 0.0), again),
    )


def _able(rows: list[_Row], scoring: Scoring, *, by_metric: bool, sign: float) -> list[_Row]:
    """Return ingredients with finite weights in the order to try. By metric all are scored, otherwise the first."""
    able: list[_Row] = []
    # Other orders score only the first alone. The rest must still be finite, because one NaN would spoil each mean.
    for row in rows:
        if by_metric or not able:
            row.single, row.reason = scoring.alone(row.number, row.item, row.single)
        elif (bad := non_finite_tensor(row.item)) is not None:
            row.single, row.reason = None, not_finite(bad)
        if not row.reason:
            able.append(row)
    check_able(able, 1, "a finite metric", {row.item.name: row.reason for row in rows})
    # A stable sort: of equal metrics, the one given first is tried first.
    if by_metric:
        able.sort(key=lambda row: -sign * (row.single or 0.0))
    able[0].score, able[0].accepted = able[0].single, True
    able[0].reason = "the best single ingredient" if by_metric else "the first in order"
    return able


def _grown(
    able: list[_Row],
    scoring: Scoring,
    candidate: Candidate | AdapterCandidate,
    sign: float,
    asks: tuple[bool, float],
    most: int | None,
) -> list[_Row]:
    """Write the greedy average and return its members: the first, and each one that keeps the metric."""
    best, *others = able
    members, current, (strict, min_delta) = [best], float(best.single or 0.0), asks
    candidate.begin_mean(best.item)
    for row in others:
        if most is not None and len(members) >= most:
            row.reason = f"not tried: the soup has {most} ingredients"
            continue
        # Members in the order of acceptance, because the last bits of a running mean, and so the score, depend on it.
        key = "+".join(str(member.number) for member in (*members, row))
        known = scoring.score(key, partial(candidate.write_average, row.item))
        row.score = known if math.isfinite(known) else None
        # The paper accepts equal metrics (>=). With strict, an average must be better by more than min_delta.
        gain = sign * (known - current)
        row.accepted = math.isfinite(known) and (gain > min_delta if strict else gain >= min_delta)
        row.reason = _reason(known, gain)
        if gain > 0 and not row.accepted:
            row.reason += f", less than min_delta {min_delta:g}"
        if row.accepted:
            candidate.accept(row.item)
            members.append(row)
            current = known
    # The candidate may hold a rejected average, so write the accepted one over it.
    candidate.write_mean()
    return members


def _reason(score: float, gain: float) -> str:
    if not math.isfinite(score):
        return f"the metric of the average is {score}"
    if gain == 0:
        return "the metric of the average stayed the same"
    return f"the metric of the average {'improved' if gain > 0 else 'got worse'} by {abs(gain):.4g}"


def path_table(result: SoupResult) -> Table:
    """Return the path as a table with one row per ingredient, in the order tried.

    Args:
        result: The result of `greedy_soup`.
    """
    logged = any("logged" in row for row in result.history)
    keys = (*(["logged"] if logged else []), "single", "score")
    headings = ("", "checkpoint", *(["logged"] if logged else []), "alone", "average", "in", "why")
    rows = [
        (row["order"] + 1, row["name"], *(row[key] for key in keys), "✓" if row["accepted"] else "", row["reason"])
        for row in result.history
    ]
    title = f"Soup of {len(result.ingredients)} of {counted(len(rows), 'checkpoint')}, metric {result.score:.6g}"
    return table(title, ("checkpoint", "in", "why"), headings, rows)


def path_dict(result: SoupResult) -> dict[str, Any]:
    """Return the path as plain values: score, ingredients, history, and the first member's repeated metric."""
    # The second evaluation may give NaN, which JSON does not support.
    repeat = result.repeat and [score if math.isfinite(score) else None for score in result.repeat]
    return {
        "score": result.score, "ingredients": result.ingredients, "history": result.history, "repeat": repeat,
        **rank_errors(result.state_dict),
    }  # fmt: skip


def path_json(result: SoupResult) -> str:
    """Return `path_dict` as JSON.

    Args:
        result: The result of `greedy_soup`.
    """
    return json.dumps(path_dict(result))


def noise_of(result: SoupResult) -> str | None:
    """Return a message if the evaluation gave equal weights two metrics, or None.

    Args:
        result: The result of `greedy_soup`.
    """
    if result.repeat is None or result.repeat[0] == result.repeat[1]:
        return None
    first, second = result.repeat
    return (
        f"evaluation is not deterministic: {result.ingredients[0]} got {first:.6g}, then {second:.6g}; gains of "
        f"{abs(first - second):.2g} may be chance. Fix its seed, evaluate in eval mode, or raise min_delta"
    )


def rank_errors(state_dict: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the relative error from cutting an average of adapters to a lower rank: in total, and per layer."""
    if not isinstance(state_dict, AdapterWeights) or not state_dict.errors:
        return {}
    return {"rank_error": state_dict.error, "rank_errors": state_dict.errors}


def path_plot(result: SoupResult, file: str | Path) -> Path:
    """Plot the metric along the path, and return the file.

    Args:
        result: The result of `greedy_soup`.
        file: Its suffix selects one of matplotlib's formats.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    optional("matplotlib", "plots", "soup plot")
    from matplotlib.figure import Figure

    rows = [row for row in result.history if not row["reason"].startswith("left out")]
    figure = Figure(figsize=(max(5.0, 0.45 * len(rows) + 2), 4), layout="constrained")
    axes = figure.subplots()
    alone = [row for row in rows if row["single"] is not None]
    axes.plot([row["order"] for row in alone], [row["single"] for row in alone], "o", label="ingredient alone")
    for accepted, mark, label in ((True, "^", "average, accepted"), (False, "x", "average, rejected")):
        tried = [row for row in rows if row["score"] is not None and row["accepted"] == accepted]
        axes.plot([row["order"] for row in tried], [row["score"] for row in tried], mark, label=label)
    axes.axhline(result.score, linewidth=1, linestyle="--", label=f"soup: {result.score:.5g}")
    axes.set_xticks(range(len(rows)), [Path(row["name"]).name for row in rows], rotation=45, ha="right")
    axes.set_ylabel("held-out metric")
    axes.legend()
    with atomic_write(file) as temporary:
        figure.savefig(temporary)
    return Path(file)
