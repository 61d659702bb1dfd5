"""`eff flags`: every option of every technique; the table in docs/flags.md is its output."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Annotated, Any

import typer


def describe_flags(*keys: str) -> list[dict[str, str]]:
    """Return one row a flag: flag, type, default (empty: none, ``"required"``: it is the switch), help.

    Args:
        keys: Of the techniques; none: of all.
    """
    from shared_core.rooms import ROOMS
    from shared_core.rooms import flags as flags_of

    rows = []
    for flag, (key, field) in flags_of(*keys).items():
        hint = ROOMS[key].config_class.hints()[field.name]
        no_default = field.default is dataclasses.MISSING
        default = "required" if no_default else "" if field.default in ((), None) else _text(field.default)
        kind = _type_text(field.metadata.get("flag_type", hint))
        rows.append({"flag": f"--{flag}", "type": kind, "default": default, "help": field.metadata["help"]})
    return rows


def _text(default: Any) -> str:
    return ", ".join(default) if isinstance(default, tuple) else str(default)


def _type_text(hint: Any) -> str:
    from shared_core.positions import Position

    if hint in (Position, Position | None):
        return "position"
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(str(choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return "list"
    inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    name = str(getattr(inner[0] if inner else hint, "__name__", hint))
    return {"str": "text", "int": "integer", "float": "number", "bool": "true | false"}.get(name, name)


def markdown() -> str:
    """Return the table as Markdown."""
    lines = ["| flag | type | default | |", "|---|---|---|---|"]
    for row in describe_flags():
        cells = (text.replace("|", "\\|") for text in (row["type"], row["default"], row["help"]))
        lines.append(f"| `{row['flag']}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def flags(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/flags.md.")] = False,
) -> None:
    """List the flags of all techniques with type, default and meaning."""
    if as_json:
        typer.echo(json.dumps(describe_flags(), indent=2))
        return
    if as_markdown:
        typer.echo(markdown(), nl=False)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for heading in ("flag", "type", "default", "meaning"):
        table.add_column(heading)
    for row in describe_flags():
        table.add_row(*row.values())
    Console().print(table)
