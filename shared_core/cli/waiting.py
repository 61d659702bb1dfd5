"""Show on a terminal that a command is still importing libraries."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TextIO

from shared_core.printing import is_quiet

_SLOW = {
    "torch": "torch", "transformers": "transformers", "transformers.modeling_utils": "transformers",
    "transformers.trainer": "transformers", "pytorch_lightning": "lightning", "lightning.pytorch": "lightning",
}  # fmt: skip


def tell_imports() -> None:
    """Show ``loading torch …`` on stderr while a large library is imported, only on a terminal."""
    if sys.stderr.isatty() and not is_quiet():
        sys.meta_path.insert(0, _Telling(sys.stderr))


class _Telling(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, terminal: TextIO) -> None:
        self._terminal, self._found = terminal, dict[str, importlib.abc.Loader]()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a slow module with a loader that reports it; ignore other modules."""
        if fullname not in _SLOW or fullname in self._found:
            return None
        others = (one.find_spec(fullname, path, target) for one in sys.meta_path if one is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            self._found[fullname], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._found[spec.name].create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        loader = self._found[module.__name__]
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = loader
        self._say(f"loading {_SLOW[module.__name__]} …")
        try:
            loader.exec_module(module)
        finally:
            self._say("")

    def _say(self, text: str) -> None:
        self._terminal.write(f"\r\x1b[K{text}\r")  # the library's own output starts at the left
        self._terminal.flush()
