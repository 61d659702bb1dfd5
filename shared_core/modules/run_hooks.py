"""Module hooks that stay with one run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class RunHook:
    """A hook that does nothing in a copied or pickled module, since the run belongs to the original.

    Args:
        hook: The hook, None for one that does nothing.

    Example:
        >>> import copy
        >>> from torch import nn
        >>> layer = nn.Identity()
        >>> handle = layer.register_forward_hook(RunHook(lambda module, args, output: output + 1))
        >>> layer(1), copy.deepcopy(layer)(1)
        (2, 1)
    """

    def __init__(self, hook: Callable[..., Any] | None) -> None:
        self._hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the hook."""
        return None if self._hook is None else self._hook(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return RunHook, (None,)
