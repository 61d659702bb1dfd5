"""Repeat published results and write ``results/papers.md``: ``python benchmarks/replicas.py [NAME ...]``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import stdev
from typing import Protocol

import torch
from digits28 import Batch
from measure import RESULTS, Row, Runs, measured_on, rows_of_program, write_sections
from mnist import mnist

NAMES = (
    "loss_scaling", "fp8", "quantization", "lottery_ticket", "pruning", "compression", "low_rank", "distillation",
    "soup", "privacy",
)  # fmt: skip

ON_MNIST = (
    "quantization", "precision", "compression", "pruning", "low_rank", "distillation", "soup", "privacy",
    "one_shot_ticket", "lottery_ticket",
)  # fmt: skip

HEAD = """\
# Published results, repeated

Accuracies, errors and bytes, no times. Seeds are fixed. ± is the standard deviation over seeds. Other machines sum in
another order, so the last digits will differ.

Sections "MNIST" train the papers' own networks on the original 60,000 and 10,000 images (`make replicas DATA=FOLDER`).
"No worse" is yes if the mean is not worse than the paper's figure by more than the standard deviation.

Sections "Digits" train on scikit-learn's digits (`make replicas`). All variants of a seed see the same start and the
same batches. "Prototype" is an earlier measurement of the same experiment in plain torch. The targets rest on it."""
ORDER = (*(f"MNIST: {name}" for name in ON_MNIST), *(f"Digits: {name}" for name in NAMES))


class Measure(Protocol):
    """The interface of a replica."""

    def __call__(self, quick: bool, runs: Runs) -> list[Row]:
        """Return its rows."""


class MeasureOnMnist(Protocol):
    """The interface of a replica on MNIST."""

    def __call__(self, data: tuple[Batch, Batch], quick: bool, runs: Runs) -> list[Published]:
        """Return its rows, from images and labels to train on, and to test on."""


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return mean ± standard deviation, without the latter for a single value."""
    center = mean(values)
    if len(values) == 1:
        return f"{center:.{digits}f}"
    return f"{center:.{digits}f} ± {stdev(values):.{digits}f}"


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table; a replica's peer is the prototype."""
    verdict = {True: "yes", False: "**no**", None: ""}
    lines = ["| what | reached | prototype | target | met |", "|---|---|---|---|---|"]
    lines += [f"| {row.what} | {row.ours} | {row.peer} | {row.target} | {verdict[row.met]} |" for row in rows]
    return "\n".join(lines)


@dataclass(frozen=True)
class Published:
    """A published figure beside ours. `met` is None where the paper says nothing that can be compared."""

    what: str
    paper: str
    ours: str
    why: str = ""
    """How ours differs from the paper."""
    met: bool | None = None


def reaches(values: Sequence[float], paper: float, *, lower: bool = False) -> bool:
    """Return whether the mean is no worse than the paper's figure by more than its own standard deviation."""
    sign = -1 if lower else 1
    error = stdev(values) if len(values) > 1 else 0.0
    return sign * mean(values) + error >= sign * paper


def published_table(rows: Sequence[Published]) -> str:
    """Return the rows as a Markdown table."""
    verdict = {True: "yes", False: "**no**", None: ""}
    lines = ["| what | paper | ours | why different | no worse |", "|---|---|---|---|---|"]
    lines += [f"| {row.what} | {row.paper} | {row.ours} | {row.why} | {verdict[row.met]} |" for row in rows]
    return "\n".join(lines)


def main(measure: Measure) -> None:
    """Run one replica as a program: ``--quick`` for a look, ``--keep FILE`` to go on later, ``--json FILE``."""
    arguments = _parser().parse_args()
    rows = measure(arguments.quick, Runs(arguments.keep))
    _report(rows, table(rows), arguments.json)


def published(measure: MeasureOnMnist) -> None:
    """Run one replica on MNIST as a program: as `main`, with ``--data FOLDER``."""
    parser = _parser()
    parser.add_argument("--data", type=Path, required=True, help="the four IDX files of MNIST")
    arguments = parser.parse_args()
    rows = measure(mnist(arguments.data), arguments.quick, Runs(arguments.keep))
    _report(rows, published_table(rows), arguments.json)


def _parser() -> argparse.ArgumentParser:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a few steps, one seed: to see that it runs")
    parser.add_argument("--keep", type=Path, help="keep finished runs here; those that are there are not run again")
    parser.add_argument("--json", type=Path, help="write the rows here")
    return parser


def _report(rows: Sequence[Row | Published], text: str, file: Path | None) -> None:
    print(text)
    if file:
        file.write_text(json.dumps([asdict(row) for row in rows]))


def run_all() -> int:
    """Return 1 if a replica could not run; a target that is missed is a result, not a failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--quick", action="store_true", help="a look in a minute; writes no result file")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep finished runs here and go on from them")
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help=f"the four IDX files of MNIST, for {', '.join(ON_MNIST)} on it"
    )
    arguments = parser.parse_args()
    known = ON_MNIST if arguments.data else NAMES
    names = arguments.names or known
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"NAME must be one of {', '.join(known)}, got {unknown[0]}")
    if arguments.keep:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    sections, failed = {}, []
    for name in names:
        print(f"== {name}", flush=True)
        options = ["--quick"] * arguments.quick
        if arguments.keep:
            options += ["--keep", str(arguments.keep / f"{name}.jsonl")]
        try:
            if arguments.data:
                options += ["--data", str(arguments.data)]
                text = published_table(rows_of_program(f"papers.{name}", *options, kind=Published))
            else:
                text = table(rows_of_program(f"replica.{name}", *options))
        except subprocess.CalledProcessError as error:
            failed.append(name)
            print(f"replica {name} failed: {error}", file=sys.stderr, flush=True)
            continue
        sections[f"{'MNIST' if arguments.data else 'Digits'}: {name}"] = f"{measured_on()}\n\n{text}"
    if sections and not arguments.quick:
        print(f"\nwrote {write_sections(RESULTS / 'papers.md', HEAD, sections, ORDER)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_all())
