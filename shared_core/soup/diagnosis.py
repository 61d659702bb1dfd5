"""Measure whether checkpoints can be averaged: their metrics, distances, and the barriers between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shared_core.checkpoint_formats import ADAPTER, Ingredient, averaged
from shared_core.config.options import checked
from shared_core.distributed.job import Job
from shared_core.errors import ConfigError
from shared_core.files.atomic import atomic_write
from shared_core.libraries import optional
from shared_core.printing import counted, table
from shared_core.soup.averaging import CHUNK, Candidate
from shared_core.soup.greedy import Mode
from shared_core.soup.ingredients import Source, check_able, open_ingredients
from shared_core.soup.scoring import Evaluate, Journal, Scoring

if TYPE_CHECKING:
    from rich.table import Table

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
# A metric that gets worse by this share means that averaging failed.
_COLLAPSE = 0.05


@dataclass(frozen=True)
class Diagnosis:
    """Measurements of ingredients. Lists and matrices are in the order of `names`."""

    names: list[str]
    metrics: list[float]
    """The metric of each ingredient alone."""
    uniform: float
    """The metric of the uniform soup, possibly NaN."""
    distances: list[list[float]]
    """L2 distance of each pair, over all averaged tensors."""
    from_mean: list[float]
    """L2 distance of each ingredient from the mean of all."""
    cosines: list[list[float]]
    """Cosine of ``w_i - mean`` and ``w_j - mean``. -1/(n-1) if members are spread evenly around their mean, NaN for a
    member that equals the mean."""
    best: str
    """The best single ingredient."""
    paths: dict[str, list[float]]
    """Metrics from the best (α = 0) to each other ingredient (α = 1), at `ALPHAS`."""
    barriers: dict[str, float]
    """The largest drop of the metric below the straight line between both ends, 0 or more."""
    left_out: dict[str, str]
    """Ingredient without finite weights or metric → why."""
    warnings: list[str]
    """Reasons against averaging them all."""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, and the values of α."""
        return {**asdict(self), "alphas": list(ALPHAS)}


def diagnose(
    ingredients: Sequence[Source],
    evaluate: Evaluate,
    *,
    mode: Mode = "max",
    jobs: int = 1,
    progress: Callable[[], object] | None = None,
    journal: str | Path | None = None,
    about: Mapping[str, Any] | None = None,
    after_average: Callable[[dict[str, Tensor]], None] | None = None,
    job: Job | None = None,
) -> Diagnosis:
    r"""Measure metrics, distances and interpolation barriers of checkpoints, and whether a uniform soup would collapse.

    The barrier between the best ingredient b and another one x is the largest drop of the metric M below the straight
    line between both ends, ``max_α ((1-α) M(b) + α M(x)) - M((1-α) b + α x)`` for a metric that is better when larger.
    It is measured at `ALPHAS`. Near 0, both are in one basin and can be averaged. n ingredients need 4n - 2 evaluations
    and, for distances, one read of each. Memory is one model.

    Args:
        ingredients: At least two paths (see `open_ingredient`) or state dicts.
        evaluate: Returns the held-out metric of a state dict.
        mode: ``"max"`` if the metric is better when larger, otherwise ``"min"``.
        jobs: Number of processes that evaluate single ingredients. Ingredients must be files, and functions importable.
        progress: Called after each evaluation.
        journal: A JSON file that records every score at once, to continue a diagnosis that was killed.
        about: What else distinguishes this diagnosis from others in the journal.
        after_average: Called with every candidate before it is evaluated, to change it in place (masks).
        job: Other processes that also evaluate single ingredients, by calling `score_share`.

    Raises:
        CheckpointError: If ingredients cannot be read or do not match, fewer than two are finite, or the journal
            belongs to another diagnosis.
        ConfigError: If `mode` is invalid, or `evaluate` does not return a number.

    Source: Frankle et al., 2020, arXiv:1912.05671; the straight line: Entezari et al., 2022, arXiv:2110.06296.

    Example:
        >>> import torch
        >>> runs = [{"w": torch.tensor([value])} for value in (-1.0, 1.0)]
        >>> found = diagnose(runs, lambda weights: float(weights["w"].abs()))  # two basins, and a barrier at 0
        >>> found.metrics, found.uniform, found.barriers, found.distances[0][1]
        ([1.0, 1.0], 0.0, {'ingredient 1': 1.0}, 2.0)
    """
    checked(mode, Mode, "soup", "mode")
    opened = open_ingredients(ingredients)
    if opened[0].kind == ADAPTER:
        rule = "diagnose must get whole models, got adapters, whose ranks differ"
        raise ConfigError("soup", rule, "merge them into their base model")
    candidate = Candidate(opened[0], None, after_average)
    search = {"kind": "diagnosis", "mode": mode, **(about or {})}
    scoring = Scoring(evaluate, candidate, Journal(journal, opened, search), progress)
    sign = 1.0 if mode == "max" else -1.0

    scoring.in_processes(list(enumerate(opened)), jobs, after_average)
    scoring.in_job(list(enumerate(opened)), job or Job())
    able, left_out = _alone(opened, scoring)
    items, metrics = [item for _, item, _ in able], [single for *_, single in able]
    names = [item.name for item in items]

    def write_uniform() -> None:
        candidate.begin_mean(items[0])
        for item in items[1:]:
            candidate.accept(item)
        candidate.write_mean()

    uniform = scoring.score("uniform", write_uniform)
    best = max(able, key=lambda row: sign * row[2])
    paths = _paths(able, best, scoring, candidate)
    barriers = {name: _barrier(path, sign) for name, path in paths.items()}
    distances, from_mean, cosines = geometry(items)
    return Diagnosis(
        names, metrics, uniform, distances, from_mean, cosines, best[1].name, paths, barriers, left_out,
        _warnings(names, metrics, uniform, barriers, best[2], sign),
    )  # fmt: skip


