"""Run the replicas of published accuracy results and write one table: ``python benchmarks/replicas.py [NAME ...]``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import torch
from measure import RESULTS, Row, Runs, device, rows_of_program, today, versions

NAMES = (
    "loss_scaling", "fp8", "quantization", "lottery_ticket", "pruning", "compression", "low_rank", "distillation",
    "soup", "privacy",
)  # fmt: skip

METHOD = """\
Accuracies, flush shares and losses, no times: fixed seeds, variants of a seed see the same start and the same batches.
"Prototype" is what a separate, plain torch prototype of the same experiment had measured before; the targets rest on
it. ± is the standard deviation over seeds. Written by `make replicas`; other machines sum in another order, so the last
digits will differ."""


class Measure(Protocol):
    """The interface of a replica."""

    def __call__(self, quick: bool, runs: Runs) -> list[Row]:
        """Return its rows."""


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return mean ± standard deviation, without the latter for a single value."""
    centre = mean(values)
    if len(values) == 1:
        return f"{centre:.{digits}f}"
    deviation = (sum((value - centre) ** 2 for value in values) / (len(values) - 1)) ** 0.5
    return f"{centre:.{digits}f} ± {deviation:.{digits}f}"


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table; a replica's peer is the prototype."""
    verdict = {True: "yes", False: "**no**", None: ""}
    lines = ["| what | reached | prototype | target | met |", "|---|---|---|---|---|"]
    lines += [f"| {row.what} | {row.ours} | {row.peer} | {row.target} | {verdict[row.met]} |" for row in rows]
    return "\n".join(lines)


def main(measure: Measure) -> None:
    """Run one replica as a program: ``--quick`` for a look, ``--keep FILE`` to go on later, ``--json FILE``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a few steps, one seed: to see that it runs")
    parser.add_argument("--keep", type=Path, help="keep finished runs here; those that are there are not run again")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(arguments.quick, Runs(arguments.keep))
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows]))


def run_all() -> int:
    """Return 1 if a replica could not run; a target that is missed is a result, not a failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--quick", action="store_true", help="a look in a minute; writes no result file")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep finished runs here and go on from them")
    arguments = parser.parse_args()
    names = arguments.names or NAMES
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        parser.error(f"NAME must be one of {', '.join(NAMES)}, got {unknown[0]}")
    if arguments.keep:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    sections, failed = [], []
    for name in names:
        print(f"== {name}", flush=True)
        try:
            keep = ["--keep", str(arguments.keep / f"{name}.jsonl")] if arguments.keep else []
            rows = rows_of_program(f"replica.{name}", *["--quick"] * arguments.quick, *keep)
        except subprocess.CalledProcessError as error:
            failed.append(name)
            print(f"replica {name} failed: {error}", file=sys.stderr, flush=True)
            continue
        sections.append(f"## {name}\n\n{table(rows)}")
    if sections and not arguments.quick:
        print(f"\nwrote {write(sections, names)}")
    return 1 if failed else 0


def write(sections: Sequence[str], names: Sequence[str]) -> Path:
    suffix = "" if set(names) == set(NAMES) else "-" + "-".join(names)
    file = RESULTS / f"{today()}-replicas{suffix}.md"
    installed = ", ".join(f"{name} {number}" for name, number in versions().items())
    head = f"# Replicas, {today()}\n\nDevice: {device()}, CPU, one thread. {installed}.\n\n{METHOD}"
    file.write_text("\n\n".join([head, *sections]) + "\n", encoding="utf-8")
    return file


if __name__ == "__main__":
    sys.exit(run_all())
