"""A hook of mkdocs: pages for the techniques' cards, and for files outside docs/ that a page links to.

A card is the README.md of its package. A link such as ``../examples/quickstart/quickstart.py`` leads to the file in the
repository, and on the site to its text.
"""

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
HERE = "repository/"  # where they lie on the site
CARDS = {
    path.relative_to(ROOT).as_posix(): f"techniques/{path.parent.name}.md"
    for path in sorted((ROOT / "shared_core").rglob("README.md"))
}
ALWAYS = ("CHANGELOG.md", "CONTRIBUTING.md", *CARDS)  # in the navigation
LINK = re.compile(r"(\]\(|^\[[\w-]+\]: )(?!\w+:)([^)#\s]+)", flags=re.M)  # [text](path), or [name]: path
FENCE = re.compile(r"^(`{3,})[^\n]*\n.*?^\1\s*$", flags=re.M | re.S)


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add a page for each file that a page links to, or one of these."""
    waiting = [*ALWAYS, *(path for file in files.documentation_pages() for path in _outside(file))]
    while waiting:
        path = waiting.pop()
        if files.get_file_from_path(uri := _uri(path)) is None:
            file = File.generated(config, uri, content=_page_of(path), inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(file)
            waiting += _outside(file)


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turn links to files outside docs/ to their pages, and links in such files to the site."""
    folder = posixpath.dirname(_place(page.file))

    def turned(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        uri = path.removeprefix("docs/") if path.startswith("docs/") else _uri(path)
        return link[1] + posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(turned, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(turned, markdown[end:])])


def _place(file: File) -> str:
    """Return where a page's file lies in the repository."""
    for card, uri in CARDS.items():
        if file.src_uri == uri:
            return card
    if file.src_uri.startswith(HERE):
        path = file.src_uri.removeprefix(HERE)
        return path if (ROOT / path).is_file() else path.removesuffix(".md")
    return f"docs/{file.src_uri}"


def _uri(path: str) -> str:
    return CARDS.get(path) or HERE + (path if path.endswith(".md") else f"{path}.md")


def _outside(file: File) -> list[str]:
    folder, found = posixpath.dirname(_place(file)), []
    for link in LINK.finditer(FENCE.sub("", file.content_string)):
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        if not path.startswith(("docs/", "..")) and (ROOT / path).exists():
            found.append(path)
    return found


def _page_of(path: str) -> str:
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
