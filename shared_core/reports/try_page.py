"""The page of `eff try`: what each technique did to a short run, and how that was judged."""

from __future__ import annotations

from collections.abc import Sequence

from shared_core.reports.page import Cell, Section, Table
from shared_core.runs.verdicts import FLOORS, TRIMMED, Figure, Findings, Row

_RULES = (
    "Two runs take turns of {block} steps, so that what else the machine does slows both alike: a plain one and one "
    "with the technique, both with the same random numbers. Each pair has others. The first turn does not count.",
    "Step time: the mean over turns of the logarithm of (time with / time without), a share of {trimmed:g} left out at "
    "each end. A difference is noise if it is at most two standard errors of that mean, or at most what two plain runs "
    "differed by and two standard errors of it, or at most {time:g} %.",
    "All other figures: noise is a difference to the mean of the n plain runs of at most t·s·√(1/r + 1/n), with s "
    "their standard deviation, r the runs with the technique, t the 95 % quantile of Student's distribution for n - 1; "
    "but never less than {memory:g} % of memory, {metric:g} % of the metric, {packed:g} % of a packed file.",
    "Keep: something is better, and the metric is not worse. Your choice: something is better, and the metric is "
    "worse. Leave out: something is worse, and nothing is better. Else the steps were too few to show anything.",
    "Packed file: what zlib leaves of it; zeros and weights on a grid show there, not in a file of float32. What a "
    "model is worth after training (eff export, eff shrink, eff compress) is measured by these commands.",
    "A run of {steps} steps is not the whole one: schedules were made to fit it, and what needs long training may look "
    "worse here than it is. Random numbers differ in the order of the data and in dropout; first weights are the "
    "script's own, so runs with other ones would differ more.",
)  # fmt: skip


def try_page(found: Findings, script: str, steps: int, block: int) -> tuple[str, list[Section]]:
    """Return title and sections of the page.

    Args:
        found: What the runs show.
        script: As the user named it.
        steps: Of each run.
        block: Steps of a turn.
    """
    table = Table(headings(found), [plain_cells(found), *(cells(found, row) for row in found.rows)])
    shares = {name: 100 * value for name, value in FLOORS.items()}
    rules = [rule.format(block=block, steps=steps, trimmed=TRIMMED, **shares) for rule in _RULES]
    sections = [
        Section(
            "What to keep", [f"{script}, {steps:,} steps a run, {found.num_plain} plain runs.", table, *found.notes]
        ),
        Section("How it was judged", rules),
    ]
    names = sorted({name for row in found.rows for name in row.metrics} | found.plain_metrics.keys())
    if names:
        means = [("plain", found.plain_metrics), *((row.name, row.metrics) for row in found.rows if row.error is None)]
        rows: list[Sequence[Cell]] = [[title, *(values.get(name) for name in names)] for title, values in means]
        sections.append(Section("All figures, means of the runs", [Table(["run", *names], rows)]))
    told = [[row.name, key, text] for row in found.rows for key, text in row.happened.items()]
    if told:
        sections.append(Section("What happened", [Table(["run", "technique", "what happened"], told)]))
    return f"efftrain: {script} tried", sections


def headings(found: Findings) -> list[str]:
    """Return those of the table."""
    metric = found.metric or "no metric"
    return ["run", "step time", "peak memory", metric, "file", "packed file", "what to keep"]


def plain_cells(found: Findings) -> list[Cell]:
    """Return the row of the plain runs."""
    plain = found.plain
    memory = f"{plain['memory'] / 2**20:,.0f} MiB" if "memory" in plain else None
    metric = f"{plain['metric']:.4g}" if "metric" in plain else None
    sizes = [f"{plain[name] / 1000:,.0f} kB" for name in ("bytes", "packed")]
    return ["plain", f"{1000 * plain['seconds']:.3g} ms", memory, metric, *sizes, None]


def cells(found: Findings, row: Row) -> list[Cell]:
    """Return a variant's row: ratios to the plain runs, the metric itself; noise is called so."""
    ratios = [_ratio(row.figures.get(name)) for name in ("time", "memory", "bytes", "packed")]
    metric = row.figures.get("metric")
    told = None if metric is None else f"{metric.value:.4g}{_noise(metric)}"
    return [row.name, *ratios[:2], told, *ratios[2:], row.advice]


def _ratio(figure: Figure | None) -> str | None:
    if figure is None or not figure.plain:
        return None
    return f"{figure.value / figure.plain:.3g}×{_noise(figure)}"


def _noise(figure: Figure) -> str:
    return " (noise)" if figure.verdict == "noise" else ""
