"""`eff compat`: what can be combined with what, and why not."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def compat(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show which techniques combine with which, and with which run environments; every refusal with its reason."""
    from rich.console import Console
    from rich.table import Table

    from shared_core.config.conflicts import RUN_ENVIRONMENTS
    from shared_core.engine.compatibility import matrix

    rows = matrix()
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    columns = [column for column in rows[0] if column != "technique"]
    title = "yes = allowed, and tested for two techniques of this library; a number = refused, reason below"
    table = Table(title=title, title_justify="left")
    for heading in ("technique", *columns):
        table.add_column(heading)
    reasons: list[str] = []
    for row in rows:
        cells = [row["technique"]]
        for column in columns:
            answer = row[column]
            if answer not in ("yes", "-"):
                reason = f"{row['technique']} + {RUN_ENVIRONMENTS.get(column, column)}: {answer}"
                reasons.append(reason)
                answer = str(len(reasons))
            cells.append(answer)
        table.add_row(*cells)
    console = Console(width=max(Console().width, 190))
    console.print(table)
    for number, reason in enumerate(reasons, 1):
        console.print(f"{number:>3}. {reason}", markup=False, highlight=False, soft_wrap=True)


def pairs_markdown() -> str:
    """Return the table of techniques that are refused together, and why, as Markdown."""
    from shared_core.engine.compatibility import matrix

    rows, refused = matrix(), {}
    for row in rows:
        for other in (other["technique"] for other in rows):
            pair = frozenset((row["technique"], other))
            if row[other] not in ("yes", "-") and pair not in refused:
                refused[pair] = f"| `{row['technique']}` + `{other}` | {row[other]} |"
    return "\n".join(["| together | why not |", "|---|---|", *refused.values()]) + "\n"


def distributed_markdown() -> str:
    """Return the table of techniques and ways to spread a run over processes, as Markdown."""
    from shared_core.engine.compatibility import matrix

    ways = {
        "fsdp2": "FSDP2", "fsdp1": "FSDP1", "deepspeed": "DeepSpeed ZeRO 0–2", "zero3": "ZeRO 3",
        "data_parallel": "DataParallel", "tensor_parallel": "tensor parallel",
    }  # fmt: skip
    lines = [f"| technique | DDP | {' | '.join(ways.values())} |", "|---" * (len(ways) + 2) + "|"]
    for row in matrix():
        yes = {way: row[way] == "yes" for way in ways}
        yes["zero3"] &= yes["deepspeed"]
        lines.append(
            f"| `{row['technique']}` | yes | " + " | ".join("yes" if it else "–" for it in yes.values()) + " |"
        )
    return "\n".join(lines) + "\n"
