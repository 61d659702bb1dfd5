"""Replace methods of one object temporarily, and check for the private library names that this needs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shared_core.errors import CompatibilityError


class Wrapped:
    """Replaces ``owner.name`` and calls ``around(method, *args, **kwargs)`` until `undo`.

    A copied or pickled owner gets its plain method, since the wrapper belongs to this owner alone.
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any], *, keep_signature: bool = False) -> None:
        self._owner, self._name, self._around = owner, name, around
        # `undo` restores an attribute of the instance, or removes it if the method was the class's.
        self._was_on_instance, self.method = name in vars(owner), getattr(owner, name)
        if keep_signature:
            functools.update_wrapper(self, self.method, updated=())
            # Lightning unwraps only once, so point to the innermost function.
            self.__wrapped__ = getattr(self.method, "__wrapped__", self.method)
        self.__code__ = type(self).__call__.__code__  # Lightning compares it to see whether a hook is overridden
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapper, or the method itself after `undo`."""
        return self._around(self.method, *args, **kwargs)

    def undo(self) -> None:
        """Restore the method. Under a later wrapper, only pass calls through from now on."""
        # Other code may still refer to this wrapper, which then only passes calls through.
        self._around = _pass_through
        if vars(self._owner).get(self._name) is not self:
            return
        if self._was_on_instance:
            setattr(self._owner, self._name, self.method)
        else:
            delattr(self._owner, self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle a reference to the owner's attribute: spawned processes create their own.
        return getattr, (self._owner, self._name)


def _pass_through(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return method(*args, **kwargs)


class UntilEnd:
    """Base class of what changes a library's objects until the end of a run."""

    def __init__(self) -> None:
        self.ends = contextlib.ExitStack()
        self.until_end = self.ends.callback  # registers a call with its arguments for the end

    def wrap(self, owner: Any, **around: Callable[..., Any]) -> None:
        """Wrap methods of an object until the end, see `Wrapped`."""
        for name, outer in around.items():
            self.until_end(Wrapped(owner, name, outer).undo)


@dataclass(frozen=True)
class PrivateName:
    """A private method or attribute of a library.

    Args:
        user: Library code that calls or sets it: a method of its owner, or ``module:Class.method``.
        purpose: Why it is needed instead of a public hook.
        since: First version known to have it.
        is_method: True for a method; an attribute exists only on instances.
        owner: Its owner, ``module:Class`` or a module; by default the Trainer.
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
        raise CompatibilityError(f"{whose} lacks {', '.join(lacking)} ({names[lacking[0]].purpose})", remedy=remedy)
