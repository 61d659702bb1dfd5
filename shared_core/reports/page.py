"""One page of paragraphs, tables and plots, as self-contained HTML and as Markdown with the same words."""

from __future__ import annotations

import base64
import functools
import io
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared_core.errors import CheckpointError, ConfigError, MissingExtraError
from shared_core.files.atomic import atomic_write
from shared_core.printing import markdown_text, printable

Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Rows under headings; numbers stand to the right, None is a dash."""

    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Plot:
    """An SVG and what it shows, in words: the Markdown page has those alone, and so has HTML where nothing draws."""

    svg: bytes
    caption: str


@dataclass(frozen=True)
class Section:
    """A heading and, in order, paragraphs (plain text), tables and plots."""

    title: str
    blocks: Sequence[str | Table | Plot]


_MARKED, _LONGEST = 40, 60  # points of a curve with a mark on each, characters of a name in a plot
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
{% if refresh %}
<meta http-equiv="refresh" content="{{ refresh }}">
{% endif %}
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; overflow-wrap: break-word }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2rem; border-bottom: 1px solid #8886 }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto }
th, td { padding: .2rem .7rem; border-bottom: 1px solid #8884; text-align: left }
th { border-bottom: 2px solid #888 } .n { text-align: right; font-variant-numeric: tabular-nums }
figure { margin: 1rem 0 } img { max-width: 100% } figcaption { opacity: .75 }
@media (prefers-color-scheme: dark) { img { filter: invert(.9) hue-rotate(180deg) } }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% for section in sections %}
<h2>{{ section.title }}</h2>
{% for block in section.blocks %}
{% if block is string %}
<p>{{ block }}</p>
{% elif block.headings %}
{% set numbers, number = numeric(block), ' class="n"'|safe %}
<table>
<thead><tr>
{%- for cell in block.headings %}<th{{ number if numbers[loop.index0] }}>{{ text(cell) }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in block.rows %}
<tr>
{%- for cell in row %}<td{{ number if numbers[loop.index0] }}>{{ text(cell) }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
{% elif block.svg %}
<figure>
<img alt="{{ block.caption }}" src="data:image/svg+xml;base64,{{ base64(block.svg) }}">
<figcaption>{{ block.caption }}</figcaption>
</figure>
{% else %}
<p>Plot, not drawn: {{ block.caption }}</p>
{% endif %}
{% endfor %}
{% endfor %}
</body>
</html>
"""


def build_page(title: str, sections: Iterable[Section], refresh: int = 0) -> tuple[str, str]:
    r"""Return (HTML, Markdown) of a page; every string is shown as it is, whatever markup it holds.

    The HTML loads nothing and runs nothing: plots are images inside it, and its content policy forbids the rest.

    Example:
        >>> page, text = build_page("run", [Section("size", ["a < b", Table(["layer", "bytes"], [["0", 1280]])])])
        >>> "a &lt; b" in page, '<td class="n">1,280</td>' in page
        (True, True)
        >>> print(text)
        # run
        <BLANKLINE>
        ## size
        <BLANKLINE>
        a \< b
        <BLANKLINE>
        | layer | bytes |
        |---|---:|
        | 0 | 1,280 |
        <BLANKLINE>
    """
    sections = list(sections)
    page = _template().render(title=title, sections=sections, refresh=refresh)
    written = [f"# {markdown_text(title)}", *map(markdown, sections)]
    return printable(page), printable("\n\n".join(written) + "\n")


@functools.cache
def _template() -> Any:
    import jinja2

    pages = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    pages.globals |= {
        "text": _text,
        "numeric": _numeric,
        "base64": lambda svg: base64.b64encode(svg).decode("ascii"),
    }
    return pages.from_string(_PAGE)


def markdown(section: Section) -> str:
    """Return a section as Markdown, under a heading of the second level."""
    return "\n\n".join([f"## {markdown_text(section.title)}", *map(_markdown, section.blocks)])


def check_place(path: Path, where: str, made: Path | None = None) -> None:
    """Refuse a place where no page can be written, before any work.

    Args:
        path: The file.
        where: Who asks.
        made: A folder that will exist by then.

    Raises:
        ConfigError: If it is no ``.html`` file in a folder that exists.
        CheckpointError: If something other than a file lies there.
    """
    exists = path.parent.is_dir() or (made is not None and path.parent.resolve() == made.resolve())
    if path.suffix != ".html" or not exists:
        raise ConfigError(f"{where} must be an .html file in a folder that exists, got {path}")
    for target in (path, path.with_suffix(".md")):
        if target.exists() and not target.is_file():
            raise CheckpointError(f"{where} must be a file, got {target}; choose another name")


