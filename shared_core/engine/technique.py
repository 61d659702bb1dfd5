"""The hooks of a technique, and the run that they are called with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from shared_core.config.options import TechniqueConfig
from shared_core.config.training_time import Position, StepsPerEpoch, parse_position
from shared_core.engine.checks.claims import Claim
from shared_core.engine.checks.model_guards import is_element_wise
from shared_core.engine.observers.micro_batches import mean_over_micro_batch
from shared_core.engine.observers.optimizer_modes import OptimizerModes
from shared_core.engine.observers.unsaved_buffers import LeftOutBuffers
from shared_core.engine.plan import Plan, Touched
from shared_core.engine.protocols import FollowsWeights, Window, offering
from shared_core.engine.services import BareServices, Services
from shared_core.engine.undo import Undo
from shared_core.errors import ConfigError
from shared_core.modules.calls import buffers_restored

Purpose = Literal["evaluate", "checkpoint", "export"]


@dataclass
class Context:
    """The run, as every hook of a technique is told. One object lives from `Session.attach` to the end of that run."""

    model: nn.Module
    """The user's model without wrappers (DDP, compile)."""
    front_end: str = "bare"
    services: Services = field(default_factory=BareServices)
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    unheld: Mapping[nn.Parameter, str] = field(default_factory=dict)
    """Parameters that require gradients but were in no optimizer when training began, with their names."""
    shapes: Mapping[nn.Module, list[torch.Size]] = field(default_factory=dict)
    """The shapes of the parameters of each module, before techniques attached."""
    step: int = 0
    """Applied optimizer steps so far; micro-batches and skipped steps do not count."""
    skipped: int = 0
    """Steps that were skipped or discarded."""
    reached: tuple[int, int] = (0, 0)
    """Steps applied and skipped before an earlier state was loaded."""
    total_steps: int | None = None
    steps_per_epoch: StepsPerEpoch | None = None
    clips_gradients: bool = True
    """True if the trainer clips by norm."""
    normalise: Callable[[Tensor, Tensor | int], Tensor] = mean_over_micro_batch
    """``normalise(total, count)``: a sum over counted positions, averaged as this trainer averages the task loss."""
    resumed: Mapping[str, Any] = field(default_factory=dict)
    """The techniques' states in a checkpoint whose weights are loaded next, for those that attach as it needs."""
    note: Callable[[str], None] = lambda text: None
    """Tells the user one line, and keeps it among the notes of the receipt; the same line only once."""
    drop: Callable[[Callable[..., Any]], None] = lambda method: None
    """``drop(self.forward)``: the session calls this method of a technique no more in this run."""
    restructured: Callable[[], None] = lambda: None
    """Tells that the model, as it is now, is what saved models are to be loaded in: its layers changed for good."""
    projections: list[Callable[[Mapping[Tensor, Tensor] | None], None]] = field(default_factory=list)
    """Constraints of weights (masks, shared values), in the order of composition: techniques append in `attach` what
    makes it hold, in place, of the weights (None), or of other values for parameters; of a sharded one, of its part."""
    projection_changes: int = 0
    """Version of the constraints: techniques count it up where a projection does something else from then on."""
    windows: dict[str, Window] = field(default_factory=dict)
    """State that gathers within an accumulation window, by ``<key>.<name>``: techniques add it in `attach`. It is saved
    with the gradients of a window that is not over, and restored after `begin`."""
    is_preview: bool = False
    """True if the model is only looked at: `attach` writes, loads and sets nothing outside of it."""
    widen_gradients: Callable[[torch.optim.Optimizer], None] | None = None
    """Set by a technique that updates 16-bit parameters in float32: makes an optimizer's gradients float32, so that a
    scaler can unscale them."""
    in_full_precision: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda weights: weights
    """Returns weights as they are stepped, where parameters are 16-bit copies of them; every process must call it."""
    modes: OptimizerModes = field(default_factory=OptimizerModes)
    """Keeps optimizers that have modes from moving weights that are not theirs: a technique that puts others into the
    model calls `hold` before, and `release` once the weights are back."""
    discard_step: bool = False
    """A technique sets it in `before_step`, equally on every rank, to have this step discarded: the session
    drops all gradients, so that the optimizer changes nothing, and the step counts as skipped."""
    adds_parameters: bool = False
    """True if optimizers were made first and given what techniques added to the model; see `attach_with`."""
    takes_gradients_in_backward: bool = False
    """True if an optimizer steps inside backward, and leaves no gradients for the step that comes."""
    techniques: Mapping[str, Technique] = field(default_factory=dict)
    """All of the recipe, by key, in the order of composition."""
    touched: dict[str, Touched] = field(default_factory=dict)
    """By recipe key what each technique chose in the model."""
    undo: Undo = field(default_factory=Undo)
    """What techniques put here in `attach` gives the model back as the user made it."""
    plans: dict[str, Plan] = field(default_factory=dict)
    """By recipe key what each technique said last of its plan: those before in the order of composition have begun."""
    unvalidated: bool = False
    """True if the model holds what no validation of the user's has seen: a technique sets it where it puts in other
    weights or ranges; steps of training do not."""
    generator: torch.Generator = field(default_factory=torch.Generator)
    """For techniques that draw: seeded from the run's seed, the same on every rank, part of the saved state."""

    default_device: torch.device = field(default_factory=torch.get_default_device)
    """The script's own, which `attach` and `begin` of techniques are kept from."""
    left_out: LeftOutBuffers = field(init=False)
    """Buffers of the user's own that no state dict holds."""

    def __post_init__(self) -> None:
        self.left_out = LeftOutBuffers(self.model)

    def calibrate(self, num_batches: int) -> None:
        """Run some training batches through the model, as `Services.calibrate` does, under the script's own device.

        Buffers are left as they were: statistics of batch norms would move by what this process alone sees.
        """
        with buffers_restored(self.model), self.default_device:
            self.services.calibrate(num_batches)

    def project(self, values: Mapping[Tensor, Tensor] | None = None) -> None:
        """Make what must hold of weights hold of them, or of these other values for them."""
        for projection in self.projections:
            projection(values)

    def weights_replaced(self) -> None:
        """Tell every technique that the weights came from elsewhere: masks are re-applied, ranges re-estimated."""
        self.project()
        for _, following in offering(self.techniques, FollowsWeights):
            following.weights_replaced(self)

    @property
    def gradients_mix(self) -> bool:
        """True if elements of a gradient act on each other in a step: then those of dead weights must be zeroed first.

        They do where the trainer clips by norm, and in every optimizer that is not known to be element-wise.
        """
        # Clipping by a global norm couples all elements, too.
        return self.clips_gradients or not all(map(is_element_wise, self.optimizers))

    @property
    def has_gradients(self) -> bool:
        """True if the step that comes has a gradient: a script may leave out every micro-batch of a window."""
        if not self.optimizers or self.takes_gradients_in_backward:
            return True  # nothing tells that there were none
        held = (value for one in self.optimizers for group in one.param_groups for value in group["params"])
        return any(value.grad is not None for value in held)

    @property
    def furthest(self) -> tuple[int, int]:
        """Steps applied and skipped in this run: an earlier state that is loaded does not undo what happened."""
        return max(self.reached, (self.step, self.skipped))

    def ask_plans(self) -> dict[str, Plan]:
        """Ask every technique again what it plans, lacks and guards.

        Raises:
            ConfigError: If a position does not fit the run.
        """
        for key, technique in self.techniques.items():
            self.plans[key] = technique.plan(self)
        return self.plans

    def events_after(self, step: int) -> list[tuple[str, int, str]]:
        """Return what is planned for later than a step: recipe key, step and event."""
        planned = ((key, event) for key, plan in self.plans.items() for event in plan.events)
        return [(key, at, what) for key, (at, what) in planned if at is not None and at > step]

    @property
    def first_usable_step(self) -> int:
        """The step from which all plans hold of a checkpoint's weights."""
        return max((plan.usable_from for plan in self.plans.values()), default=0)

    @property
    def is_beyond_plan(self) -> bool:
        """True if more steps were applied than planned: schedules stay where they ended, all else goes on."""
        return self.total_steps is not None and self.step > self.total_steps

    def resolve(self, position: Position, where: str) -> int:
        """Return the optimizer step that a position means in this run."""
        parsed = parse_position(position, where)
        return parsed.resolve(where, total_steps=self.total_steps, steps_per_epoch=self.steps_per_epoch)

    def resolve_range(self, begin: Position, end: Position, where: str) -> tuple[int, int]:
        """Return ``(begin, end)`` as optimizer steps.

        Raises:
            ConfigError: If the range ends before it begins, or after training does; it may be empty.
        """
        first, last = self.resolve(begin, f"{where}.begin"), self.resolve(end, f"{where}.end")
        if last < first:
            raise ConfigError(
                where, f"end must not lie before begin, got begin {begin!r} = step {first}, end {end!r} = step {last}"
            )
        if self.total_steps is not None and last > self.total_steps:
            raise ConfigError(
                where, f"end must lie within the {self.total_steps} steps of this run, got {end!r} = step {last}"
            )
        return first, last


