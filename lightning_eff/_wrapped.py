"""A method of one object, replaced for a while and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Wrapped:
    """Stands in for ``owner.name`` and calls ``around(original, *args, **kwargs)`` until `undo`.

    A copy of the owner shares it (`copy.deepcopy` would else drag the trainer along), and a pickled owner gets its
    plain method back.

    Args:
        owner: The object, not its class, whose method is replaced.
        name: The method.
        around: What is called instead, with the original method first.
        keep_signature: Whether code that looks at signatures should see the original's. It then also takes the
            method for the original, so not for methods that count as overridden once they are replaced.
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any], *, keep_signature: bool = False) -> None:
        self._owner, self._name, self._around = owner, name, around
        self._was_on_instance = name in vars(owner)
        self._original = getattr(owner, name)
        if keep_signature:
            # Lightning unwraps once only, so the innermost function must be the first that it meets.
            self.__wrapped__ = getattr(self._original, "__wrapped__", self._original)
        self.__code__ = type(self).__call__.__code__  # Lightning compares it to see whether a hook is overridden
        self._active = True
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what surrounds the original, or the original itself once undone."""
        if not self._active:
            return self._original(*args, **kwargs)
        return self._around(self._original, *args, **kwargs)

    def undo(self) -> None:
        """Put the original back. Under a wrapper that came later, only pass through from now on."""
        self._active = False
        if vars(self._owner).get(self._name) is not self:
            return
        if self._was_on_instance:
            setattr(self._owner, self._name, self._original)
        else:
            delattr(self._owner, self._name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Wrapped:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, self._name)
