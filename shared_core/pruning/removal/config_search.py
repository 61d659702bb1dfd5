"""Which numbers of a configuration describe which widths of a model, found by building it on no device."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shared_core.pruning.removal.config_numbers import (
    Path,
    changed_config,
    explicit_head_sizes,
    numbers,
    ratios,
    read,
)
from shared_core.pruning.removal.groups import ChannelGroup

Shapes = dict[str, tuple[int, ...]]
_HEAD_SIZES = ("head_dim", "d_kv", "kv_channels", "head_size")


@dataclass(frozen=True)
class Knob:
    """Numbers of a configuration that change together, and what one step down removes.

    `steps` holds for each its path, its value now and how much it falls in a step; `removes` by group how many units
    go.
    """

    steps: tuple[tuple[Path, int, int], ...]
    removes: Mapping[str, int]


def built_shapes(model: nn.Module, config: Any) -> Shapes:
    """Return the shapes of a model of the same class and another configuration, built on no device."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a number that is tried may make an empty tensor
        made: Any = type(model)(config)
    return {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}


def explained(old: Shapes, new: Shapes | None, groups: Mapping[str, ChannelGroup]) -> dict[str, int] | None:
    """Return how many units of each group a change of shapes removes; None if it is no such change.

    Example:
        >>> import numpy as np
        >>> from shared_core.pruning.removal.groups import Slice
        >>> parts = (Slice("a", 0, np.arange(8).reshape(4, 2), "out"), Slice("b", 1, np.arange(4).reshape(4, 1), "in"))
        >>> explained({"a": (8,), "b": (5, 4)}, {"a": (6,), "b": (5, 3)}, {"g": ChannelGroup("g", "head", 4, parts)})
        {'g': 1}
    """
    if new is None or set(new) != set(old):
        return None
    differing: dict[tuple[str, int], int] = {}
    for name, shape in old.items():
        if len(shape) != len(new[name]):
            return None
        for axis, (before, after) in enumerate(zip(shape, new[name], strict=True)):
            if before != after:
                differing[name, axis] = before - after
    holders: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for group in groups.values():
        for part in group.slices:
            holders.setdefault((part.tensor, part.axis), []).append((group.name, part.positions.shape[1]))
    counts: dict[str, int] = {}
    for place, difference in differing.items():
        if len(held := holders.get(place, [])) == 1:
            counts.setdefault(held[0][0], difference // held[0][1])
    for place in set(differing) | {place for place, held in holders.items() if any(name in counts for name, _ in held)}:
        if differing.get(place, 0) != sum(counts.get(name, 0) * size for name, size in holders.get(place, [])):
            return None
    return counts if counts and all(count > 0 for count in counts.values()) else None


class KnobSearch:
    """Finds the numbers of a model's configuration that narrow a group.

    Args:
        model: Built from its ``config``.
        groups: By name; of tied tensors under every name.
        ties: By every name in the state dict the first one of the same tensor.
    """

    def __init__(self, model: nn.Module, groups: Mapping[str, ChannelGroup], ties: Mapping[str, str]) -> None:
        self._model, self._groups = model, groups
        self._names = {name for name in model.state_dict() if ties.get(name, name) == name}
        self.base: dict[Path, Any] = dict(explicit_head_sizes(model.config))
        self.refusals: dict[str, str] = {}
        """By group what the configuration said when numbers of heads or widths were tried."""
        self.error, self._needs_extra = "", False  # the error: what the last numbers that were tried led to
        self._probed: dict[tuple[tuple[Path, int, int], ...], tuple[dict[str, int] | None, bool, str]] = {}
        self._extra: dict[tuple[tuple[Path, int, int], ...], dict[Path, int]] = {}
        self.shapes = self._shapes({}) or {}

    def _shapes(self, values: Mapping[Path, Any]) -> Shapes | None:
        try:
            config = changed_config(self._model.config, {**self.base, **values})
            if hasattr(config, "from_dict"):  # as saving and loading will
                config = type(config).from_dict(config.to_dict())
            shapes = built_shapes(self._model, config)
        except Exception as error:  # whatever a configuration's checks or a model's own code raise
            self.error = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), "")
            return None
        return {name: shape for name, shape in shapes.items() if name in self._names}

    def describes_itself(self) -> bool:
        """Return whether a model built from the unchanged configuration has the model's shapes."""
        state = self._model.state_dict()
        return self.shapes == {name: tuple(state[name].shape) for name in self._names}

    def values(self, knob: Knob, count: int) -> dict[Path, Any]:
        """Return the numbers after so many steps of a knob."""
        values = {path: value - step * count for path, value, step in knob.steps}
        return self.base | self._extra.get(knob.steps, {}) | values

    def removes(self, values: Mapping[Path, Any]) -> dict[str, int] | None:
        """Return how many units of each group a configuration with these values removes."""
        return explained(self.shapes, self._shapes(values), self._groups)

    def knobs(self, group: ChannelGroup) -> Iterator[Knob]:
        """Yield what narrows a group: single numbers, then pairs of numbers of heads, then pairs of equal widths."""
        for paths in self._combinations(group):
            extra = self._head_size(paths) if group.kind in ("head", "width") else {}
            steps = tuple((path, value, value // group.units or 1) for path, value in paths)
            for factor in self._factors(group, paths):
                found = self._probe(tuple((path, value, step * factor) for path, value, step in steps), extra)
                if found is not None and group.name in found:
                    if any(count % factor for count in found.values()):
                        break
                    self._extra[steps] = extra if self._needs_extra else {}
                    yield Knob(steps, {name: count // factor for name, count in found.items()})
                    break
                if factor > 1 and self.error:
                    self.refusals.setdefault(group.name, self.error)

    def _factors(self, group: ChannelGroup, paths: tuple[tuple[Path, int], ...]) -> list[int]:
        """Return by how many units to try: widths and numbers of heads may have to divide each other."""
        of_heads = all("head" in str(path[-1]) for path, _ in paths)
        if group.kind not in ("head", "width") or of_heads != (group.kind == "head"):
            return [1]
        return sorted(
            {factor for factor in (1, 2, 3, 4, 8, group.units // 4, group.units // 2) if 0 < factor < group.units}
        )

    def _probe(self, steps: tuple[tuple[Path, int, int], ...], extra: dict[Path, int]) -> dict[str, int] | None:
        if steps not in self._probed:
            self.error = ""
            values = {path: value - step for path, value, step in steps}
            found = self.removes(values)
            extended = self.removes(values | extra) if found is None and extra else None
            self._probed[steps] = (found or extended, extended is not None, self.error)
        found, self._needs_extra, self.error = self._probed[steps]
        return found

    def _combinations(self, group: ChannelGroup) -> Iterator[tuple[tuple[Path, int], ...]]:
        sizes = self._sizes(group)
        singles = [
            (path, group.units if value is None else value)
            for path, value in numbers(self._model.config)
            if (value is None or value % group.units == 0 or value in sizes)
            # other numbers than heads can have the same effect on shapes, not on the outputs
            and not (group.kind == "head" and str(path[-1]).endswith(_HEAD_SIZES))
        ]
        heads = [(path, value) for path, value in singles if "head" in str(path[-1]) and value % group.units == 0]
        yield from ((single,) for single in singles)
        yield from itertools.combinations(heads, 2)
        if group.kind != "head":
            equal = [(path, value) for path, value in singles if value == group.units]
            yield from itertools.combinations(equal[:8], 2)

    def _head_size(self, paths: tuple[tuple[Path, int], ...]) -> dict[Path, int]:
        """Return the head size for a configuration that has none, but whose model may read it."""
        owner = paths[0][0][:-1]
        config = read(self._model.config, owner)
        width, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
        if hasattr(config, "head_dim") or not isinstance(width, int) or not isinstance(heads, int) or not heads:
            return {}
        return {(*owner, "head_dim"): width // heads}

    def _sizes(self, group: ChannelGroup) -> set[int]:
        return {self.shapes[part.tensor][part.axis] for part in group.slices if part.tensor in self.shapes}

    def ratio(self, group: ChannelGroup, share: float) -> tuple[Path, float, dict[str, int]] | None:
        """Return (path, value, units removed by group) of a ratio of widths that leaves at least `share` of a group."""
        for path, value in ratios(self._model.config):
            tries: list[float] = [value * (share + (1 - share) * part / 16) for part in range(16)]
            if isinstance(value, int):
                tries += [whole for whole in range(math.ceil(value * share - 1e-6), value)]
            for wanted in tries:
                found = self.removes({path: wanted})
                if found and group.name in found and found[group.name] <= group.units * (1 - share) + 1e-6:
                    return path, wanted, found
                if found is not None and group.name not in found:
                    break
                if found is None and wanted == tries[0] and not isinstance(value, int):
                    break
        return None
