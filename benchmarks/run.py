"""Run the benchmarks and write one table: ``python benchmarks/run.py [NAME ...] [--quick]``.

Other options go to the benchmarks, as in ``python benchmarks/run.py export --more 1``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from measure import Row, device, rows_of_program, write

NAMES = (
    "pruning", "sparse_inference", "soup", "loss_scaling", "overhead", "quantization", "distillation", "export",
    "activations", "checkpointing", "optimizer_memory", "ops", "training", "privacy",
)  # fmt: skip

METHOD = """\
One thread of CPU time (`time.process_time`), never wall time. Variants run in one process, in turn, each round in an
order of its own; a ratio is the median of the rounds' paired ratios, with its quartiles. Memory is torch's allocator's
or `RssAnon`, which leaves mapped files out. Roofline: the bytes that one pass has to move over the time, as a share of
what a copy reaches on this machine. Written by `make bench`; other machines will differ.
Unstructured sparsity makes files smaller, not dense products faster."""


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
    rows: list[Row] = []
    failed = []
    begun = time.monotonic()
    seconds = {}
    for name in names:
        print(f"== {name}", flush=True)
        start = time.monotonic()
        try:
            rows += rows_of_program(f"speed.{name}", *options)
        except subprocess.CalledProcessError as error:
            failed.append(name)
            print(f"benchmark {name} failed: {error}", file=sys.stderr, flush=True)
        seconds[name] = round(time.monotonic() - start)
        print(f"== {name}: {seconds[name]} s", flush=True)
    took = f"Took {time.monotonic() - begun:.0f} s: {', '.join(f'{name} {taken}' for name, taken in seconds.items())}."
    print(f"\n{took}")
    if rows and not arguments.quick:
        suffix = "" if set(names) == set(NAMES) else "-".join(names)
        print(f"wrote {write(rows, f'{device()}, CPU, one thread', f'{METHOD} {took}', suffix=suffix)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
