"""The terminal of the `eff` commands."""

from __future__ import annotations

from typing import Any

from rich import console
from rich.text import Text

from shared_core.printing import printable


class Console(console.Console):
    """Shows every string as it is: none is markup, and what a terminal would obey is written out."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:  # type: ignore[override]
        """Return a string, of a table's cell too, as it is shown."""
        return super().render_str(printable(text), **options)
