"""A page of paragraphs, tables and plots, with the same text as HTML, as Markdown and on a terminal."""

from __future__ import annotations

import base64
import functools
import io
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import console, table
from rich.text import Text

from shared_core.errors import CheckpointError, require
from shared_core.files.atomic import atomic_write, check_writable
from shared_core.libraries import optional
from shared_core.printing import UNBOUNDED, fitted, markdown_text, printable, width_of_output
from shared_core.printing import table as grid


class Console(console.Console):
    """Prints to the width of the terminal, and unwrapped lines into a pipe.

    Every string is shown literally: no markup is interpreted, and terminal control characters are escaped.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "width": width_of_output(), **options})

    def print(self, *objects: Any, **options: Any) -> None:
        """Print objects. A table that is too wide becomes a list of headings and values."""
        for one in objects or ("",):
            if isinstance(one, table.Table):
                shown, title = fitted(one, self.width), one.title
                if title:
                    super().print(Text(printable(str(title)), style="bold"), soft_wrap=self.width >= UNBOUNDED)
                shown.title = None  # rich would wrap it to the width of the columns
                super().print(shown, **options)
                one.title = title
            else:
                super().print(one, **options)

    def blocks(self, blocks: Iterable[str | table.Table]) -> None:
        """Print lines and tables, with an empty line around a table."""
        was_table, is_first = False, True
        for block in blocks:
            is_table = isinstance(block, table.Table)
            if (is_table or was_table) and not is_first:
                self.print()
            self.print(block, highlight=False, soft_wrap=not is_table and self.width >= UNBOUNDED)
            was_table, is_first = is_table, False

    def render_str(self, text: str, **options: Any) -> Text:  # type: ignore[override]
        """Return a string as it is shown, also in a table's cell."""
        return super().render_str(printable(text), **options)


ROWS = 1000
"""Number of table rows that are shown; the last one says how many more there are."""


class Table(NamedTuple):
    """Rows under headings.

    A cell is any JSON value: numbers are right-aligned, None and the empty text are a dash.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def texts(self) -> list[list[str]]:
        """Return the rows as they are shown."""
        shown = [[cell_text(cell) for cell in row] for row in self.rows[:ROWS]]
        if len(self.rows) > ROWS:
            shown[-1] = [f"… and {len(self.rows) - ROWS + 1:,} more", *["–"] * (len(self.headings) - 1)]
        return shown

    def numeric(self) -> list[bool]:
        """Return for each column True if it holds only numbers."""
        columns = [[row[i] for row in self.rows if row[i] is not None] for i in range(len(self.headings))]
        return [
            bool(column) and all(isinstance(cell, int | float) and not isinstance(cell, bool) for cell in column)
            for column in columns
        ]


class Plot(NamedTuple):
    """A picture with a caption. Without an SVG, and outside HTML, only the caption is shown."""

    caption: str
    svg: bytes = b""


Block = str | Table | Plot
Columns = Mapping[str, str | Callable[[Any], Any]]
"""Heading → key in an entry, or a function from the entry to the cell."""


class Section(NamedTuple):
    """A heading and, in order, paragraphs (plain text), tables and plots."""

    title: str
    blocks: Sequence[Block]


def table_of(entries: Iterable[Mapping[str, Any]], columns: Columns) -> Table:
    """Return a table with one row per entry.

    Example:
        >>> table_of([{"name": "0", "bits": 8}], {"layer": "name", "bytes": lambda entry: entry["bits"] / 8})
        Table(headings=['layer', 'bytes'], rows=[['0', 1.0]])
    """
    rows = [[column(entry) if callable(column) else entry[column] for column in columns.values()] for entry in entries]
    return Table(list(columns), rows)


def cell_text(value: Any, digits: int = 6) -> str:
    """Return a value of JSON as a cell shows it.

    Example:
        >>> [cell_text(value) for value in (1048576.0, 0.25, True, None, [4, 4], float("inf"))]
        ['1,048,576', '0.25', 'true', '–', '4, 4', '∞']
    """
    if value is None or value == "":
        return "–"
    if isinstance(value, str | bool):
        return str(value) if isinstance(value, str) else str(value).lower()
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) >= 1000):
        return f"{int(value):,}"
    if isinstance(value, float):
        return {math.inf: "∞", -math.inf: "−∞"}.get(value, f"{value:.{digits}g}")
    if isinstance(value, list | tuple) and all(isinstance(item, int | float | str) for item in value):
        return ", ".join(map(str, value)) or "none"
    return json.dumps(value, ensure_ascii=False, default=str)


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
{% macro row(tag, cells, numeric) %}
<tr>
{%- for cell in cells %}<{{ tag }}{% if numeric[loop.index0] %} class="n"{% endif %}>{{ cell }}</{{ tag }}>{% endfor %}
</tr>
{% endmacro %}
<h1>{{ title }}</h1>
{% for section in sections %}
<h2>{{ section.title }}</h2>
{% for block in section.blocks %}
{% if block is string %}
<p>{{ block }}</p>
{% elif block.headings %}
{% set numeric = block.numeric() %}
<table>
{{ row("th", block.headings, numeric) }}
{%- for cells in block.texts() %}{{ row("td", cells, numeric) }}{% endfor %}
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
    r"""Return (HTML, Markdown) of a page. Every string is shown literally, even if it holds markup.

    The HTML loads and runs nothing: plots are embedded images, and its content policy forbids the rest.

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
    pages.globals["base64"] = lambda svg: base64.b64encode(svg).decode("ascii")
    return pages.from_string(_PAGE)


