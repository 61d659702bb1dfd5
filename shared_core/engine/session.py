"""`Session`: one training run. It drives a recipe's techniques, counts steps, and saves and restores their state."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.checkpoint_formats.plain import PlainKeys
from shared_core.checkpoint_formats.saved_rows import save_as_float_
from shared_core.config.training_time import StepsPerEpoch
from shared_core.distributed.sharded_tensors import is_tensor_parallel, join_buffers_, place_gradients_
from shared_core.engine.checks import compatibility, coverage, model_guards
from shared_core.engine.checks.optimizer_parameters import joined_note
from shared_core.engine.hooks import Hooks, overrides
from shared_core.engine.observers.expert_use import ExpertUse
from shared_core.engine.observers.history import History, Validation
from shared_core.engine.observers.micro_batches import MicroBatchMeans
from shared_core.engine.observers.progress import Progress, not_finite_note
from shared_core.engine.observers.step_watch import StepWatch
from shared_core.engine.plan import Touched
from shared_core.engine.protocols import LooksFirst, PreparesOptimizer, SeesMetrics, offering
from shared_core.engine.receipt import Receipt
from shared_core.engine.recipe import Recipe
from shared_core.engine.registry import REGISTRY, in_order
from shared_core.engine.saving.saved_files import SavedFiles, Swaps
from shared_core.engine.saving.session_state import UnsavedBuffers, reading, restore, state_of
from shared_core.engine.services import Services
from shared_core.engine.technique import Context, Purpose, Technique, returned
from shared_core.errors import TrainingError
from shared_core.modules.calls import forget_compiled
from shared_core.modules.like_stock import leave_look_alikes, take_look_alikes


def _layers_in_parts(model: nn.Module) -> set[str]:
    return {"tensor_parallel"} if is_tensor_parallel(model) else set()


class Session:
    """One run of a recipe. A front end calls its methods at the moments they name.

    `front_ends.session.Session` is what users and front ends make, and describes the arguments.
    """

    def __init__(
        self, recipe: Mapping[str, Any], *, front_end: str = "bare", services: Services | None = None, seed: int = 0
    ) -> None:
        self.recipe, self.front_end, self._seed = Recipe.from_dict(recipe), front_end, seed
        self._services = services or Services()
        self._reset()

    def _reset(self) -> None:
        self.techniques = {key: REGISTRY[key].technique_class(config) for key, config in self.recipe.items()}
        self.context: Context | None = None
        self.notes: list[str] = []
        self.coverage = coverage.Coverage()
        """How much of the weights that multiply activations each technique reaches, by key."""
        self.is_changed = False
        """True if the run resumed from a checkpoint of another recipe, whose best model is not what was asked for."""
        self.plain: PlainKeys | None = None
        self.unsaved_buffers = UnsavedBuffers(nn.Module())
        self._is_tensor_parallel = False
        self.has_begun = False
        """True if `begin` was called in this run."""
        self.is_finished = False
        """True if the run ended and the model is plain again."""
        self.is_complete = False
        """True if the run ended by `finish`, not by `detach`."""
        self.is_resumed = False
        """True if the run began with a loaded state."""
        self._restored: Mapping[str, Any] = {}
        self._final_reports: dict[str, Any] = {}
        self._joined: tuple[int, int] | None = None
        self.steps, self.experts, self._means = StepWatch(), ExpertUse(), MicroBatchMeans(self.front_end)
        self.history, self.progress, self.validation = History(), Progress(self), Validation(self)
        self.files, self.swaps = SavedFiles(self), Swaps(self)
        self.started, self.hooks = time.perf_counter(), Hooks(self.techniques)

    @property
    def is_attached(self) -> bool:
        """True if the techniques are attached to a model."""
        return self.context is not None and not self.is_finished

    @property
    def is_live(self) -> bool:
        """True while the techniques act, from `begin` until the run ends."""
        return self.has_begun and not self.is_finished

    @property
    def step(self) -> int:
        """Optimizer steps applied so far."""
        return self.context.step if self.context else 0

    @property
    def skipped(self) -> int:
        """Steps that were skipped or discarded so far."""
        return self.context.skipped if self.context else 0

    def attach(
        self, model: nn.Module, run_environment: Iterable[str] = (), resumed: Mapping[str, Any] | None = None
    ) -> None:
        """Prepare the user's unwrapped model before the optimizer exists. A second call on it does nothing.

        Args:
            model: The user's model.
            run_environment: Keys of `environments.RUN_ENVIRONMENTS` that apply to this run.
            resumed: States of the techniques, by key, in the checkpoint that is loaded next.

        Raises:
            CompatibilityError: If the recipe cannot run in this environment.
            MatchError: If a technique matches nothing or too little (`coverage.ENOUGH`). The model is restored.
            TrainingError: If another session is attached to the model, or this one to another model.
        """
        environment = {*run_environment, *_layers_in_parts(model)}
        if self.front_end == "bare":  # trainers tell it themselves
            environment |= model_guards.wrapped_by_user(model) - {"sharded_by_user"}
        compatibility.check(self.recipe, environment)
        compatibility.refuse_late_weights(self.techniques)
        if self.is_finished:
            self._reset()
        if self.context is not None:
            if self.context.model is model:
                return
            raise TrainingError("session", "must be attached to one model only", "make a session for each")
        # Checked before anything changes: two sessions on one model would undo each other's work.
        model_guards.refuse_second_session(self, model)
        context, reduced = self._context_of(model, resumed or {}), model_guards.trained_in_ddp(model)
        try:
            self._look_at(context)
            for key, technique in self.techniques.items():
                with self.hooks.timed(key), torch.device("cpu"):
                    context.touched[key] = returned(key, "attach", technique.attach(context), Touched)
            model_guards.refuse_not_reduced(model, reduced)
            # The run of a checkpoint was measured when it began, and knew what the optimizers hold.
            self.coverage.measure(context, allow_partial=self.recipe.allow_partial or bool(resumed))
            for note in coverage.frozen_notes(context.touched):
                self.note(note)
        except BaseException:
            context.undo.close()
            raise
        if self.coverage:
            self.experts.watch(model)
        self.context = context
        self.note(save_as_float_(model))

    def _context_of(self, model: nn.Module, resumed: Mapping[str, Any]) -> Context:
        # The user's keys, to compare saved ones with.
        self.plain, self.unsaved_buffers = PlainKeys(model), UnsavedBuffers(model)
        context = Context(
            model, self.front_end, self._services, techniques=self.techniques, resumed=resumed, note=self.note,
            drop=self.hooks.drop, restructured=functools.partial(self.plain.read, model),
        )  # fmt: skip
        context.generator.manual_seed(self._seed)
        return context

    def _look_at(self, context: Context) -> None:
        """Find out what techniques need to know about the model before they change it."""
        if self.techniques:
            context.undo.callback(leave_look_alikes, take_look_alikes(context.model))
            self.coverage.look_at(context)
        # A teacher that copies the student must copy the plain model. It lives on the CPU, whatever default device the
        # script or Lightning (around configure_model) has set.
        with torch.device("cpu"):
            for _, looking in offering(self.techniques, LooksFirst):
                looking.before_attach(context)

    def prepare_optimizers(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Show the optimizers to the techniques before their saved state is loaded. Only a resume needs it."""
        context = self.context_for("prepare_optimizers")
        context.optimizers = tuple(optimizers)
        self._leave_unheld(context)
        for _, preparing in offering(self.techniques, PreparesOptimizer):
            preparing.prepare_optimizers(context)

    def begin(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        total_steps: int | None,
        steps_per_epoch: StepsPerEpoch | None = None,
        clips_gradients: bool = True,
        wrappers: Iterable[Any] = (),
    ) -> None:
        """Start the run or resume it. The optimizer exists, and on a resume `load_state_dict` was called.

        Args:
            optimizers: The unwrapped torch optimizers.
            total_steps: Optimizer steps of the whole run, None if unknown.
            steps_per_epoch: Optimizer steps per epoch, a list where epochs differ, None if unknown.
            clips_gradients: True if gradients are clipped by norm.
            wrappers: The trainer's wrappers of these optimizers, which a script may call instead.

        Raises:
            ConfigError: If a position does not fit the run.
        """
        context = self.context_for("begin")
        if self.is_finished:
            raise TrainingError("session", "begin was called after the session was detached", "call attach first")
        optimizers = model_guards.optimizers_of(optimizers, self.front_end)
        in_parts = _layers_in_parts(context.model)  # may have changed since `attach`
        compatibility.check(self.recipe, in_parts | model_guards.kinds_of(optimizers))
        self._is_tensor_parallel = bool(in_parts)
        context.optimizers, context.clips_gradients = optimizers, clips_gradients
        context.total_steps, context.steps_per_epoch = total_steps, steps_per_epoch
        context.modes.watch(context.optimizers, wrappers)
        self.unsaved_buffers.mark()  # now they hold what training begins with
        plans = context.ask_plans()
        compatibility.refuse_without_batches(context)
        self._leave_unheld(context)
        added = "session" if context.adds_parameters else ""  # the optimizer's hooks miss parameters made after it
        acting = next((key for key, _ in self.hooks.before_step if plans[key].acts_on_gradients), added)
        self.steps.watch(context.model, context.optimizers, acting, is_bare=self.front_end == "bare")
        self.started = self.started if self.has_begun else time.perf_counter()
        context.default_device = torch.get_default_device()
        self.begin_again()
        self.has_begun = True
        for remark in [*coverage.lines(self.coverage), *compatibility.remarks(self.recipe)]:
            self.note(remark)

    def begin_again(self) -> None:
        """Hand each technique the state that `load_state_dict` restored. `begin` does so too.

        Call it alone after loading a state during a run. Load the weights before, and the optimizers if more steps
        follow.
        """
        context = self.context_for("begin_again")
        for key, technique in self.techniques.items():
            state = self._restored.get(key)
            guard = contextlib.nullcontext() if state is None else reading(key)
            with self.hooks.timed(key), guard, torch.device("cpu"):
                context.ask_plan(key)  # first, because later techniques read it
                technique.begin(context, state)
        self._restored = {}
        if self.techniques:
            forget_compiled()

    def _leave_unheld(self, context: Context) -> None:
        if self.techniques and (note := self.coverage.learn_held(context, self.hooks.timed)):
            self.coverage.measure(context, allow_partial=self.recipe.allow_partial)
            self.note(note)

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager for one micro-batch's forward pass and loss. A no-op before `begin`."""
        if self.context is None or not self.is_live:
            return contextlib.nullcontext()
        self.steps.check_reported()
        around = self.hooks.around_forward(self.context)
        # In the first steps, weights are recorded after the forward pass.
        return self.steps.marking(around) if self.steps.is_comparing else around

    def loss(self, task_loss: Tensor, normalize: Callable[[Tensor, Tensor | int], Tensor] | None = None) -> Tensor:
        """Return the loss to train on.

        Args:
            task_loss: The user's loss of this micro-batch, as the trainer would use it.
            normalize: ``normalize(total, count)`` averages a sum as the trainer averages the task loss. The default
                averages over the micro-batch, so that all micro-batches of a step weigh the same.
        """
        if self.hooks.loss and self.is_live:
            context = self.context_for("loss")
            self._means.open()
            context.normalize = normalize or self._means.normalize
            task_loss = self.hooks.mixed(task_loss, context)
        self.steps.mark()
        return task_loss

    def before_step(self) -> None:
        """Call when gradients are complete and unscaled, but not yet clipped."""
        context = self.context_for("before_step")
        self.note(self._means.close())
        self.steps.before_step()
        context.takes_gradients_in_backward = bool(self.steps.inside_backward)
        if self._is_tensor_parallel:
            place_gradients_(context.model)
        if self.is_live:
            self.hooks.call(self.hooks.before_step, context)
        if context.discard_step:
            self.steps.discard()

    def after_step(self, applied: bool = True) -> bool:
        """Count the optimizer's step. Return True if it was applied and not discarded.

        Args:
            applied: False if a scaler skipped the step.

        Raises:
            TrainingError: If another optimizer made the step.
        """
        context = self.context_for("after_step")
        # For the trainer a discarded step did happen, without gradients.
        applied, context.discard_step = applied and not context.discard_step, False
        self.steps.after_step(skipped=not applied)
        if applied:
            context.step += 1
            if context.step & (context.step - 1) == 0:
                self.refuse_changed()  # at powers of two, so that at most half of the training time is lost
            if context.total_steps is not None and context.step > context.total_steps:
                self.progress.passed_end()
        else:
            context.skipped += 1
        if self.is_live:
            self.hooks.call(self.hooks.after_step, context, applied)
        return applied

    def swapped(self, purpose: Purpose) -> contextlib.AbstractContextManager[None]:
        """Hold the weights to evaluate or to save in the model, on every process.

        In nested calls for one purpose, or for two kinds of files, only the outermost acts.

        Args:
            purpose: ``"evaluate"``, ``"checkpoint"`` (weights to resume from) or ``"export"`` (weights for the user).
        """
        return self.swaps.during(purpose)

    def evaluated(self, metrics: Mapping[str, float | Tensor]) -> None:
        """Record the metrics of the user's validation of the current weights. A no-op before `begin`."""
        if self.has_begun:
            self.history.validated(self.step, metrics)
        if self.context is not None and self.is_live:
            self.validation.saw(metrics)
            for key, seeing in offering(self.techniques, SeesMetrics):
                with self.hooks.timed(key):
                    seeing.evaluated(self.context, metrics)

    def finish(self) -> None:
        """End the run: write the result into plain weights and leave stock modules. A second call does nothing.

        Targets that were not reached are reported, not forced: nothing is pruned after the last step.
        """
        if self.is_finished or self.context is None:
            return
        if not self.has_begun:
            if self.recipe:
                self.note(f"Training ended before its first step, so nothing was applied of: {', '.join(self.recipe)}")
            self.detach()
            self.is_complete = True
            return
        self.swaps.end_evaluation()
        self.settle_optimizers()
        self.refuse_changed()
        self.join_buffers()
        self.experts.join()
        self.note(self._means.differing())
        self.progress.note_unreached()
        self.note(self.experts.note())
        # The order of finishing differs from the order of attaching, see `finishes_after`.
        for key in in_order(self.techniques, "finish"):
            with self.hooks.timed(key):
                self.techniques[key].finish(self.context)
        claimed = {
            key: returned(key, "claims", one.claims(self.context), Mapping) for key, one in self.techniques.items()
        }
        self.detach()
        self.is_complete = True
        self.files.settle(claimed)
        self.note(not_finite_note(self.context.model))

    def settle_optimizers(self) -> None:
        """Make optimizers with an eval mode leave its weights in the model for good, because the run ends."""
        context = self.context_for("settle_optimizers")
        if any(overrides(one.claims, Technique.claims) for one in self.techniques.values()):
            context.modes.settle()

    def join_buffers(self) -> None:
        """Copy the main process's buffers to all, since final weights may depend on them. Each process must call it."""
        context, place = self.context_for("join_buffers"), (self.step, self.skipped)
        if self.techniques and not self._is_tensor_parallel and self._joined != place:
            self._joined = place
            join_buffers_(context.model)

    def detach(self) -> None:
        """Leave stock modules without writing the result into them, because the run was cut short."""
        if self.context is None or self.is_finished:
            return
        self.steps.close()
        self.experts.close()
        self.context.modes.leave()
        try:
            self._final_reports = self.reports()  # stock layers cannot be asked later
            self.progress.keep()
        finally:
            self.context.undo.close()
            self.is_finished = True

    def state_dict(self) -> dict[str, Any]:
        """Return all that an exact resume needs in addition to what the trainer saves."""
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state after `attach`. A changed recipe is reported.

        `begin` or `begin_again` then hands each technique its state, and refuses a damaged one.

        Raises:
            CheckpointError: If the state does not come from a session.
        """
        changes = restore(self, state)
        self._restored = state["techniques"]
        if self.has_begun:
            self.validation.restored()
        self.is_resumed |= not self.has_begun
        self.is_changed |= bool(changes)
        for change in changes:
            self.note(f"resumed {change}")

    def figures(self) -> dict[str, float]:
        """Return the figures of all techniques for progress bar and logger, and record them for the receipt."""
        self.note(self._means.differing())
        return self.history.logged(self.step, self.techniques)

    def note(self, text: str) -> None:
        """Print a message once and add it to the receipt. An empty one is ignored."""
        if text and text not in self.notes:
            self.notes.append(text)
            self._services.say(f"efftrain: {text}")

    def receipt(self) -> Receipt:
        """Return what was asked for, what was changed, what ran so far, and what it cost."""
        return Receipt.of(self)

    def reports(self) -> dict[str, Any]:
        """Return each technique's report by key. After the run, the report from before its end."""
        return self._final_reports or {
            key: returned(key, "report", one.report(), Mapping) for key, one in self.techniques.items()
        }

    def context_for(self, verb: str) -> Context:
        """Return the run; raise `TrainingError` before `attach`."""
        if self.context is None:
            raise TrainingError("session", f"attach must come before {verb}", "call session.attach(model) first")
        return self.context

    def refuse_changed(self) -> None:
        """Refuse a model whose techniques' layers were replaced by other code. Walks through the model."""
        if self.is_live:
            context = self.context_for("refuse_changed")
            model_guards.refuse_changed(context.ask_plans(), context)
            self.note(joined_note(self.coverage.idle, context.optimizers))
