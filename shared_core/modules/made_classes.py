"""Classes that are made at run time, so that models with such layers can still be pickled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn


def importable(name: str, bases: tuple[type, ...], module: str) -> type[nn.Module]:
    """Create a class and add it to a module under its name, so that models with such layers can be pickled."""
    made = type(name, bases, {"__doc__": f"`torch.nn.{bases[-1].__name__}`: {bases[0].__doc__}", "__module__": module})
    setattr(sys.modules[module], name, made)
    return made


def derived(prefix: str, mixin: type, kind: type[nn.Module], again: Callable[..., Any]) -> type[nn.Module]:
    """Create a class for a class found in a model. Layers of it are unpickled by the class `again(kind, mixin)`."""

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        return (_empty, (again, kind, mixin), *object.__reduce_ex__(self, protocol)[2:])

    about = {"__doc__": f"{prefix} {kind.__name__}.", "__module__": __name__, "__reduce_ex__": reduce}
    return type(f"{prefix}{kind.__name__}", (mixin, kind), about)


def _empty(again: Callable[..., type[nn.Module]], kind: type[nn.Module], mixin: type) -> nn.Module:
    made = again(kind, mixin)
    return made.__new__(made)
