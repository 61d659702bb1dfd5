"""The figures among what a trainer's validation reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

# what evaluation took, which differs between runs that are otherwise equal
_TIMINGS = ("_runtime", "_per_second", "_time")


def figures(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among metrics, but not how long the validation took.

    Example:
        >>> figures({"eval_loss": 0.5, "eval_runtime": 3.0, "note": "x"})
        {'eval_loss': 0.5}
    """
    return {name: float(value) for name, value in metrics.items() if _is_figure(name, value)}


def _is_figure(name: str, value: Any) -> bool:
    is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    return is_number and not isinstance(value, bool) and not name.endswith(_TIMINGS)
