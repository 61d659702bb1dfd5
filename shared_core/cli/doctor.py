"""`eff doctor`: what this machine has, what each technique can do on it, and what is missing."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from shared_core.front_ends.finding import front_ends
from shared_core.printing import echo


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show devices, formats, kernels, libraries, how each technique runs here; exit code 1 if a version is wrong."""
    from shared_core.hardware import default_device
    from shared_core.libraries import libraries
    from shared_core.tools.machine import abilities, devices, formats, tools

    found = libraries()
    device = default_device()
    told = {
        "python": sys.version.split()[0],
        "devices": devices(),
        "trains_on": device.type,
        "formats": formats(device),
        "tools": tools(),
        "libraries": [
            {**dataclasses.asdict(library), "state": library.state, "install": library.install} for library in found
        ],
        "trainers": [front_end.name for front_end in front_ends()],
        "techniques": {key: dataclasses.asdict(ability) for key, ability in abilities(device).items()},
        "usable": not any(library.state in ("out of range", "known bad") for library in found),
    }
    if as_json:
        from shared_core.files.json_yaml import json_text

        echo(json_text(told))
    else:
        _show(told)
    if not told["usable"]:
        raise typer.Exit(1)


def _show(told: dict[str, Any]) -> None:
    from rich.table import Table

    from shared_core.reports.console import Console

    console = Console(width=max(Console().width, 100), markup=False)

    def table(title: str, rows: Sequence[tuple[str, ...]]) -> None:
        drawn = Table(title=title, title_justify="left", show_header=False)
        for _ in rows[0]:
            drawn.add_column(overflow="fold")  # commands to copy must be whole
        for row in rows:
            drawn.add_row(*row)
        console.print(drawn)

    rows = []
    for device in told["devices"]:
        if device["device"] == "cpu":
            about = f"{device['cores']} cores, torch uses {device['threads']}; {', '.join(device['instructions'])}"
        else:
            about = f"compute capability {device['capability']}, {device['memory'] / 2**30:.1f} GiB"
        rows.append((device["device"], device["name"], about))
    table(f"devices (Python {told['python']}; trains on {told['trains_on']})", rows)
    table(f"formats on {told['trains_on']}", list(told["formats"].items()))
    table("tools", [*told["tools"].items(), ("trainers", ", ".join(told["trainers"]) or "none")])
    table(
        "libraries",
        [
            (each["name"], each["found"] or "none", each["wanted"], each["state"], each["install"])
            for each in told["libraries"]
        ],
    )
    table(
        f"techniques on {told['trains_on']}",
        [(key, each["level"], each["why"]) for key, each in told["techniques"].items()],
    )
    if not told["trainers"]:
        echo('no trainer: pip install "efftrain[hf]" or pip install "efftrain[lightning]"')
    wrong = [each for each in told["libraries"] if each["state"] in ("out of range", "known bad")]
    for each in wrong:
        echo(f"{each['name']} {each['found']} is {each['state']} ({each['wanted']}): {each['install']}")
