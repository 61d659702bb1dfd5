"""Call a function with a module when somebody has imported it; nothing is imported before."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then` with the module of this name once it is imported: now, if it is."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own spec with a loader that reports; leave every other module alone."""
        if fullname != self.name:
            return None
        # Before the search goes on, or this finder would find itself; others may wait for the same module.
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Reporting(spec.loader, self._then)
        return spec


class _Reporting(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, then: Callable[[ModuleType], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    # Executed by the real loader first: its classes exist then.
    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then(module)
