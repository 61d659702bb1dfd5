"""`eff report`: a finished run, or several beside each other, as a page, a table and JSON."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from shared_core.printing import echo

PAGE = "eff_report.html"


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Output folders of runs, loggers or commands, or files that commands wrote; several: a comparison."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help=f"The .html page to write, and .md beside it; default {PAGE} in the folder, or here for several."
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="While the run goes on: write the page again and again, until its end.")
    ] = False,
    seconds: Annotated[int, typer.Option(help="With --watch: between two pages.", min=1)] = 10,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; the page is then written only where --out says.")
    ] = False,
) -> None:
    """Show what runs were asked, what happened, quality and size before and after, and their curves.

    The page is one file that loads nothing; plots need matplotlib. What a run's folder does not hold is not shown.
    """
    from shared_core.engine.receipt import Receipt
    from shared_core.errors import ConfigError
    from shared_core.files.json_yaml import json_text
    from shared_core.reports.page import check_place, write_page
    from shared_core.reports.run_folder import of_ours, read_run
    from shared_core.reports.run_page import as_values, page_of

    if len({run.resolve() for run in runs}) < len(runs):
        raise ConfigError("eff report", f"runs must differ, got {' '.join(map(str, runs))}", "name each once")
    if out is not None:
        check_place(out, "eff report: --out")
    if watch:
        if as_json:
            raise ConfigError("eff report", "--watch must come without --json, got both", "leave one out")
        _watch(runs, out, seconds)
    found = [read_run(run) for run in runs]
    if out is None and not as_json:
        home = Path() if len(runs) > 1 else runs[0] if runs[0].is_dir() else runs[0].parent
        out = home / PAGE
        check_place(out, "eff report: the page")
    with of_ours(*found):
        receipts = [Receipt(run.receipt).text() for run in found if run.receipt is not None]
    if out is not None:
        write_page(out, *page_of(found))
    if as_json:
        values = [{**(run.receipt or {}), "report": as_values(run)} for run in found]
        echo(json_text(values[0] if len(values) == 1 else {"runs": values}))
        return
    for text in receipts:
        echo(text)
    echo(f"wrote {out!s}, and .md with the same words beside it")


def _watch(runs: list[Path], out: Path | None, seconds: int) -> None:
    """Write the page until all runs say that they are finished, or somebody interrupts."""
    from shared_core.errors import CheckpointError
    from shared_core.reports.page import write_page
    from shared_core.reports.run_folder import read_run
    from shared_core.reports.run_page import page_of

    target = out or (Path() if len(runs) > 1 else runs[0]) / PAGE
    seen = ""
    while True:
        try:
            found = [read_run(run) for run in runs]
        except CheckpointError:  # nothing is there yet, or a log is just being written
            found = []
        if found and all(run.receipt is not None and run.receipt.get("finished") for run in found):
            return
        steps = [max((curve[-1][0] for curve in run.curves.values()), default=0) for run in found]
        told = f"step {', '.join(f'{step:,}' for step in steps)}" if found else "nothing is logged yet"
        if absent := [str(run) for run in runs if not run.exists()]:
            told += f"; waiting for {', '.join(absent)}, not there so far"
        if found:
            write_page(target, *page_of(found), refresh=seconds)
            told += f": {target!s}"
        if told != seen:
            echo(told)
            seen = told
        try:
            time.sleep(seconds)
        except KeyboardInterrupt:
            if found:
                return
            raise
