"""Run the benchmarks and write ``results/cpu.md``: ``python benchmarks/run.py [NAME ...] [--quick]``.

Each benchmark rewrites its own section and leaves the others. Other options go to the benchmarks, as in
``python benchmarks/run.py export --more 1``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from measure import RESULTS, measured_on, rows_of_program, table, write_sections

NAMES = (
    "pruning", "sparse_inference", "soup", "loss_scaling", "overhead", "quantization", "distillation", "export",
    "binary", "activations", "checkpointing", "optimizer_memory", "ops", "training", "privacy",
)  # fmt: skip

HEAD = """\
# CPU benchmarks

Each section gives its date, device and versions. Times are CPU time of one thread (`time.process_time`), never wall
time. Variants take turns in one process, in a new order each round. A ratio is the median of the paired ratios of all
rounds, with its quartiles in brackets. Memory is the peak of torch's allocator, or `RssAnon`, which excludes mapped
files. Roofline: the bytes that one pass must move, divided by the time, as a share of what a copy reaches on the same
machine. `make bench` writes this page, `python benchmarks/run.py NAME` one section. Other machines will differ."""


def main() -> int:
    """Return 1 if a benchmark could not run; a target that is missed is a result, not a failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--quick", action="store_true", help="a look in a minute or two; writes no result file")
    arguments, options = parser.parse_known_args()
    options += ["--quick"] * arguments.quick
    names = arguments.names or NAMES
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        parser.error(f"NAME must be one of {', '.join(NAMES)}, got {unknown[0]}")
    sections, failed = {}, []
    for name in names:
        print(f"== {name}", flush=True)
        start = time.monotonic()
        try:
            rows = rows_of_program(f"speed.{name}", *options)
        except subprocess.CalledProcessError as error:
            failed.append(name)
            print(f"benchmark {name} failed: {error}", file=sys.stderr, flush=True)
            continue
        seconds = round(time.monotonic() - start)
        print(f"== {name}: {seconds} s", flush=True)
        sections[name] = f"{measured_on()} Took {seconds} s.\n\n{table(rows)}"
    if sections and not arguments.quick:
        print(f"\nwrote {write_sections(RESULTS / 'cpu.md', HEAD, sections, NAMES)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