_Scored = tuple[int, Ingredient, float]


def _alone(opened: Sequence[Ingredient], scoring: Scoring) -> tuple[list[_Scored], dict[str, str]]:
    """Return number, ingredient and metric of those with a finite metric, and why the others have none."""
    able: list[_Scored] = []
    left_out = {}
    for number, item in enumerate(opened):
        single, reason = scoring.alone(number, item)
        if single is None:
            left_out[item.name] = reason
        else:
            able.append((number, item, single))
    check_able(able, 2, "a finite metric", left_out)
    return able, left_out


def _paths(able: list[_Scored], best: _Scored, scoring: Scoring, candidate: Candidate) -> dict[str, list[float]]:
    """Return the metrics from the best ingredient to each other one, at `ALPHAS`."""
    start, first, top = best
    candidate.begin_mean(first)
    paths = {}
    for number, item, single in (row for row in able if row is not best):
        # The mean of the best with weight 1 and the other with weight alpha / (1 - alpha) interpolates at alpha.
        between = [
            scoring.score(
                f"{start} to {number} at {alpha}", partial(candidate.write_average, item, alpha / (1 - alpha))
            )
            for alpha in ALPHAS[1:-1]
        ]
        paths[item.name] = [top, *between, single]
    return paths


def _barrier(path: Sequence[float], sign: float) -> float:
    if not all(math.isfinite(score) for score in path):
        return math.inf
    # The barrier of Frankle et al. (2020, arXiv:1912.05671): the straight line between both ends minus the metric.
    # The ends have none by definition.
    falls = [
        sign * ((1 - alpha) * path[0] + alpha * path[-1] - score) for alpha, score in zip(ALPHAS, path, strict=True)
    ]
    return max(0.0, *falls[1:-1])


def _warnings(
    names: Sequence[str],
    metrics: Sequence[float],
    uniform: float,
    barriers: Mapping[str, float],
    top: float,
    sign: float,
) -> list[str]:
    mean = sum(metrics) / len(metrics)
    found = []
    # `not isfinite` first: comparisons with NaN are false, and would hide a soup that failed.
    if not math.isfinite(uniform) or sign * (mean - uniform) > _COLLAPSE * abs(mean):
        found.append(
            f"a uniform soup would collapse: its metric is {uniform:.6g}, the members' mean is {mean:.6g}; average "
            "greedily, or leave out ingredients behind a barrier"
        )
    apart = [name for name in names if barriers.get(name, 0.0) > _COLLAPSE * abs(top)]
    if apart:
        found.append(f"behind a barrier, so do not average these with the best: {', '.join(apart)}")
    return found