def markdown(section: Section) -> str:
    """Return a section as Markdown, under a heading of the second level."""
    return "\n\n".join([f"## {markdown_text(section.title)}", *map(_markdown, section.blocks)])


def _markdown(block: Block) -> str:
    if isinstance(block, Plot):
        return f"*Plot: {markdown_text(block.caption)}*"
    if isinstance(block, str):  # what would start a list or a heading is escaped
        return re.sub(r"^(\d*)([-+#.)])(?=[\s#-]|$)", r"\1\\\2", markdown_text(block))
    lines = ["| " + " | ".join(map(markdown_text, cells)) + " |" for cells in (block.headings, *block.texts())]
    rule = "|" + "|".join("---:" if is_number else "---" for is_number in block.numeric()) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def show(blocks: Iterable[Block]) -> None:
    """Print paragraphs and tables on the terminal."""
    shown: list[str | table.Table] = []
    for block in blocks:
        if isinstance(block, Table):
            words = {name for name, is_number in zip(block.headings, block.numeric(), strict=True) if not is_number}
            shown.append(grid("", words, block.headings, block.texts()))
        elif isinstance(block, str):
            shown.append(block)
    Console().blocks(shown)


def check_place(path: Path, where: str, made: Path | None = None) -> None:
    """Raise an error before any work if the page cannot be written there."""
    exists = path.parent.is_dir() or (made is not None and path.parent.resolve() == made.resolve())
    is_page = path.suffix == ".html" and exists
    require(is_page, f"{where} must be an .html file in an existing folder, got {path}", "")
    for target in (path, path.with_suffix(".md")):
        rule, is_free = f"{where} must be a file, got {target}", target.is_file() or not target.exists()
        require(is_free, rule, "", "choose another name", CheckpointError)


def write_page(path: Path, title: str, sections: Iterable[Section], refresh: int = 0) -> None:
    """Write a page and its Markdown version beside it, each atomically."""
    page, text = build_page(title, sections, refresh)
    for target, content in ((path, page), (path.with_suffix(".md"), text)):
        with atomic_write(target) as temporary:
            temporary.write_text(content, encoding="utf-8")


_BARS = 60  # more are unreadable
_MARKED, _LONGEST = 40, 60  # points of a curve with a mark on each, characters of a name


def can_draw() -> bool:
    """Return True if matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def bar_plot(values: Mapping[str, float], label: str, caption: str, *, lowest: bool = False) -> Plot:
    """Return a plot with one bar per name, from top to bottom. Non-finite bars are left out.

    Args:
        values: Name → length.
        label: Label of the axis, with its unit.
        caption: Text below the plot.
        lowest: With more than 60 bars, show the lowest ones instead of the highest.
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
        curves: Name → points; empty ones are left out.
        x: Label of the horizontal axis, with its unit.
        y: Label of the vertical axis.
        caption: Text below the plot.
        marks: Names of curves whose points are not joined by lines.
        log: Logarithmic axes, ``"x"`` or ``"y"``, with the base of their ticks.
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
        # no user style, date or random ids: the same values give the same bytes
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.hashsalt": "efftrain", "text.parse_math": False, "axes.axisbelow": True})
        figure = Figure(figsize=(8.0, height), layout="constrained")
        draw(axes := figure.subplots())
        axes.grid(alpha=0.3)
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return Plot(caption, stream.getvalue())


def _short(name: str) -> str:
    """Return a name short enough for a plot. A leading underscore would hide it from the legend."""
    name = name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}"
    return f"\u200b{name}" if name.startswith("_") else name


def check_plot(file: Path, where: str) -> None:
    """Raise an error if matplotlib cannot write this plot file.

    Raises:
        MissingExtraError: If matplotlib is not installed.
        ConfigError: If its extension is not a known format.
    """
    optional("matplotlib", "plots", where)
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    rule = f"--plot must be a file ending in .png, .svg, .pdf or another of {', '.join(sorted(kinds))}, got {file}"
    require(file.suffix[1:].lower() in kinds and not file.is_dir(), where, rule, "rename it")
    check_writable(file, f"{where}: --plot")
