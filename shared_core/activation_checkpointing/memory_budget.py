"""Segments for a budget of memory: what the user writes, a profile of the user's own model, the plan.

A budget that is resolved while training: the user's own first micro-batches are the profile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shared_core.activation_checkpointing.budget_planner import BlockCost, SegmentPlan, StepCost
from shared_core.activation_checkpointing.config import parse_budget
from shared_core.activation_checkpointing.model_blocks import find_blocks
from shared_core.activation_checkpointing.profiler import PeakBytes, StepProfile, device_of, measure_peak
from shared_core.distributed.collectives import all_reduce_
from shared_core.errors import ConfigError, TrainingError
from shared_core.modules.calls import buffers_restored, modes_restored

PROFILED_STEPS = 2  # the first one of a process is slow: kernels are chosen, memory is taken


def plan_segments(
    model: nn.Module,
    budget: str,
    example_inputs: Any = None,
    step: Callable[[], object] | None = None,
    names: Sequence[str] | None = None,
) -> SegmentPlan:
    """Return the segments to checkpoint in a model so that its activations keep within a budget.

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

    Example:
        >>> net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(8)))
        >>> [block.saved for block in profile_blocks(net, torch.ones(64, 8)).blocks[:2]]
        [2048, 2048]
    """
    if (example_inputs is None) == (step is None):
        raise ConfigError(
            "checkpointing",
            "a budget must have example_inputs or a step to profile, and not both, got "
            f"{'neither' if step is None else 'both'}",
            "pass what the model's forward takes",
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
    # A model without a loss is profiled on the sum of its outputs: only memory and time matter.
    values = [leaf.float().sum() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not values:
        raise TrainingError(
            "checkpointing",
            f"{type(model).__name__} must return a tensor with a gradient, got none",
            "train some of its parameters, or give a step instead of inputs",
        )
    return torch.stack(values).sum()


@contextlib.contextmanager
def _without_trace(model: nn.Module) -> Iterator[None]:
    # Profiling runs real steps: gradients, buffers, modes and random state are put back.
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    devices = sorted({parameter.device.index or 0 for parameter in model.parameters() if parameter.is_cuda})
    try:
        with modes_restored(model), buffers_restored(model), torch.random.fork_rng(devices):
            if not model.training:  # as it comes from from_pretrained
                model.train()
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


_COLUMNS = ("input", "saved", "inner", "seconds", "tail")


class LazyBudget:
    """Profiles the first two micro-batches that it is shown, plans, applies, and measures the one after.

    Both verbs around every micro-batch, or `after_backward` once for a window of accumulation: then its last one
    counts. The plan changes no result, so it may come in the middle of a window. Every process decides by the most
    bytes and times of all, and so alike. A resumed run applies the saved plan at once, unless it has another budget or
    other blocks.

    Example:
        >>> net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(8)))
        >>> applied = []
        >>> lazy = LazyBudget(net, "budget:0.7", [str(i) for i in range(8)], applied.extend)
        >>> for _ in range(3):
        ...     lazy.before_forward()
        ...     net(torch.ones(64, 8)).sum().backward()
        ...     lazy.after_backward()
        >>> lazy.plan.segments == tuple(applied), lazy.measured_peak > 0
        (True, True)
    """

    def __init__(
        self,
        model: nn.Module,
        budget: str,
        names: Sequence[str],
        apply: Callable[[Sequence[Sequence[str]]], object],
    ) -> None:
        self._model, self._budget, self._apply = model, parse_budget(budget), apply
        self._asked = {"budget": budget, "names": list(names)}
        self._profile = StepProfile(model, names)
        self._measuring: tuple[ExitStack, PeakBytes] | None = None
        self._looking = False
        self.plan: SegmentPlan | None = None
        """The plan that was chosen, None until then."""
        self.measured_peak: int | None = None
        """The most bytes of activations that a micro-batch under the plan held on any process, None until then."""

    @property
    def is_done(self) -> bool:
        """Whether there is nothing more to see: the verbs need not be called any more."""
        return self.measured_peak is not None

    @property
    def remark(self) -> str | None:
        """The warning about the measured peak, if there is one."""
        if self.plan is None or self.measured_peak is None:
            return None
        if not self.plan.segments:
            return f"nothing is recomputed: {self._asked['budget']} holds without, at {_mib(self.plan.peak)}"
        bound = self._budget.num_bytes(self.plan.full_peak)
        if bound is None or self.measured_peak <= bound:
            return None
        return (
            f"the measured peak of {_mib(self.measured_peak)} exceeds {self._asked['budget']}, {_mib(bound)}, where "
            f"{_mib(self.plan.peak)} were predicted; take a lower budget if memory is short"
        )

    def before_forward(self) -> None:
        """A micro-batch of training begins; one whose backward never came is forgotten."""
        self.cancel()
        if self.is_done:
            return
        self._looking = True
        if self.plan is None:
            self._profile.start()
        else:
            stack = ExitStack()
            self._measuring = stack, stack.enter_context(measure_peak(self._model))

    def cancel(self) -> None:
        """Forget the micro-batch that was begun, if any: it failed, or was none of training."""
        self._looking = False
        self._profile.cancel()
        if self._measuring is not None:
            self._measuring[0].close()
            self._measuring = None

    def after_backward(self) -> None:
        """A micro-batch's backward is over. With several processes, all of them call it as often."""
        if not self._looking:
            return
        self._looking = False
        if self._measuring is not None:
            stack, peak = self._measuring
            self._measuring = None
            stack.close()
            # The slowest or largest process decides: all must follow one plan, as DDP and FSDP2 expect equal steps.
            most = all_reduce_(torch.tensor(peak.activations, device=device_of(self._model)), "max")
            self.measured_peak = int(most.item()) or None  # nothing was made: the script left this micro-batch out
            return
        self._profile.stop()
        if self._profile.num_steps == PROFILED_STEPS:
            self.plan = self._budget.plan(_most_of_all_processes(self._profile.cost(), device_of(self._model)))
            self._apply(self.plan.segments)

    def state_dict(self) -> dict[str, Any]:
        """Return the plan and what was measured, as plain values; nothing before there is a plan."""
        if self.plan is None:
            return {}
        plan = asdict(self.plan) | {"segments": [list(segment) for segment in self.plan.segments]}
        return {"plan": plan, "asked": self._asked} | (
            {} if self.measured_peak is None else {"measured_peak": self.measured_peak}
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Apply the saved plan, if it was made for this budget and these blocks and none is applied already."""
        if self.plan is None and "plan" in state and state.get("asked") == self._asked:
            segments = tuple(tuple(segment) for segment in state["plan"]["segments"])
            self.plan = SegmentPlan(**{**state["plan"], "segments": segments})
            self.measured_peak = state.get("measured_peak")
            self._apply(segments)

    def report(self) -> dict[str, Any]:
        """Return predicted and measured peak in bytes, and what the recomputation takes, for the receipt."""
        if self.plan is None:
            return {"planned": False}
        return {
            "planned": True,
            "plan": [list(segment) for segment in self.plan.segments],
            "predicted_peak_bytes": self.plan.peak,
            "measured_peak_bytes": self.measured_peak,
            "peak_bytes_without": self.plan.full_peak,
            "least_peak_bytes": self.plan.least_peak,
            "recomputed_share_of_forward": self.plan.share,
        }


def _most_of_all_processes(cost: StepCost, device: torch.device) -> StepCost:
    """Return the most of every figure over all processes; every process must call it."""
    # `not follows` as 0 or 1: the maximum is then "breaks on any process".
    rows = [[*(float(getattr(block, name)) for name in _COLUMNS), float(not block.follows)] for block in cost.blocks]
    figures = torch.tensor([[cost.head] + [0] * len(_COLUMNS), *rows], dtype=torch.float64)
    (head, *_), *rows = all_reduce_(figures.to(device), "max").tolist()
    blocks = (
        BlockCost(
            name=block.name,
            input=int(most[0]),
            saved=int(most[1]),
            inner=int(most[2]),
            seconds=most[3],
            tail=most[4],
            follows=not most[5],
        )
        for block, most in zip(cost.blocks, rows, strict=True)
    )
    return StepCost(blocks=tuple(blocks), head=int(head))


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
