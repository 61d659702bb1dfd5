"""What `eff report` says of a folder, as Markdown; nothing is drawn."""

from unittest.mock import patch

from shared_core.reports.page import build_page
from shared_core.reports.run_folder import read_run
from shared_core.reports.run_page import page_of


def report_of(*folders):
    with patch("shared_core.reports.page.can_draw", return_value=False):
        return build_page(*page_of([read_run(folder) for folder in folders]))[1]


def part(text, heading):
    return text.split(f"## {heading}\n")[1].split("\n## ")[0]


def row(text, name):
    """Return the cells of the row that begins with a name."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split(" | ")][1:]
