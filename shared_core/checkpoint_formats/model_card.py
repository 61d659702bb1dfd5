"""The model card, README.md, of a saved model: a section of ours in it, and the rest as it is."""

from __future__ import annotations

from pathlib import Path

from shared_core.files.atomic import atomic_write

CARD = "README.md"
_BEGIN, _END = "<!-- efftrain: begin -->", "<!-- efftrain: end -->"


def add_section(card: Path, section: str) -> None:
    """Put a section at the end of a card, in place of an earlier one of ours."""
    text = card.read_text(encoding="utf-8")
    before, begin, rest = text.partition(_BEGIN)
    after = rest.partition(_END)[2] if begin else ""
    # Text before and after ours stays: a user may have written on below an earlier section.
    kept = (before.rstrip() + after).rstrip()
    with atomic_write(card) as temporary:
        temporary.write_text(f"{kept}\n\n{_BEGIN}\n{section}\n{_END}\n", encoding="utf-8")
