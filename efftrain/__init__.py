"""The front door: loops, sessions, recipes of `shared_core`, `hf` (that is `hf_eff`), `lightning` (`lightning_eff`)."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

__version__ = importlib.metadata.version("efftrain")
_CORE = ("EffError", "Recipe", "Session", "register", "training")
_FRONT_ENDS = ("hf", "lightning")
__all__ = ["__version__", *_CORE, *_FRONT_ENDS]


def __getattr__(name: str) -> Any:  # each loads what it needs when it is first used, torch and trainers too
    if name in _FRONT_ENDS:
        return importlib.import_module(f"efftrain.{name}")
    if name in _CORE:
        return getattr(importlib.import_module("shared_core"), name)
    raise AttributeError(f"module 'efftrain' has no attribute {name!r}", name=name)


def __dir__() -> list[str]:
    return sorted(__all__)
