"""Run the GPU tests, then measure every operation on a CUDA GPU beside its peers: ``python benchmarks/gpu.py``.

Each row is kept as it comes: a run that was cut off, started again, goes on where it stopped.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import logging
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, Row, Runs, installed, python, table, today, versions
from operations import At, Case, Ceilings, ceilings, row_of

METHOD = """\
Time is device time between two CUDA events. The L2 cache is flushed before each call, and the host launches the call
while the device waits. In brackets: what a call takes of the host in a row of calls, which bounds short ones. Where the
host waits for the device, as in steps that may be skipped, the wait counts. Variants take turns, in a new order each
round. A ratio is the median of the paired ratios of ours to that peer, with its quartiles: below 1 ours is faster.
Before a peer is timed, it must give the same numbers. Memory is what is allocated above the inputs at the peak.
Roofline: the bytes that one fused pass must move, or the operations of the products, divided by the time, as a share of
what a copy and a bfloat16 product reach here. `make bench-gpu` writes this page."""
ROOT = RESULTS.parents[1]
SECONDS, OF_TESTS = 22 * 60.0, 8 * 60.0
"""For the tests and all cases, without imports, and for the tests of it."""
_SHOWN = 20  # tests by name


Make = Callable[[At], Case]


def cases() -> tuple[Make, ...]:
    """Return all of them; they are imported here because torchao talks while it is."""
    from gpu_cases.casts import CASTS
    from gpu_cases.ops import OPERATIONS
    from gpu_cases.training import TRAINING

    return (*OPERATIONS, *CASTS, *TRAINING)


def label(make: Make) -> str:
    """Return the name by which a case is kept before it is made."""
    if isinstance(make, functools.partial):
        return ", ".join([make.func.__name__, *(f"{key} {value}" for key, value in make.keywords.items())])
    return make.__name__


def code() -> str:
    """Return the commit, where git knows it, and a digest of what is measured and tested."""
    digest = hashlib.sha256()
    for folder in ("kernels", "shared_core", "benchmarks", "tests"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    try:
        git = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        commit = git.stdout.strip()
    except OSError:
        commit = ""
    return f"{f'commit {commit}, ' if commit else ''}sources {digest.hexdigest()[:12]}"


def run_tests() -> dict[str, Any]:
    """Return a row: whether every test of the GPU passed, and which did not."""
    begun = time.perf_counter()
    files = [str(file) for file in (ROOT / "tests").rglob("test_*.py") if "mark.gpu\n" in file.read_text()]
    processes = str(min(12, os.cpu_count() or 1))  # kernels are compiled on CPUs
    command = python("-P", "-m", "pytest", "-q", "-m", "gpu", "-n", processes, "--tb=line", "-rfEs", *sorted(files))
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    try:
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=OF_TESTS)
        lines = [line.strip("= ") for line in (run.stdout or run.stderr).splitlines()] or ["no output"]
        passed = run.returncode == 0 and " passed" in f" {lines[-1]}" and "skipped" not in lines[-1]
    except subprocess.TimeoutExpired:
        passed, lines = False, [f"not finished after {OF_TESTS:.0f} s"]
    failures = [line.replace("|", "/")[:200] for line in lines if re.match(r"(FAILED|ERROR|SKIPPED) ", line)]
    failures[_SHOWN:] = [f"and {len(failures) - _SHOWN} more"] if len(failures) > _SHOWN else []
    row = Row("`TRITON_INTERPRET=0 pytest -m gpu`", "; ".join([lines[-1], *failures]), target="all pass", met=passed)
    return {**asdict(row), "seconds": time.perf_counter() - begun}


def measure(runs: Runs, at: At, chosen: Sequence[Make], keep: Callable[[], object], seconds: float = SECONDS) -> None:
    """Measure each case that is not among the runs, call `keep` after each; those begun before in vain come last.

    A case gets an equal part of the time that is left: then no further peer is tried, and no case when none is left.
    """
    best = Ceilings(**runs.of("ceilings", lambda: asdict(ceilings(at))))
    todo = [make for make in chosen if label(make) not in runs]
    todo.sort(key=lambda make: f"begun: {label(make)}" in runs)
    for i, make in enumerate(todo):
        runs.of(f"begun: {label(make)}", dict)
        share = (seconds - runs.seconds) / (len(todo) - i)
        result = runs.of(label(make), functools.partial(_result, make, at, best, share))
        keep()
        if result["met"] is False and _is_lost(at.device):
            print("bench-gpu: the GPU takes no more work of this process, a new one goes on", flush=True)
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _result(make: Make, at: At, best: Ceilings, share: float) -> dict[str, Any]:
    begun = time.perf_counter()
    if share <= 0:
        return asdict(Row(label(make), "not measured: no time was left"))
    try:
        row = row_of(make, at, best, begun + share)
    except Exception as error:  # the other cases are still worth their time
        text = " ".join(f"{type(error).__name__}: {error}".split())
        row = Row(label(make), f"failed: {text[:200]}".replace("|", "/"), met=False)
    return {**asdict(row), "seconds": time.perf_counter() - begun}


def _is_lost(device: torch.device) -> bool:
    """Return whether an error stays with this process, as that of an address does."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def rows_of(runs: Runs, chosen: Sequence[Make]) -> list[Row]:
    """Return what was found, the tests first, a line for each case that has no result yet."""
    rows = []
    for name in [*(["tests"] if "tests" in runs else []), *map(label, chosen)]:
        result = dict(runs.of(name, dict)) if name in runs else asdict(Row(name, "not yet measured"))
        result.pop("seconds", None)
        rows.append(Row(**result))
    return rows


