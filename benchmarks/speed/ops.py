"""The operations of `gpu_cases/ops.py` and `casts.py` on this CPU, beside eager torch, torch's own and torchao's."""

from __future__ import annotations

import logging
import warnings

import torch
from gpu_cases.casts import CASTS
from gpu_cases.ops import OPERATIONS
from measure import Row, main
from operations import At, ceilings, row_of


def measure(quick: bool) -> list[Row]:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    at = At(torch.device("cpu"), 2 if quick else 1, compiler="")
    best = ceilings(at)
    rows = [row_of(make, at, best) for make in (*OPERATIONS, *CASTS)]
    return [Row("copy of 256 MiB, the bandwidth beside which rooflines stand", best.text()), *rows]


if __name__ == "__main__":
    main(measure)
