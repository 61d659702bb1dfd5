"""Write the table of pretrained networks into docs/results.md, from ``results/evidence.md``: ``python summary.py``."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "evidence.md", ROOT / "docs" / "results.md"
BEGIN, END = "<!-- make evidence -->\n\n", "\n<!-- end of make evidence -->"
INT8 = {"float": "float", "int8": "ours", "int8 by onnxruntime": "peer"}
# network, what is measured, section of the results, label → row there
NETWORKS: list[tuple[str, str, str, dict[str, str]]] = [
    ("CREPE tiny, pitch tracker", "frames right", "crepe-tiny", INT8),
    ("CREPE tiny, distilled from the full size", "frames right", "crepe-taught",
     {"as published": "tiny, as published", "distilled": "taught", "distilled by a torch loop": "peer: taught"}),
    ("CREPE tiny, half of its channels, retrained", "frames right", "crepe-half",
     {"as published": "tiny, as published", "half": "half, healed", "half by Torch-Pruning": "peer: half, healed"}),
    ("GE2E, speaker encoder", "equal-error rate", "voices",
     {"float": "float", "int8 weights": "int8_weight", "int8 by onnxruntime": "peer: onnxruntime"}),
    ("Silero VAD, voice detector", "area under ROC", "silero", INT8 | {"int8": "ours, transform too"}),
    ("EasyOCR, line reader", "lines right", "reader", INT8),
]  # fmt: skip


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
    lines = [f"{' and '.join(days)}, {where}", "", "| network | file | measured | | kB | ms a call |", "|---" * 6 + "|"]
    for network, measure, section, rows in NETWORKS:
        for label, name in rows.items():
            row = measured[section][1][name]
            size = f"{int(row['bytes']) / 1000:,.0f}" if row.get("bytes") else ""
            milliseconds = row.get("ms", "").partition(" ")[0]
            lines.append(f"| {network} | {label} | {measure} | {row['quality']} | {size} | {milliseconds} |")
            network = measure = ""
    return "\n".join(lines) + "\n"


def write() -> None:
    """Rewrite the marked part of the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    write()