def same_run(runs: Runs, about: dict[str, Any]) -> str:
    """Return the day on which the run began; one of another device or commit is left, which is said."""
    kept = runs.of("about", lambda: {**about, "day": today()})
    other = [f"{key} was {kept[key]}, is {value}" for key, value in about.items() if kept[key] != value]
    if other:
        print(f"bench-gpu: starts anew: {'; '.join(other)}", flush=True)
        runs.forget()
        kept = runs.of("about", lambda: {**about, "day": today()})
    elif "tests" in runs or "ceilings" in runs:
        print("bench-gpu: goes on where it was cut off", flush=True)
    return str(kept["day"])


def page_of(device: str, suffix: str) -> Path:
    """Return the page of a device, as ``results/h200.md``, with the words that chose the cases behind it."""
    words = re.sub(r"[^a-z0-9]+", "-", f"{device.removeprefix('NVIDIA ')} {suffix}".lower())
    return RESULTS / f"{words.strip('-')}.md"


def write(file: Path, text: str) -> Path:
    from shared_core.files.atomic import atomic_write  # here: what is measured may be an import

    with atomic_write(file) as aside:
        aside.write_text(text, encoding="utf-8")
    return file


def on_gpu(device: torch.device, chosen: Sequence[Make], suffix: str, seconds: float = SECONDS) -> list[Row]:
    """Test if all cases are chosen, measure, and write the table after each row."""
    RESULTS.mkdir(exist_ok=True)
    runs = Runs(RESULTS / f"gpu{suffix and '-'}{suffix}.unfinished.jsonl")
    name, found = torch.cuda.get_device_name(device), code()
    day = same_run(runs, {"device": name, "code": found, "versions": {"CUDA": torch.version.cuda, **versions()}})
    if not suffix:
        tests = runs.of("tests", run_tests)
        print(f"bench-gpu: every GPU test passed: {'yes' if tests['met'] else 'NO'}: {tests['ours']}", flush=True)

    def keep() -> Path:
        best = Ceilings(**runs.of("ceilings", dict))
        on = f"{day}, {name}, CUDA {torch.version.cuda}: {best.text()}; {found}. {installed()}."
        return write(page_of(name, suffix), f"# {name}\n\n{on}\n\n{METHOD}\n\n{table(rows_of(runs, chosen))}\n")

    measure(runs, At(device), chosen, keep, seconds)
    print(f"\nwrote {keep()} after {runs.seconds:.0f} s")
    rows = rows_of(runs, chosen)
    runs.forget()
    return rows


def quick(device: torch.device, chosen: Sequence[Make]) -> list[Row]:
    """Run the cases at tiny sizes and write nothing."""
    runs = Runs()
    measure(runs, At(device, 2, "eager"), chosen, lambda: None)
    return rows_of(runs, chosen)


def main() -> int:
    """Return 1 if a test or a case failed, 2 without a GPU or a case of that name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="only cases whose name holds one of these, without the tests"
    )
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with --quick, to see that every case runs")
    parser.add_argument("--minutes", type=float, default=SECONDS / 60, help="for the tests and all cases")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, no tests; writes no result file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            "bench-gpu: device must be a CUDA GPU, got none; `make bench` measures on the CPU, "
            "`benchmarks/gpu.py --device cpu --quick` only shows that the cases run",
            file=sys.stderr,
        )
        return 2
    if device.type != "cuda" and not arguments.quick:
        print(f"bench-gpu: device must be a CUDA GPU, got {device}; add --quick to see the cases run", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    words, found = arguments.words, cases()
    chosen = [make for make in found if not words or any(word in label(make) for word in words)]
    if not chosen:
        names = ", ".join(sorted({label(make).partition(",")[0] for make in found}))
        print(f"bench-gpu: WORD must be in a case's name, got {' '.join(words)}; of {names}", file=sys.stderr)
        return 2
    seconds = 60 * arguments.minutes
    rows = quick(device, chosen) if arguments.quick else on_gpu(device, chosen, "-".join(words), seconds)
    print(table(rows))
    return int(any(row.met is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
