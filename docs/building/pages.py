"""Write the Markdown that the site is built from: ``python docs/building/pages.py FOLDER``.

These are the pages of docs/, the techniques' cards (the README.md of each package), the API, the commands, and every
file of the repository that a page links to. A link such as ``../examples/quickstart/quickstart.py`` leads to the file
in the repository, and on the site to its text.
"""

import ast
import posixpath
import re
import shutil
import sys
from functools import partial
from pathlib import Path

import api
import commands

ROOT = Path(__file__).resolve().parents[2]
CARDS = {
    path.relative_to(ROOT).as_posix(): f"techniques/{path.parent.name}.md"
    for path in sorted((ROOT / "shared_core").rglob("README.md"))
}
GENERATED = {"commands.md": commands.page, **{f"api/{name}.md": partial(api.page, name) for name in api.PACKAGES}}
PICTURES = (".svg", ".png")
LINK = re.compile(r"(\]\(|^\[[\w-]+\]: )(?!\w+:)([^)#\s]+)", flags=re.M)  # [text](path), or [name]: path
FENCE = re.compile(r"^(`{3,}|~{3,})[^\n]*\n.*?^\1\s*$", flags=re.M | re.S)


def write(folder: Path) -> None:
    """Write all pages and pictures into an empty folder."""
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns("*.md", "*.py", "building", "__pycache__"))
    pages = {place: make() for place, make in GENERATED.items()}
    waiting = ["CHANGELOG.md", "CONTRIBUTING.md", *CARDS]
    waiting += [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")]
    while waiting:
        path = waiting.pop()
        if (place := _place(path)) not in pages and not path.endswith(PICTURES):
            pages[place], linked = _with_links_of_the_site(_text(path), path)
            waiting += linked
    named = set(re.findall(r": ([\w./]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.M))
    if wrong := named ^ {place for place in pages if not place.startswith("repository/") or place in named}:
        raise ValueError(f"the navigation in mkdocs.yml lacks these pages, or they don't exist: {sorted(wrong)}")
    for place, text in pages.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text, encoding="utf-8")


def _place(path: str) -> str:
    """Return where the site has a file of the repository."""
    if path.startswith("docs/") and path.endswith((".md", *PICTURES)):
        return path.removeprefix("docs/")
    return CARDS.get(path) or "repository/" + (path if path.endswith(".md") else f"{path}.md")


def _with_links_of_the_site(text: str, path: str) -> tuple[str, list[str]]:
    """Return a page whose links lead to places on the site, and the files that it links to."""
    folder, place, linked = posixpath.dirname(path), posixpath.dirname(_place(path)) or ".", []

    def turned(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        page = _place(target)
        if page not in GENERATED:
            if not (ROOT / target).exists():
                raise FileNotFoundError(f"{path} links to {link[2]}, which does not exist")
            linked.append(target)
        return link[1] + posixpath.relpath(page, place)

    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(turned, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(turned, text[end:])]), linked


def _text(path: str) -> str:
    file = ROOT / path
    if path.endswith(".md"):
        return file.read_text(encoding="utf-8")
    if file.is_dir():
        rows = [f"- {_named(entry)}{_first_line(entry)}" for entry in sorted(file.glob("[!_.]*.*"))]
        return "\n".join([f"# {path}/", "", *rows, ""])
    head = "---\nsearch: {exclude: true}\n---\n" if path.startswith("tests/") else ""
    return f"{head}# {path}\n\n~~~~{file.suffix.removeprefix('.')}\n{file.read_text(encoding='utf-8')}~~~~\n"


def _named(file: Path) -> str:
    return f"[{file.name}]({file.parent.name}/{file.name})" if file.suffix == ".md" else f"`{file.name}`"


def _first_line(file: Path) -> str:
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) if file.suffix == ".py" else None
    return f": {text.splitlines()[0]}" if text else ""


if __name__ == "__main__":
    write(Path(sys.argv[1]))
