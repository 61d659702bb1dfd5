"""Methods of one object, replaced for a while and put back; and private names of a library that this needs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shared_core.errors import CompatibilityError


class Wrapped:
    """Stands in for ``owner.name`` and calls ``around(method, *args, **kwargs)`` until `undo`.

    A copied or pickled owner gets its plain method back: what is around it belongs to this owner alone.
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any], *, keep_signature: bool = False) -> None:
        self._owner, self._name, self._around = owner, name, around
        # What undo must put back: an attribute of the instance, or nothing over the class's.
        self._was_on_instance, self.method = name in vars(owner), getattr(owner, name)
        if keep_signature:
            functools.update_wrapper(self, self.method, updated=())
            # Lightning unwraps once only, so the innermost function must be the first that it meets.
            self.__wrapped__ = getattr(self.method, "__wrapped__", self.method)
        self.__code__ = type(self).__call__.__code__  # Lightning compares it to see whether a hook is overridden
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what surrounds the method, or the method itself once undone."""
        return self._around(self.method, *args, **kwargs)

    def undo(self) -> None:
        """Put the method back. Under a wrapper that came later, only pass through from now on."""
        # Others may hold this wrapper: it must do no more than call through.
        self._around = _pass_through
        if vars(self._owner).get(self._name) is not self:
            return
        if self._was_on_instance:
            setattr(self._owner, self._name, self.method)
        else:
            delattr(self._owner, self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled, it is the owner's attribute: processes that are spawned make their own.
        return getattr, (self._owner, self._name)


def _pass_through(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return method(*args, **kwargs)


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
