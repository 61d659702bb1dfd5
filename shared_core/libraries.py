"""The libraries that efftrain can use: which are installed, and whether their versions are ones it was made for."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any, Literal

from shared_core.errors import MissingExtraError

_BUNDLES = ("all", "dev", "examples")


@dataclass(frozen=True)
class Library:
    """A library that efftrain names in its metadata.

    Args:
        name: Its distribution.
        wanted: Versions that efftrain takes.
        found: The installed one, None without.
        extra: Of efftrain, which installs it; empty: it always comes along.
    """

    name: str
    wanted: str
    found: str | None
    extra: str

    @property
    def state(self) -> Literal["ok", "missing", "out of range", "known bad"]:
        """How far it can be used; known bad: a version that efftrain names as one to leave out."""
        from packaging.specifiers import SpecifierSet

        if self.found is None:
            return "missing"
        specifiers = SpecifierSet(self.wanted)
        if specifiers.contains(self.found, prereleases=True):
            return "ok"
        named = any(part.operator == "!=" and not part.contains(self.found, prereleases=True) for part in specifiers)
        return "known bad" if named else "out of range"

    @property
    def install(self) -> str:
        """The command that makes it usable; empty if it is."""
        if self.state == "ok":
            return ""
        options = "" if self.found is None else "--upgrade "
        return f'pip install {options}"efftrain{f"[{self.extra}]" if self.extra else ""}"'


def libraries(requirements: list[str] | None = None) -> list[Library]:
    """Return the libraries of efftrain's own metadata, each once with the smallest extra that installs it.

    Args:
        requirements: As `importlib.metadata.requires` returns them; by default efftrain's.

    Example:
        >>> [library] = libraries(['torch>=1; extra == "hf"'])
        >>> library.extra, library.state, library.install
        ('hf', 'ok', '')
    """
    from packaging.requirements import Requirement

    texts = requirements if requirements is not None else requires("efftrain") or []
    asked = [
        (wanted, str(wanted.marker or "").partition('extra == "')[2].partition('"')[0])
        for wanted in map(Requirement, texts)
    ]
    size = Counter(extra for _, extra in asked)
    found: dict[str, Library] = {}
    for wanted, extra in sorted(asked, key=lambda one: (one[1] != "", size[one[1]])):
        if extra not in _BUNDLES and wanted.name not in found:
            found[wanted.name] = Library(wanted.name, str(wanted.specifier), installed_version(wanted.name), extra)
    return list(found.values())


def optional(module: str, extra: str, where: str) -> Any:
    """Return a module of a library that an extra of efftrain installs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(where, module.partition(".")[0], extra) from error


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


@contextlib.contextmanager
def collecting_later() -> Iterator[None]:
    """Pause the garbage collector, which searches the objects of all libraries again and again as their number grows.

    Use it for work that makes many objects and little garbage, such as imports and traces.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
