"""Figures that techniques log while training: names, meanings, and which appear in the progress bar."""

from __future__ import annotations

from shared_core.config.options import Figure
from shared_core.engine.registry import REGISTRY


def logged_figures() -> dict[str, Figure]:
    """Return the figures that techniques log while training, name → figure, in the order of registration."""
    return {
        f"{key}/{name}": figure for key, one in REGISTRY.items() for name, figure in one.config_class.figures.items()
    }


def is_in_bar(name: str) -> bool:
    """Return True if the progress bar shows a figure."""
    key, _, figure = name.partition("/")
    declared = REGISTRY[key].config_class.figures if key in REGISTRY else {}
    return figure in declared and declared[figure].in_bar


def markdown() -> str:
    """Return the table for the documentation."""
    rows = ["| figure | meaning | progress bar |", "|---|---|---|"]
    for name, figure in logged_figures().items():
        only = f" ({figure.only})" if figure.only else ""
        rows.append(f"| `{name}` | {figure.text}{only} | {'yes' if figure.in_bar else ''} |")
    for key, one in REGISTRY.items():
        if reason := one.config_class.logs_nothing:
            rows.append(f"| `{key}` | nothing ({reason}); see the receipt | |")
    return "\n".join(rows) + "\n"