def check_page(path: Path, where: str, made: Path | None = None) -> None:
    """Refuse a place as `check_place` does, and to go on without what draws plots.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    check_place(path, where, made)
    if not can_draw():
        raise MissingExtraError(where, "matplotlib", "plots")


def can_draw() -> bool:
    """Return whether matplotlib, which draws the plots, is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def write_page(path: Path, title: str, sections: Iterable[Section], refresh: int = 0) -> None:
    """Write a page and, beside it, its Markdown twin, each whole or not at all.

    Args:
        path: The ``.html`` file; the twin has the suffix ``.md``.
        title: Of the page.
        sections: What it holds.
        refresh: Seconds after which a browser reads it again; 0: never.

    Raises:
        CheckpointError: If a file cannot be written.
    """
    page, text = build_page(title, sections, refresh)
    for target, content in ((path, page), (path.with_suffix(".md"), text)):
        with atomic_write(target) as temporary:
            temporary.write_text(content, encoding="utf-8")


def bar_plot(values: Mapping[str, float], label: str, caption: str) -> Plot:
    """Return a plot of one bar for each name, from top to bottom; a bar that is not finite is left out.

    Args:
        values: Name → length.
        label: Of the axis, with its unit.
        caption: What the plot shows.
    """
    finite = {name: value for name, value in values.items() if math.isfinite(value)}

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        bars = axes.barh(range(len(finite)), list(finite.values()), color="#0072b2")
        axes.bar_label(bars, [_text(value, 3) for value in finite.values()], padding=3, fontsize=8)
        axes.set_yticks(range(len(finite)), [_short(name) for name in finite])
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel(label)

    return _drawn(draw, (8.0, 1.0 + 0.26 * max(len(finite), 1)), caption)


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

    def draw(figure: Any) -> None:
        axes = figure.subplots()
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
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        if axes.lines:
            axes.legend()

    return _drawn(draw, (8.0, 4.0), caption)


def _drawn(draw: Any, size: tuple[float, float], caption: str) -> Plot:
    if not can_draw():
        return Plot(b"", caption)
    import matplotlib
    from matplotlib.figure import Figure

    stream = io.BytesIO()
    with matplotlib.rc_context():
        # neither the user's style, nor the day, nor random ids: the same values give the same bytes
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.hashsalt": "efftrain", "text.parse_math": False, "axes.axisbelow": True})
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        figure.axes[0].grid(alpha=0.3)
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return Plot(stream.getvalue(), caption)


def _short(name: str) -> str:
    """Return a name as a plot has room for it; a leading underscore would keep it out of the legend."""
    name = name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}"
    return f"\u200b{name}" if name.startswith("_") else name


def _text(cell: Cell, digits: int = 6) -> str:
    if cell is None or cell == "":
        return "–"
    if isinstance(cell, float):
        return {math.inf: "∞", -math.inf: "−∞"}.get(cell, f"{cell:.{digits}g}")
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)


def _numeric(table: Table) -> list[bool]:
    columns = zip(*table.rows, strict=True) if table.rows else [()] * len(table.headings)
    return [
        any(cell is not None for cell in column)
        and all(cell is None or isinstance(cell, (int, float)) for cell in column)
        for column in columns
    ]


def _markdown(block: str | Table | Plot) -> str:
    if isinstance(block, str):
        return _paragraph(block)
    if isinstance(block, Plot):
        return f"*Plot: {markdown_text(block.caption)}*"
    lines = [block.headings, *block.rows]
    shown = ["| " + " | ".join(markdown_text(_text(cell)) for cell in cells) + " |" for cells in lines]
    rule = "|" + "|".join("---:" if numeric else "---" for numeric in _numeric(block)) + "|"
    return "\n".join([shown[0], rule, *shown[1:]])


def _paragraph(text: str) -> str:
    return re.sub(r"^(\d*)([-+#.)])(?=[\s#-]|$)", r"\1\\\2", markdown_text(text))  # would start a list or a heading
