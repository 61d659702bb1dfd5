"""What the documents say is what the code does."""

import dataclasses
import re
from pathlib import Path

import pytest

from shared_core.cli.compat import distributed_markdown, pairs_markdown
from shared_core.cli.flags import markdown
from shared_core.rooms import ROOMS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_flag_table_is_the_generated_one():
    assert (ROOT / "docs" / "flags.md").read_text(encoding="utf-8").endswith(markdown()), "run `make docs`"


@pytest.mark.parametrize(("page", "table"), [("distributed.md", distributed_markdown), ("recipes.md", pairs_markdown)])
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
