"""Strings of files that somebody else wrote, on a terminal and in Markdown: names of tensors, files and options."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

if TYPE_CHECKING:
    from rich.table import Table

# What a terminal obeys: C0 but for tab and newline, C1, what ends lines or reorders them, and halves of characters.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Return a text with the characters that a terminal would obey written out, as JSON writes them.

    Example:
        >>> printable("run\x1b[31m")
        'run\\u001b[31m'
    """
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


QUIET = "EFF_QUIET"
"""Variable of the environment: no progress, and receipts in a line."""


def is_quiet() -> bool:
    """Return True if the environment asks for less output."""
    return os.environ.get(QUIET, "") not in ("", "0")


_results: list[TextIO] = []


@contextlib.contextmanager
def results_alone() -> Iterator[None]:
    """Surround a command whose output a program reads: what else is printed goes to stderr.

    The user's functions may print what they like.
    """
    _results.append(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _results.pop()


def echo(text: object = "", *, nl: bool = True, err: bool = False) -> None:
    """Print a line of a command, to stderr with `err`; without `nl` no newline ends it."""
    import typer

    typer.echo(printable(str(text)), file=_results[-1] if _results and not err else None, nl=nl, err=err)


def markdown_text(text: str) -> str:
    r"""Return a text as Markdown that shows it as it is, in one line.

    Example:
        >>> markdown_text("a\n# <b> of *all*")
        'a # \\<b\\> of \\*all\\*'
    """
    one_line = " ".join(printable(text).split()).replace("&", "&amp;")
    return re.sub(r"([\\`*\[\]<>|~]|\b_(?!\w)|(?<!\w)_)", r"\\\1", one_line)


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, in the singular or plural.

    Example:
        >>> counted(1, "layer"), counted(1200, "layer"), counted(2, "copy", "copies")
        ('1 layer', '1,200 layers', '2 copies')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def amount(number: float) -> str:
    """Return a large number in short.

    Example:
        >>> amount(9999), amount(1_234_567), amount(7e9)
        ('9,999', '1.2 M', '7.0 G')
    """
    return f"{number:,.0f}" if number < 10_000 else _scaled(number, 1000, ("", "k", "M", "G", "T"))


def size_text(bytes_: float) -> str:
    """Return a number of bytes in a unit that a person reads.

    Example:
        >>> size_text(1), size_text(1500), size_text(2.5e9)
        ('1 byte', '1.5 kB', '2.5 GB')
    """
    return counted(round(bytes_), "byte") if bytes_ < 1000 else _scaled(bytes_, 1000, ("B", "kB", "MB", "GB", "TB"))


def duration(seconds: float) -> str:
    """Return a time in a unit that a person reads.

    Example:
        >>> duration(0.0000005), duration(0.25), duration(90), duration(7200)
        ('0.5 µs', '250.0 ms', '1.5 min', '2.0 h')
    """
    if not seconds:
        return "0 s"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"
    unit, name = next(one for one in ((3600, "h"), (60, "min"), (1, "s")) if seconds >= one[0])
    return f"{seconds / unit:.1f} {name}"


def share_text(share: float) -> str:
    """Return a share in percent. Rounding never gives 0 % of something or 100 % of less than all.

    Example:
        >>> share_text(0.8), share_text(0.00042), share_text(0.9999), share_text(1.0)
        ('80.0 %', '0.042 %', 'above 99.9 %', '100 %')
    """
    if 0 < abs(share) < 0.001:
        return f"{100 * share:.2g} %"
    if 0.9995 <= share <= 1:
        return "100 %" if share == 1 else "above 99.9 %"
    return f"{100 * share:.1f} %"


def listed(names: Iterable[str], most: int = 5) -> str:
    """Return names in a line, the first few where there are many.

    Example:
        >>> listed("abc"), listed("abcdef", 2)
        ('a, b, c', 'a, b and 4 more')
    """
    found = list(names)
    more = f" and {len(found) - most:,} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def most_telling(
    entries: Sequence[_Entry], key: Callable[[_Entry], float], noun: str, every: bool, more: str = "--layers lists all"
) -> tuple[str, list[_Entry]]:
    """Return a title and the ten entries with the largest key, or all of them in their order if asked for.

    Example:
        >>> title, found = most_telling(range(12), float, "layer", every=False)
        >>> title, found[0], len(found)
        ('10 of 12 layers (--layers lists all)', 11, 10)
    """
    if every or len(entries) <= _FEW:
        return counted(len(entries), noun), list(entries)
    title = f"{_FEW} of {counted(len(entries), noun)} ({more})"
    return title, sorted(entries, key=key, reverse=True)[:_FEW]


def by_reason(left_out: Mapping[str, str], verb: str) -> Iterator[str]:
    """Yield a line for each reason of what was left out, with the names.

    Example:
        >>> list(by_reason({"a": "too small", "b": "too small"}, "Left dense"))
        ['Left dense: a, b (too small)']
    """
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names.setdefault(str(reason), []).append(name)
    yield from (f"{verb}: {listed(found)} ({reason})" for reason, found in names.items())


def _scaled(number: float, step: int, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if number < step:
            return f"{number:.1f} {unit}"
        number /= step
    return f"{number:,.1f} {units[-1]}"


def width_of_output() -> int:
    """Return the columns of the terminal, or ``COLUMNS``; in a pipe without it, enough that no line is wrapped."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return int(given)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else UNBOUNDED


_FEW = 10
_Entry = TypeVar("_Entry")
UNBOUNDED = 1000
"""The columns of a line that is not wrapped."""


def table(title: str, words: Collection[str], headings: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table for a terminal; columns under `words` are text, the others numbers, None is a dash."""
    from rich.table import Table

    made = Table(title=title or None, **_look())
    for heading in headings:
        is_text = heading in words
        # Words wrap in a narrow terminal, names of layers too. A number is never cut.
        made.add_column(heading, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    for row in rows:
        made.add_row(*map(_cell, row))
    return made


def fitted(made: Table, width: int) -> Table:
    """Return a table as it is where it fits; else one of two columns, with a heading and its value in each row."""
    from rich.table import Table

    columns = [[str(cell) for cell in column.cells] for column in made.columns]
    widths = [max(map(len, [*cells, str(column.header)])) for column, cells in zip(made.columns, columns, strict=True)]
    gaps = (made.padding[1] + made.padding[3]) * len(widths)
    if not made.show_header or sum(widths) + gaps <= width:
        return made
    least = []
    for column, cells in zip(made.columns, columns, strict=True):
        words = str(column.header).split()
        most = max(map(len, [*cells, *words]), default=0)
        least.append(most if column.no_wrap else min(most, _WRAPPED))
        if column.no_wrap:
            column.header = textwrap.fill(str(column.header), max(most, 1))
    if sum(least) + gaps <= width:
        return made
    listed = Table(title=made.title, **_look(), show_header=False)
    listed.add_column(no_wrap=True)
    listed.add_column(overflow="fold")
    for row in zip(*columns, strict=True):
        for column, cell in zip(made.columns, row, strict=True):
            if cell:
                listed.add_row(str(column.header).replace("\n", " "), cell)
        listed.add_row()
    return listed


def _look() -> dict[str, Any]:
    """Return the options of all tables: without lines between columns a row takes less room, and a pipe gets text."""
    from rich import box

    return {
        "title_justify": "left", "box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False,
        "padding": (0, 1, 0, 0),
    }  # fmt: skip


_WRAPPED = 14  # the least width of a column of words


def _cell(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "–" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
