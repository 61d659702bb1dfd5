"""Strings of files that somebody else wrote, on a terminal and in Markdown: names of tensors, files and options."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

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


def table(title: str, words: Collection[str], headings: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table for a terminal; columns under `words` are text, the others numbers, None is a dash."""
    from rich.table import Table

    made = Table(title=title, title_justify="left")
    for heading in headings:
        made.add_column(heading, justify="left" if heading in words else "right", overflow="fold")
    for row in rows:
        made.add_row(
            *("–" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in row)
        )
    return made


def _cell(value: object) -> str:
    return "–" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
