"""Greedy soup: add an ingredient to the average if the held-out metric does not fall."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from shared_core.errors import CheckpointError, ConfigError
from shared_core.soup.averaging import non_finite_tensor
from shared_core.soup.candidates import candidate_for
from shared_core.soup.ingredients import Source, open_ingredients
from shared_core.soup.journal import Journal
from shared_core.soup.sources import Ingredient

Mode = Literal["max", "min"]


@dataclass(frozen=True)
class SoupResult:
    """A soup and the path that led to it."""

    state_dict: dict[str, Tensor]
    """The average, in the best ingredient's dtypes."""
    ingredients: list[str]
    """Names of the members in the order they were added, the best single one first."""
    score: float
    """The metric of the soup; never worse than that of the best single ingredient."""
    history: list[dict[str, Any]]
    """One row an ingredient, in the order tried: order, name, single, score, accepted, reason."""


@dataclass
class _Row:
    number: int
    item: Ingredient
    single: float | None
    reason: str = ""
    score: float | None = None
    accepted: bool = False


def greedy_soup(
    ingredients: Sequence[Source],
    evaluate: Callable[[dict[str, Tensor]], float],
    *,
    mode: Mode = "max",
    strict: bool = False,
    journal: str | Path | None = None,
    scores: Sequence[float | None] | None = None,
    max_ingredients: int | None = None,
    after_average: Callable[[dict[str, Tensor]], None] | None = None,
    into: dict[str, Tensor] | None = None,
    rank: int | None = None,
) -> SoupResult:
    r"""Return the greedy soup of checkpoints of one architecture.

    Each ingredient is evaluated alone; then, best first, each is added to the running mean
    ``m += (x - m) / (k + 1)`` (float32, whatever the checkpoints' dtype) if the metric of the average does not fall.
    The same candidate dict is given to every call of `evaluate`, with new values: copy what you keep. Integers and
    booleans come from the best ingredient, tied weights are averaged once, equal ingredients give equal bits.
    Memory is two models, whatever the number of ingredients.

    Args:
        ingredients: Paths (see `open_ingredient`) or state dicts. Equal metrics keep this order.
        evaluate: Returns the held-out metric of a state dict (of adapters: `AdapterWeights`, whose rank differs from
            call to call). Quality is then to be told on other data.
        mode: Whether the metric is better when larger (``"max"``) or smaller (``"min"``).
        strict: Accept only what improves the metric (the authors' code), not what keeps it (the paper).
        journal: A JSON file that takes every score at once; a killed search started again with it evaluates nothing
            twice and ends with the same bits.
        scores: Metrics of the single ingredients that are known already; None where not.
        max_ingredients: Stop when the soup has that many members.
        after_average: Called with every candidate before it is evaluated, single ones and the result included;
            changes it in place (masks, BatchNorm).
        into: Tensors to write candidates into, for example ``model.state_dict()``; by default new ones.
        rank: Cut averages of adapters to this rank by SVD; one alone stays as it is. See `AdapterWeights.errors`.

    Returns:
        `SoupResult`. An ingredient with a non-finite metric or weight is left out; its history row says so.

    Raises:
        CheckpointError: If an ingredient cannot be read or does not belong with the others, all are left out, or the
            journal is of another search.
        ConfigError: If an argument is out of range, or `evaluate` does not return a number.

    Source: Wortsman et al., 2022, Model soups, arXiv:2203.05482, recipe 1.

    Example:
        >>> import torch
        >>> runs = [{"w": torch.tensor([value])} for value in (0.0, 4.0, 9.0)]
        >>> result = greedy_soup(runs, lambda weights: -abs(float(weights["w"]) - 2.5))
        >>> result.state_dict["w"], result.ingredients, result.score
        (tensor([2.]), ['ingredient 1', 'ingredient 0'], -0.5)
    """
    if mode not in ("max", "min"):
        raise ConfigError(f"soup: mode must be max or min, got {mode!r}")
    if max_ingredients is not None and not max_ingredients >= 1:
        raise ConfigError(f"soup: max_ingredients must be at least 1, got {max_ingredients!r}")
    opened = open_ingredients(ingredients)
    if scores is not None and len(scores) != len(opened):
        raise ConfigError(f"soup: scores must be one for each of {len(opened)} ingredients, got {len(scores)}")
    candidate = candidate_for(opened, into, after_average, rank)
    diary = Journal(journal, opened, mode, strict, rank)
    sign = 1.0 if mode == "max" else -1.0

    def score_of(members: list[int]) -> float:
        score = _number(evaluate(candidate.state_dict))
        diary.record(members, score)
        return score

    rows = []
    for number, item in enumerate(opened):
        single = scores[number] if scores is not None else None
        single = diary.score([number]) if single is None else single
        if single is not None:
            bad = non_finite_tensor(item)
        else:
            bad = candidate.write_single(item)
            single = None if bad else score_of([number])
        row = _Row(number, item, single)
        if bad:
            row.single, row.reason = None, f"left out: {bad!r} holds a NaN or an infinity"
        elif single is None or not math.isfinite(single):
            row.single, row.reason = None, f"left out: its metric is {single}"
        rows.append(row)

    able = sorted((row for row in rows if row.single is not None), key=lambda row: -sign * (row.single or 0.0))
    left_out = [row for row in rows if row.single is None]
    if not able:
        raise CheckpointError(
            "soup: at least one ingredient must have finite weights and a finite metric, got "
            + "; ".join(f"{row.item.name} {row.reason}" for row in left_out)
        )
    best, *others = able
    best.score, best.accepted, best.reason = best.single, True, "the best single ingredient"
    members, current = [best], float(best.single or 0.0)
    candidate.begin_mean(best.item)
    for row in others:
        if max_ingredients is not None and len(members) >= max_ingredients:
            row.reason = f"not tried: the soup has {max_ingredients} ingredients"
            continue
        numbers = [*(member.number for member in members), row.number]
        known = diary.score(numbers)
        if known is None:
            candidate.write_average(row.item)
            known = score_of(numbers)
        row.score = known if math.isfinite(known) else None
        gain = sign * (known - current)
        row.accepted = math.isfinite(known) and (gain > 0 if strict else gain >= 0)
        row.reason = _reason(known, gain)
        if row.accepted:
            candidate.accept(row.item)
            members.append(row)
            current = known
    candidate.write_mean()
    return SoupResult(
        candidate.state_dict,
        [row.item.name for row in members],
        current,
        [
            {"order": order, "name": row.item.name, "single": row.single, "score": row.score,
             "accepted": row.accepted, "reason": row.reason}
            for order, row in enumerate([*able, *left_out])
        ],
    )  # fmt: skip


def _number(score: Any) -> float:
    if isinstance(score, Tensor) and score.numel() != 1:
        raise ConfigError(f"soup: evaluate must return one number, got a tensor of shape {tuple(score.shape)}")
    try:
        return float(score)
    except (TypeError, ValueError):
        raise ConfigError(f"soup: evaluate must return a number, got {score!r:.80}") from None


def _reason(score: float, gain: float) -> str:
    if not math.isfinite(score):
        return f"the metric of the average is {score}"
    if gain == 0:
        return "the metric of the average stayed the same"
    return f"the metric of the average {'improved' if gain > 0 else 'fell off'} by {abs(gain):.4g}"
