"""Segments for a budget of memory: what the user writes, a profile of the user's own model, the plan."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shared_core.activation_checkpointing.blocks import find_blocks
from shared_core.activation_checkpointing.plan import SegmentPlan, StepCost, choose_segments, peak_bytes
from shared_core.activation_checkpointing.profile import StepProfile
from shared_core.errors import ConfigError, TrainingError

_SUFFIXES = {"GiB": 1 << 30, "MiB": 1 << 20}
PROFILED_STEPS = 2  # the first one of a process is slow: kernels are chosen, memory is taken


@dataclass(frozen=True)
class Budget:
    """How much memory the activations of a step may take: `value` in units of `unit`."""

    value: float
    unit: Literal["fraction", "bytes", "least"]

    def plan(self, cost: StepCost) -> SegmentPlan:
        """Return the segments that keep within the budget in a step of this cost.

        Raises:
            ConfigError: If none do; names the least.
        """
        return choose_segments(cost, self.num_bytes(peak_bytes(cost, ())))

    def num_bytes(self, full_peak: int) -> float | None:
        """Return what it comes to in a step that holds so much without checkpointing; None for the least."""
        return None if self.unit == "least" else self.value * (full_peak if self.unit == "fraction" else 1)


def parse_budget(policy: str) -> Budget:
    """Return the budget that a policy names.

    A number below 1 is a fraction of what the step holds without checkpointing, a number from 1 on are GiB: so ``1.0``
    is one GiB, for all of the memory would be no checkpointing. With ``GiB`` or ``MiB`` behind it, it is that.
    ``least`` is the least there is.

    Args:
        policy: ``budget:<fraction|GiB>``, ``budget:<number>GiB``, ``budget:<number>MiB`` or ``budget:least``.

    Raises:
        ConfigError: If it is none of these, or not positive.

    Example:
        >>> parse_budget("budget:0.5")
        Budget(value=0.5, unit='fraction')
        >>> parse_budget("budget:2").value == parse_budget("budget:2048MiB").value == 2 * 2**30
        True
        >>> parse_budget("budget:0.5GiB"), parse_budget("budget:least").unit
        (Budget(value=536870912.0, unit='bytes'), 'least')
    """
    kind, _, text = policy.partition(":")
    if (kind, text) == ("budget", "least"):
        return Budget(0.0, "least")
    suffix = text[-3:] if text[-3:] in _SUFFIXES else ""
    value = math.nan
    with contextlib.suppress(ValueError):
        value = float(text.removesuffix(suffix))
    if kind != "budget" or not 0 < value < math.inf:
        raise ConfigError(
            "checkpointing.policy: a budget must be budget:<fraction below 1>, budget:<GiB>, budget:<number>MiB or "
            f"budget:least, got {policy!r}; write for example budget:0.5 for half of what a step holds now"
        )
    if value < 1 and not suffix:
        return Budget(value, "fraction")
    return Budget(value * _SUFFIXES[suffix or "GiB"], "bytes")


def plan_segments(
    model: nn.Module,
    budget: str,
    example_inputs: Any = None,
    step: Callable[[], object] | None = None,
    names: Sequence[str] | None = None,
) -> SegmentPlan:
    """Return the segments to checkpoint in a model so that its activations keep within a budget.

    Args:
        model: Nothing of it is checkpointed yet.
        budget: As of `parse_budget`.
        example_inputs: As of `profile_blocks`.
        step: As of `profile_blocks`.
        names: As of `profile_blocks`.

    Raises:
        ConfigError: If the budget is none, or less than the least; if neither inputs nor a step are given, or both.
        MatchError: If the model has no repeated blocks.
        TrainingError: If blocks do not run once a step, in one order.

    Example:
        >>> net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(8)))
        >>> plan = plan_segments(net, "budget:0.7", torch.ones(64, 8))
        >>> plan.peak <= 0.7 * plan.full_peak, 0 < plan.share < 1
        (True, True)
    """
    parsed = parse_budget(budget)
    return parsed.plan(profile_blocks(model, example_inputs, step, names))


def profile_blocks(
    model: nn.Module,
    example_inputs: Any = None,
    step: Callable[[], object] | None = None,
    names: Sequence[str] | None = None,
) -> StepCost:
    """Return what the blocks of a model cost in a step of training.

    Runs two steps, in training mode, and leaves no trace of them: gradients, buffers and random state are as before.

    Args:
        model: Nothing of it is checkpointed yet.
        example_inputs: What its forward takes: a tensor, a sequence of arguments, a mapping of keyword arguments, or
            ``(args, kwargs)``. The loss is the one that it returns, or the sum of what it returns; what another loss
            holds is not in the figures.
        step: Instead of inputs: runs one forward and backward of the model.
        names: Of the blocks, in the order in which they run; by default what `find_blocks` finds.

    Raises:
        ConfigError: If neither inputs nor a step are given, or both.
        MatchError: If the model has no repeated blocks.
        TrainingError: If blocks do not run once a step, in one order.

    Example:
        >>> net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(8)))
        >>> [block.saved for block in profile_blocks(net, torch.ones(64, 8)).blocks[:2]]
        [2048, 2048]
    """
    if (example_inputs is None) == (step is None):
        raise ConfigError(
            "checkpointing: a budget must have example_inputs or a step to profile, and not both, got "
            f"{'neither' if step is None else 'both'}; pass what the model's forward takes"
        )
    profile = StepProfile(model, find_blocks(model) if names is None else names)
    with _without_trace(model):
        for _ in range(PROFILED_STEPS):
            model.zero_grad()
            profile.start()
            try:
                step() if step is not None else _loss(model, example_inputs).backward()  # type: ignore[no-untyped-call]
                profile.stop()
            finally:
                profile.cancel()
    return profile.cost()


def _loss(model: nn.Module, inputs: Any) -> Tensor:
    if isinstance(inputs, Tensor):
        output = model(inputs)
    elif isinstance(inputs, Mapping):
        output = model(**inputs)
    elif len(inputs) == 2 and isinstance(inputs[0], tuple) and isinstance(inputs[1], dict):
        output = model(*inputs[0], **inputs[1])
    else:
        output = model(*inputs)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    values = [leaf.float().sum() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not values:
        raise TrainingError(
            f"checkpointing: {type(model).__name__} must return a tensor with a gradient, got none; train some of its "
            "parameters, or give a step instead of inputs"
        )
    return torch.stack(values).sum()


@contextlib.contextmanager
def _without_trace(model: nn.Module) -> Iterator[None]:
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({parameter.device.index or 0 for parameter in model.parameters() if parameter.is_cuda})
    if not model.training:  # as it comes from from_pretrained
        model.train()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
