"""What `eff report` says of a folder, as Markdown without plots, and what a browser makes of a page."""

from html.parser import HTMLParser
from unittest.mock import patch

from shared_core.reports.page import build_page
from shared_core.reports.run_folder import read_run
from shared_core.reports.run_page import page_of

VOID = {"meta", "img"}


class Outline(HTMLParser):
    """What a browser would make of a page; fails where tags do not close."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.text, self.attributes = [], [], [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def report_of(*folders):
    with patch("shared_core.reports.page.can_draw", return_value=False):
        return build_page(*page_of([read_run(folder) for folder in folders]))[1]


def part(text, heading):
    return text.split(f"## {heading}\n")[1].split("\n## ")[0]


def row(text, name):
    """Return the cells of the row that begins with a name."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split(" | ")][1:]
