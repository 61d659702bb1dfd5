"""What the documents say is what the code does."""

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest
import typer

from shared_core.cli import app
from shared_core.cli.arguments import describe_flags
from shared_core.cli.reference import distributed_markdown, figures_markdown, flags_markdown, pairs_markdown
from shared_core.engine.recipe import PARTIAL_FLAG
from shared_core.engine.registry import REGISTRY

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CARDS = sorted((ROOT / "shared_core").rglob("README.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), *CARDS]


def test_the_tables_of_flags_are_the_generated_ones():
    assert (ROOT / "docs" / "flags.md").read_text(encoding="utf-8").endswith(flags_markdown()), "run `make docs`"


@pytest.mark.parametrize(
    ("page", "table"),
    [("distributed.md", distributed_markdown), ("combine.md", pairs_markdown), ("reports.md", figures_markdown)],
)
def test_the_tables_of_what_combines_are_the_generated_ones(page, table):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert all(part in text for part in re.split(r"(?<=\n)\n", table())), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_of_the_repository(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    generated = ("commands.md", "api/")  # pages that only the site has
    for target in re.findall(r"(?:\]\(|^\[.*\]: )(?!https?:)([^)#\s]+)", text, flags=re.M):
        assert target.startswith(generated) or (page.parent / target).exists(), target


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.parent.name)
def test_cards_have_their_place_on_the_site(card):
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert f" techniques/{card.parent.name}.md\n" in navigation
    assert f" api/{'.'.join(card.parent.relative_to(ROOT).parts)}.md\n" in navigation


def test_every_make_target_of_the_readme_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"make ([\w-]+)", README):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


def _texts_of_the_code():
    """Return each text in the code, with VALUE for what is filled in."""
    for package in ("shared_core", "hf_eff", "lightning_eff"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                yield "".join(str(one.value) if isinstance(one, ast.Constant) else "VALUE" for one in parts)


def test_the_messages_that_troubleshooting_explains_are_those_of_the_code():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| message .*\n(?:\|.*\n)+", page, flags=re.M)
    cells = [row.split(" | ")[0] for table in tables for row in table.splitlines()[2:]]
    foreign = ("cannot import name", "torch.OutOfMemoryError", "eff doctor")
    messages = [one for cell in cells if cell.startswith("| `") for one in re.findall(r"`(.+?)`", cell)]
    messages = [one for one in messages if not one.startswith(foreign)]
    assert len(messages) > 10
    code = "\n\n".join(dict.fromkeys(_texts_of_the_code()))
    for message in messages:
        words = re.findall(r"[^\s:,]+", message)
        pattern = r"[\s:,]+".join(f"(?:{re.escape(word)}|VALUE)" for word in words)
        found = re.findall(pattern, code)
        assert any(one.count("VALUE") <= len(words) / 2 for one in found), message


def test_benchmarks_that_pages_start_import_nothing_from_the_folder_above():
    named = {file for page in PAGES for file in re.findall(r"python (benchmarks/[\w/]+\.py)", page.read_text())}
    assert "benchmarks/run.py" in named
    modules = {file.stem for file in (ROOT / "benchmarks").glob("*.py")}
    for file in named:
        found = set(re.findall(r"^\s*(?:from|import) (\w+)", (ROOT / file).read_text(), re.MULTILINE))
        assert file.count("/") == 1 or not found & modules, file


@pytest.mark.parametrize("one", REGISTRY.values(), ids=lambda one: one.key)
def test_the_options_that_a_card_names_exist_and_have_its_defaults(one):
    card = (ROOT.joinpath(*one.package.split("."), "README.md")).read_text(encoding="utf-8")
    assert f"`{one.config_class.switch}`" in card
    known = {row["flag"].removeprefix(f"--{one.key}_"): row["default"] for row in describe_flags(one.key)}
    for table in re.findall(r"^\| option \| default \|.*\n\|[-|]+\n((?:\|.*\n)+)", card, flags=re.M):
        for row in table.splitlines():
            names, defaults = (cell.strip() for cell in row.split("|")[1:3])
            options = re.findall(r"`(\w+)`", names)
            assert options, row
            assert known.keys() >= set(options), f"{one.package} has no option {names}"
            told = dict(zip(options, defaults.lower().replace("`", "").split(", "), strict=False))
            for option in filter(known.get, options):  # an empty default is told in words
                assert told[option] == known[option].lower(), f"{one.package}: {option}"


def test_the_repository_speaks_of_the_project_alone():
    words = re.compile(r"/work/|/root/|\bClaude\b|\bhelper-\d|\bissue #?\d", flags=re.I)
    folders = (folder for folder in ROOT.iterdir() if not folder.name.startswith("."))  # environments
    for path in {*PAGES, *(path for folder in folders for path in folder.rglob("*.py"))} - {Path(__file__).resolve()}:
        found = words.search(path.read_text(encoding="utf-8"))
        assert not found, f"{path}: {found}"


def module_of(file):
    spec = importlib.util.spec_from_file_location(Path(file).stem, ROOT / file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_pretrained_networks_is_the_generated_one():
    summary = module_of("benchmarks/evidence/summary.py")
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert summary.BEGIN + summary.table() + summary.END in page, "run `python benchmarks/evidence/summary.py`"


def test_the_figure_of_the_peers_holds_the_committed_results():
    peers = module_of("docs/peers.py")
    drawn = (ROOT / "docs" / "peers.svg").read_text(encoding="utf-8")
    for line in [*peers.STEP, *peers.MEMORY]:
        for told, name in zip(peers.figures(line), ("efftrain", line[2]), strict=True):
            assert f"{told} {line[1]}  {name}" in drawn, "run `make docs`"


METHODS = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
COMMANDS = typer.main.get_command(app).commands
VALUES = {row["flag"]: row["type"].split(" | ") for row in describe_flags()} | {f"--{PARTIAL_FLAG}": [""]}


def check_method(span):
    """Check a flag and its value, a command and its options, or a function."""
    first, *words = span.split()
    if first.startswith("--"):
        assert first in VALUES, span
        assert not words or len(VALUES[first]) == 1 or words[0] in VALUES[first], span
    elif first == "eff":
        command = COMMANDS[words[0]]
        options = {name for one in command.get_params(command.context_class(command)) for name in one.opts}
        assert {word for word in words if word.startswith("--")} <= options, span
    else:
        package, _, name = span.rpartition(".")
        outside = package in ("efftrain", "hf_eff", "lightning_eff")
        assert hasattr(importlib.import_module(package if outside else f"shared_core.{package}"), name), span


def test_every_method_names_flags_functions_and_tests_that_exist():
    tables = re.findall(r"^\| what \| flag, .*\n\|.*\n((?:\|.*\n)+)", METHODS, flags=re.M)
    rows = [
        re.fullmatch(r"\| (.+?) \| (.+?) \| (.+) \|", row).groups() for table in tables for row in table.splitlines()
    ]
    assert len(rows) > 200
    for _, used, test in rows:
        for span in re.findall(r"`(.+?)`", used):
            check_method(span)
        found = re.fullmatch(r'\[.+\]\(\.\./(tests/\S+\.py)(?: "(\w+)")?\)|–', test)
        assert found, test
        if found[2]:
            text = (ROOT / found[1]).read_text(encoding="utf-8")
            assert re.search(rf"^ *def {found[2]}\(", text, flags=re.M), test
