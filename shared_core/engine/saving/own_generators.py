"""Save and restore random generators that a data set, collator or sampler owns."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_DEPTH = 6
_WIDTH = 64
"""Longer containers hold data and are not searched."""
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_LEAVES = (str, bytes, int, float, Tensor, np.ndarray, nn.Module, type, type(None), type(random))

Place = tuple[Any, ...]


class OwnGenerators:
    """Generators found through attributes, short lists and dicts, partial functions, methods and closures.

    Args:
        owners: Objects to search, in the same order in every run.

    Example:
        >>> class Noise:
        ...     def __init__(self):
        ...         self.generator = random.Random(0)
        >>> noise = Noise()
        >>> own = OwnGenerators(noise)
        >>> before, first = own.states(), noise.generator.random()
        >>> own.restore(before)
        >>> noise.generator.random() == first
        True
    """

    def __init__(self, *owners: Any) -> None:
        self._owners = owners
        self._found: dict[Place, Any] = {}
        self.look()

    def look(self) -> None:
        """Search again, since many generators are created at the first draw."""
        self._found = dict(_search(self._owners))

    def states(self) -> list[dict[str, Any]]:
        """Return the place and state of each generator."""
        return [{"place": list(place), **_state_of(one)} for place, one in self._found.items()]

    def restore(self, states: list[dict[str, Any]]) -> None:
        """Restore the result of `states`, and create generators that do not exist yet."""
        self.look()
        for state in states:
            place = tuple(state["place"])
            one = self._found.get(place)
            # Some are created at the first draw, which the resumed run has not made yet: create one of the same kind.
            if one is None and (one := _made(state)) is not None:
                owner = _at(self._owners, place[:-1])
                # Only if the attribute exists and is None. Otherwise the class has changed.
                if owner is None or getattr(owner, str(place[-1]), owner) is not None:
                    continue
                setattr(owner, place[-1], one)
                self._found[place] = one
            if one is not None:
                _put(one, state)


def _search(owners: tuple[Any, ...]) -> Iterator[tuple[Place, Any]]:
    todo: list[tuple[Place, Any]] = [((index,), owner) for index, owner in enumerate(owners)]
    seen: set[int] = set()
    while todo:
        place, one = todo.pop()
        # Objects may refer to each other, so track identity and limit the depth.
        if isinstance(one, _LEAVES) or id(one) in seen or len(place) > _DEPTH:
            continue
        seen.add(id(one))
        if isinstance(one, _KINDS):
            yield place, one
        else:
            todo += [((*place, key), part) for key, part in _parts(one)]


def _parts(one: Any) -> list[tuple[Any, Any]]:
    if isinstance(one, functools.partial):
        return [("func", one.func), ("args", one.args), ("keywords", one.keywords)]
    if isinstance(one, MethodType):
        return [("__self__", one.__self__)]
    if isinstance(one, FunctionType):
        # Closures: a collator is often a nested function.
        return [(index, cell.cell_contents) for index, cell in enumerate(one.__closure__ or ()) if _is_full(cell)]
    if isinstance(one, dict):
        return [(key, part) for key, part in one.items() if isinstance(key, str)] if len(one) <= _WIDTH else []
    if isinstance(one, list | tuple):
        return list(enumerate(one)) if len(one) <= _WIDTH else []
    return list(getattr(one, "__dict__", {}).items())


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a name that is not yet bound
        return False


def _at(owners: tuple[Any, ...], place: Place) -> Any:
    """Return the object at a place, None if its attributes cannot be set."""
    one: Any = owners[place[0]]
    for key in place[1:]:
        one = dict(_parts(one)).get(key)
    return one if hasattr(one, "__dict__") and not isinstance(one, FunctionType | functools.partial) else None


def _state_of(one: Any) -> dict[str, Any]:
    if isinstance(one, torch.Generator):
        return {"kind": "torch", "device": str(one.device), "state": one.get_state()}
    if isinstance(one, random.Random):
        return {"kind": "python", "state": one.getstate()}
    if isinstance(one, np.random.RandomState):
        return {"kind": "numpy legacy", "state": _plain(one.get_state(legacy=False))}
    return {"kind": "numpy", "name": type(one.bit_generator).__name__, "state": _plain(one.bit_generator.state)}


def _put(one: Any, state: Mapping[str, Any]) -> None:
    values = state["state"]
    if isinstance(one, torch.Generator):
        one.set_state(values)
    elif isinstance(one, random.Random):
        version, words, gauss = values
        one.setstate((version, tuple(words), gauss))
    elif isinstance(one, np.random.RandomState):
        one.set_state(_like(one.get_state(legacy=False), values))
    elif isinstance(one, np.random.Generator) and type(one.bit_generator).__name__ == state["name"]:
        one.bit_generator.state = _like(one.bit_generator.state, values)


def _made(state: Mapping[str, Any]) -> Any:
    if state["kind"] == "torch":
        return torch.Generator(state["device"])
    if state["kind"] == "python":
        return random.Random(0)
    if state["kind"] == "numpy legacy":
        return np.random.RandomState(0)
    kinds = (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
    return next((np.random.Generator(kind(0)) for kind in kinds if kind.__name__ == state["name"]), None)


def _plain(state: Any) -> Any:
    """Return numpy's state as lists and numbers (some with 128 bits)."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state


def _like(present: Any, saved: Any) -> Any:
    if isinstance(present, dict):
        # Use the present state's structure and dtypes, since JSON has only lists.
        return {key: _like(value, saved[key]) for key, value in present.items()}
    return np.array(saved, present.dtype) if isinstance(present, np.ndarray) else saved
