"""`eff compat`: what can be combined with what, and why not."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from shared_core.errors import ConfigError, nearest
from shared_core.printing import echo


def compat(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Techniques or run environments: one for all of its refusals, several for their pairs."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show which techniques combine with which, and with which run environments; with names, the reasons."""
    from shared_core.engine.compatibility import matrix
    from shared_core.reports.console import Console

    rows = matrix()
    if as_json:
        echo(json.dumps(rows, indent=2))
    elif names:
        for line in _reasons(rows, names):
            echo(line)
    else:
        for table in _tables(rows):
            Console().print(table)
        echo("why: eff compat prune, or eff compat prune fsdp1")


def _tables(rows: list[dict[str, str]]) -> list[Any]:
    """Return the techniques with each other, and by run environment those that it refuses."""
    from rich import box
    from rich.table import Table

    from shared_core.config.conflicts import RUN_ENVIRONMENTS

    keys = [row["technique"] for row in rows]
    marks = {"yes": "·", "-": ""}
    among = Table(box=None, title="techniques: x = refused together", title_justify="left", padding=(0, 1, 0, 0))
    among.add_column("", no_wrap=True)
    for number in range(1, len(keys) + 1):
        among.add_column(str(number), justify="right", no_wrap=True)
    for number, row in enumerate(rows, 1):
        among.add_row(f"{number} {row['technique']}", *(marks.get(row[key], "x") for key in keys))
    around = Table(box=box.SIMPLE, title="run environments", title_justify="left", pad_edge=False)
    for heading in ("name", "what it is", "refused by"):
        around.add_column(heading, overflow="fold", no_wrap=heading == "name")
    for name, what in RUN_ENVIRONMENTS.items():
        by = [row["technique"] for row in rows if row[name] != "yes"]
        around.add_row(name, what, "all" if len(by) == len(rows) else ", ".join(by) or "none")
    return [among, around]


def _reasons(rows: list[dict[str, str]], names: list[str]) -> list[str]:
    """Return a line for each refusal of one name, or for each pair of several."""
    known = [*rows[0]][1:]
    for name in names:
        if name not in known:
            raise ConfigError(
                "eff compat", f"{name} must be a technique or a run environment, got none{nearest(name, known)}"
            )
    pairs = [(row["technique"], other, row[other]) for row in rows for other in known if row[other] != "-"]
    if len(names) == 1:
        found = [pair for pair in pairs if names[0] in pair[:2] and pair[2] != "yes"]
    else:
        found = [pair for pair in pairs if {*pair[:2]} <= {*names}]
    lines = {frozenset(pair[:2]): f"{pair[0]} + {pair[1]}: {pair[2]}" for pair in reversed(found)}
    return [*reversed(lines.values())] or [f"{' + '.join(names)}: nothing is refused"]


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
