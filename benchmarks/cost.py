"""Measure how the cost of each technique grows, and write docs/cost.md: ``python benchmarks/cost.py [--quick]``."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cost_curves
import torch
from cost_page import fit_text, page, plot
from measure import RESULTS, device, today, versions

DOCS = Path(__file__).resolve().parents[1] / "docs"
FILE = RESULTS / "cost.json"


def measure(quick: bool) -> dict[str, Any]:
    """Return what was measured, every curve at all its sizes, quickly at its two smallest."""
    curves = []
    for curve in cost_curves.CURVES:
        begun = time.monotonic()
        sizes = curve.sizes[: 2 if quick else None]
        found = {**asdict(curve), "sizes": sizes, "values": [curve.measure(size) for size in sizes]}
        del found["measure"]
        curves.append(found)
        told = f"{curve.technique}, {curve.quantity}, with {curve.axis}: {fit_text(found)}"
        print(f"{time.monotonic() - begun:5.1f} s  {told}", flush=True)
    libraries = ", ".join(f"{name} {number}" for name, number in versions().items() if name in ("Python", "torch"))
    about = {"device": device(), "date": today(), "versions": libraries, "layers": cost_curves.LAYERS}
    return {"about": about, "curves": curves}


def main() -> int:
    """Write the numbers, the page and the plot; with ``--quick`` none of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two small sizes of each; writes nothing")
    parser.add_argument("--page", action="store_true", help="write page and plot from the numbers that there are")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    begun = time.monotonic()
    if arguments.quick:
        cost_curves.SECONDS = 0.05
    result = json.loads(FILE.read_text()) if arguments.page else measure(arguments.quick)
    print(f"took {time.monotonic() - begun:.0f} s")
    if not arguments.quick:
        FILE.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (DOCS / "cost.md").write_text(page(result), encoding="utf-8")
        plot(result, DOCS / "cost.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
