"""The notebooks of examples/notebooks are the pages of docs/tutorials, outputs included, and run."""

import re
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "docs"))
import notebooks  # noqa: E402  # docs/notebooks.py

NAMES = sorted(notebooks.PAGES)


def stored(name):
    return nbformat.read(notebooks.notebook_file(name), as_version=4)


def printed(notebook):
    return [notebooks.output_of(cell) for cell in notebook.cells if cell.cell_type == "code"]


def test_every_page_has_its_notebook():
    assert sorted(path.stem for path in notebooks.notebook_file("").parent.glob("*.ipynb")) == NAMES
    assert len(NAMES) >= 4


@pytest.mark.parametrize("name", NAMES)
def test_page_and_notebook_are_the_same(name):
    notebook, cells = stored(name), notebooks.cells_of(notebooks.PAGES[name].read_text(encoding="utf-8"))
    nbformat.validate(notebook)
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [cell[:2] for cell in cells]
    shown = [output.strip("\n") for kind, _, output in cells if kind == "code"]
    assert printed(notebook) == shown, "run `make notebooks`, which writes the outputs of a run into both"


@pytest.mark.slow  # half a minute each
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_the_page_runs_and_prints_what_it_shows(name, tmp_path):
    ran = notebooks.run(notebooks.PAGES[name].read_text(encoding="utf-8"), tmp_path)
    for now, then in zip(ran.cells, stored(name).cells, strict=True):
        if now.cell_type == "code" and not now.source.startswith("%%bash"):  # what `eff` says depends on the processor
            assert kinds_of_lines(notebooks.output_of(now)) == kinds_of_lines(notebooks.output_of(then))


def kinds_of_lines(text):
    """Return the first word of each line, without boxes, notes and wrapped cells, whose widths follow the figures."""
    lines = [line for line in text.splitlines() if line and not line.startswith((*"│┃┏┡└ ", "efftrain: "))]
    return [re.match(r"[\w/]*", line)[0] for line in lines]
