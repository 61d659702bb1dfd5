"""How a technique runs on a device."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from shared_core.errors import MissingExtraError


@dataclass(frozen=True)
class Ability:
    """The level of a technique on a device: as the hardware can, by other arithmetic, to no effect, or not."""

    level: Literal["native", "emulated", "inactive", "refused"]
    why: str = ""


def needs(library: str, extra: str, where: str) -> Ability | None:
    """Return that a technique is refused without a library that is not installed; None if it is."""
    return None if find_spec(library) else Ability("refused", str(MissingExtraError(where, library, extra)))
