"""The diagnosis of a soup's ingredients as table and plot."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.table import Table

from shared_core.atomic import atomic_write
from shared_core.soup.diagnosis import ALPHAS, Diagnosis
from shared_core.soup.path_report import check_matplotlib


def diagnosis_table(found: Diagnosis) -> Table:
    """Return one row an ingredient: metric, distances, and metrics on the way to it from the best one.

    Args:
        found: As `diagnose` returns it.
    """
    left_out = [f"{_short(name)} {reason}" for name, reason in found.left_out.items()]
    table = Table(
        title=f"uniform soup of {len(found.names)}: {found.uniform:.6g}", box=box.SIMPLE, padding=(0, 1, 0, 0),
        caption="\n".join(left_out) or None, caption_justify="left",
    )  # fmt: skip
    ways = [f"α {alpha:g}" for alpha in ALPHAS[1:-1]]
    table.add_column("ingredient", min_width=12, overflow="fold")
    for name in ("alone", "from mean", "to best", *ways, "barrier"):
        table.add_column(name, justify="right", overflow="fold")
    best = found.names.index(found.best)
    for i, name in enumerate(found.names):
        numbers = [found.metrics[i], found.from_mean[i], found.distances[i][best]]
        if i != best:
            numbers += [*found.paths[name][1:-1], found.barriers[name]]
        ends = [] if i != best else [*[""] * len(ways), "the best"]
        table.add_row(_short(name), *(f"{number:.4g}" for number in numbers), *ends)
    return table


def _short(name: str) -> str:
    return "/".join(Path(name).parts[-2:])


def diagnosis_plot(found: Diagnosis, file: str | Path) -> Path:
    """Write a plot of the ways from the best ingredient to the others, and of all distances; return its file.

    Args:
        found: As `diagnose` returns it.
        file: Its ending names the format, one that matplotlib writes.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    check_matplotlib()
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
