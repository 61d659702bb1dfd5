"""What commands print: their report as JSON, or in lines and tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from shared_core.printing import echo

if TYPE_CHECKING:
    from rich.table import Table


def print_report(values: Any, shown: Iterable[str | Table], *, as_json: bool, width: int = 0) -> None:
    """Print a report as JSON, or what is shown of it, which is not made otherwise, at least so wide."""
    if as_json:
        from shared_core.files.json_yaml import json_text

        echo(json_text(values))
        return
    from shared_core.reports.console import Console

    console = Console()
    console.width = max(console.width, width)
    for each in shown:
        console.print(each, soft_wrap=isinstance(each, str))


def table(title: str, words: Collection[str], headings: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table; columns under `words` are text, the others numbers."""
    from rich.table import Table

    made = Table(title=title, title_justify="left")
    for heading in headings:
        made.add_column(heading, justify="left" if heading in words else "right", overflow="fold")
    for row in rows:
        made.add_row(*map(str, row))
    return made
