"""Names that a stranger chose, of tensors, layers, files and options, cannot drive a terminal or a page."""

import html
import json
import re
import sys

import pytest
import torch
import typer
from commands import user_module
from rich.table import Table
from safetensors.torch import save_file

from shared_core.cli import app, main
from shared_core.printing import markdown_text, printable
from shared_core.reports.page import Console, Section, build_page
from shared_core.reports.page import Table as PageTable

OBEYED = "\x1b]0;title\x07\x1b[2J\x9b31m\r\b\x7f\u202e\u2066\u200f\u2028"
MARKUP = "[red]x[_red] [link=http:__a_b]y <script>z<_script> `c` *d*"  # no / is in a name of a file or a module
NAME = f"w{OBEYED}{MARKUP}"
CODE = """
import torch
from torch import nn
NAME = {name!r}
def build():
    torch.manual_seed(0)
    net = nn.Sequential()
    for number in range(2):
        net.add_module(f"{{number}}{{NAME}}", nn.Linear(32, 32))
        net.add_module(f"{{number}}act{{NAME}}", nn.ReLU())
    return net, torch.randn(4, 32)
def batches():
    return [torch.randn(4, 32) for _ in range(2)]
def quality(model):
    return 1.0
def alone():
    return build()[0]
"""


def hazards(text):
    """Return the characters in a text that a terminal obeys, colors aside."""
    return sorted({char for char in re.sub(r"\x1b\[[0-9;]*m", "", text) if not char.isprintable() and char != "\n"})


@pytest.fixture
def room(tmp_path, monkeypatch):
    user_module(tmp_path, monkeypatch, "hostile", CODE.format(name=NAME))
    import hostile

    state = hostile.alone().state_dict()
    for number in range(2):
        save_file({name: value + number for name, value in state.items()}, f"{number}{NAME}.safetensors")
    save_file({NAME: torch.ones(3)}, f"other{NAME}.safetensors")
    (tmp_path / "option.yaml").write_text(json.dumps({"prune": {"sparsity": 0.5, NAME: 1}}))
    (tmp_path / "key.yaml").write_text(json.dumps({NAME: {"sparsity": 0.5}}))
    skip = {"prune": {"sparsity": 0.5, "skip": [f"0{printable('w')}*", NAME]}, "qat": {"scheme": "int8"}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(skip))
    run = tmp_path / f"run{NAME}"
    run.mkdir()
    receipt = {
        "recipe": {"prune": {"criterion": NAME}, NAME: {NAME: NAME}}, "front_end": NAME, "finished": True,
        "steps": {"applied": 3, "skipped": 0, "planned": 3}, "notes": [NAME, f"# {NAME}\n# heading"],
        "techniques": {"prune": {"sparsity": 0.5, NAME: NAME}, NAME: {NAME: 1.5}}, "seconds": {"prune": 0.1},
        "unreached": {"prune": NAME}, "final_evaluation": {NAME: 1.0},
        "environment": {"device": NAME, "python": NAME, "libraries": {NAME: NAME}},
        "coverage": {}, "wall_seconds": 1.0,
    }  # fmt: skip
    (run / "eff_receipt.json").write_text(json.dumps(receipt))
    return tmp_path


