"""Every example runs as a user would run it, from another folder, and ends with a figure."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
ENDS = ("hf", "lightning")
STORIES = ("compact_lm_hf",)  # a minute
SCRIPTS = [
    path
    for path in sorted(EXAMPLES.glob("*_*.py"))
    if path.stem.rsplit("_", 1)[1] in ENDS and not path.stem.startswith("digits")  # data and model of the others
]


@pytest.mark.parametrize(
    "script",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in STORIES)) for path in SCRIPTS],
)
def test_example(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    assert any(character.isdigit() for character in capsys.readouterr().out.splitlines()[-1])
    assert len(script.read_text(encoding="utf-8").splitlines()) < 80


def test_every_technique_has_an_example_on_both_front_ends():
    from shared_core.rooms import ROOMS

    names = {path.stem for path in SCRIPTS}
    assert {f"{room.name}_{end}" for room in ROOMS.values() for end in ENDS} <= names
