"""`eff formats`: the table of number formats; the one in docs/formats.md is its output."""

from __future__ import annotations

from typing import Annotated

import typer

from shared_core.cli.output import print_report, table
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
    if as_markdown:
        echo(markdown(), nl=False)
        return
    found = rows()
    shown = [[_text(column, cell) for column, cell in row.items()] for row in found]
    print_report(found, [table("", ("format",), [*found[0]], shown)], as_json=as_json, width=150)
