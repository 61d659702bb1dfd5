"""The algorithms and the frame that both front ends drive; needs torch, knows no trainer."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared_core.errors import EffError as EffError
    from shared_core.recipe import Recipe as Recipe
    from shared_core.session import Session as Session

_PUBLIC = {"EffError": "errors", "Recipe": "recipe", "Session": "session"}
__all__ = ["EffError", "Recipe", "Session"]


def __getattr__(name: str) -> Any:
    # Lazy, so that `eff --help` does not wait for torch.
    if name not in _PUBLIC:
        raise AttributeError(f"module 'shared_core' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"shared_core.{_PUBLIC[name]}"), name)
