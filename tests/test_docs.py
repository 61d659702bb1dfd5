"""What the documents say is what the code does."""

import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest

from shared_core.cli.compat import distributed_markdown, pairs_markdown
from shared_core.cli.flags import markdown
from shared_core.engine import metrics as logged_figures
from shared_core.engine.registry import ROOMS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_flag_table_is_the_generated_one():
    assert (ROOT / "docs" / "flags.md").read_text(encoding="utf-8").endswith(markdown()), "run `make docs`"


@pytest.mark.parametrize(
    ("page", "table"),
    [("distributed.md", distributed_markdown), ("recipes.md", pairs_markdown), ("logging.md", logged_figures.markdown)],
)
def test_the_tables_of_what_combines_are_the_generated_ones(page, table):
    assert table() in (ROOT / "docs" / page).read_text(encoding="utf-8"), "run `make docs`"


@pytest.mark.parametrize("target", re.findall(r"\]\((?!http)([^)#]+)", README))
def test_every_link_of_the_readme_leads_somewhere(target):
    assert (ROOT / target).exists(), target


def test_every_make_target_of_the_readme_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"make ([\w-]+)", README):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


@pytest.mark.parametrize("room", ROOMS.values(), ids=lambda room: room.key)
def test_method_cards_have_their_headings_and_name_every_option(room):
    # a room with two techniques has a card for each, the second under its key
    own = ROOT / "docs" / "techniques" / f"{room.key}.md"
    card = (own if own.is_file() else own.with_name(f"{room.name}.md")).read_text(encoding="utf-8")
    assert len(re.findall(r"^## ", card, flags=re.M)) >= 5
    for field in (field.name for field in dataclasses.fields(room.config_class)):
        assert f"`{field}`" in card or f"_{field}`" in card, f"{room.name}.md does not name {field}"


def test_the_repository_speaks_of_the_project_alone():
    words = re.compile(r"/work/|/root/|\bClaude\b|\bhelper-\d|\bissue #?\d", flags=re.I)
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/**/*.py")]:
        if ".venv" in path.parts or path == Path(__file__).resolve():
            continue
        found = words.search(path.read_text(encoding="utf-8"))
        assert not found, f"{path}: {found}"


def rows_of(cell):
    """Return the rows of the specification that a cell such as ``A1, B1-B3`` names."""
    for letter, first, last in re.findall(r"([A-H])(\d*)(?:–[A-H](\d+))?b?(?:, |$)", cell):
        yield from (f"{letter}{number}" for number in range(int(first), int(last or first) + 1)) if first else [letter]


def test_the_feature_table_holds_every_row_with_a_page_and_its_tests():
    rows = re.findall(r"^\| ([A-H][^|]*) \| \[[^|]+\]\(docs/[^|]+\) \| [^|]+ \| (.+) \|$", README, flags=re.M)
    assert all(re.fullmatch(r"(\[[\w ]+\]\(tests/[\w/]+\.py\) ?)+", tests) for _, tests in rows)
    named = {row for cell, _ in rows for row in rows_of(cell)}
    last = {"A": 14, "B": 17, "C": 13, "D": 12, "E": 8, "F": 5}
    assert named == {f"{letter}{i}" for letter, end in last.items() for i in range(1, end + 1)} | {"G", "H"}


def test_the_figure_of_the_peers_holds_the_committed_results():
    spec = importlib.util.spec_from_file_location("peers", ROOT / "docs" / "peers.py")
    peers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(peers)
    drawn = (ROOT / "docs" / "peers.svg").read_text(encoding="utf-8")
    for line in [*peers.STEP, *peers.MEMORY]:
        for told, name in zip(peers.figures(line), ("efftrain", line[2]), strict=True):
            assert f"{told} {line[1]}  {name}" in drawn, "run `make docs`"
