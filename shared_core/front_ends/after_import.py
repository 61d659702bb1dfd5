"""Patch another library's module when the user's script imports it, not earlier."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call a function with a module: now if it is imported already, else after its import."""
    if name in sys.modules:
        then(sys.modules[name])
    elif not any(isinstance(one, _Finder) and (one.name, one.then) == (name, then) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own spec with a loader that calls `then`. Ignore every other module."""
        if fullname != self.name:
            return None
        # Remove this finder first, or the search would find it again.
        sys.meta_path.remove(self)
        # Ask other finders for this module too: each wraps the loader of the next.
        spec = next(
            filter(None, (one.find_spec(fullname, path) for one in sys.meta_path if isinstance(one, _Finder))), None
        )
        spec = spec or importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Reporting(spec.loader, self.then)
        return spec


class _Reporting(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, then: Callable[[ModuleType], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    # The real loader runs first, so that the module's classes exist.
    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then(module)
