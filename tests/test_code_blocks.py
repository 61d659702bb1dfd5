"""Every block of code in the documents: Sybil runs Python, calls fit the signatures, commands and recipes parse."""

import ast
import contextlib
import importlib
import inspect
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
import unittest
from pathlib import Path

import pytest
import torch
import typer
import yaml
from onnxruntime import InferenceSession
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
from torch import nn

from shared_core import Recipe
from shared_core.cli import app
from shared_core.engine.registry import REGISTRY, flags
from shared_core.front_ends.flags import recipe_of, take_flags

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "shared_core").rglob("README.md"))]
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
OURS = ("efftrain", "hf_eff", "lightning_eff", "shared_core", "eff_kernels")
SHELL = ("", "bash", "console")
SYBIL = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()])
SCRIPT = re.compile(r"# \w+\.\w+\n")
"""Begins a block that is a file; tests of their own run these."""
COMMANDS = typer.main.get_command(app)
TAKE_FLAGS = ("run", "try", "chain", "lottery", "search")  # those of techniques too


def blocks(page, *languages):
    """Return the texts of a page's blocks in these languages."""
    found = re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [textwrap.dedent(block[3]) for block in found if block[2] in languages]


def commands(page):
    """Return the words of each command of a page's shell blocks; comments and prompts are left out."""
    for block in blocks(page, *SHELL):
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"(\$ )?([A-Z_]+=\S+ )*(eff|make|python|torchrun|accelerate) ", line):
                yield shlex.split(line.removeprefix("$ "), comments=True)


def imports(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def check_use(tree):
    """Check that what is imported of this project exists, and that its functions take what they are given."""
    ours = {package: importlib.import_module(package) for package in ("hf_eff", "lightning_eff")}
    for node in imports(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in OURS:
            module = importlib.import_module(node.module)
            ours |= {alias.name: getattr(module, alias.name) for alias in node.names}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function = ours.get(ast.unparse(call.func))
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) in OURS:
            function = getattr(ours[call.func.value.id], call.func.attr)
        starred = any(isinstance(argument, ast.Starred) for argument in call.args)
        if callable(function) and not starred and all(keyword.arg for keyword in call.keywords):
            inspect.signature(function).bind(*call.args, **{word.arg: word.value for word in call.keywords})
            if key := getattr(function, "key", ""):  # a callback, whose options are those of its technique
                assert {word.arg for word in call.keywords} <= REGISTRY[key].config_class.hints().keys()


def yours():
    """Return what stands for the reader's own in every block: a model, what it takes, and a loss."""
    batch = torch.rand(8, 64)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)]
    return {
        "__name__": "__main__",
        "model": nn.Sequential(*layers, nn.Linear(64, 10)),
        "batches": [batch],
        "pairs": [(batch, torch.zeros(8, dtype=torch.long))],
        "criterion": nn.CrossEntropyLoss(),
    }


@pytest.fixture
def own_technique(monkeypatch):
    """Let a page import the example of a technique of your own, and forget it afterwards."""
    monkeypatch.syspath_prepend(ROOT / "examples" / "own_technique")
    sys.modules.pop("gradient_noise", None)  # it registers when it is imported
    yield
    sys.modules.pop("gradient_noise", None)
    REGISTRY.remove("noise")


@EVERY_PAGE
@pytest.mark.filterwarnings("ignore:register")  # flags of the other tests are made
def test_python(page, tmp_path, monkeypatch, capsys, own_technique):
    for block in blocks(page, "python"):
        check_use(ast.parse(block))
    if page.parent.name == "tutorials":  # see test_notebooks.py
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [page.name])
    document, given = SYBIL.parse(page), yours()
    document.namespace.update(given)
    for example in document.examples():
        for name, value in yours().items():  # new for each block, unless the page has made its own
            if document.namespace[name] is given[name]:
                document.namespace[name] = given[name] = value
        if not SCRIPT.match(str(example.parsed)):
            with contextlib.suppress(unittest.SkipTest):  # a block after `skip: next "reason"`
                example.evaluate()


def parse(words):
    """Parse a command of `eff` as it does, up to opening the files."""
    name, *arguments = words
    command = COMMANDS.commands[name]
    if name in TAKE_FLAGS:
        arguments = take_flags(arguments)[1]
    if name == "run":
        return
    parent = COMMANDS.context_class(COMMANDS, **COMMANDS.context_settings)
    context = command.context_class(command, info_name=name, parent=parent, **command.context_settings)
    command.make_parser(context).parse_args(list(arguments))


@EVERY_PAGE
def test_the_commands_of_a_page_exist(page):
    for words in commands(page):
        while "=" in words[0]:
            words.pop(0)
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M), words
        elif words[0] == "eff":
            cut = words.index("--") if "--" in words else len(words)
            parse(words[1:cut])
        else:
            ours, _ = take_flags(words[1:])
            assert recipe_of({name: value for name, value in ours.items() if name != "eff_recipe"}) is not None


