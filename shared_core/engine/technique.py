"""`Technique`: the hooks of a technique. `Context`: the run that every hook receives."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from shared_core.config.options import TechniqueConfig
from shared_core.config.training_time import Position, StepsPerEpoch, parse_position
from shared_core.distributed.sharded_tensors import reshard_
from shared_core.engine.checks.claims import Claim
from shared_core.engine.checks.model_guards import is_element_wise
from shared_core.engine.observers.micro_batches import mean_over_micro_batch
from shared_core.engine.observers.optimizer_modes import OptimizerModes
from shared_core.engine.plan import Plan, Touched
from shared_core.engine.protocols import FollowsWeights, Window, offering
from shared_core.engine.services import Services
from shared_core.errors import ConfigError
from shared_core.modules.calls import buffers_restored

Result = TypeVar("Result")


def returned(key: str, hook: str, result: Result, kind: type[object]) -> Result:
    """Return the result of a technique's hook.

    Raises:
        TypeError: If it is of another kind, often None because the hook lacks a `return`.
    """
    if not isinstance(result, kind):
        raise TypeError(f"{key}: {hook} must return a value of type {kind.__name__}, got {type(result).__name__}")
    return result


class Undo:
    """Calls to make at the end of a run, last to first.

    Unlike with `ExitStack`, a deep copy of a run restores the copied model, not the original.

    Example:
        >>> undo = Undo()
        >>> undo.callback(print, "first in, last out")
        >>> undo.callback(print, "last in, first out")
        >>> undo.close()
        last in, first out
        first in, last out
    """

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []

    def callback(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Add a call."""
        self._calls.append(functools.partial(function, *args, **kwargs))

    def close_with(self, function: Callable[[], object]) -> None:
        """Add a call to make after all others."""
        self._calls.insert(0, function)

    def close(self) -> None:
        """Make all calls once. An error in one does not prevent the others."""
        calls, self._calls = self._calls, []
        with contextlib.ExitStack() as stack:
            for call in calls:
                stack.callback(call)


Purpose = Literal["evaluate", "checkpoint", "export"]


