"""The page of `eff try`: the effect of each technique on a short run, and how it was judged."""

from __future__ import annotations

from shared_core.reports.page import Block, Section, Table, show
from shared_core.runs.try_out import FLOORS, TRIMMED, Figure, Findings, Row

_RULES = (
    "Each run with a technique takes turns of {block} steps with a plain run, so that other load on the machine slows "
    "both alike. Both use the same random numbers, and each pair uses others. The first turn does not count.",
    "Step time: the mean over turns of the logarithm of (time with / time without), a share of {trimmed:g} left out at "
    "each end. A difference is noise if it is at most two standard errors of that mean, or at most what two plain runs "
    "differed by plus two standard errors, or at most {time:g} %.",
    "All other figures: noise is a difference from the mean of the n plain runs of at most t·s·√(1/r + 1/n), with s "
    "their standard deviation, r the runs with the technique, t the 95 % quantile of Student's distribution for n - 1; "
    "but never less than {memory:g} % of memory, {metric:g} % of the metric, {packed:g} % of a packed file.",
    "Keep: something is better, and the metric is not worse. Your choice: something is better, and the metric is "
    "worse. Leave out: something is worse, and nothing is better. Otherwise the runs were too short to tell.",
    "Nothing is advised before the plain runs learn: their mean training loss must be lower in the last quarter of the "
    "steps than in the first, by more than two standard errors and more than {metric:g} %.",
    "Packed file: its size after zlib, which shows zeros and quantized weights better than a float32 file does. To "
    "measure size and speed after training, use eff export, eff shrink and eff compress.",
    "A run of {steps} steps is not the full training: schedules are shortened, and what needs long training may look "
    "worse than it is. Runs differ in the order of the data and in dropout, but start from the script's own "
    "weights, so runs from other weights would differ more.",
)  # fmt: skip


def try_page(found: Findings, script: str, steps: int, block: int) -> tuple[str, list[Section]]:
    """Return the title and sections of the page."""
    shares = {name: 100 * value for name, value in FLOORS.items()}
    rules = [rule.format(block=block, steps=steps, trimmed=TRIMMED, **shares) for rule in _RULES]
    summary = f"{script}, {steps:,} steps a run, {found.num_plain} plain runs."
    sections = [
        Section("What to keep", [summary, _table(found), *found.notes]),
        Section("How it was judged", rules),
    ]
    names = sorted({name for row in found.rows for name in row.metrics} | found.plain_metrics.keys())
    if names:
        means = [("plain", found.plain_metrics), *((row.name, row.metrics) for row in found.rows if row.error is None)]
        rows = [[title, *map(values.get, names)] for title, values in means]
        sections.append(Section("All figures, means of the runs", [Table(["run", *names], rows)]))
    happened = [[row.name, key, text] for row in found.rows for key, text in row.happened.items()]
    if happened:
        sections.append(Section("What happened", [Table(["run", "technique", "what happened"], happened)]))
    return f"efftrain: {script} tried", sections


def print_findings(found: Findings) -> None:
    """Print the table without its last column, and the advice as lines."""
    table = _table(found)
    blocks: list[Block] = [
        f"compared with {found.num_plain} plain runs; (noise): no more than they differ from each other",
        Table(table.headings[:-1], [row[:-1] for row in table.rows]),
        *(f"{row.name}: {row.advice}" for row in found.rows),
        *(f"note: {note}" for note in found.notes),
    ]
    show(blocks)


def _table(found: Findings) -> Table:
    plain, metric = found.plain, found.metric or "no metric"
    first = [
        "plain", f"{1000 * plain['seconds']:.3g} ms",
        f"{plain['memory'] / 2**20:,.0f} MiB" if "memory" in plain else None,
        f"{plain['metric']:.4g}" if "metric" in plain else None,
        *(f"{plain[name] / 1000:,.0f} kB" for name in ("bytes", "packed")), None,
    ]  # fmt: skip
    headings = ["run", "step time", "peak memory", metric, "file", "packed file", "what to keep"]
    return Table(headings, [first, *map(_cells, found.rows)])


def _cells(row: Row) -> list[str | None]:
    """Return a variant's row: ratios to the plain runs, and the metric itself. Noise is marked."""
    time, memory, metric, *sizes = (
        _cell(row.figures.get(name), name) for name in ("time", "memory", "metric", "bytes", "packed")
    )
    return [row.name, time, memory, metric, *sizes, row.advice]


def _cell(figure: Figure | None, name: str) -> str | None:
    if figure is None or (name != "metric" and not figure.plain):
        return None
    noise = " (noise)" if figure.verdict == "noise" else ""
    return f"{figure.value:.4g}{noise}" if name == "metric" else f"{figure.value / figure.plain:.3g}×{noise}"
