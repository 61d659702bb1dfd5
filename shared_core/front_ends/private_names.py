"""Private names of a trainer's library that a front end needs: a version that lacks one is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shared_core.errors import CompatibilityError


@dataclass(frozen=True)
class PrivateName:
    """A private method or attribute of the library.

    Args:
        user: Who calls or sets it there: a method of its owner, or ``module:Class.method``.
        purpose: Why it is needed, in place of a public hook.
        since: The first version that has it, as far back as the front end looked.
        is_method: Whether it is a method; an attribute exists on instances alone.
        owner: Whose it is, ``module:Class`` or a module; the Trainer's where it is left out.
    """

    user: str
    purpose: str
    since: str = ""
    is_method: bool = True
    owner: str = ""


def check_private_names(
    names: Mapping[str, PrivateName], owner_of: Callable[[PrivateName], Any], whose: str, remedy: str
) -> None:
    """Refuse a library without a private method that techniques need."""
    lacking = [
        name for name, its in names.items() if its.is_method and not callable(getattr(owner_of(its), name, None))
    ]
    if lacking:
        raise CompatibilityError(
            f"{whose} must have {', '.join(lacking)} ({names[lacking[0]].purpose}), got none", remedy=remedy
        )