@EVERY_PAGE
def test_commands_and_flags_in_the_text(page):
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    spans = re.findall(r"`([^`]+)`", text)
    for span in spans:
        words = span.replace("\n", " ").split()
        if words[0] == "eff" and len(words) > 1 and re.fullmatch(r"[a-z][a-z-]+", words[1]):
            options = {name for parameter in COMMANDS.commands[words[1]].params for name in parameter.opts}
            given = {
                word.partition("=")[0].replace("_", "-")
                for word in words[2:]
                if word.startswith("--") and len(word) > 2
            }
            if words[1] not in (
                "run",
                "try",
                "chain",
                "lottery",
                "search",
                "prune",
                "low-rank",
            ):  # which also take flags
                assert given <= options, span
        for flag in re.findall(r"--(\w+)", span):
            told = flag.endswith("_") or re.search(rf"is not a flag| -- .*{flag}", span)  # quoted, or the script's own
            if any(flag.startswith(f"{key}_") for key in REGISTRY) and not told:
                assert flag in flags(), span


@EVERY_PAGE
def test_the_recipes_of_a_page_are_valid(page):
    for block in blocks(page, "yaml"):
        values = yaml.safe_load(block)
        if "trainer" not in values:  # a file of LightningCLI
            assert Recipe.from_dict(values)


def saved_data():
    """Return the file of data that a user brings."""
    return {"inputs": torch.rand(96, 64), "classes": torch.randint(10, (96,))}


@pytest.mark.parametrize("name", ["hugging_face", "integrations", "lightning", "own_loop", "resume"])
def test_the_pages_of_the_trainers_and_loops_run_as_they_are(name, tmp_path, monkeypatch, capsys):
    page = ROOT / "docs" / f"{name}.md"
    monkeypatch.chdir(tmp_path)
    save_file(saved_data(), "data.safetensors")
    for block in blocks(page, "python", "yaml"):
        if SCRIPT.match(block):
            (tmp_path / block[2 : block.index("\n")]).write_text(block)
    runs = [words for words in commands(page) if words[0] == "python"]
    runs += [["python", file.name] for file in tmp_path.glob("*.py") if not any(file.name in words for words in runs)]
    for words in runs:
        monkeypatch.setattr(sys, "argv", words[1:])
        runpy.run_path(words[1], run_name="__main__")
    assert [*tmp_path.rglob("eff_receipt.json"), *tmp_path.rglob("state.pt")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_the_readme_run_one_after_the_other(tmp_path):
    page = ROOT / "README.md"
    for block in blocks(page, "python"):
        if SCRIPT.match(block):
            shorter = block.replace("num_train_epochs=15", "max_steps=60, save_steps=30")
            (tmp_path / block[2 : block.index("\n")]).write_text(shorter)
    asked = [words for words in commands(page) if words[:2] in (["eff", "run"], ["eff", "export"], ["eff", "report"])]
    # hf_eff/test_released.py trains and exports small releases
    asked = [words for words in asked if "released" not in words]
    for _, *words in asked:
        words = [word.replace("checkpoint-500", "checkpoint-30") for word in words]
        subprocess.run([sys.executable, "-m", "efftrain", *words], cwd=tmp_path, check=True)
    saved = load_file(tmp_path / "runs" / "small" / "model.safetensors")
    layers = [weight for name, weight in saved.items() if name.startswith("vit.encoder") and weight.ndim == 2]
    zeros, numel = sum(int((weight == 0).sum()) for weight in layers), sum(weight.numel() for weight in layers)
    assert zeros > 0.79 * numel
    assert (tmp_path / "runs" / "adapter" / "adapter_model.safetensors").exists()
    images = (load_digits().images[1500:, None] / 16).astype("float32")
    (scores,) = InferenceSession(tmp_path / "model.onnx").run(["logits"], {"pixel_values": images})
    assert 0 < (scores.argmax(-1) == load_digits().target[1500:]).mean() <= 1


@pytest.mark.slow
def test_the_file_of_functions_serves_the_commands_below_it(tmp_path, monkeypatch, capsys):
    page = ROOT / "docs" / "own_loop.md"
    (text,) = (block for block in blocks(page, "python") if block.startswith("# my_task.py"))
    (tmp_path / "my_task.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "my_task", None)  # whatever is imported under this name ends with the test
    del sys.modules["my_task"]
    save_file(saved_data(), "data.safetensors")
    for name in ("net", "other"):
        save_file(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).state_dict(), f"{name}.safetensors")
    asked = [words[1:] for words in commands(page) if any("my_task:" in word for word in words)]
    assert {words[0] for words in asked} == {"prune", "quantize", "export", "soup"}
    for words in asked:
        app(words, standalone_mode=False)
        assert (tmp_path / words[words.index("--out") + 1]).exists()
