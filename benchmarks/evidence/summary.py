"""Write the table of pretrained networks into docs/results.md, from ``results/evidence.md``: ``python summary.py``."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "evidence.md", ROOT / "docs" / "results.md"
BEGIN, END = "<!-- make evidence -->\n\n", "\n<!-- end of make evidence -->"
# network, what is measured, section of the results, its rows of float, int8, and int8 by onnxruntime
NETWORKS: list[tuple[str, str, str, tuple[str, str, str]]] = [
    ("CREPE tiny, pitch tracker", "frames right", "crepe-tiny", ("float", "ours", "peer")),
    ("GE2E speaker encoder, int8 weights", "equal-error rate", "voices", ("float", "int8_weight", "peer: onnxruntime")),
    ("Silero VAD, voice detector", "area under ROC", "silero", ("float", "ours, transform too", "peer")),
    ("EasyOCR, line reader", "lines right", "reader", ("float", "ours", "peer")),
]


def sections() -> dict[str, tuple[str, dict[str, dict[str, str]]]]:
    """Return the caption and the rows of each section of the results."""
    found = {}
    for part in re.split(r"^## ", RESULTS.read_text(encoding="utf-8"), flags=re.M)[1:]:
        name, _, text = part.partition("\n")
        cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"]
        rows = {row[0]: dict(zip(cells[0], row, strict=True)) for row in cells[2:]}
        found[name] = text.strip().partition("\n")[0], rows
    return found


def table() -> str:
    """Return the caption and the table."""
    measured = sections()
    days = sorted({measured[section][0].partition(",")[0] for _, _, section, _ in NETWORKS})
    where = measured[NETWORKS[0][2]][0].partition(", ")[2]
    columns = "| network | measured | float | int8 | int8 by onnxruntime |"
    lines = [f"{' and '.join(days)}, {where}", "", columns, "|---" * 5 + "|"]
    for network, measure, section, names in NETWORKS:
        cells = [measured[section][1][name]["quality"] for name in names]
        lines.append(f"| {network} | {measure} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write() -> None:
    """Rewrite the marked part of the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    write()
