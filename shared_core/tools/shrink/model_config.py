"""Rewrite a model's config to describe the smaller model.

To find which number sets which width, the model is built on the meta device with one number changed at a time.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.channel_graph.groups import ChannelGroup
from shared_core.errors import CompatibilityError
from shared_core.tools.shrink.cutting import Change, Rescale, Work, check_eps, joined

Path = tuple[str | int, ...]
"""Attributes and indices that lead to a number in a config."""
_WIDTHS_BY_DEFAULT = ("n_inner", "intermediate_size", "ffn_dim", "ffn_hidden_size", "d_inner")
"""Names that may hold None for a multiple of the hidden size."""


def is_configured(model: nn.Module) -> bool:
    """Return True if a model is built from a config object alone, as transformers models are."""
    config = getattr(model, "config", None)
    return hasattr(config, "to_dict") and hasattr(model, "save_pretrained") and hasattr(type(model), "from_pretrained")


def read(config: Any, path: Path) -> Any:
    """Return the value at a path of attributes and indices, None if there is none."""
    for part in path:
        config = config[part] if isinstance(part, int) else getattr(config, part, None)
    return config


def changed_config(config: Any, values: Mapping[Path, Any]) -> Any:
    """Return a copy of a configuration with these values."""
    config = copy.deepcopy(config)
    for path, value in values.items():
        *parents, last = path
        owner = read(config, tuple(parents))
        if isinstance(last, int):
            owner[last] = value
        else:
            setattr(owner, last, value)
    return config


def _is_config(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(value, "__dict__")


def _fields(config: Any, prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and value of every public field, of the configurations within it too."""
    for name, value in vars(config).items():
        if not name.startswith("_"):
            yield from _fields(value, (*prefix, name)) if _is_config(value) else [((*prefix, name), value)]


def numbers(config: Any) -> Iterator[tuple[Path, Any]]:
    """Yield path and value of every whole number above 1, also in lists, and of widths left at their default."""
    for path, value in _fields(config):
        name = str(path[-1])
        # Token ids and indices are whole numbers too, but not widths; a bool is an int.
        if name.endswith(("_id", "_ids", "_index")) or isinstance(value, bool):
            # bool is an int.
            continue
        if (isinstance(value, int) and value > 1) or (value is None and name in _WIDTHS_BY_DEFAULT):
            yield path, value
        elif isinstance(value, list) and all(type(item) is int for item in value):
            yield from (((*path, index), item) for index, item in enumerate(value) if item > 1)


def ratios(config: Any) -> Iterator[tuple[Path, float]]:
    """Yield path and value of every ratio of widths."""
    for path, value in _fields(config):
        name = str(path[-1])
        if name.endswith("ratio") and isinstance(value, int | float) and value > 0 and not isinstance(value, bool):
            yield path, value
        elif name.endswith("ratios") and isinstance(value, list):
            yield from (((*path, index), item) for index, item in enumerate(value) if item > 0)


def explicit_head_sizes(config: Any, prefix: Path = ()) -> Iterator[tuple[Path, int]]:
    """Yield a head size for every config that would otherwise divide the width by the number of heads."""
    # Without head_dim a config divides the width by the number of heads, so fewer heads would be wider. With
    # an explicit size, heads can be removed one by one.
    if hasattr(config, "head_dim") and config.head_dim is None and (size := head_size(config)):
        yield (*prefix, "head_dim"), size
    for name, value in vars(config).items():
        if _is_config(value) and not name.startswith("_"):
            yield from explicit_head_sizes(value, (*prefix, name))


def head_size(config: Any) -> int | None:
    """Return the head width implied by a config's width and number of heads, None if it has none."""
    width, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None


Shapes = dict[str, tuple[int, ...]]
_HEAD_SIZES = ("head_dim", "d_kv", "kv_channels", "head_size")


@dataclass(frozen=True)
class Knob:
    """Numbers of a config that change together, and what one step down removes.

    `steps` has for each its path, current value and decrease per step; `removes` has the number of units per
    group.
    """

    steps: tuple[tuple[Path, int, int], ...]
    removes: Mapping[str, int]


def built_shapes(model: nn.Module, config: Any) -> Shapes:
    """Return the shapes of a model of the same class with another config, without allocating memory."""
    # On meta: shapes without memory. Forked: initialization draws random numbers also there.
    with torch.random.fork_rng(devices=[]), torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a tried number may create an empty tensor
        made: Any = type(model)(config)
    return {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}


