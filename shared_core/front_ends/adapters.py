"""Adapters of a front end to one technique each, found in a package of theirs, so that drivers name none."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import Any, ClassVar, TypeVar

from shared_core.engine.recipe import Recipe
from shared_core.engine.session import Session

_Adapter = TypeVar("_Adapter", bound="Adapter")


class Adapter:
    """Derive from a front end's own to register one: it is made for each trainer, and asked where `applies`."""

    key: ClassVar[str] = ""
    """Recipe key of the technique; without one it applies to every recipe that switches something on."""
    session: Session
    """The trainer's."""

    @classmethod
    def registered(cls: type[_Adapter]) -> list[type[_Adapter]]:
        """Return the adapters in the package of a front end's base class, and those that others derived from it.

        They come in the order of their modules' names.
        """
        _import_modules(cls.__module__.rpartition(".")[0])
        # Sorted: the order of imports must not decide how wrappers nest.
        return sorted(cls.__subclasses__(), key=lambda kind: kind.__module__)

    @classmethod
    def applies(cls, recipe: Recipe) -> bool:
        """Return True if a run of this recipe needs it."""
        return cls.key in recipe if cls.key else bool(recipe)

    @property
    def technique(self) -> Any:
        """The session's technique of this key, None if it is off."""
        return self.session.techniques.get(self.key)


@functools.cache
def _import_modules(package: str) -> None:
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{found.name}")
