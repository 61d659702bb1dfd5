"""`eff formats`: the table of number formats; the one in docs/formats.md is its output."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from shared_core.printing import echo

Cell = str | int | float | None


def rows() -> list[dict[str, Cell]]:
    """Return the figures of every format, one row a format."""
    from shared_core.numerics import FORMATS

    return [row.row() for row in FORMATS.values()]


def markdown() -> str:
    """Return the table as Markdown."""
    table = rows()
    lines = ["| " + " | ".join(table[0]) + " |", "|---" * len(table[0]) + "|"]
    lines += ["| " + " | ".join(_text(column, cell) for column, cell in row.items()) + " |" for row in table]
    return "\n".join(lines) + "\n"


def _text(column: str, cell: Cell) -> str:
    if cell is None:
        return ""
    if column in ("relative error", "NaN/Inf share"):
        return f"{100 * float(cell):.3g} %"
    if column == "decades":
        return f"{cell:.1f}"
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)


def formats(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every digit, instead of a table.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/formats.md.")] = False,
) -> None:
    """Show every number format: bits, bias, range, error, and what its codes are spent on."""
    if as_json:
        echo(json.dumps(rows(), indent=2))
        return
    if as_markdown:
        echo(markdown(), nl=False)
        return
    from rich.table import Table

    from shared_core.reports.console import Console

    table = Table()
    for column in rows()[0]:
        table.add_column(column, justify="left" if column == "format" else "right")
    for row in rows():
        table.add_row(*(_text(column, cell) for column, cell in row.items()))
    Console(width=max(Console().width, 150)).print(table)
