"""Front-end code for single techniques, found in a package, so that the drivers name no technique."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import Any, ClassVar, TypeVar

from shared_core.engine.recipe import Recipe
from shared_core.front_ends.session import Session

_Adapter = TypeVar("_Adapter", bound="Adapter")


class Adapter:
    """Base class. A subclass of a front end's adapter is registered and created for each trainer where it `applies`."""

    key: ClassVar[str] = ""
    """Recipe key of the technique. Without one it applies to every recipe that is not empty."""
    session: Session
    """The trainer's session."""

    @classmethod
    def registered(cls: type[_Adapter]) -> list[type[_Adapter]]:
        """Return all subclasses of a front end's base class, in the order of their modules' names."""
        _import_modules(cls.__module__)  # the package that defines the base class
        # Sorted, so that the nesting of wrappers does not depend on the import order.
        return sorted(cls.__subclasses__(), key=lambda kind: kind.__module__)

    @classmethod
    def applies(cls, recipe: Recipe) -> bool:
        """Return True if a run of this recipe needs it."""
        return cls.key in recipe if cls.key else bool(recipe)

    @property
    def technique(self) -> Any:
        """The session's technique with this key, None if it is off."""
        return self.session.techniques.get(self.key)


@functools.cache
def _import_modules(package: str) -> None:
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{found.name}")
