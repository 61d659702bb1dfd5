"""What an option asks the ranks to be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared_core.errors import ConfigError
from shared_core.parsing import parse_json

_SHARES = ("energy", "budget", "sensitivity")


@dataclass(frozen=True)
class RankRule:
    """How ranks are chosen.

    Args:
        kind: ``number``, ``share``, ``energy``, ``budget``, ``sensitivity`` or ``report``.
        value: The number, the share in (0, 1], or the path of a report.
    """

    kind: str
    value: Any


def parse_rank(given: Any) -> RankRule:
    """Return what a rank option means.

    Args:
        given: 16, 0.25, ``"energy:0.95"``, ``"budget:0.5"``, ``"sensitivity:0.5"`` or a path that ends in ``.json``;
            numbers may be texts. As in positions, one with a dot is a share.

    Raises:
        ConfigError: If it is none of these.

    Example:
        >>> parse_rank("16"), parse_rank(0.25), parse_rank("budget:0.5").kind
        (RankRule(kind='number', value=16), RankRule(kind='share', value=0.25), 'budget')
    """
    text = str(given).strip()
    kind, colon, number = text.partition(":")
    if text.endswith(".json"):
        return RankRule("report", text)
    try:
        if isinstance(given, bool) or (colon and kind not in _SHARES):
            raise ValueError
        if not colon and (isinstance(given, int) or text.isdecimal()):
            if int(text) >= 1:
                return RankRule("number", int(text))
            raise ValueError
        value = float(number if colon else text)
        if not (math.isfinite(value) and 0 < value <= 1):
            raise ValueError
        return RankRule(kind if colon else "share", value)
    except ValueError:
        raise ConfigError(
            "low_rank: rank must be a whole number from 1, a share in (0, 1], energy:, budget: or sensitivity: with "
            f"such a share, or a report (.json), got {given!r}; 16, 0.25, energy:0.95 and budget:0.5 are examples"
        ) from None


def read_report(path: str) -> dict[str, Mapping[str, Any]]:
    """Return the structure that a report of `eff low-rank` tells: rank and scheme by layer.

    Raises:
        ConfigError: If it cannot be read, or tells none.
    """
    try:
        layers = parse_json(Path(path).read_text(encoding="utf-8"))["layers"]
        return {str(each["name"]): {"rank": int(each["rank"]), "scheme": str(each["scheme"])} for each in layers}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"low_rank: rank must name a report of eff low-rank, got {path!r} ({type(error).__name__}: {error}); "
            "run eff low-rank first"
        ) from error
