"""The page of costs holds the committed numbers, and its fits find what was put in."""

import json
from pathlib import Path

import cost_page
import numpy as np
import pytest
from cost_curves import CURVES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def result():
    return json.loads((ROOT / "benchmarks" / "results" / "cost.json").read_text(encoding="utf-8"))


def test_the_page_is_the_generated_one(result):
    text = (ROOT / "docs" / "cost.md").read_text(encoding="utf-8")
    assert text == cost_page.page(result), "run `python benchmarks/cost.py --page`"


def test_what_eff_explain_tells_is_the_same_result(result):
    told = json.loads((ROOT / "shared_core" / "tools" / "measured.json").read_text(encoding="utf-8"))
    assert told == cost_page.figures(result), "run `python benchmarks/cost.py --page`"


def test_every_curve_was_measured_at_all_its_sizes(result):
    measured = [
        (curve["technique"], curve["quantity"], curve["axis"], tuple(curve["sizes"])) for curve in result["curves"]
    ]
    assert measured == [(c.technique, c.quantity, c.axis, c.sizes) for c in CURVES], "run `make cost`"
    for curve in result["curves"]:
        assert len(curve["sizes"]) == len(curve["values"]) >= 3
        assert curve["axis"] in cost_page.AXES


def test_fits_find_the_law():
    n = np.array([3, 30, 300])
    assert cost_page.power_law(n, 5 * n**1.5) == pytest.approx((5, 1.5))
    assert cost_page.line(n, 7 + 0.25 * n) == pytest.approx((7, 0.25))
    assert cost_page.fit_text({"law": "power", "unit": "ms", "sizes": n, "values": 2 * n**0.5}) == "n^0.50"
    assert cost_page.fit_text({"law": "line", "unit": "MiB", "sizes": n, "values": 4 + n / 1024}) == "4 MiB + 1 KiB·n"
    assert cost_page.fit_text({"law": "line", "unit": "MiB", "sizes": n, "values": 0 * n + 4.0}) == "4 MiB, flat"


def test_masks_take_a_byte_a_weight_however_few_there_are():
    (curve,) = [curve for curve in CURVES if curve.quantity == "memory of the masks"]
    assert curve.measure(1 << 14) == pytest.approx(2**14 / 2**20, rel=0.02)
