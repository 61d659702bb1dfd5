"""A published floor of the loss scale, as pairs of step and floor."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Literal

from shared_core.errors import ConfigError

FLOAT32_MAX = 3.4028234663852886e38
Pairs = tuple[tuple[int, float], ...]


def parse_floor(floor: str | Sequence[tuple[int, float]]) -> Pairs | Literal["auto"]:
    """Return the floor as ``(step, floor)`` pairs, or ``"auto"``.

    Source: Mellempudi et al., 2019, arXiv:1905.12334, section 3.1.
    """
    if floor == "auto":
        return "auto"
    pairs: list[tuple[float, float]] = []
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        parts = [part.split(":") for part in floor.split(",")] if isinstance(floor, str) else list(floor)
        pairs = [(float(step), float(value)) for step, value in parts]
    good = all(step >= 0 and step.is_integer() and 0 < value <= FLOAT32_MAX for step, value in pairs)
    rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in itertools.pairwise(pairs))
    if not (pairs and good and rising):
        raise ConfigError(
            "loss_scale",
            "floor must be auto or pairs of step and floor, both rising, no floor above "
            f"{FLOAT32_MAX}, such as 40000:8192,150000:32768, got {floor!r}",
        )
    return tuple((int(step), value) for step, value in pairs)


def floor_text(floor: str | Sequence[tuple[int, float]] | None) -> str | None:
    """Return a floor as the text that `parse_floor` reads."""
    if floor is None or isinstance(floor, str):
        return floor
    pairs = parse_floor(floor)
    return pairs if isinstance(pairs, str) else ",".join(f"{step}:{value!r}" for step, value in pairs)


def floor_at(pairs: Pairs, step: int) -> float:
    """Return the floor at a step, 0 before the first pair."""
    return max((value for at, value in pairs if at <= step), default=0.0)
