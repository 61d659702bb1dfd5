"""Models that are built from a configuration: it must describe the smaller one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shared_core.errors import CompatibilityError
from shared_core.pruning.removal.config_numbers import Path, changed_config
from shared_core.pruning.removal.config_search import Knob, KnobSearch
from shared_core.pruning.removal.groups import ChannelGroup
from shared_core.pruning.removal.width import Rescale, check_eps
from shared_core.pruning.removal.work import Change, Work, joined

NOT_DESCRIBED = "the configuration has no number that describes it alone"


def changes(work: Work) -> list[Change]:
    """Return one change for every number, or numbers together, of the configuration.

    Raises:
        CompatibilityError: If the configuration does not describe the model as it is.
    """
    groups = work.selection.groups
    search = KnobSearch(work.model, groups, work.ties)
    if not search.describes_itself():
        raise CompatibilityError(
            f"shrink: {type(work.model).__name__} must have the shapes that its config describes, but has others; "
            "from_config=False cuts it as it is"
        )
    found: list[Change] = []
    handled: set[str] = set()
    for name, group in groups.items():
        if name in handled or not work.allowed(name):
            continue
        change = _change(work, search, group)
        if change is None:
            continue
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
    work.selection.reasons.setdefault(group.name, _why(search, group, limits))
    return None


def _why(search: KnobSearch, group: ChannelGroup, limits: list[str]) -> str:
    if group.name in search.refusals:
        return f"the configuration refuses it: {search.refusals[group.name]}"
    return limits[0] if limits else NOT_DESCRIBED


def _limit(work: Work, search: KnobSearch, knob: Knob) -> str:
    others = [other for other, count in knob.removes.items() if work.allowed(other) < count]
    if others:
        return f"{_name(knob)} of the configuration also sets the width of {others[0]}, which has none to lose"
    return f"{_name(knob)} of the configuration cannot be lower: {search.error}"


def _by_knob(work: Work, search: KnobSearch, knob: Knob) -> Change | None:
    most = min(work.allowed(name) // count for name, count in knob.removes.items())
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
        share = max(1 - work.allowed(other) / work.selection.groups[other].units for other in counts)
        if share >= 1:
            return None
    return None


def builder(work: Work) -> Callable[[list[Change]], nn.Module]:
    """Return a function that builds the model from the configuration with the values of changes."""

    def build(changes: list[Change]) -> nn.Module:
        values = {path: value for change in changes for path, value in change.values.items()}
        changed, norms = work.cut(joined(changes))
        values |= dict(_epsilons(work.model.config, norms))
        config = changed_config(work.model.config, values)
        with torch.random.fork_rng(devices=[]):
            smaller: Any = type(work.model)(config)
        state = {**work.state, **changed}
        full = {name: state[work.ties.get(name, name)] for name in work.model.state_dict()}
        places = dict(smaller.named_parameters()) | dict(smaller.named_buffers())
        for name, tensor in places.items():
            if name in full:
                tensor.data = tensor.data.to(full[name].dtype)
        smaller.load_state_dict(full)
        check_eps(work.model, smaller, norms)
        _like(smaller, work.model)
        return smaller  # type: ignore[no-any-return]

    return build


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


def _epsilons(config: Any, norms: list[Rescale], prefix: Path = ()) -> Iterator[tuple[Path, float]]:
    """Yield the configuration's epsilons that are those of narrowed norms."""
    wanted = {norm.eps: norm.new_eps for norm in norms}
    for name, value in vars(config).items():
        if isinstance(value, float) and "eps" in name and value in wanted:
            yield (*prefix, name), wanted[value]
        elif hasattr(value, "to_dict") and hasattr(value, "__dict__") and not name.startswith("_"):
            yield from _epsilons(value, norms, (*prefix, name))


def told(old: Any, new: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Return by dotted name the numbers in which two configurations differ: (before, after).

    Example:
        >>> from types import SimpleNamespace as Config
        >>> told(Config(width=4, sizes=[8, 8]), Config(width=3, sizes=[8, 6]))
        {'width': (4, 3), 'sizes.1': (8, 6)}
    """
    found: dict[str, tuple[Any, Any]] = {}
    for name, value in getattr(new, "__dict__", {}).items():
        before, path = getattr(old, name, None), f"{prefix}{name}"
        if name.startswith("_") or isinstance(value, bool):
            continue
        if isinstance(value, int | float) and value != before:
            found[path] = (before, value)
        elif isinstance(value, list) and isinstance(before, list) and len(value) == len(before):
            for index, pair in enumerate(zip(before, value, strict=True)):
                if pair[0] != pair[1]:
                    found[f"{path}.{index}"] = pair
        elif hasattr(value, "to_dict"):
            found |= told(before, value, f"{path}.")
    return found


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))
