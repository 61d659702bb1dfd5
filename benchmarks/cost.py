"""Measure how the cost of each technique grows, and write docs/cost.md: ``python benchmarks/cost.py [--quick]``."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cost_curves
import torch
from cost_page import figures, fit_text, page, plot
from measure import RESULTS, device, today, versions

ROOT = Path(__file__).resolve().parents[1]
DOCS, FIGURES = ROOT / "docs", ROOT / "shared_core" / "tools" / "measured.json"
FILE = RESULTS / "cost.json"


def measure(techniques: Sequence[str], quick: bool) -> dict[str, Any]:
    """Return what was measured: curves at all their sizes, quickly at the two smallest; those of others as they are."""
    before = json.loads(FILE.read_text()) if techniques else {"curves": []}
    known = {curve_name(curve): curve for curve in before["curves"]}
    curves = []
    for curve in cost_curves.CURVES:
        begun = time.monotonic()
        found = asdict(curve)
        del found["measure"]
        if techniques and curve.technique not in techniques:
            curves.append(found | {key: known[curve_name(found)][key] for key in ("sizes", "values")})
            continue
        found["sizes"] = curve.sizes[: 2 if quick else None]
        found["values"] = [float(f"{curve.measure(size):.4g}") for size in found["sizes"]]
        curves.append(found)
        text = f"{curve.technique}, {curve.quantity}, with {curve.axis}: {fit_text(found)}"
        print(f"{time.monotonic() - begun:5.1f} s  {text}", flush=True)
    libraries = ", ".join(f"{name} {number}" for name, number in versions().items() if name in ("Python", "torch"))
    about = {"device": device(), "date": today(), "versions": libraries, "layers": cost_curves.LAYERS}
    if techniques:  # the other curves are of another day
        text = f"{about['device']}, {about['date']}"
        about = before["about"] | {"again": before["about"].get("again", {}) | dict.fromkeys(techniques, text)}
    return {"about": about, "curves": curves}


def curve_name(curve: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(curve[key] for key in ("technique", "quantity", "axis"))


def main() -> int:
    """Write the numbers, the page and the plot; with ``--quick`` none of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = sorted({curve.technique for curve in cost_curves.CURVES})
    parser.add_argument("techniques", nargs="*", metavar="TECHNIQUE", help=f"again: {', '.join(names)}; all by default")
    parser.add_argument("--quick", action="store_true", help="two small sizes of each; writes nothing")
    parser.add_argument("--page", action="store_true", help="write page and plot from the numbers that there are")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.techniques if name not in names]
    if unknown:
        parser.error(f"TECHNIQUE must be one of {', '.join(names)}, got {unknown[0]}")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    begun = time.monotonic()
    if arguments.quick:
        cost_curves.SECONDS = 0.05
    result = json.loads(FILE.read_text()) if arguments.page else measure(arguments.techniques, arguments.quick)
    print(f"took {time.monotonic() - begun:.0f} s")
    if not arguments.quick:
        FILE.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (DOCS / "cost.md").write_text(page(result), encoding="utf-8")
        plot(result, DOCS / "cost.svg")
        FIGURES.write_text(json.dumps(figures(result), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
