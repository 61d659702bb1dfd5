"""`eff flags`: every option of every technique; the table in docs/flags.md is its output."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from shared_core.cli.output import print_report, table
from shared_core.printing import echo


def describe_flags(*keys: str) -> list[dict[str, str]]:
    """Return one row a flag: flag, type, default (empty: none, ``"required"``: it is the switch), help."""
    from shared_core.config.options import default_text, type_text
    from shared_core.engine.registry import REGISTRY
    from shared_core.engine.registry import flags as flags_of

    rows = []
    for flag, (key, field) in flags_of(*keys).items():
        config_class = REGISTRY[key].config_class
        hint = config_class.hints()[field.name]
        default = "required" if field.default is dataclasses.MISSING else default_text(field.default)
        kind = type_text(field.metadata.get("flag_type", hint))
        rows.append({"flag": f"--{flag}", "type": kind, "default": default, "help": config_class.meaning(field)})
    return rows


def markdown() -> str:
    """Return the table as Markdown."""
    lines = ["| flag | type | default | |", "|---|---|---|---|"]
    for row in describe_flags():
        cells = (text.replace("|", "\\|") for text in (row["type"], row["default"], row["help"]))
        lines.append(f"| `{row['flag']}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def flags(
    techniques: Annotated[
        list[str] | None, typer.Argument(help="Keys of techniques, such as prune; all if left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/flags.md.")] = False,
) -> None:
    """List the flags of techniques with type, default and meaning."""
    from shared_core.engine.registry import registration

    keys = [registration(key).key for key in techniques or ()]
    rows = [row for row in describe_flags() if not keys or row["flag"].startswith(tuple(f"--{key}_" for key in keys))]
    if as_markdown:
        echo(markdown(), nl=False)
        return
    from rich import box

    headings = ("flag", "type", "default", "meaning")
    made = table("", headings, headings, [[*row.values()] for row in rows])
    made.box, made.pad_edge, made.columns[0].no_wrap = box.SIMPLE, False, True
    print_report(rows, [made], as_json=as_json)
