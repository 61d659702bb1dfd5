"""Greedy soup of large checkpoints: peak memory and CPU time beside the reference algorithm."""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import MIB, Row, main, python, ratio, run_and_watch

PROGRAMS = str(Path(__file__).with_name("soup_programs.py"))
CHECKPOINTS = 16
MEMORY_TARGET, TIME_TARGET = 2.7, 0.45


def compare(folder: Path, scores: str, checkpoints: int, model_bytes: int, rounds: int) -> Row:
    """Run both in processes of their own, in turn, on the same files."""
    seconds: dict[str, list[float]] = {"ours": [], "reference": []}
    peaks: dict[str, int] = {"ours": 0, "reference": 0}
    members: dict[str, Any] = {}
    for i in range(rounds):
        for name in ("ours", "reference") if i % 2 else ("reference", "ours"):
            result, peak = run_and_watch(python(PROGRAMS, name, str(folder), scores))
            seconds[name].append(result["seconds"])
            peaks[name] = max(peaks[name], peak)
            members[name] = result["members"]
    if members["ours"] != members["reference"]:
        raise RuntimeError(f"both must find the same soup, got {members}")
    _, empty = run_and_watch(python(PROGRAMS, "nothing", str(folder), scores))
    time = ratio(seconds, "ours", "reference")
    ours, peer = (peaks[name] / model_bytes for name in ("ours", "reference"))
    which = "scores of the single ones known" if scores == "known" else "single ones scored first"
    return Row(
        f"greedy soup of {checkpoints} x {model_bytes / 4e6:.0f} M parameters, {which}; "
        f"{len(members['ours'])} accepted",
        f"{statistics.median(seconds['ours']):.2f} s CPU",
        f"reference {statistics.median(seconds['reference']):.2f} s CPU",
        f"{time.text()} of the reference",
        f"{ours:.2f} models, peer {peer:.2f} (a bare interpreter with torch, within: {empty / MIB:.0f} MiB)",
        f"<= {TIME_TARGET}, < {MEMORY_TARGET} models",
        time.median <= TIME_TARGET and ours < MEMORY_TARGET,
    )


def measure(quick: bool, parameters: int) -> list[Row]:
    parameters = min(parameters, 10_000_000) if quick else parameters
    needed = 1.1 * CHECKPOINTS * parameters * 4
    with tempfile.TemporaryDirectory(prefix="eff-bench-soup-") as name:
        free = shutil.disk_usage(name).free
        if free < needed:
            sys.exit(
                f"bench_soup: {name} must have {needed / 1e9:.1f} GB free, got {free / 1e9:.1f}; set TMPDIR to a "
                "folder on a larger disk, or give fewer --parameters"
            )
        made, _ = run_and_watch(python(PROGRAMS, "make", name, str(CHECKPOINTS), str(parameters)))
        return [
            compare(Path(name), scores, CHECKPOINTS, made["bytes"], rounds=1 if quick else 5)
            for scores in ("known", "unknown")
        ]


if __name__ == "__main__":
    main(measure, parameters=100_000_000)
