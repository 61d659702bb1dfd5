"""The page of `eff report`: of one run everything, of several what sets them apart."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared_core.cli.report_changes import change_table, changes
from shared_core.cli.report_curves import curve_sections
from shared_core.cli.report_details import detail_sections
from shared_core.cli.run_folder import RunFolder, of_ours
from shared_core.page import Cell, Section, Table, can_draw
from shared_core.receipt_page import Block, asked, happened, limited

_NO_PLOTS = "Plots are not drawn, because matplotlib is not installed: pip install 'efftrain[plots]'."


def page_of(runs: Sequence[RunFolder]) -> tuple[str, list[Section]]:
    """Return title and sections.

    Raises:
        CheckpointError: If a file does not hold what this library writes.
    """
    with of_ours(*runs):
        title, sections = _one(runs[0]) if len(runs) == 1 else _several(runs)
    return title, [*([] if can_draw() else [Section("Plots", [_NO_PLOTS])]), *sections]


def as_values(run: RunFolder) -> dict[str, Any]:
    """Return what `eff report --json` prints of a run beside its receipt.

    Raises:
        CheckpointError: If a file does not hold what this library writes.
    """
    with of_ours(run):
        found = [vars(change) for change in changes(run)]
    return {
        "path": str(run.path),
        "files": run.files,
        "notes": run.notes,
        "changes": found,
        "curves": run.curves,
        **run.reports,
        "soups": run.soups,
        "exports": run.exports,
    }


def _one(run: RunFolder) -> tuple[str, list[Section]]:
    found = changes(run)
    table: list[Block] = (
        [change_table(found)] if found else ["The files of this run hold no figure of before and after."]
    )
    sections = [Section("Before and after", table)]
    if run.receipt:
        sections.insert(0, Section("What was asked", _recipe(run.receipt)))
        sections.append(Section("What happened", happened(run.receipt)))
    read = Section("Where this comes from", [f"Read: {', '.join(run.files)}.", *run.notes])
    name = run.path.resolve().name
    return f"Run {name}", [*sections, *curve_sections({name: run}), *detail_sections(run), read]


def _recipe(receipt: dict[str, Any]) -> list[Block]:
    if not receipt["recipe"]:
        return ["No technique was switched on."]
    return [asked(receipt["recipe"]), "All other options have their defaults; eff_receipt.json names every one."]


def _several(runs: Sequence[RunFolder]) -> tuple[str, list[Section]]:
    names = names_of([run.path for run in runs])
    named = dict(zip(names, runs, strict=True))
    overview: list[list[Cell]] = []
    figures: dict[str, dict[str, Cell]] = {}
    options: dict[str, dict[str, Cell]] = {}
    for name, run in named.items():
        receipt = run.receipt or {}
        steps = receipt.get("steps", {})
        overview.append([name, ", ".join(receipt.get("recipe", {})) or None, steps.get("applied"),
                         steps.get("skipped"), receipt.get("wall_seconds"), ", ".join(run.files)])  # fmt: skip
        for change in changes(run):
            figures.setdefault(change.what, {})[name] = change.before if change.after is None else change.after
        for technique, option, value in asked(receipt.get("recipe", {})).rows:
            options.setdefault(f"{technique}.{option}", {})[name] = value
    sections = [
        Section("Runs", [Table(["run", "techniques", "steps", "skipped", "seconds", "read"], overview)]),
        Section(
            "Figures",
            [
                "Those after; a dash where a run does not hold one.",
                _side_by_side("figure", figures, names),
            ],
        ),
        Section(
            "Options", ["A dash: the default, or a technique that is off.", _side_by_side("option", options, names)]
        ),
        *curve_sections(named),
    ]
    notes = [f"{name}: {note}" for name, run in named.items() for note in run.notes]
    return f"{len(runs)} runs", [*sections, *([Section("Notes", notes)] if notes else [])]


def _side_by_side(heading: str, rows: dict[str, dict[str, Cell]], names: list[str]) -> Table:
    return limited([heading, *names], [[row, *(cells.get(name) for name in names)] for row, cells in rows.items()])


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return what sets paths apart: each without the folder that all lie in.

    Example:
        >>> names_of([Path("runs/a/out"), Path("runs/b/out")])
        ['a/out', 'b/out']
    """
    whole = [str(path.resolve()) for path in paths]
    shared = os.path.commonpath([str(Path(name).parent) for name in whole])
    return [str(Path(name).relative_to(shared)) for name in whole]
