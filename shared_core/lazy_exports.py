"""Packages whose names are imported when first used; the stub beside each lists them, for type checkers too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import lazy_loader


def export_lazily(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package whose names its ``__init__.pyi`` lists.

    Whoever imports the options of one technique must not wait for the modules of all.
    """
    load, names, exported = lazy_loader.attach_stub(package, file)

    def load_or_name_extra(name: str) -> Any:
        try:
            return load(name)
        except ModuleNotFoundError as error:
            _name_extra(error, package)
            raise
        except AttributeError as error:
            if name in exported:
                raise  # of a module of ours
            # with both, Python's traceback tells the nearest name
            rule = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(rule, name=name, obj=sys.modules[package]) from error

    return load_or_name_extra, names, exported


def _name_extra(error: ModuleNotFoundError, package: str) -> None:
    """Raise `MissingExtraError` in place of an error that one of efftrain's optional libraries is not there."""
    from shared_core.errors import MissingExtraError
    from shared_core.libraries import libraries

    for library in libraries():
        if library.extra and library.name == error.name:
            raise MissingExtraError(package, library.name, library.extra) from error
