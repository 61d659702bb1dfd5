"""Rewrite the generated tables of the documents: ``python docs/tables.py``."""

import re
from pathlib import Path

from shared_core.cli.compat import distributed_markdown, pairs_markdown
from shared_core.cli.flags import markdown as flags
from shared_core.cli.formats import markdown as formats
from shared_core.engine.logged_figures import markdown as logged

DOCS = Path(__file__).resolve().parent
TABLES = {
    "flags.md": flags(),
    "formats.md": formats(),
    "distributed.md": distributed_markdown(),
    "recipes.md": pairs_markdown(),
    "logging.md": logged(),
}

for name, table in TABLES.items():
    page = (DOCS / name).read_text(encoding="utf-8")
    heading = re.escape(table.splitlines()[0])
    (DOCS / name).write_text(re.sub(rf"{heading}\n(\|.*\n)*", lambda _: table, page), encoding="utf-8")  # noqa: B023
