"""Plots of a page, drawn by matplotlib; without it their captions stay."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared_core.errors import ConfigError
from shared_core.files.atomic import check_writable
from shared_core.libraries import optional
from shared_core.reports.page import Plot, cell_text

_BARS = 60  # more would not be read
_MARKED, _LONGEST = 40, 60  # points of a curve with a mark on each, characters of a name


def can_draw() -> bool:
    """Return True if matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def bar_plot(values: Mapping[str, float], label: str, caption: str, *, lowest: bool = False) -> Plot:
    """Return a plot of one bar for each name, from top to bottom; a bar that is not finite is left out.

    Args:
        values: Name → length.
        label: Of the axis, with its unit.
        caption: What the plot shows.
        lowest: Of more than 60 bars, whether the lowest ones are shown, or the highest.
    """
    if len(values) > _BARS:
        caption += f": the {_BARS} {'lowest' if lowest else 'highest'} of {len(values)}"
        chosen = set(sorted(values, key=values.__getitem__, reverse=not lowest)[:_BARS])
        values = {name: value for name, value in values.items() if name in chosen}
    finite = {name: value for name, value in values.items() if math.isfinite(value)}

    def draw(axes: Any) -> None:
        bars = axes.barh(range(len(finite)), list(finite.values()), color="#0072b2")
        axes.bar_label(bars, [cell_text(value, 3) for value in finite.values()], padding=3, fontsize=8)
        axes.set_yticks(range(len(finite)), [_short(name) for name in finite])
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel(label)

    return _drawn(draw, 1.0 + 0.26 * max(len(finite), 1), caption)


def line_plot(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    x: str,
    y: str,
    caption: str,
    *,
    marks: Collection[str] = (),
    log: Mapping[str, int] | None = None,
) -> Plot:
    """Return a plot of curves through points (x, y), each with its name in the legend.

    Args:
        curves: Name → points; those without a point are left out.
        x: Label of the horizontal axis, with its unit.
        y: Of the vertical one.
        caption: What the plot shows.
        marks: Names of those whose points are not joined by lines.
        log: Axes that are logarithmic, ``"x"`` or ``"y"``, with the base of their ticks.
    """

    def draw(axes: Any) -> None:
        styles = zip(("-", "--", "-.", ":") * len(curves), ("o", "s", "^", "x", "d") * len(curves), strict=False)
        for (name, points), (line, mark) in zip(curves.items(), styles, strict=False):
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    linestyle="none" if name in marks else line,
                    marker=mark if len(points) <= _MARKED or name in marks else "",
                    label=_short(name),
                )
        if all(float(place).is_integer() for points in curves.values() for place, _ in points):
            axes.xaxis.get_major_locator().set_params(integer=True)
        for axis, base in (log or {}).items():
            getattr(axes, f"set_{axis}scale")("log", base=base)
            getattr(axes, f"{axis}axis").set_major_formatter("{x:g}")
        axes.set(xlabel=x, ylabel=y)
        if axes.lines:
            axes.legend()

    return _drawn(draw, 4.0, caption)


def _drawn(draw: Callable[[Any], None], height: float, caption: str) -> Plot:
    if not can_draw():
        return Plot(caption)
    import matplotlib
    from matplotlib.figure import Figure

    stream = io.BytesIO()
    with matplotlib.rc_context():
        # neither the user's style, nor the day, nor random ids: the same values give the same bytes
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.hashsalt": "efftrain", "text.parse_math": False, "axes.axisbelow": True})
        figure = Figure(figsize=(8.0, height), layout="constrained")
        draw(axes := figure.subplots())
        axes.grid(alpha=0.3)
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return Plot(caption, stream.getvalue())


def _short(name: str) -> str:
    """Return a name as a plot has room for it; a leading underscore would keep it out of the legend."""
    name = name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}"
    return f"\u200b{name}" if name.startswith("_") else name


def check_plot(file: Path, where: str) -> None:
    """Refuse a file for a plot that matplotlib cannot write, or nobody.

    Raises:
        MissingExtraError: If matplotlib is not installed.
        ConfigError: If its ending names no format.
    """
    optional("matplotlib", "plots", where)
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if file.suffix[1:].lower() not in kinds or file.is_dir():
        raise ConfigError(
            where,
            f"--plot must be a file ending in .png, .svg, .pdf or another of {', '.join(sorted(kinds))}, got {file}",
            "rename it",
        )
    check_writable(file, f"{where}: --plot")