@dataclass
class Context:
    """The run, passed to every hook. One object lives from `Session.attach` to the end of the run."""

    model: nn.Module
    """The user's model without wrappers (DDP, compile)."""
    front_end: str = "bare"
    services: Services = field(default_factory=Services)
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    unheld: Mapping[nn.Parameter, str] = field(default_factory=dict)
    """Parameters that require gradients but were in no optimizer when training began, and their names."""
    shapes: Mapping[nn.Module, list[torch.Size]] = field(default_factory=dict)
    """Shapes of each module's parameters before techniques attached."""
    step: int = 0
    """Optimizer steps applied so far. Micro-batches and skipped steps don't count."""
    skipped: int = 0
    """Steps that were skipped or discarded."""
    steps_before_load: tuple[int, int] = (0, 0)
    """Steps applied and skipped before an earlier state was loaded."""
    total_steps: int | None = None
    steps_per_epoch: StepsPerEpoch | None = None
    clips_gradients: bool = True
    """True if the trainer clips by norm."""
    normalize: Callable[[Tensor, Tensor | int], Tensor] = mean_over_micro_batch
    """``normalize(total, count)`` averages a sum over `count` positions as this trainer averages the task loss."""
    resumed: Mapping[str, Any] = field(default_factory=dict)
    """States of the techniques in the checkpoint whose weights are loaded next. Some techniques attach by them."""
    note: Callable[[str], None] = lambda text: None
    """Print a message once and add it to the receipt. `services.say` only prints."""
    drop: Callable[[Callable[..., Any]], None] = lambda method: None
    """``drop(self.forward)`` stops the session from calling this method for the rest of the run."""
    restructured: Callable[[], None] = lambda: None
    """Declare that the layers changed for good: saved models must load into the model as it is now."""
    projections: list[Callable[[Mapping[Tensor, Tensor] | None], None]] = field(default_factory=list)
    """Constraints on weights (masks, shared values), in the order of composition. Techniques append them in `attach`.
    Each applies its constraint in place: to the weights (None), or to the given values of parameters. For a sharded
    parameter it applies to the local shard."""
    projection_changes: int = 0
    """Version of the constraints. A technique increments it when one of its projections changes."""
    windows: dict[str, Window] = field(default_factory=dict)
    """State that accumulates within one accumulation window, by ``<key>.<name>``. Techniques add it in `attach`. It is
    saved with the gradients of an unfinished window, and restored after `begin`."""
    part_alone: bool = False
    """True if checkpoints hold only what `SavesPart` returns. The other weights come from the user's model."""
    is_preview: bool = False
    """True if the model is only inspected: `attach` writes, loads and sets nothing outside it."""
    widen_gradients: Callable[[torch.optim.Optimizer], None] | None = None
    """Casts an optimizer's gradients to float32 so that a scaler can unscale them. Set by a technique that updates
    16-bit parameters in float32."""
    in_full_precision: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda weights: weights
    """Return the weights that the optimizer steps, where parameters are their 16-bit copies. Every process must call
    it."""
    modes: OptimizerModes = field(init=False)
    """Switches optimizers with a train and an eval mode. A technique that swaps other weights into the model calls
    `hold` before and `release` after, so that a mode switch does not change them."""
    discard_step: bool = False
    """Set by a technique in `before_step`, equally on every rank, to discard the step. The session then drops all
    gradients, so that the optimizer changes nothing, and the step counts as skipped."""
    adds_parameters: bool = False
    """True if the optimizers existed before `attach` and received the parameters that techniques added."""
    takes_gradients_in_backward: bool = False
    """True if an optimizer steps inside backward, so that no gradients are left for `before_step`."""
    techniques: Mapping[str, Technique] = field(default_factory=dict)
    """All techniques of the recipe by key, in the order of composition."""
    touched: dict[str, Touched] = field(default_factory=dict)
    """What each technique chose in the model, by recipe key."""
    undo: Undo = field(default_factory=Undo)
    """Actions that restore the user's model. Techniques push them in `attach`."""
    plans: dict[str, Plan] = field(default_factory=dict)
    """The latest plan of each technique, by recipe key. Techniques earlier in the order of composition have begun."""
    unvalidated: bool = False
    """True if the weights changed after the last validation. A technique sets it when it puts in other weights or
    ranges. Training steps don't set it."""
    generator: torch.Generator = field(default_factory=torch.Generator)
    """Random numbers for techniques: seeded from the run's seed, equal on every rank, part of the saved state."""

    default_device: torch.device = field(default_factory=torch.get_default_device)
    """The script's default device. `attach` and `begin` of techniques run under the CPU instead."""

    def __post_init__(self) -> None:
        self.modes = OptimizerModes(self._weights_moved)

    def _weights_moved(self) -> None:
        reshard_(self.model)
        self.project()

    def calibrate(self, num_batches: int) -> None:
        """Run some training batches through the model, as `Services.calibrate` does, on the script's default device.

        Buffers are restored: batch norm statistics would otherwise move by what this process alone sees.
        """
        with buffers_restored(self.model), self.default_device:
            self.services.calibrate(num_batches)

    def project(self, values: Mapping[Tensor, Tensor] | None = None) -> None:
        """Apply all constraints to the weights, or to the given values of parameters."""
        for projection in self.projections:
            projection(values)

    def report_weights_replaced(self) -> None:
        """Tell every technique that the weights were replaced: masks are re-applied, ranges re-estimated."""
        self.project()
        for _, following in offering(self.techniques, FollowsWeights):
            following.weights_replaced(self)

    @property
    def gradients_mix(self) -> bool:
        """True if a gradient's elements influence each other in a step, so that those of masked weights must be zeroed.

        They do if the trainer clips by norm, and in every optimizer that is not known to be element-wise.
        """
        return self.clips_gradients or not all(map(is_element_wise, self.optimizers))

    @property
    def has_gradients(self) -> bool:
        """True if the next step has a gradient. A script may skip every micro-batch of a window."""
        if not self.optimizers or self.takes_gradients_in_backward:
            return True  # their absence cannot be seen
        held = (value for one in self.optimizers for group in one.param_groups for value in group["params"])
        return any(value.grad is not None for value in held)

    @property
    def furthest(self) -> tuple[int, int]:
        """Steps applied and skipped in this run. Loading an earlier state does not reduce them."""
        return max(self.steps_before_load, (self.step, self.skipped))

    def ask_plans(self) -> dict[str, Plan]:
        """Ask every technique for its plan again.

        Raises:
            ConfigError: If a position does not fit the run.
        """
        for key in self.techniques:
            self.ask_plan(key)
        return self.plans

    def ask_plan(self, key: str) -> Plan:
        """Ask one technique for its plan again."""
        self.plans[key] = returned(key, "plan", self.techniques[key].plan(self), Plan)
        return self.plans[key]

    def events_after(self, step: int, *, with_end: bool = False) -> list[tuple[str, int | None, str]]:
        """Return the events planned after a step: recipe key, step (None: after training, if wanted) and event."""
        events = [(key, at, what) for key, plan in self.plans.items() for at, what in plan.events]
        return [event for event in events if (with_end if event[1] is None else event[1] > step)]

    @property
    def first_usable_step(self) -> int:
        """The first step whose weights satisfy all plans."""
        return max((plan.usable_from for plan in self.plans.values()), default=0)

    def resolve(self, position: Position, where: str) -> int:
        """Return the optimizer step of a position in this run; refuse one after its end.

        Raises:
            ConfigError: If it lies after the run.
        """
        parsed = parse_position(position, where)
        step = parsed.resolve(where, total_steps=self.total_steps, steps_per_epoch=self.steps_per_epoch)
        if self.total_steps is not None and step > self.total_steps:
            rule = f"must lie within the {self.total_steps} steps of this run, got {position!r} = step {step}"
            raise ConfigError(where, rule, "write a fraction of the run, such as 0.5, or train longer")
        return step

    def resolve_range(self, begin: Position, end: Position, where: str) -> tuple[int, int]:
        """Return ``(begin, end)`` as optimizer steps.

        Raises:
            ConfigError: If the range ends before it begins, or after training. It may be empty.
        """
        first, last = self.resolve(begin, f"{where}.begin"), self.resolve(end, f"{where}.end")
        if last < first:
            rule = f"end ({end!r} = step {last}) must not come before begin ({begin!r} = step {first})"
            raise ConfigError(where, rule, f"write an earlier {where}.begin, or also set {where}.end")
        return first, last


