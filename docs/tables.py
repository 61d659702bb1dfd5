"""Rewrite the generated tables of the documents: ``python docs/tables.py``."""

import re
from pathlib import Path

from shared_core.cli.reference import (
    distributed_markdown,
    figures_markdown,
    flags_markdown,
    formats_markdown,
    pairs_markdown,
)

DOCS = Path(__file__).resolve().parent
TABLES = [
    ("formats.md", formats_markdown()),
    ("distributed.md", distributed_markdown()),
    *(("combine.md", table) for table in re.split(r"(?<=\n)\n", pairs_markdown())),
    ("reports.md", figures_markdown()),
]

for name, table in TABLES:
    page = (DOCS / name).read_text(encoding="utf-8")
    heading = re.escape(table.splitlines()[0])
    rows = re.compile(rf"{heading}\n(\|.*\n)*(\n(\d+\. .*\n)+)?")  # and their numbered notes
    (DOCS / name).write_text(rows.sub(lambda _: table, page), encoding="utf-8")  # noqa: B023

introduction, _, _ = (DOCS / "flags.md").read_text(encoding="utf-8").partition("\n## ")
(DOCS / "flags.md").write_text(f"{introduction}\n{flags_markdown()}", encoding="utf-8")
