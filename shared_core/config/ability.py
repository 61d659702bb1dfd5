"""How well a technique runs on a device."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from shared_core.errors import MissingExtraError


@dataclass(frozen=True)
class Ability:
    """How a technique runs on a device: natively, emulated, without effect, or not at all."""

    level: Literal["native", "emulated", "inactive", "refused"]
    why: str = ""


def needs(library: str, extra: str, where: str) -> Ability | None:
    """Return a refusal if a required library is not installed, else None."""
    return None if find_spec(library) else Ability("refused", str(MissingExtraError(where, library, extra)))
