"""The pages that `make docs` builds: strictly, without a network, and with every public name in the API."""

import ast
import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import typer

from shared_core.cli import app
from shared_core.engine.registry import REGISTRY

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"hf_eff", "lightning_eff", "shared_core", *(one.package for one in REGISTRY.values())}
PACKAGES |= {"shared_core.runs", "shared_core.numerics", "shared_core.contrib.planning"}
BUILD = """
import socket
def refuse(*_):
    raise OSError("no network here")
socket.socket.connect = socket.getaddrinfo = refuse
from zensical.main import cli
cli(["build", "--strict"])
"""


@pytest.mark.slow
def test_the_site(tmp_path):
    # one test, for a build takes half a minute
    for entry in ROOT.iterdir():
        if entry.name not in ("mkdocs.yml", "build", "site", ".cache"):
            (tmp_path / entry.name).symlink_to(entry)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)  # beside which the site is built
    for command in (["docs/building/pages.py", "build/pages"], ["-P", "-c", BUILD]):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
    site = tmp_path / "site"
    check_that_nothing_is_loaded_from_elsewhere(site)
    # on pages opened from a disk, the search reads its index and its worker as scripts
    assert (site / "search.js").read_text(encoding="utf-8").startswith("var __index = ")
    assert "iframe-worker.js" in (site / "index.html").read_text(encoding="utf-8")
    check_that_links_lead_somewhere(site)
    check_that_lists_and_tables_are_such(site)
    check_that_every_public_name_has_its_text(site)
    commands = (site / "commands.html").read_text(encoding="utf-8")
    assert [name for name in typer.main.get_command(app).commands if f'<h2 id="eff-{name}"' not in commands] == []


def test_each_version_has_its_own_folder_and_the_newest_is_the_latest(tmp_path):
    site, folder = tmp_path / "site", tmp_path / "versions"
    for place in (site, folder / "0.0.9", folder / "0.0.10"):
        place.mkdir(parents=True)
        (place / "index.html").write_text(place.name)
    for _ in range(2):  # the second time in place of the first
        subprocess.run([sys.executable, ROOT / "docs" / "building" / "versions.py", site, folder], check=True)
    now = version("efftrain")
    listed = json.loads((folder / "versions.json").read_text(encoding="utf-8"))
    assert [one["version"] for one in listed] == [now, "0.0.10", "0.0.9"]
    assert [one["aliases"] for one in listed] == [["latest"], [], []]
    assert (folder / now / "index.html").read_text() == "site"
    assert (folder / "0.0.9" / "index.html").read_text() == "0.0.9"
    assert f"url={now}/" in (folder / "index.html").read_text()


def check_that_links_lead_somewhere(site):
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # its links are absolute
            continue
        for link in re.findall(r"\b(?:href|src)=\"?([^\s\">]+)", page.read_text(encoding="utf-8")):
            path = unquote(urlsplit(link).path)
            if path and not re.match(r"\w+:", link):
                assert (page.parent / path).exists(), f"{page.relative_to(site)}: {link}"


def check_that_nothing_is_loaded_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:link|script|img|iframe|source)\b[^>]*\b(?:href|src)=.?(?:https?:)?//[^>]*>", text)
        assert not loaded, f"{page.name}: {loaded}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def check_that_lists_and_tables_are_such(site):
    # mkdocs' Markdown wants an empty line before them, which a reader of the file does not miss
    for page in site.rglob("*.html"):
        for paragraph in re.findall(r"<p>(.*?)</p>", page.read_text(encoding="utf-8"), flags=re.S):
            swallowed = re.search(r"^ *([-*] |\d+\. |\|).*", paragraph, flags=re.M)
            assert not swallowed, f"{page.relative_to(site)}: {swallowed[0]}"


@pytest.mark.parametrize("page", [
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "shared_core").rglob("README.md")),
], ids=lambda page: str(page.relative_to(ROOT)))  # fmt: skip
def test_rows_of_tables_have_as_many_cells_as_their_heading(page):
    cells = 0
    for line in page.read_text(encoding="utf-8").splitlines():
        bars = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert cells in (0, bars) or not bars, line
        cells = bars


def public_names():
    """Return package and name of what is public by what Python says, and of ops that rooms take from eff_kernels."""
    found = set()
    for package in PACKAGES:
        module = importlib.import_module(package)
        names = getattr(module, "__all__", None) or [
            name for name, value in vars(module).items() if getattr(value, "__module__", "").startswith(package)
        ]
        found |= {(package, name) for name in names if name[0] != "_"}
    for source in (ROOT / "shared_core").rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and re.match(r"eff_kernels\.[^_]", str(node.module)):
                names = [alias.name for alias in node.names if not alias.name.isupper()]
                home = importlib.import_module(str(node.module))
                found |= {(home.__name__, name) for name in names if not inspect.ismodule(getattr(home, name, inspect))}
    return sorted(found)


def check_that_every_public_name_has_its_text(site):
    told = set()
    for page in (site / "api").glob("*.html"):
        parts = re.split(r'<h2 id="([\w.]+)"', page.read_text(encoding="utf-8"))
        named = zip(parts[1::2], parts[2::2], strict=True)
        told |= {(page.stem, home) for home, text in named if re.search(r"doc-contents.*?<p>\S", text, flags=re.S)}
    lacking = set(public_names()) - {(page, home.rpartition(".")[2]) for page, home in told}
    lacking -= {tuple(home.rsplit(".", 1)) for page, home in told if page == "eff_kernels"}
    homes = {home for _, home in told}  # a name may stand on the page of the module that defines it
    lacking = {
        (package, name)
        for package, name in lacking
        if f"{getattr(getattr(importlib.import_module(package), name), '__module__', '')}.{name}" not in homes
    }
    assert not lacking, lacking


def test_docstrings_tell_what_is_returned_and_every_argument():
    lacking = {}
    for package, name in public_names():
        value = getattr(importlib.import_module(package), name)
        value = getattr(value, "_init_fn", value)  # an operator of torch.library
        if not callable(value):
            continue
        doc = inspect.cleandoc(value.__doc__ or "")
        section = re.search(r"^Args:\n((?: .*\n?|\n)*)", doc, flags=re.M)
        told = re.findall(r"^ {4}([\w*][\w, *]*):", section[1] if section else "", flags=re.M)
        signature = inspect.signature(value) if not isinstance(value, type) else inspect.Signature()
        silent = signature.parameters.keys() - set(re.findall(r"\w+", " ".join(told)))
        if silent and not re.search(r"^Args.*: (As of|As for|Same as|See) `", doc, flags=re.M):
            lacking[package, name] = silent
        if signature.return_annotation not in (None, "None", inspect.Signature.empty) and "eturn" not in doc:
            lacking[package, name] = "what it returns"
        if not doc or doc.startswith(f"{name}("):  # the latter is what dataclasses write by themselves
            lacking[package, name] = "a docstring"
    assert not lacking, lacking
