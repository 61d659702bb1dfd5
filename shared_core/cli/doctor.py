"""`eff doctor`: what this machine has, what each technique can do on it, and what is missing."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared_core.cli.output import print_report, table
from shared_core.front_ends.finding import front_ends

if TYPE_CHECKING:
    from rich.table import Table

_UNUSABLE = ("out of range", "known bad")


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
        "usable": not any(library.state in _UNUSABLE for library in found),
    }
    print_report(told, _lines(told), as_json=as_json, width=100)
    if not told["usable"]:
        raise typer.Exit(1)


def _lines(told: dict[str, Any]) -> Iterator[str | Table]:
    rows = []
    for device in told["devices"]:
        if device["device"] == "cpu":
            about = f"{device['cores']} cores, torch uses {device['threads']}; {', '.join(device['instructions'])}"
        else:
            about = f"compute capability {device['capability']}, {device['memory'] / 2**30:.1f} GiB"
        rows.append((device["device"], device["name"], about))
    yield _table(f"devices (Python {told['python']}; trains on {told['trains_on']})", rows)
    yield _table(f"formats on {told['trains_on']}", list(told["formats"].items()))
    yield _table("tools", [*told["tools"].items(), ("trainers", ", ".join(told["trainers"]) or "none")])
    columns = ("name", "found", "wanted", "state", "install")
    yield _table(
        "libraries", [tuple(each[name] or "none" * (name == "found") for name in columns) for each in told["libraries"]]
    )
    abilities = [(key, each["level"], each["why"]) for key, each in told["techniques"].items()]
    yield _table(f"techniques on {told['trains_on']}", abilities)
    if not told["trainers"]:
        yield 'no trainer: pip install "efftrain[hf]" or pip install "efftrain[lightning]"'
    for each in told["libraries"]:
        if each["state"] in _UNUSABLE:
            yield f"{each['name']} {each['found']} is {each['state']} ({each['wanted']}): {each['install']}"


def _table(title: str, rows: Sequence[Sequence[str]]) -> Table:
    columns = [str(number) for number in range(len(rows[0]))]
    made = table(title, columns, columns, rows)
    made.show_header = False
    return made
