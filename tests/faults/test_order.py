"""R2: what takes an old file's place is on disk before it does, and the change of the folder is on disk afterwards."""

import sys

import pytest
from fault_points import recorded
from fault_writers import IN_PLACE, WRITERS, Simple

from shared_core.engine.recipe import Recipe
from shared_core.reports.page import Section, write_page
from shared_core.runs.command import TrainingCommand
from shared_core.runs.lottery import CurveRow, TicketCurve
from shared_core.soup.diagnosis import Diagnosis, diagnosis_plot

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="descriptors have no paths elsewhere")


def _start(folder, version):
    TrainingCommand.parse(["true"], "test").with_recipe(Recipe({}), folder / "recipe.yaml", {})


def _curve(folder, version):
    row = CurveRow(0, "none", 10, 1.0, 0.5, 1, None, None, "round-00")
    TicketCurve((row,), "accuracy", True).plot(folder / "curve.svg")


def _diagnosis(folder, version):
    square, ways = [[0.0, 1.0], [1.0, 0.0]], {"b": [0.5, 0.4, 0.3, 0.4, 0.5]}
    found = Diagnosis(["a", "b"], [0.5, 0.5], 0.5, square, [0.5, 0.5], square, "a", ways, {"b": 0.1}, {}, [])
    diagnosis_plot(found, folder / "diagnosis.svg")


MORE = {
    "page": Simple(lambda folder, version: write_page(folder / "page.html", "title", [Section("a", ["b"])]), None),
    "recipe of a command": Simple(_start, None),
    "curve of a lottery": Simple(_curve, None),
    "plot of a diagnosis": Simple(_diagnosis, None),
}


def snapshot(folder):
    return {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in folder.rglob("*") if file.is_file()}


def out_of_order(file, events, folder):
    """Return what is wrong with how a new file came to its place, None if nothing is."""
    renames = [
        (number, old / file.relative_to(new)) for number, (what, old, *rest) in enumerate(events)
        for new in rest if what == "rename" and file.is_relative_to(new)
    ]  # fmt: skip
    if not renames:
        return "was written in place"
    moment, old = renames[-1]
    if ("fsync", old) not in events[:moment]:
        return "was renamed before it was on disk"
    if not any(("fsync", parent) in events[moment:] for parent in file.parents if parent.is_relative_to(folder)):
        return "was renamed, and its folder is not on disk"
    return None


@pytest.mark.parametrize("name", WRITERS | MORE)
def test_every_writer_keeps_the_order(name, tmp_path):
    writer = (WRITERS | MORE)[name]
    folder = tmp_path / "folder"
    folder.mkdir()
    writer.prepare(folder)
    before = snapshot(folder)
    with recorded() as events:
        writer.write(folder, 1)
    changed = {file for file, state in snapshot(folder).items() if before.get(file) != state}
    assert changed
    wrong = {file.name: out_of_order(file, events, folder) for file in changed}
    in_place = IN_PLACE.get(name, set())
    assert {name: told for name, told in wrong.items() if told and name not in in_place} == {}
    last = max(number for number, event in enumerate(events) if event[0] == "rename")
    assert all(("fsync", file) in events[:last] for file in changed if file.name in in_place)