def explained(old: Shapes, new: Shapes | None, groups: Mapping[str, ChannelGroup]) -> dict[str, int] | None:
    """Return how many units of each group a change of shapes removes; None if it is not such a change.

    Example:
        >>> import numpy as np
        >>> from shared_core.channel_graph.groups import Slice
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
    # An axis with only one group tells how many of its units are gone.
    for place, difference in differing.items():
        if len(held := holders.get(place, [])) == 1:
            counts.setdefault(held[0][0], difference // held[0][1])
    # Then every axis, also those of several groups, must have changed by exactly these counts, and no other axis.
    for place in set(differing) | {place for place, held in holders.items() if any(name in counts for name, _ in held)}:
        if differing.get(place, 0) != sum(counts.get(name, 0) * size for name, size in holders.get(place, [])):
            return None
    return counts if counts and all(count > 0 for count in counts.values()) else None


class KnobSearch:
    """Finds the numbers in a model's config that narrow a group."""

    def __init__(self, model: nn.Module, groups: Mapping[str, ChannelGroup], ties: Mapping[str, str]) -> None:
        self._model, self._groups = model, groups
        # By first names: tied weights have one shape.
        self._names = {name for name in model.state_dict() if ties.get(name, name) == name}
        self.base: dict[Path, Any] = dict(explicit_head_sizes(model.config))
        self.refusals: dict[str, str] = {}
        """By group, the config's error when numbers of heads or widths were tried."""
        self.error, self._needs_extra = "", False  # error: the result of the last numbers that were tried
        self._probed: dict[tuple[tuple[Path, int, int], ...], tuple[dict[str, int] | None, bool, str]] = {}
        self._extra: dict[tuple[tuple[Path, int, int], ...], dict[Path, int]] = {}
        self.shapes = self._shapes({}) or {}

    def _shapes(self, values: Mapping[Path, Any]) -> Shapes | None:
        try:
            config = changed_config(self._model.config, {**self.base, **values})
            # from_dict may compute further fields: the saved config must give these shapes, not only this object.
            if hasattr(config, "from_dict"):  # as saving and loading will
                config = type(config).from_dict(config.to_dict())
            shapes = built_shapes(self._model, config)
        except Exception as error:  # a config's checks and a model's code may raise anything
            self.error = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), "")
            return None
        return {name: shape for name, shape in shapes.items() if name in self._names}

    def describes_itself(self) -> bool:
        """Return True if a model built from the unchanged configuration has the model's shapes."""
        state = self._model.state_dict()
        return self.shapes == {name: tuple(state[name].shape) for name in self._names}

    def values(self, knob: Knob, count: int) -> dict[Path, Any]:
        """Return the numbers after so many steps of a knob."""
        values = {path: value - step * count for path, value, step in knob.steps}
        return self.base | self._extra.get(knob.steps, {}) | values

    def removes(self, values: Mapping[Path, Any]) -> dict[str, int] | None:
        """Return how many units of each group a config with these values removes."""
        return explained(self.shapes, self._shapes(values), self._groups)

    def knobs(self, group: ChannelGroup) -> Iterator[Knob]:
        """Yield knobs that narrow a group: single numbers, then pairs of head counts, then pairs of equal widths."""
        for paths in self._combinations(group):
            extra = self._head_size(paths) if group.kind in ("head", "width") else {}
            # A width of n * units falls by n per unit: 4h for an intermediate size, 1 for a number of heads.
            steps = tuple((path, value, value // group.units or 1) for path, value in paths)
            for factor in self._factors(group, paths):
                found = self._probe(tuple((path, value, step * factor) for path, value, step in steps), extra)
                if found is not None and group.name in found:
                    # It took several units at a time, and the model loses a number that is not a multiple: not a whole
                    # step.
                    if any(count % factor for count in found.values()):
                        break
                    # True if a head size had to be given as well.
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
        # Divisors that models require: hidden sizes by heads, heads by groups of key-value heads.
        return sorted(
            {factor for factor in (1, 2, 3, 4, 8, group.units // 4, group.units // 2) if 0 < factor < group.units}
        )

    def _probe(self, steps: tuple[tuple[Path, int, int], ...], extra: dict[Path, int]) -> dict[str, int] | None:
        # Building a model is slow, and groups share numbers.
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
            # numbers other than heads can have the same effect on shapes, but not on the outputs
            and not (group.kind == "head" and str(path[-1]).endswith(_HEAD_SIZES))
        ]
        # Numbers of query and key-value heads often have to fall together.
        heads = [(path, value) for path, value in singles if "head" in str(path[-1]) and value % group.units == 0]
        yield from ((single,) for single in singles)
        yield from itertools.combinations(heads, 2)
        if group.kind != "head":
            equal = [(path, value) for path, value in singles if value == group.units]
            # Bounded: the number of pairs of equal widths grows quadratically.
            yield from itertools.combinations(equal[:8], 2)

    def _head_size(self, paths: tuple[tuple[Path, int], ...]) -> dict[Path, int]:
        """Return the head size for a config without one, if its model may read it."""
        owner = paths[0][0][:-1]
        config = read(self._model.config, owner)
        size = None if hasattr(config, "head_dim") else head_size(config)
        return {} if size is None else {(*owner, "head_dim"): size}

    def _sizes(self, group: ChannelGroup) -> set[int]:
        return {self.shapes[part.tensor][part.axis] for part in group.slices if part.tensor in self.shapes}

    def ratio(self, group: ChannelGroup, share: float) -> tuple[Path, float, dict[str, int]] | None:
        """Return (path, value, units removed by group) of a ratio of widths that keeps at least `share` of a group."""
        for path, value in ratios(self._model.config):
            # From the required share upwards: the first that works removes the most.
            tries: list[float] = [value * (share + (1 - share) * part / 16) for part in range(16)]
            if isinstance(value, int):
                # A whole ratio may have to stay whole.
                tries += [whole for whole in range(math.ceil(value * share - 1e-6), value)]
            for wanted in tries:
                found = self.removes({path: wanted})
                # 1e-6: a share that is exact in the config may not be in floating point.
                if found and group.name in found and found[group.name] <= group.units * (1 - share) + 1e-6:
                    return path, wanted, found
                # This ratio belongs to other layers.
                if found is not None and group.name not in found:
                    break
                # Like the first one, all fractions are rejected.
                if found is None and wanted == tries[0] and not isinstance(value, int):
                    break
        return None


NOT_DESCRIBED = "the configuration has no number that describes it alone"


def changes(work: Work) -> list[Change]:
    """Return one change per number, or per set of numbers, in the config."""
    groups = work.selection.groups
    search = KnobSearch(work.model, groups, work.ties)
    # A config that does not describe the current model cannot describe a smaller one.
    if not search.describes_itself():
        rule = f"{type(work.model).__name__} must have the shapes that its config describes, but has others"
        raise CompatibilityError("shrink", rule, "from_config=False cuts it as it is")
    found: list[Change] = []
    handled: set[str] = set()
    for name, group in groups.items():
        if name in handled or not work.allowed(name):
            continue
        change = _change(work, search, group)
        if change is None:
            continue
        # One number may narrow several groups: handle them together.
        handled |= set(change.plan)
        found.append(change)
        for other, units in change.plan.items():
            more = work.allowed(other) - int(units.sum())
            if more > 0:
                work.selection.reasons.setdefault(
                    other, f"{more} more units are zero, but the number in the configuration cannot be lower"
                )
    return found


def _change(work: Work, search: KnobSearch, group: ChannelGroup) -> Change | None:
    limits = []
    for knob in search.knobs(group):
        if (change := _by_knob(work, search, knob)) is not None:
            return change
        limits.append(_limit(work, search, knob))
    if (change := _by_ratio(work, search, group.name)) is not None:
        return change
    refusal = search.refusals.get(group.name)
    why = f"the configuration refuses it: {refusal}" if refusal is not None else next(iter(limits), NOT_DESCRIBED)
    work.selection.reasons.setdefault(group.name, why)
    return None


def _limit(work: Work, search: KnobSearch, knob: Knob) -> str:
    others = [other for other, count in knob.removes.items() if work.allowed(other) < count]
    if others:
        return f"{_name(knob)} of the configuration also sets the width of {others[0]}, which has none to lose"
    return f"{_name(knob)} of the configuration cannot be lower: {search.error}"


def _by_knob(work: Work, search: KnobSearch, knob: Knob) -> Change | None:
    # As many steps as the group with the fewest removable units allows.
    most = min(work.allowed(name) // count for name, count in knob.removes.items())
    # Down from the most: not every number is possible (heads must divide widths). 64 attempts bound the time.
    for steps in range(most, max(0, most - 64), -1):
        values = search.values(knob, steps)
        found = search.removes(values)
        if found is not None and all(work.allowed(name) >= count for name, count in found.items()):
            plan = {name: work.selection.choose(name, count) for name, count in found.items()}
            return Change(_name(knob), plan, values)
    return None


def _name(knob: Knob) -> str:
    return ", ".join(_dotted(path) for path, _, _ in knob.steps)


def _by_ratio(work: Work, search: KnobSearch, name: str) -> Change | None:
    group = work.selection.groups[name]
    share = 1 - work.allowed(name) / group.units
    for _ in range(8):
        found = search.ratio(group, share)
        if found is None:
            return None
        path, value, counts = found
        if all(work.allowed(other) >= count for other, count in counts.items()):
            plan = {other: work.selection.choose(other, count) for other, count in counts.items()}
            return Change(_dotted(path), plan, {path: value})
        # Others would lose too many: keep the ratio larger, and restart the search.
        share = max(1 - work.allowed(other) / work.selection.groups[other].units for other in counts)
        if share >= 1:
            return None
    return None


def builder(work: Work) -> Callable[[list[Change]], nn.Module]:
    """Return a function that builds the model from the config with the values of changes."""

    def build(changes: list[Change]) -> nn.Module:
        values = {path: value for change in changes for path, value in change.values.items()}
        changed, norms = work.cut(joined(changes))
        # A narrower RMS norm has another epsilon: see `Rescale`.
        values |= dict(epsilons(work.model.config, norms))
        state = {**work.state, **changed}
        full = {name: state[work.ties.get(name, name)] for name in work.model.state_dict()}
        smaller = built(work.model, changed_config(work.model.config, values), full)
        check_eps(work.model, smaller, norms)
        return smaller

    return build


def built(model: nn.Module, config: Any, state: Mapping[str, Tensor]) -> nn.Module:
    """Return a model of the same class with another config and these weights, on the old one's device."""
    # Initialized and then overwritten: its random draws must not affect the caller's generator.
    with torch.random.fork_rng(devices=[]):
        smaller: Any = type(model)(config)
    places = dict(smaller.named_parameters()) | dict(smaller.named_buffers())
    # Set the state's dtypes before loading: load_state_dict would cast values to those of the new model.
    for name, tensor in places.items():
        if name in state:
            tensor.data = tensor.data.to(state[name].dtype)
    smaller.load_state_dict(state)
    _like(smaller, model)
    return smaller  # type: ignore[no-any-return]


def _like(new: nn.Module, old: nn.Module) -> None:
    """Give the new model the device, modes and generation settings of the old one."""
    device = next((tensor.device for tensor in old.parameters()), torch.device("cpu"))
    new.to(device)
    modes = dict(old.named_modules())
    for name, module in new.named_modules():
        module.training = modes[name].training if name in modes else old.training
    wanted = {name: parameter.requires_grad for name, parameter in old.named_parameters()}
    for name, parameter in new.named_parameters():
        parameter.requires_grad_(wanted.get(name, True))
    if hasattr(old, "generation_config"):
        target: Any = new
        target.generation_config = copy.deepcopy(old.generation_config)


def epsilons(config: Any, norms: list[Rescale]) -> Iterator[tuple[Path, float]]:
    """Yield the config's epsilons that belong to narrowed norms."""
    # By value: configs have many names for epsilons.
    wanted = {norm.eps: norm.new_eps for norm in norms}
    for path, value in _fields(config):
        if isinstance(value, float) and "eps" in str(path[-1]) and value in wanted:
            yield path, wanted[value]


def changed_numbers(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """Return by dotted name the numbers in which two configs differ: (before, after).

    Example:
        >>> from types import SimpleNamespace as Config
        >>> changed_numbers(Config(width=4, sizes=[8, 8]), Config(width=3, sizes=[8, 6]))
        {'width': (4, 3), 'sizes.1': (8, 6)}
    """
    found: dict[str, tuple[Any, Any]] = {}
    was = dict(_fields(old)) if hasattr(old, "__dict__") else {}
    for path, value in _fields(new) if hasattr(new, "__dict__") else ():
        before = was.get(path)
        if isinstance(value, int | float) and not isinstance(value, bool) and value != before:
            found[_dotted(path)] = (before, value)
        elif isinstance(value, list) and isinstance(before, list) and len(value) == len(before):
            pairs = zip(before, value, strict=True)
            found |= {f"{_dotted(path)}.{index}": (a, b) for index, (a, b) in enumerate(pairs) if a != b}
    return found


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))