ZERO, ONE, OTHER, RUN = f"0{NAME}.safetensors", f"1{NAME}.safetensors", f"other{NAME}.safetensors", f"run{NAME}"
EVAL = ("--eval", "hostile:quality", "--model", "hostile:alone")
COMMANDS = {
    "cache-teacher": [("hostile:alone", "--data", NAME, "--out", f"cache{NAME}")],
    "chain": [("--out", f"chain{NAME}", "--students", NAME, "--", sys.executable, f"{NAME}.py")],
    "compat": [(NAME,), ("prune", NAME)],
    "compress": [(ZERO, "--out", f"packed{NAME}.eff"), (f"none{NAME}", "--out", "x.eff"), (OTHER, "--out", "y.eff")],
    "decompress": [(f"packed{NAME}.eff", "--out", f"unpacked{NAME}"), (ZERO, "--out", "z")],
    "doctor": [()],
    "explain": [
        ("recipe.yaml", "--model", "hostile:build"), ("option.yaml",), ("key.yaml",), (f"{NAME}.yaml",),
        ("recipe.yaml", "--model", f"hostile:{NAME}"),
    ],
    "export": [("hostile:build", "--out", f"model{NAME}.onnx", "--weights", ZERO), (NAME, "--out", "x.onnx")],
    "flags": [(NAME,)],
    "formats": [()],
    "init": [("--goal", NAME), ("--out", f"no{NAME}/recipe.yaml")],
    "lottery": [("--out", f"lottery{NAME}", "--", sys.executable, f"{NAME}.py")],
    "low-rank": [("hostile:build", "--rank", "4", "--min-size", "0", "--out", f"low{NAME}", "--weights", ZERO)],
    "plan": [("key.yaml",), ("--params", NAME)],
    "privacy": [("--noise-multiplier", NAME)],
    "prune": [
        ("hostile:build", "--sparsity", "0.5", "--out", f"pruned{NAME}", "--weights", ZERO),
        ("hostile:build", "--sparsity", "0.5", "--skip", NAME, "--out", "p", "--weights", OTHER),
    ],
    "quantize": [
        ("hostile:build", "--scheme", "int8_weight", "--out", f"codes{NAME}", "--weights", ZERO),
        ("hostile:build", "--scheme", NAME, "--out", "q"),
    ],
    "report": [(RUN,), (f"none{NAME}",), (RUN, RUN, "--out", f"page{NAME}.html")],
    "run": [(f"{NAME}.py", "--prune_sparsity", "0.5"), ("hostile.py", "--prune_sparsity", NAME)],
    "search": [
        ("hostile:build", "--calibration", f"hostile:{NAME}", "--out", f"search{NAME}", "--", NAME),
        (NAME, "--calibration", NAME, "--out", NAME, "--", sys.executable, f"{NAME}.py"),
    ],
    "shrink": [("hostile:build", "--out", f"small{NAME}", "--weights", ZERO)],
    "soup": [
        (ZERO, ONE, *EVAL, "--out", f"soup{NAME}.safetensors"), (ZERO, OTHER, *EVAL, "--out", "s.safetensors"),
        (ZERO, ONE, *EVAL, "--diagnose"),
    ],
    "try": [(f"{NAME}.py", "--prune_sparsity", "0.5")],
}  # fmt: skip


def eff(*arguments):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["eff", *arguments])
        main()
    return ended.value.code


def test_every_command_is_tried():
    assert COMMANDS.keys() == typer.main.get_command(app).commands.keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_no_character_that_a_terminal_obeys(room, command, capsys):
    if command == "decompress":
        eff("compress", *COMMANDS["compress"][0])
    for arguments in COMMANDS[command]:
        code = eff(command, *arguments)
        shown = capsys.readouterr()
        assert shown.out + shown.err
        assert (code, hazards(shown.out), hazards(shown.err)) == (code, [], []), arguments
        assert "Traceback" not in shown.err
    for page in (*room.rglob("*.html"), *room.rglob("*.md")):
        text = page.read_text()
        assert hazards(text) == []
        assert "<script>" not in text
        assert page.suffix == ".html" or "\n# heading" not in text


@pytest.mark.parametrize("arguments", [(f"--{NAME}",), (NAME,), ("prune", f"--{NAME}")])
def test_words_that_no_command_knows_are_printed_as_they_are(room, arguments, capsys):
    assert eff(*arguments) == 2
    shown = capsys.readouterr()
    assert hazards(shown.out + shown.err) == []
    assert re.search(r"\\u001b|\\x1b", shown.err)


def test_a_console_shows_strings_without_markup_in_its_own_colors_alone(capsys):
    console = Console(force_terminal=True, color_system="truecolor", width=300)
    table = Table(title=NAME)
    table.add_column(NAME, style="red")
    table.add_row(NAME)
    console.print(table)
    console.print(NAME, style="bold")
    shown = capsys.readouterr().out
    assert hazards(shown) == []
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert plain.count(MARKUP) == 4
    assert len(shown) > len(plain)


def test_a_page_holds_names_as_text(room):
    page, text = build_page(NAME, [Section(NAME, [f"- {NAME}\n# heading", PageTable([NAME], [[NAME]])])])
    assert hazards(page) == hazards(text) == []
    assert html.escape(MARKUP) in page
    assert "\n# heading" not in text
    assert markdown_text("a\n# *b* <c>") == r"a # \*b\* \<c\>"
