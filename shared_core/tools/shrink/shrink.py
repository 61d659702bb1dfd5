"""Build a smaller model that computes the same as the masked one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from shared_core.channel_graph.groups import trace
from shared_core.config.options import checked
from shared_core.errors import CompatibilityError, ConfigError, EffError, first_line
from shared_core.modules.matching import check_model
from shared_core.printing import counted, duration, size_text
from shared_core.tools import measuring
from shared_core.tools.shrink import model_config as configured
from shared_core.tools.shrink.cutting import (
    Change,
    Work,
    bias_names,
    joined,
    masked_state,
    replaced,
    select,
    why_not_narrow,
    why_uncalled_layers_need,
)
from shared_core.tools.shrink.model_config import is_configured


@dataclass
class ShrinkResult:
    """A smaller model and a report.

    Attributes:
        model: The smaller model, in the modes of the original.
        removed: Number of removed units, by group.
        kept: Why seemingly removable units stayed, by group.
        units: Original number of units, by group.
        tensors: Shapes before and after, by name.
        config: Values before and after by dotted name, for a model built from a config.
        bytes: Bytes of parameters and buffers, before and after.
        flops: FLOPs of a forward pass of the example, before and after.
        milliseconds: Time of a forward pass of the example, before and after; None if not measured.
        largest_difference: Of the outputs from those of the masked model, relative to the largest output.
        notes: Further remarks.
    """

    model: nn.Module
    removed: dict[str, int]
    kept: dict[str, str]
    units: dict[str, int]
    tensors: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    config: dict[str, tuple[Any, Any]]
    bytes: tuple[int, int]
    flops: tuple[int, int]
    milliseconds: tuple[float, float] | None
    largest_difference: float
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.removed:
            return f"Nothing was removed: {self.notes[0] if self.notes else 'no unit is zero'}."
        units, groups = counted(sum(self.removed.values()), "unit"), counted(len(self.removed), "group")
        lines = [
            f"Removed {units} in {groups}.",
            f"Size: {size_text(self.bytes[1])} instead of {size_text(self.bytes[0])}.",
            f"FLOPs of a forward pass: {self.flops[1]:,} instead of {self.flops[0]:,}.",
        ]
        if self.milliseconds is not None:
            before, after = (duration(time / 1e3) for time in self.milliseconds)
            lines.append(f"Time of a forward pass: {after} instead of {before}.")
        return "\n".join(lines)


def shrink(
    model: nn.Module,
    example_inputs: Any,
    *,
    keep: Mapping[str, Tensor] | None = None,
    allow_inexact: bool = False,
    multiple_of: int = 1,
    from_config: bool | None = None,
    latency_repeats: int = 5,
) -> ShrinkResult:
    """Return a smaller model with the same outputs: units that are zero are removed from every tensor.

    Tracing one forward pass (`find_groups`) finds units (channels, neurons, attention heads, positions of the residual
    width) and everything that depends on them. A unit can go if its value in every sum is known
    from the weights alone: zero, because its rows are, or a constant f(0), which is added to the next bias. The
    result is compared with the original on the example. Changes that fail the comparison are undone and reported.

    A transformers model is rebuilt from its config with the new widths, so that ``save_pretrained`` and
    ``from_pretrained`` work. If the config has one number for all layers, each loses as many units as the
    one with the fewest to lose. If it has none, the units stay and `kept` says so.

    Narrowing a normalized width d → d′ is exact for root-mean-square norms: γ·√(d/d′), ε·d/d′.

    Args:
        model: The model. It is not changed. Masks must be baked: zeros in the weights.
        example_inputs: A tensor, a tuple of arguments or a mapping of keyword arguments; a small batch is enough.
        keep: By group name (see `find_groups`), bool of shape (units,): False sets a unit to zero and removes it.
            Outputs are then those of the model with these units zero.
        allow_inexact: Also narrow the inputs of layer norms, scaled in the same way.
        multiple_of: Leave a multiple of this many units in every group of neurons and channels.
        from_config: True if ``model.config`` must describe the result; None: if the model has one.
        latency_repeats: Rounds of timing both models; 0: not timed.

    Raises:
        ConfigError: If an argument breaks its rule.
        CompatibilityError: If the model cannot be rebuilt from its configuration.

    Sources: Fang et al. 2023, *DepGraph*, arXiv:2301.12900 (dependency groups).

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> _ = nn.init.zeros_(net[0].weight[1]), nn.init.zeros_(net[0].bias[1:2])
        >>> result = shrink(net, torch.ones(2, 4))
        >>> result.model[0], result.removed
        (Linear(in_features=4, out_features=2, bias=True), {'0': 1})
    """
    check_model(model, "shrink")
    multiple_of = checked(multiple_of, int, "shrink", "multiple_of", low=1)
    latency_repeats = checked(latency_repeats, int, "shrink", "latency_repeats", low=0)
    if callable(example_inputs):
        raise ConfigError("shrink", "example_inputs must be a tensor, a tuple or a mapping, got a function")
    model = getattr(model, "_orig_mod", model)  # inside torch.compile's wrapper
    try:
        measuring.outputs(model, example_inputs)
    except (TypeError, RuntimeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        text = f"{type(example_inputs).__name__} ({first_line(error)})"
        rule = f"example_inputs must be what the model takes, got {text}"
        raise ConfigError("shrink", rule, "pass a tensor, a tuple or a mapping of keyword arguments") from error
    described = is_configured(model) if from_config is None else from_config
    if described and not is_configured(model):
        rule = f"from_config needs a model built from its config, got {type(model).__name__}"
        raise CompatibilityError("shrink", rule, "leave it out")
    # First apply a given mask to the weights as zeros: from there on both cases are the same.
    if keep is not None:
        groups = {group.name: group for group in trace(model, example_inputs, constants=False).groups}
        model = replaced(model, masked_state(model, groups, keep))
    traced = trace(model, example_inputs, constants=True)
    biases = bias_names(model)
    selection = select(traced, biases, create_biases=not described)
    # Constants are known, but norms over a width are not sums and need a separate check.
    kept = why_not_narrow(model, traced, allow_inexact) | why_uncalled_layers_need(model, traced)
    for name, reason in kept.items():
        if selection.removable[name].any():
            selection.reasons[name] = reason
            selection.removable[name][:] = False
    work = Work(model, example_inputs, traced, selection, biases, multiple_of)
    changes = configured.changes(work) if described else work.changes()
    build = configured.builder(work) if described else work.build
    accepted, smaller, gap = _accepted(work, changes, build)
    return _result(work, accepted, smaller, gap, latency_repeats)


def _accepted(
    work: Work, changes: list[Change], build: Callable[[list[Change]], nn.Module]
) -> tuple[list[Change], nn.Module, float]:
    """Return the changes that keep the outputs: all, or else those that do, one after the other."""
    if not changes:
        return [], copy.deepcopy(work.model), 0.0
    expected = measuring.outputs(work.model, work.example_inputs)

    # Failure to build, run or compare is a reason, not an error: other changes may still work.
    def attempt(tried: list[Change]) -> tuple[nn.Module, float] | str:
        try:
            smaller = build(tried)
            gap = measuring.difference(expected, measuring.outputs(smaller, work.example_inputs))
        except (RuntimeError, ValueError, IndexError, AttributeError, TypeError, AssertionError) as error:
            line = first_line(error)
            return line if isinstance(error, EffError) else f"the model's code does not run without them: {line}"
        # `not <=` catches NaN. Inexact changes were requested, and are reported in the notes.
        if not gap <= work.tolerance and work.is_exact(tried):
            return f"without them the outputs differ by {gap:.1e}"
        return smaller, gap

    # All together first, which nearly always works. Otherwise one by one, so that one bad change does not block the
    # others.
    whole = attempt(changes)
    if not isinstance(whole, str):
        return changes, *whole
    accepted: list[Change] = []
    best: tuple[nn.Module, float] = (copy.deepcopy(work.model), 0.0)
    for change in changes:
        found = attempt([*accepted, change])
        if isinstance(found, str):
            work.selection.reasons.update(dict.fromkeys(change.plan, found))
        else:
            accepted.append(change)
            best = found
    return accepted, *best


def _result(work: Work, accepted: list[Change], smaller: nn.Module, gap: float, repeats: int) -> ShrinkResult:
    """Return the result with its measurements."""
    plan = joined(accepted)
    notes = []
    if not plan:
        found = any(mask.any() for mask in work.selection.removable.values()) or work.selection.reasons
        notes.append("none of the units that are zero can be removed, see kept" if found else "no unit is zero")
    if not work.is_exact(accepted):
        notes.append("layer norms were narrowed: the outputs differ from those of the masked model")
    return ShrinkResult(
        model=smaller, removed={name: int(units.sum()) for name, units in plan.items()},
        kept=dict(work.selection.reasons), units={group.name: group.units for group in work.traced.groups},
        largest_difference=gap, notes=notes, **compared(work.model, smaller, work.example_inputs, repeats),
    )  # fmt: skip


def compared(old: nn.Module, new: nn.Module, example: Any, repeats: int) -> dict[str, Any]:
    """Compare two models: shapes, config numbers, bytes, operations, time."""
    before, after, models = old.state_dict(), new.state_dict(), (old, new)
    return {
        "tensors": {
            name: (tuple(tensor.shape), tuple(after[name].shape))
            for name, tensor in before.items()
            if isinstance(tensor, Tensor) and name in after and tensor.shape != after[name].shape
        },
        "config": configured.changed_numbers(*(getattr(model, "config", None) for model in models)),
        "bytes": tuple(map(measuring.state_bytes, models)),
        "flops": tuple(measuring.forward_flops(model, example) for model in models),
        "milliseconds": measuring.latency(old, new, example, repeats) if repeats else None,
    }
