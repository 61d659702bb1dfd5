"""Packages whose names are imported when first used: one list, which type checkers and Python both read."""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from types import ModuleType
from typing import Any


def export_lazily(package: str) -> None:
    """Make a package import the names under its ``if TYPE_CHECKING:`` when they are first asked for.

    Whoever imports the options of one technique must not wait for the modules of all.

    Args:
        package: Its ``__name__``; called in its ``__init__`` file, which holds ``from ... import X as X`` alone.
    """
    sys.modules[package].__class__ = _LazyPackage


class _LazyPackage(ModuleType):
    def __getattr__(self, name: str) -> Any:
        homes = _homes(self)
        if name == "__all__":
            return sorted(homes)
        if name not in homes:
            # with both, Python's traceback tells the nearest name
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name, obj=self)
        try:
            value = getattr(importlib.import_module(homes[name]), name)
        except ModuleNotFoundError as error:
            _name_extra(error, self.__name__)
            raise
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Python binds a submodule to its name in the package, which would hide the function that it is named after.
        if not (isinstance(value, ModuleType) and name in _homes(self)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_homes(self)})


def _name_extra(error: ModuleNotFoundError, package: str) -> None:
    """Raise `MissingExtraError` in place of an error that one of efftrain's optional libraries is not there."""
    from shared_core.errors import MissingExtraError
    from shared_core.libraries import libraries

    for library in libraries():
        if library.extra and library.name == error.name:
            raise MissingExtraError(package, library.name, library.extra) from error


@functools.cache
def _homes(package: ModuleType) -> dict[str, str]:
    """Return the module of each exported name."""
    loader: Any = package.__loader__
    tree = ast.parse(loader.get_source(package.__name__))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names if alias.asname == alias.name}