class Technique:
    """Base class for techniques. Override the hooks you need; the others do nothing.

    Args:
        config: The technique's options, already validated.
    """

    needs_window_mean: ClassVar[bool] = False
    """True if `loss` needs a task loss averaged over the whole accumulation window, however it is split."""
    reaches_frozen: ClassVar[bool] = False
    """True if it also works on frozen weights. Frozen weights that it skips then count against its coverage."""
    replaces_weights: ClassVar[bool] = False
    """True if `finish` puts other weights into the model. It then calls `context.report_weights_replaced`, and finishes
    before the techniques that follow weights (`finishes_before`)."""
    makes_gradients_private: ClassVar[bool] = False
    """True if its `before_step` runs before that of every other technique."""

    def __init__(self, config: TechniqueConfig) -> None:
        self.config, self.key = config, config.key

    # -- describe

    def plan(self, context: Context) -> Plan:
        """Return what happens when, what is missing, and what must not change. Asked again at each use.

        Resolve positions, and store them if you like, but leave the model as it is. Also called before `begin`.

        Raises:
            ConfigError: If a position does not fit the run.
            UnknownLengthError: If a position is a share of a run of unknown length.
        """
        return Plan()

    # -- attach

    def attach(self, context: Context) -> Touched:
        """Prepare the model before the optimizer exists and before any wrapping. Return what was chosen in it.

        Choosing no layers or weights is an error. Push an action to `context.undo` for each change, which reverts it
        without touching the user's weights. They run in reverse order when the run is over or was cut short.
        """
        return Touched()

    def leave_unheld(self, context: Context) -> Touched:
        """Stop acting on the parameters in `context.unheld`, which no optimizer holds. Return what is left.

        Called once, before a state is restored, and only if there are such parameters.
        """
        return context.touched[self.key]

    # -- train

    def begin(self, context: Context, state: Mapping[str, Any] | None) -> None:
        """Restore what `state_dict` returned, or start fresh. The optimizer exists.

        Called again when an earlier state is loaded during a run, or the best one at its end. Then first remove what
        the previous call put in.

        Args:
            context: The run. On a resume its weights and step are already the checkpoint's.
            state: This technique's state in the checkpoint, None without one.
        """

    def forward(self, context: Context) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for one micro-batch's forward pass and loss.

        Backward runs after it, and needs what forward saved: to compute with other weights, put new tensors in front of
        the parameters (``vars(module)["weight"] = ...``) instead of writing into them, and take them away at the end.
        """
        return contextlib.nullcontext()

    def loss(self, task_loss: Tensor, context: Context) -> Tensor:
        """Return the loss to train on. Called after the forward pass."""
        return task_loss

    def before_step(self, context: Context) -> None:
        """Change gradients in place. They are complete and unscaled, but not yet clipped.

        A parameter's `grad` may be None, sparse or a DTensor. LBFGS calls this more than once per step.
        """

    def after_step(self, context: Context, applied: bool) -> None:
        """Called after the step. If it was skipped or discarded, `applied` is False and nothing advances."""

    # -- evaluate and save

    def swapped(self, context: Context, purpose: Purpose) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for a validation or a save, entered on every process. Exceptions pass through it.

        Inside, the model holds the weights to evaluate, to resume from (``"checkpoint"``), or to give to the user
        (``"export"``). A save may come inside a validation: exchange the weights again, and restore those that were in
        the model before. A file may need both kinds, so implement `Bakes` too. A sharded technique gathers on entering,
        because one process saves alone.
        """
        return contextlib.nullcontext()

    # -- finish

    def finish(self, context: Context) -> None:
        """Called at the end of training: write the result into plain weights, in place, and leave stock modules."""

    def claims(self, context: Context) -> Mapping[str, Claim]:
        """Return what the final report says about weights, by name in the model's state dict.

        Called on every process after all techniques have finished, so gathered weights can be counted here.
        """
        return {}

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Return everything that an exact resume needs: tensors, numbers, strings, lists, and dicts with string keys.

        The session saves the step and `context.generator`.
        """
        return {}

    # -- report

    def figures(self) -> dict[str, float]:
        """Return figures for the progress bar and the logger, named ``<key>/<figure>`` as the config declares them."""
        return {}

    def report(self) -> dict[str, Any]:
        """Return what was touched, what ran and what it cost, for the receipt. Count again; don't rely on counters."""
        return {}

    @staticmethod
    def summary(report: Mapping[str, Any]) -> list[str]:
        """Return a report in plain sentences, the result first. It may have been read from a file.

        Without any, a receipt shows the report's own names and figures.
        """
        return []