@torch.no_grad()
def geometry(items: Sequence[Ingredient]) -> tuple[list[list[float]], list[float], list[list[float]]]:
    """Return pairwise distances, distances from the mean, and cosines of ``w_i - mean``, in float64.

    All ingredients are read in parallel, several ten thousand numbers at a time.
    """
    count = len(items)
    # float64: a squared distance sums up to 1e9 small terms, and cosines of nearly equal members cancel.
    squares = torch.zeros(count, count, dtype=torch.float64)
    products = torch.zeros(count, count, dtype=torch.float64)
    for key, spec in items[0].specs.items():
        if not averaged(spec.dtype):
            continue
        flat = [item.tensor(key).reshape(-1) for item in items]
        for parts in zip(*(torch.split(tensor, CHUNK) for tensor in flat), strict=True):
            # A complex number counts as its two parts.
            wide = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
            rows = torch.stack([part.cpu().double().flatten() for part in wide])
            # Use differences instead of the products below, so that equal ingredients have distance 0.
            for i in range(count - 1):
                squares[i, i + 1 :] += (rows[i + 1 :] - rows[i]).square().sum(1)
            # Products after subtracting the mean: the Gram matrix of w_i - mean, summed piece by piece.
            rows -= rows.mean(0)
            products += rows @ rows.T
    for item in items:
        item.close()
    # A member that equals the mean has norm 0, and 0 / 0 gives the documented NaN.
    norms = products.diagonal().sqrt()
    cosines = products / norms.outer(norms)
    return (squares + squares.T).sqrt().tolist(), norms.tolist(), cosines.clamp(-1, 1).tolist()


def diagnosis_table(found: Diagnosis) -> Table:
    """Return a table with a row per ingredient: metric, distances, and metrics between it and the best one.

    Args:
        found: The result of `diagnose`.
    """
    ways = [f"α {alpha:g}" for alpha in ALPHAS[1:-1]]
    best = found.names.index(found.best)
    rows: list[list[object]] = []
    for i, name in enumerate(found.names):
        numbers = [found.metrics[i], found.from_mean[i], found.distances[i][best]]
        if i != best:
            numbers += [*found.paths[name][1:-1], found.barriers[name]]
        ends = [] if i != best else [*[""] * len(ways), "the best"]
        rows.append([_short(name), *(f"{number:.4g}" for number in numbers), *ends])
    rows += [[f"left out: {_short(name)} {reason}", *[""] * (len(ways) + 4)] for name, reason in found.left_out.items()]
    title = f"Uniform soup of {counted(len(found.names), 'checkpoint')}, metric {found.uniform:.6g}"
    headings = ("checkpoint", "alone", "from mean", "to best", *ways, "barrier")
    return table(title, headings[:1], headings, rows)


def _short(name: str) -> str:
    return "/".join(Path(name).parts[-2:])


def diagnosis_plot(found: Diagnosis, file: str | Path) -> Path:
    """Plot the metrics between the best ingredient and the others, and all distances. Return the file.

    Args:
        found: The result of `diagnose`.
        file: Its suffix selects one of matplotlib's formats.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    optional("matplotlib", "plots", "soup plot")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    ways, matrix = figure.subplots(1, 2)
    for name, path in found.paths.items():
        ways.plot(ALPHAS, path, "o-", label=Path(name).name)
    ways.axhline(found.uniform, linewidth=1, linestyle="--", color="black", label="uniform soup")
    ways.set(xlabel=f"α from {Path(found.best).name}", ylabel="held-out metric")
    ways.legend(fontsize="small")
    labels = [Path(name).name for name in found.names]
    image = matrix.imshow(found.distances)
    matrix.set_xticks(range(len(labels)), labels, rotation=45, ha="right")
    matrix.set_yticks(range(len(labels)), labels)
    figure.colorbar(image, ax=matrix, label="L2 distance")
    with atomic_write(file) as temporary:
        figure.savefig(temporary)
    return Path(file)
