"""How well a technique runs on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from shared_core.errors import MissingExtraError


@dataclass(frozen=True)
class Ability:
    """How a technique runs on a device: natively, emulated, without effect, or not at all."""

    level: Literal["native", "emulated", "inactive", "refused"]
    why: str = ""


def missing(libraries: Mapping[str, str], where: str) -> MissingExtraError | None:
    """Return the error for the first library that is not installed, None if all are.

    Args:
        libraries: Library → the extra of efftrain that installs it.
        where: The start of the message.
    """
    absent = ((name, extra) for name, extra in libraries.items() if find_spec(name) is None)
    return next((MissingExtraError(where, *one) for one in absent), None)