class Technique:
    """Base of techniques: override the hooks you need; the others do nothing.

    Args:
        config: The options of this technique, already checked.
    """

    key: ClassVar[str] = ""
    weighs_loss: ClassVar[bool] = False
    """True if `loss` needs a task loss that is averaged over the whole accumulation window, however it is cut."""
    reaches_frozen: ClassVar[bool] = False
    """True if it works on frozen weights too: then those that it leaves count against its coverage."""
    replaces_weights: ClassVar[bool] = False
    """True if it puts other weights into the model at the end; those that look at batches then do."""
    makes_gradients_private: ClassVar[bool] = False
    """True if `before_step` is called before that of every other technique."""

    def __init__(self, config: TechniqueConfig) -> None:
        self.config = config

    # -- describe

    def plan(self, context: Context) -> Plan:
        """Return what will happen when, what is missing, and what must stay as it is; asked before `begin`, too.

        Raises:
            ConfigError: If a position does not fit the run.
            UnknownLengthError: If one is a share of a run whose length is not known.
        """
        return Plan()

    # -- attach

    def attach(self, context: Context) -> Touched:
        """Prepare the model, before the optimizer exists and before any wrapping; return what was chosen in it.

        Matching nothing is an error. For each change something is put on `context.undo` that takes it back, without
        touching a weight that is the user's: called once the run is over or was cut short, the last one first.
        """
        return Touched()

    # -- train

    def begin(self, context: Context, state: Mapping[str, Any] | None) -> None:
        """Resolve positions; restore what `state_dict` returned, or make the first masks. The optimizer exists.

        Called again when an earlier state is loaded in the middle of a run, or the best one at its end: remove what the
        first call put in.

        Args:
            context: The run; weights and its step are those of the checkpoint already.
            state: This technique's in the checkpoint that the run goes on from; None if there is none.
        """

    def forward(self, context: Context) -> contextlib.AbstractContextManager[None]:
        """Return what surrounds the forward and the loss of each training micro-batch."""
        return contextlib.nullcontext()

    def loss(self, task_loss: Tensor, context: Context) -> Tensor:
        """Return the loss to train on, after the student's forward."""
        return task_loss

    def before_step(self, context: Context) -> None:
        """Gradients are complete and unscaled, not yet clipped."""

    def after_step(self, context: Context, applied: bool) -> None:
        """The step was applied, and ``context.step`` counts it; or it was skipped or discarded: nothing advances."""

    # -- evaluate and save

    def swapped(self, context: Context, purpose: Purpose) -> contextlib.AbstractContextManager[None]:
        """Return what surrounds a validation or saving, on every process; it is left by an exception too.

        Inside, the model holds what is evaluated, saved to go on from (``"checkpoint"``), or given to the user
        (``"export"``). A file may be saved inside a validation: then leave what was found. What a sharded technique
        gathers on entering, one process saves alone.
        """
        return contextlib.nullcontext()

    # -- finish

    def finish(self, context: Context) -> None:
        """End of training: bake into plain weights in place and leave stock modules behind."""

    def claims(self, context: Context) -> Mapping[str, Claim]:
        """Return by name in the model's state dict what the final report, asked for next, says of weights.

        Every technique has finished, and every process calls it: the place to count in weights that must be gathered.
        """
        return {}

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Return everything an exact resume needs: tensors, numbers, strings, lists and dicts of them."""
        return {}

    # -- report

    def figures(self) -> dict[str, float]:
        """Return figures for progress bar and logger, named ``<technique>/<figure>``."""
        return {}

    def report(self) -> dict[str, Any]:
        """Return what was touched, what ran and what it cost, for the receipt. Counts are recounted, not remembered."""
        return {}

    @staticmethod
    def summary(report: Mapping[str, Any]) -> list[str]:
        """Return a report in plain sentences, the result first. It may have been read from a file.

        Without any, a receipt shows the report's own names and figures.
        """
        return []
