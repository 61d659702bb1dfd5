"""Measure every operation on a CUDA GPU beside its peers: ``python benchmarks/gpu.py [WORD ...]``."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable

import torch
from measure import table, write
from operations import At, Case, rows_of

METHOD = """\
Device time between two CUDA events, the L2 cache flushed before each call; variants in turn, each round in an order of
its own; a ratio is the median of the rounds' paired ratios of ours to that peer, with its quartiles: below 1 ours is
faster. Before it is timed, each peer must give the same numbers. Memory is what is allocated above the inputs at the
peak. Roofline: the bytes that one fused pass has to move, or the operations of the products, over the time, as a share
of what a copy and a bfloat16 product reach here. Written by `make bench-gpu`."""


def cases() -> tuple[Callable[[At], Case], ...]:
    """Return all of them; they are imported here because torchao talks while it is."""
    from gpu_cases.casts import CASTS
    from gpu_cases.ops import OPERATIONS
    from gpu_cases.training import TRAINING

    return (*OPERATIONS, *CASTS, *TRAINING)


def main() -> int:
    """Return 1 if a case failed, 2 without a GPU or a case of that name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="only cases whose name holds one of these; all by default"
    )
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with --quick, to see that every case runs")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; writes no result file")
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
    at = At(device, 2, "eager") if arguments.quick else At(device)
    rows, failed, best = rows_of(cases(), at, arguments.words)
    if not rows and not failed:
        print(f"bench-gpu: WORD must be in a case's name, got {' '.join(arguments.words)}", file=sys.stderr)
        return 2
    print(table(rows))
    if rows and not arguments.quick:
        name = torch.cuda.get_device_name(device)
        suffix = "-".join(arguments.words)
        print(f"\nwrote {write(rows, f'{name}, CUDA {torch.version.cuda}: {best.text()}', METHOD, suffix=suffix)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
