"""One training run: drives the techniques of a recipe, counts steps, saves and restores, writes the receipt.

A checkpoint holds of a session the step, its generator, and the state of each technique. `fit_to` prepares a model for
a checkpoint's weights before they are loaded, since techniques may have changed its structure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Concatenate

import torch
from torch import Tensor, nn

from shared_core.checkpoint_formats.plain import PlainKeys
from shared_core.config.training_time import StepsPerEpoch
from shared_core.distributed.collectives import all_finite, broadcast_, local_part, world_size
from shared_core.distributed.sharded_tensors import is_sharded, is_tensor_parallel, place_gradients_, reshard_
from shared_core.engine import claims, compatibility, coverage, model_guards, preview
from shared_core.engine.claims import Where
from shared_core.engine.expert_use import ExpertUse
from shared_core.engine.hooks import Calls, Hooks, P
from shared_core.engine.metrics import History
from shared_core.engine.micro_batches import MicroBatchMeans
from shared_core.engine.optimizer_modes import OptimizerModes
from shared_core.engine.optimizer_parameters import (
    OptimizerParameters,
    joined_note,
    own_parameters,
    shapes_of,
    unheld,
    unheld_note,
    untrained_modules,
)
from shared_core.engine.preflight import check_all, reported_names
from shared_core.engine.receipt import Receipt, environment, figures
from shared_core.engine.recipe import Recipe
from shared_core.engine.registry import REGISTRY, in_order
from shared_core.engine.step_watch import StepWatch
from shared_core.engine.technique import BareServices, Context, Services, Technique
from shared_core.errors import CheckpointError, CompatibilityError, EffError, ReceiptError, TrainingError
from shared_core.modules.calls import forget_compiled


def _state_of(
    context: Context, techniques: Mapping[str, Technique], recipe: Recipe, skipped: int, history: History,
    experts: ExpertUse,
) -> dict[str, Any]:  # fmt: skip
    """Return the state as plain values and tensors."""
    return {
        "step": context.step, "skipped": skipped, "recipe": recipe.to_dict(),
        "generator": context.generator.get_state(), "history": history.state_dict(),
        "techniques": {key: technique.state_dict() for key, technique in techniques.items()},
        "buffers": context.left_out.changed(), "experts": experts.state_dict(),
    }  # fmt: skip


@contextlib.contextmanager
def _reading(key: str) -> Iterator[None]:
    """Tell whatever a reader of a saved state trips over as damage of that state; the reader's own error is the cause.

    Raises:
        CheckpointError: If reading fails, other than for want of memory or of a file, or with an error of ours.
    """
    try:
        yield
    except (EffError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a damaged state holds any value, and a reader may do anything with it
        raise CheckpointError(
            "resume",
            f"checkpoint's state of {key} must be one that a session saved, got {error!r} from it: it is damaged or "
            "of another version, or this error is a bug",
            "go on from another checkpoint",
        ) from error


def _restore(
    state: Mapping[str, Any], context: Context, techniques: Mapping[str, Technique], history: History,
    experts: ExpertUse,
) -> tuple[Mapping[str, Any], int]:  # fmt: skip
    """Put a saved state back; return the recipe that it was saved with and how many steps had been skipped.

    Raises:
        CheckpointError: If the state is not a session's.
    """
    with _reading("session"):
        saved, recipe = dict(state["techniques"]), dict(state["recipe"])
        step, skipped = int(state["step"]), int(state["skipped"])
        if step < 0 or skipped < 0:
            raise ValueError(f"step {step}, skipped {skipped}")
        context.generator.set_state(state["generator"])
        history.load_state_dict(state.get("history", {}))
        context.left_out.put_back(state.get("buffers", {}))
        experts.load_state_dict(state.get("experts", {}))
    context.step = step
    _refuse_foreign(saved, techniques)
    for key, technique in techniques.items():
        if key in saved:
            with _reading(key):
                technique.load_state_dict(saved[key])
    return recipe, skipped


def _refuse_foreign(saved: Mapping[str, Any], techniques: Mapping[str, Technique]) -> None:
    for key in techniques.keys() - saved.keys():
        if why := techniques[key].config.own_checkpoints:
            raise CheckpointError(key, f"checkpoint must be of a run with {key}, got one without, {why[0]}", why[1])


@contextlib.contextmanager
def _unstepped(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Surround saving: an optimizer of shards that has not stepped yet is not stepped by it.

    torch.distributed.checkpoint (2.13) steps one that has neither state nor gradients, with a rate and gradients of 0,
    so that the file has states. Adam would count that step in its bias correction, in this run and in a resumed one. So
    the file gets a count of 0, and the optimizer no state.
    """

    def count_none(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            if "step" in state:
                state["step"] *= 0

    fresh = [
        optimizer
        for optimizer in optimizers
        if any(is_sharded(value) for group in optimizer.param_groups for value in group["params"])
        and not optimizer.state
    ]
    handles = [optimizer.register_step_post_hook(count_none) for optimizer in fresh]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for optimizer in fresh:
            optimizer.state.clear()


def _layers_in_parts(model: nn.Module) -> set[str]:
    return {"tensor_parallel"} if is_tensor_parallel(model) else set()


class Session:
    """One run of a recipe. A front end calls its methods at the moments they name; so can a plain loop.

    Args:
        recipe: What to switch on; empty is allowed and changes nothing.
        front_end: Who drives: ``"bare"``, ``"accelerate"``, ``"fabric"``, ``"hf"`` or ``"lightning"``.
        services: What only a trainer can do (evaluate, load a teacher).
        seed: Seed of the techniques' own generator; the global generators are never seeded.

    Example:
        >>> import torch
        >>> model = nn.Linear(8, 4)
        >>> session = Session(Recipe.from_dict({"prune": {"sparsity": 0.5, "schedule": "one_shot", "begin": 1}}))
        >>> session.attach(model)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> session.begin([optimizer], total_steps=3)
        >>> for _ in range(3):
        ...     session.loss(model(torch.ones(2, 8)).square().mean()).backward()
        ...     session.before_optimizer_step()
        ...     optimizer.step()
        ...     _ = session.after_optimizer_step()
        ...     optimizer.zero_grad()
        >>> session.finish()
        >>> int((model.weight == 0).sum())
        16
    """

    def __init__(
        self, recipe: Mapping[str, Any], *, front_end: str = "bare", services: Services | None = None, seed: int = 0
    ) -> None:
        self.recipe, self._front_end, self._seed = Recipe.from_dict(recipe), front_end, seed
        self._services = services or BareServices()
        self._reset()

    def _reset(self) -> None:
        self.techniques: dict[str, Technique] = {
            key: REGISTRY[key].technique_class(config) for key, config in self.recipe.items()
        }
        self.context: Context | None = None
        self._run = object()
        self.skipped, self._eval_depth, self._seconds = 0, 0, dict.fromkeys(self.techniques, 0.0)
        self.notes: list[str] = []
        self.coverage: dict[str, coverage.Reach] = {}
        """By key what a technique of layers reaches of the weights that multiply activations."""
        self.is_changed = False
        """Whether a checkpoint of another recipe was resumed: its run's best is not what is asked for now."""
        self._plain: PlainKeys | None = None
        self._parameters: OptimizerParameters | None = None
        self._counted = coverage.Counted()
        self._trained: set[tuple[nn.Module, str]] = set()
        self._begun = self._finished = self._is_saving = self._is_tensor_parallel = self._knows_held = False
        self._evaluation = contextlib.ExitStack()
        self._restored: set[str] = set()
        self._final_reports: dict[str, Any] = {}
        self._planned: dict[str, list[preview.Event]] = {}
        self._final_unreached: dict[str, str] | None = None
        self._furthest, self._early_skips = (0, 0), 0
        self._joined: tuple[int, int] | None = None
        self._validated: tuple[int, dict[str, float]] | None = None
        self._final_evaluation: dict[str, float] = {}
        self._tells_of_best = self._is_on_plan = True
        self._experts = ExpertUse()
        self._history, self._steps, self._means = History(), StepWatch(), MicroBatchMeans()
        self._claims: claims.Claims = {}
        self._started, self._hooks = time.perf_counter(), Hooks(self.techniques)

    @property
    def front_end(self) -> str:
        """Who drives: ``"bare"``, ``"accelerate"``, ``"fabric"``, ``"hf"`` or ``"lightning"``."""
        return self._front_end

    @property
    def is_attached(self) -> bool:
        """Whether the techniques sit on a model now."""
        return self.context is not None and not self._finished

    @property
    def is_finished(self) -> bool:
        """Whether the run ended and the model is plain again."""
        return self._finished

    @property
    def is_saving(self) -> bool:
        """True during a save: torch may step the optimizer then, to have states for the file."""
        return self._is_saving

    @property
    def has_begun(self) -> bool:
        """Whether `begin` was called in this run."""
        return self._begun

    @property
    def step(self) -> int:
        """Applied optimizer steps so far."""
        return self.context.step if self.context else 0

    def join(self, recipe: Recipe) -> None:
        """Add techniques before `attach`: callbacks given one by one share one session.

        Raises:
            ConfigError: If a technique is in both.
        """
        if self.context is not None:
            raise TrainingError("session", "techniques must join before training starts", "pass all callbacks together")
        self.recipe = self.recipe.merged(recipe)
        self._reset()

    def attach(
        self, model: nn.Module, run_environment: Iterable[str] = (), resumed: Mapping[str, Any] | None = None
    ) -> None:
        """Prepare the user's unwrapped model, before the optimizer exists. A second call on it does nothing.

        Args:
            model: The user's model.
            run_environment: Keys of `conflicts.RUN_ENVIRONMENTS` that hold in this run.
            resumed: The techniques' states in the checkpoint that is loaded next, by key.

        Raises:
            CompatibilityError: If the recipe cannot be run like this.
            MatchError: If a technique matches nothing, or too little (`coverage.of_run`); the model is as it was.
            TrainingError: If another session is attached to the model, or this one to another model.
        """
        environment = {*run_environment, *_layers_in_parts(model)}
        if self._front_end == "bare":  # trainers tell it themselves
            environment |= model_guards.wrapped_by_user(model) - {"sharded_by_user"}
        compatibility.check(self.recipe, environment)
        if self._finished:
            self._reset()
        if self.context is not None:
            if self.context.model is model:
                return
            raise TrainingError("session", "must be attached to one model only", "make a session for each")
        # Before anything is changed: two sessions on one model would undo each other's work.
        model_guards.refuse_second_session(self, model)
        # Keys as the user's model has them, to compare saved ones with.
        self._plain = PlainKeys(model)
        context = Context(model, self._front_end, self._services, resumed=resumed or {})
        context.restructured = functools.partial(self._plain.read, model)
        context.note = self.note
        context.done_with = self._hooks.leave_out
        context.generator.manual_seed(self._seed)
        context.weights_replaced = functools.partial(self._weights_replaced, context)
        context.modes = OptimizerModes(functools.partial(self._weights_moved, context))
        attached: list[Technique] = []
        reduced = model_guards.trained_in_ddp(model)
        # Counted before: techniques replace layers and move weights.
        if self.techniques:
            self._counted = coverage.count(model)
            context.shapes = {module: shapes_of(module) for module in model.modules()}
            self._trained = {(owner, name) for owner, name, value in own_parameters(model) if value.requires_grad}
        # All of these before the first attach: a teacher that is a copy of the student must be one of the plain
        # model.
        # Whatever default device the script has set, or Lightning sets around configure_model.
        with torch.device("cpu"):
            for technique in self.techniques.values():
                technique.before_attach(model, context)
        try:
            for key, technique in self.techniques.items():
                attached.append(technique)
                with self._timed(key), torch.device("cpu"):
                    technique.attach(model, context)
            model_guards.refuse_not_reduced(model, reduced)
            # a checkpoint's run was looked at when it began, and knew what optimizers hold
            self._measure_coverage(model, allow_partial=self.recipe.allow_partial or bool(resumed))
        except BaseException:
            # In reverse: the last one may sit on what an earlier one put in.
            for technique in reversed(attached):
                technique.detach(model)
            raise
        if self.coverage:
            self._experts.watch(model)
        self.context = context

    def prepare_optimizers(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Show the optimizers to the techniques before their saved state is loaded; needed for a resume alone."""
        context = self._attached("prepare_optimizers")
        context.optimizers = tuple(optimizers)
        self._leave_unheld(context)
        for technique in self.techniques.values():
            technique.prepare_optimizers(context)

    def begin(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        total_steps: int | None,
        steps_per_epoch: StepsPerEpoch | None = None,
        clips_gradients: bool = True,
        wrappers: Iterable[Any] = (),
    ) -> None:
        """Start or go on: the optimizer exists and `load_state_dict` was called if this is a resume.

        Args:
            optimizers: The torch optimizers, unwrapped.
            total_steps: Optimizer steps of the whole run, None if unknown.
            steps_per_epoch: Optimizer steps of every epoch, or of each where they differ; None if unknown.
            clips_gradients: Whether gradients are clipped by norm.
            wrappers: A trainer's, around these optimizers, that a script may call in their place.

        Raises:
            ConfigError: If a position does not fit the run.
        """
        context = self._attached("begin")
        if self._finished:
            raise TrainingError("session", "begin must come after attach, got one that is detached", "attach it again")
        if isinstance(optimizers, torch.optim.Optimizer) or not isinstance(optimizers, Iterable):
            raise TrainingError(
                "session", "begin must have a list of optimizers, got one", "pass session.begin([optimizer])"
            )
        optimizers = tuple(optimizers)
        model_guards.refuse_other_optimizers(optimizers, self._front_end)
        environment = _layers_in_parts(context.model)  # since `attach`, perhaps
        compatibility.check(self.recipe, environment)
        self._is_tensor_parallel = bool(environment)
        context.optimizers, context.clips_gradients = optimizers, clips_gradients
        context.total_steps, context.steps_per_epoch = total_steps, steps_per_epoch
        context.modes.watch(context.optimizers, wrappers)
        # Marked once they are what training begins with.
        context.left_out.mark()
        self._refuse_without_batches(context)
        self._leave_unheld(context)
        acting = next((key for key, technique in self.techniques.items() if technique.acts_on_gradients), "")
        if self._parameters is not None and self._parameters.adds:
            acting = acting or "session"  # no hook of the optimizer is on parameters that were made after it
        self._steps.watch(context.model, context.optimizers, acting, is_bare=self._front_end == "bare")
        self._started = self._started if self._begun else time.perf_counter()
        context.default_device = torch.get_default_device()
        self.begin_again()
        self._begun = True
        for remark in [*coverage.lines(self.coverage), *compatibility.remarks(self.recipe)]:
            self.note(remark)

    def begin_again(self) -> None:
        """Go on from a state that `load_state_dict` restored in the middle of a run; the plan stays as `begin` got it.

        Weights must be loaded, and optimizers if steps follow.
        """
        context = self._attached("begin_again")
        for key, technique in self.techniques.items():
            # some keep what was saved until they know the run
            reading = _reading(key) if key in self._restored else contextlib.nullcontext()
            with self._timed(key), reading, torch.device("cpu"):
                technique.begin(context)
            self._planned[key] = technique.timeline(context)
        if self.techniques:
            forget_compiled()

    def _leave_unheld(self, context: Context) -> None:
        """Have techniques leave alone what no optimizer holds; the first call of a run decides."""
        if self._knows_held or not self.techniques:
            return
        # Once: techniques give optimizers copies in place of parameters.
        self._knows_held, context.unheld = True, unheld(context.model, context.optimizers, self._trained)
        if not context.unheld:
            return
        # Before techniques take out what they added to them.
        told = unheld_note(context.model, context.unheld)
        places = frozenset([*context.unheld.values(), *untrained_modules(context.model, context.unheld)])
        for key, technique in self.techniques.items():
            with self._timed(key), torch.device("cpu"):
                technique.leave_unheld(context.model, context)
        self._counted = dataclasses.replace(self._counted, unheld=places)
        self._measure_coverage(context.model, allow_partial=self.recipe.allow_partial)
        self.note(told)

    def _measure_coverage(self, model: nn.Module, *, allow_partial: bool) -> None:
        self.coverage = coverage.of_run(self._counted, self.techniques, model, allow_partial=allow_partial)

    def _refuse_without_batches(self, context: Context) -> None:
        """Refuse at the start what would look at training batches at the end, where the loop has none to look at."""
        remedy = getattr(context.services, "lacks_batches", "")
        replacing = [key for key, one in self.techniques.items() if one.replaces_weights]
        wanting = [key for key, one in self.techniques.items() if one.wants_batches(context)]
        if remedy and replacing and wanting:
            raise CompatibilityError(
                wanting[0], f"must see training batches once {replacing[0]} has put in its weights, got none", remedy
            )

    def attach_with(
        self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], run_environment: Iterable[str] = ()
    ) -> None:
        """Prepare a model whose optimizers exist: they hold what techniques add, and at the end the user's again.

        Args:
            model: As in `attach`.
            optimizers: Torch's own, unwrapped, which have not stepped yet.
            run_environment: As in `attach`.

        Raises:
            TrainingError: If no optimizer holds a parameter of the model, or one is not torch's; else as `attach`.
        """
        optimizers = tuple(optimizers)
        model_guards.refuse_other_optimizers(optimizers, self._front_end)
        parameters = OptimizerParameters(model, optimizers)
        if parameters.is_empty:
            raise TrainingError(
                self._front_end,
                f"optimizer must hold parameters of the {type(model).__name__} that trains, got none",
                "make it from model.parameters()",
            )
        self.attach(model, run_environment)
        self._parameters = parameters
        try:
            parameters.follow()
        except BaseException:
            self.detach()
            raise

    def sharding(self) -> contextlib.AbstractContextManager[None]:
        """Return what surrounds sharding the model behind `attach_with`: the optimizers hold its parts from then on."""
        return contextlib.nullcontext() if self._parameters is None else self._parameters.sharding()

    @property
    def draws_batches(self) -> bool:
        """True if a technique draws the training batches; then call `draw` before `begin`."""
        return any(technique.draws_batches for technique in self.techniques.values())

    def draw(self, loader: Any, accumulate: int = 1, batch_size: int | None = None, **more: Any) -> Any:
        """Return the DataLoader to train on: the script's, or that of a technique; see `Technique.loader`."""
        for technique in self.techniques.values():
            loader = technique.loader(loader, accumulate, batch_size, **more)
        return loader

    @property
    def needs_forward(self) -> bool:
        """Whether a technique still works in the forward or the loss of micro-batches."""
        return bool(self._hooks.forward or self._hooks.loss)

    @property
    def needs_gradients(self) -> bool:
        """True while a technique has work before optimizer steps."""
        return bool(self._hooks.before_optimizer_step)

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """Return what surrounds the forward and the loss of a training micro-batch; nothing before `begin`."""
        hooks, context = self._hooks.forward, self.context
        if context is None or not self._begun or self._finished:
            return contextlib.nullcontext()
        if self._steps.is_comparing:
            return self._compared_forward(hooks, context)
        if not hooks:
            return contextlib.nullcontext()
        # One technique is the usual case: an ExitStack costs more than its hook.
        if len(hooks) == 1:
            return hooks[0][1](context)
        with contextlib.ExitStack() as stack:
            for _, forward in hooks:
                stack.enter_context(forward(context))
            # pop_all hands the contexts over: entered here, left by the caller.
            return stack.pop_all()

    def _compared_forward(
        self, hooks: Calls[[Context], contextlib.AbstractContextManager[None]], context: Context
    ) -> contextlib.ExitStack:
        """Return what surrounds a micro-batch of the first steps, after which weights are noted."""
        self._steps.forget()
        with contextlib.ExitStack() as stack:
            stack.callback(self._steps.mark)
            for _, forward in hooks:
                stack.enter_context(forward(context))
            return stack.pop_all()

    def loss(self, task_loss: Tensor, normalise: Callable[[Tensor, Tensor | int], Tensor] | None = None) -> Tensor:
        """Return the loss to train on.

        Args:
            task_loss: The user's loss of this micro-batch, as the trainer would use it.
            normalise: ``normalise(total, count)`` averages a sum as the trainer averages the task loss; by default
                over the micro-batch, so that each of a step's micro-batches weighs the same.
        """
        hooks = self._hooks.loss
        if not hooks or not self._begun:
            self._steps.mark()
            return task_loss
        context = self._attached("loss")
        self._means.open()
        # In the order of composition: each sees the loss of those before it.
        context.normalise = normalise or self._means.normalise
        for key, loss in hooks:
            start = time.perf_counter()  # not `_timed`: a generator costs more than some hooks
            task_loss = loss(task_loss, context)
            self._seconds[key] += time.perf_counter() - start
        self._steps.mark()
        return task_loss

    def before_optimizer_step(self) -> None:
        """Gradients are complete and unscaled, not yet clipped."""
        self._tell_counts(self._means.close())
        context = self._attached("before_optimizer_step")
        self._steps.before_step()
        context.takes_gradients_in_backward = bool(self._steps.inside_backward)
        if self._is_tensor_parallel:
            place_gradients_(context.model)
        self._call(self._hooks.before_optimizer_step)
        if context.discard_step:
            if name := self._steps.inside_backward:
                raise TrainingError(
                    "session",
                    f"a step with gradients that are not finite must be discarded, but {name} made it inside backward",
                    "use an optimizer that steps after backward, such as AdamW",
                )
            # The trainer goes on to step: it must change nothing.
            for optimizer in context.optimizers:
                optimizer.zero_grad()  # to None: without gradients it leaves weights and state alone, fused too

    def _tell_counts(self, counts: tuple[int, int] | None) -> None:
        if counts is not None:
            other = "; Session.loss(normalise=...) averages otherwise" if self._front_end == "bare" else ""
            self.note(
                f"the micro-batches of a step counted {counts[0]} to {counts[1]} positions: each is averaged by itself "
                f"and weighs the same, in what is added to the loss as in a task loss that is a mean{other}"
            )

    def after_optimizer_step(self) -> bool:
        """Return whether the step was applied: a discarded one counts as skipped, another optimizer's is refused."""
        context = self._attached("after_optimizer_step")
        # The step did happen in the trainer's eyes, with no gradients.
        if context.discard_step:
            self.skipped_optimizer_step()
            return False
        self._steps.after_step()
        context.step += 1
        if context.is_beyond_plan:
            self._tell_beyond_plan(context)
        self._call(self._hooks.after_optimizer_step)
        return True

    def _tell_beyond_plan(self, context: Context) -> None:
        self.note(
            f"training goes on after the {context.total_steps} planned steps: schedules stay where they ended, and "
            "everything without an end of its own continues"
        )

    def skipped_optimizer_step(self) -> None:
        """An optimizer step was skipped (overflow): nothing advances."""
        self._steps.after_step(skipped=True)
        self.skipped += 1
        self._call(self._hooks.skipped_optimizer_step)
        self._attached("skipped_optimizer_step").discard_step = False

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Surround validation; re-entrant, and undone by an exception too."""
        self.before_eval()
        try:
            yield
        finally:
            self.after_eval()

    def before_eval(self) -> None:
        """Validation starts. Only the outermost of nested calls counts, and none before `begin`."""
        self._eval_depth += 1
        if self._eval_depth == 1:
            # Once a validation, not once a step: it walks through the model.
            self._refuse_changed()
            self._evaluation = self._entered(self._hooks.evaluating)

    def after_eval(self) -> None:
        """Validation ended; without a matching `before_eval` nothing happens."""
        if self._eval_depth == 0:
            return
        self._eval_depth -= 1
        if self._eval_depth == 0:
            self._evaluation.close()

    @contextlib.contextmanager
    def saving(self, *, baked: bool = False) -> Iterator[None]:
        """Surround saving, on every process: of the user's model, or of weights to go on from; the outermost counts."""
        if self._is_saving:
            yield
            return
        self._is_saving = True
        try:
            self._refuse_changed()
            self._experts.join()
            optimizers = self.context.optimizers if self.context else ()
            with _unstepped(optimizers), self._entered(self._hooks.saving, baked):
                yield
        finally:
            self._is_saving = False

    def look_ahead(self, done: float, *, stops_as_planned: bool = True) -> None:
        """Say once, as soon as it is clear, that optimizer steps come at another rate than positions were planned for.

        Args:
            done: The share of the run's data that was trained on, by which the trainer will end the run.
            stops_as_planned: Whether it also ends after the planned number of steps.
        """
        context = self._attached("look_ahead")
        total = context.total_steps or 0
        expected, applied = done * total, self.step
        if done < 0.25:
            self._early_skips = self.skipped  # a loss scale that is too large at first soon fits
        if not self._is_on_plan or expected < 10:
            return
        counted = float(applied + self._early_skips)
        counted = min(counted, expected) if stops_as_planned else counted
        # 10 % and a step: rounding of the last window, a few skips.
        if abs(counted - expected) <= 0.1 * expected + 1:
            return
        self._is_on_plan, end = False, round(applied / done)
        never = "; ".join(f"{key}: {what} (step {step})" for key, step, what in self._events_after(end))
        self.note(
            f"OPTIMIZER STEPS DO NOT COME AS PLANNED: {applied} were applied where {expected:.0f} were planned; at "
            f"this rate the run ends after {end} of {total}" + (f", before {never}" if never else "") + ". Positions "
            "stay where they are: give them as numbers of steps, or the trainer its true number of steps"
        )

    def _events_after(self, step: int) -> list[tuple[str, int, str]]:
        told = [(key, at, what) for key, events in self._planned.items() for at, what in events if at is not None]
        return [event for event in told if event[1] > step]

    def evaluated(self, metrics: Mapping[str, float | Tensor]) -> None:
        """Tell what the user's own validation of the present weights found; nothing happens before `begin`."""
        self._history.validated(self.step, metrics if self._begun else {})
        if self.context is not None and self._begun and not self._finished:
            # Several validations of one step (one a data set) add up.
            before = self._validated[1] if self._validated and self._validated[0] == self.step else {}
            self._validated, self.context.unvalidated = (self.step, before | figures(metrics)), False
        self._call(self._hooks.evaluated, metrics)

    def preflight(self, evaluate: Callable[[], Iterable[str]], also: Mapping[str, str] | None = None) -> None:
        """Check at the start, by one evaluated batch, that evaluation will report what is needed.

        Where the user's evaluation fails on so little data, a note says that its first run will tell. Nothing is
        evaluated in a resumed run, or where nothing needs it.

        Args:
            evaluate: Evaluates one batch and leaves no trace; returns the names of the metrics, on every process.
            also: Metrics that the trainer needs itself, by option.

        Raises:
            ConfigError: If one is not reported.
        """
        wanted = {**self.recipe.needed_metrics(), **(also or {})}
        if not wanted or self.step:
            return
        names, reason = reported_names(evaluate)
        if names is not None:
            check_all(wanted, names)
            return
        self.note(
            f"whether evaluation reports {', '.join(sorted(set(wanted.values())))} is only known after its first run: "
            f"one batch could not be evaluated at the start ({reason})"
        )

    @property
    def is_validated(self) -> bool:
        """Whether the user's last validation saw the model as it is now."""
        return bool(
            self.context and not self.context.unvalidated and self._validated and self._validated[0] == self.step
        )

    def validate_final(self, evaluate: Callable[[], Mapping[str, float]], *, anew: bool = False) -> None:
        """Evaluate the finished model if it holds what no validation has seen; the figures go into the receipt.

        Args:
            evaluate: Returns the metrics of the weights of now, on every process.
            anew: Whether steps of training after the last validation count, too.
        """
        if self.context is not None and (self.context.unvalidated or (anew and not self.is_validated)):
            self._final_evaluation = {name: value for name, value in figures(evaluate()).items() if name != "epoch"}
            told = ", ".join(f"{name} {value:.6g}" for name, value in self._final_evaluation.items())
            self.note(f"the final model was evaluated after its last change: {told}")

    @property
    def furthest_step(self) -> int:
        """Steps applied in this run; `step` is behind where the best checkpoint was loaded at its end."""
        return self._furthest_place[0]

    @property
    def _furthest_place(self) -> tuple[int, int]:
        """Steps applied and skipped in this run: an earlier state that is loaded does not undo what happened."""
        return max(self._furthest, (self.step, self.skipped))

    def unreached(self) -> dict[str, str]:
        """Return by technique what the model does not hold of that which was asked for; nothing before `begin`.

        After the run it is what the final model does not hold.
        """
        if self._final_unreached is not None:
            return dict(self._final_unreached)
        if self.context is None or not self._begun:
            return {}
        told = {key: technique.unreached(self.context) for key, technique in self.techniques.items()}
        return {key: text for key, text in told.items() if text is not None}

    def may_be_best(self) -> bool:
        """Return whether the weights of now hold what was asked for: others are not compared; told the first time."""
        unreached = self.unreached()
        if unreached and self._tells_of_best:
            self._tells_of_best = False
            so_far = "; ".join(f"{key}: {text}" for key, text in unreached.items())
            self.note(f"checkpoints do not compete for the best until they hold what was asked for; so far {so_far}")
        return not unreached

    def finish(self) -> None:
        """End the run: bake into plain weights and leave stock modules. A second call does nothing.

        What was not reached is told, not made up for: weights are cut where a step follows, or where a user asks.
        """
        if self._finished or self.context is None:
            return
        if self._begun:
            # A validation that an exception cut short left its weights in.
            self._evaluation.close()
            self.settle_optimizers()
            self._refuse_changed()
            self.join_buffers()
            # Before techniques finish: afterwards nothing tells what they did not reach.
            self._final_unreached = self.unreached()
            self._experts.join()
            self._tell_counts(self._means.differing())
            self._tell_end(self.context)
            # In the order of the end, which is not that of attaching: see `finishes_after`.
            for key in in_order(self.techniques, "finish"):
                with self._timed(key):
                    self.techniques[key].finish(self.context.model, self.context)
            # Reports before `detach`, claims of what all have finished, and digests after it: stock layers hold the
            # final tensors.
            reports = self._reports()
            claimed = {key: one.claims(self.context, reports[key]) for key, one in self.techniques.items()}
            self.detach()
            self._claims = claims.settled(claimed, self.context.model)
            self._tell_not_finite(self.context.model)
        elif self.recipe:
            self.note(
                f"TRAINING NEVER BEGAN: it ended before its first step; nothing was done of {', '.join(self.recipe)}"
            )
        self.detach()

    def settle_optimizers(self) -> None:
        """Have optimizers with modes leave the weights of evaluation in the model, for good: final ones come next."""
        context = self._attached("settle_optimizers")
        if any(type(technique).claims is not Technique.claims for technique in self.techniques.values()):
            context.modes.settle()

    @torch.no_grad()
    def join_buffers(self) -> None:
        """Give every process the main one's buffers, on which final weights may depend; each must call it.

        DDP does so as the next forward begins, so that those of the last one (statistics of batch norms) differ.
        """
        context = self._attached("join_buffers")
        place = self.step, self.skipped
        if world_size() == 1 or self._is_tensor_parallel or not self.techniques or self._joined == place:
            return
        self._joined = place
        own = getattr(context.model, "_ddp_params_and_buffers_to_ignore", ())
        for name, buffer in context.model.named_buffers():
            if name not in own and not (buffer.is_meta or is_sharded(buffer) or buffer.dtype == torch.bool):
                broadcast_(buffer)

    def _tell_end(self, context: Context) -> None:
        planned, (applied, skipped) = context.total_steps, self._furthest_place
        is_short = planned is not None and applied + skipped < planned
        ended = f"the run ended after {applied} steps" + (f" of {planned} planned" if is_short else "")
        unreached = self.unreached()
        for key, text in unreached.items():
            self.note(f"{key.upper()} DID NOT REACH WHAT WAS ASKED FOR: {text}; {ended}")
        for key, step, what in self._events_after(applied):
            if key not in unreached:
                self.note(f"{key.upper()} DID NOT RUN AS PLANNED: {ended}, before step {step}: {what}")
        if is_short or (planned is not None and applied > planned):
            self.note(f"steps: {applied} were applied, {planned} were planned")
        if experts := self._experts.told():
            self.note(experts)

    def _tell_not_finite(self, model: nn.Module) -> None:
        """Say that the trained weights, or this process's part of them, hold NaN or infinity."""
        parts = {name: local_part(value.detach()) for name, value in model.named_parameters() if not value.is_meta}
        held = {
            name: part
            for name, part in parts.items()
            # float8 (1 byte) and other libraries' packed tensors have no norm
            if part.is_floating_point() and part.itemsize > 1 and part.layout == torch.strided and type(part) is Tensor
        }
        if not all_finite(held.values()):
            wrong = next(name for name, value in held.items() if not all_finite([value]))
            self.note(f"WEIGHTS ARE NOT FINITE, such as {wrong}: training diverged, or a callback wrote into them")

    def claims_of(self, where: Where) -> bool:
        """Return whether the receipt says anything that weights of such a moment can be compared with."""
        return any(claim.holds >= where for said in self._claims.values() for claim in said.values())

    def verify(
        self,
        weights: Mapping[str, Tensor] | None,
        what: str,
        changed_by: Iterable[str] = (),
        *,
        where: Where = Where.END,
        gather: bool = True,
    ) -> None:
        """Count again in final weights what the receipt says of them; a note there tells a difference too.

        Args:
            weights: Of a file, under the names of the model's state dict; None: those of the model itself.
            what: The model or the file, for the message.
            changed_by: Classes of the callbacks that may have changed them.
            where: Of which moment they are.
            gather: Whether sharded tensors are gathered, for which every process must call; else they are left out.

        Raises:
            ReceiptError: If they are not what the receipt says.
        """
        if self.context is None or not self.claims_of(where):
            return
        if weights is None and gather:
            reshard_(self.context.model)
        found = self.context.model.state_dict() if weights is None else weights
        lines = claims.differences(self._claims, found, where, lacking=weights is None, gather=gather)
        try:
            claims.refuse(lines, what, changed_by)
        except ReceiptError as error:
            self.note(f"NOT AS THIS RECEIPT SAYS: {error}")
            raise

    def detach(self) -> None:
        """Leave stock modules behind without baking: the run was cut short."""
        if self.context is None or self._finished:
            return
        self._steps.close()
        self._experts.close()
        self.context.modes.leave()
        try:
            self._final_reports = self._reports()  # stock layers have nothing left to tell
        finally:
            for technique in reversed(self.techniques.values()):
                technique.detach(self.context.model)
            if self._parameters is not None:
                self._parameters.restore()
            self._finished = True

    def bake(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the model's state dict as the user's plain model loads it.

        Raises:
            CheckpointError: If the result is not loadable by the untouched model.
        """
        baked = dict(state_dict)
        if not self.is_attached:
            return baked
        # As `finish` would, on tensors: what one technique bakes the next one sees.
        for key in in_order(self.techniques, "finish"):
            baked = self.techniques[key].bake(baked)
        # Nobody gets a file that the plain model cannot load.
        if self._plain is not None:
            self._plain.check(baked)
        return baked

    def deployment(self) -> dict[str, Any]:
        """Return what a deployment needs beside the plain weights, by technique; also after `finish`."""
        return {key: values for key, technique in self.techniques.items() if (values := technique.deployment())}

    def state_dict(self) -> dict[str, Any]:
        """Return all that an exact resume needs, beside what the trainer saves itself."""
        context = self._attached("state_dict")
        return _state_of(context, self.techniques, self.recipe, self.skipped, self._history, self._experts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state, after `attach`; `begin` follows. A changed recipe is told, not hidden.

        Raises:
            CheckpointError: If the state is not a session's.
        """
        context, self._furthest = self._attached("load_state_dict"), self._furthest_place
        recipe, self.skipped = _restore(state, context, self.techniques, self._history, self._experts)
        self._restored = {*state["techniques"]}
        # Weights of a checkpoint are others than those that were last validated.
        context.unvalidated |= self._begun and not (self._validated and self._validated[0] == context.step)
        with _reading("session"):
            changes = self.recipe.changes_since(recipe)
        self.is_changed |= bool(changes)
        for change in changes:
            self.note(f"resumed {change}")

    def window_state(self) -> dict[str, dict[str, Any]]:
        """Return what techniques have gathered on this process in an accumulation window that is not over."""
        windows = self._attached("window_state").windows
        return {name: state for name, window in windows.items() if (state := window.window_state())}

    def load_window_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `window_state`, with the gradients of the same window, after `begin`."""
        with _reading("session"):
            found = dict(state)
        for name, window in self._attached("load_window_state").windows.items():
            if name in found:
                with _reading(name):
                    window.load_window_state(found[name])

    def metrics(self) -> dict[str, float]:
        """Return the figures of all techniques for progress bar and logger, and keep them for the receipt."""
        self._tell_counts(self._means.differing())
        metrics = {name: value for one in self.techniques.values() for name, value in one.metrics().items()}
        return self._history.logged(self.step, metrics)

    def note(self, text: str) -> None:
        """Tell the user one line now, and keep it for the receipt; the same line only once."""
        if text not in self.notes:
            self.notes.append(text)
            self._services.say(f"efftrain: {text}")

    def receipt(self) -> Receipt:
        """Return what was asked, touched and run so far, and what it cost."""
        planned, (applied, skipped) = self.context and self.context.total_steps, self._furthest_place
        last_seen = self._validated if self.is_validated else None
        return Receipt(
            {
                "recipe": self.recipe.to_dict(),
                "front_end": self._front_end,
                "finished": self._finished,
                "environment": environment(),
                "steps": {"applied": applied, "skipped": skipped, "planned": planned},
                "wall_seconds": round(time.perf_counter() - self._started, 3),
                "seconds": {key: round(spent, 4) for key, spent in self._seconds.items()},
                "techniques": self._final_reports or self._reports(),
                "unreached": self.unreached(),
                "final_evaluation": self._final_evaluation or dict(last_seen[1] if last_seen else {}),
                "coverage": {key: reach.to_dict() for key, reach in self.coverage.items()},
                "experts_without_tokens": self._experts.without_tokens(),
                **self._history.told(),
                "notes": list(self.notes),
            },
            [technique.write for technique in self.techniques.values()] if self._begun else (),
            self._run,
        )

    def _reports(self) -> dict[str, Any]:
        return {key: technique.report() for key, technique in self.techniques.items()}

    def _weights_replaced(self, context: Context) -> None:
        context.project()
        for _, weights_replaced in self._hooks.weights_replaced:
            weights_replaced(context)

    def _weights_moved(self, context: Context) -> None:
        reshard_(context.model)
        context.project()

    def _attached(self, verb: str) -> Context:
        if self.context is None:
            raise TrainingError("session", f"attach must come before {verb}", "call session.attach(model) first")
        return self.context

    def _refuse_changed(self) -> None:
        # not in every step: to go through a model takes long
        if self._begun and not self._finished:
            context = self._attached("begin")
            model_guards.refuse_changed(self.techniques, context)
            if joined := joined_note(context.unheld, context.optimizers):
                self.note(joined)

    def _call(self, hooks: Calls[Concatenate[Context, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
        if self._begun and not self._finished and self.context is not None:
            for key, hook in hooks:
                start = time.perf_counter()
                hook(self.context, *args, **kwargs)
                self._seconds[key] += time.perf_counter() - start

    def _entered(
        self,
        hooks: Calls[Concatenate[Context, P], contextlib.AbstractContextManager[None]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> contextlib.ExitStack:
        """Return what leaves the contexts of all hooks, entered; those before one that raises are left."""
        # pop_all only if all were entered: with an error, those that were are left.
        with contextlib.ExitStack() as stack:
            if self._begun and not self._finished and self.context is not None:
                for key, hook in hooks:
                    # Made outside of the time that is counted: calling a context manager's function does nothing yet.
                    surrounding = hook(self.context, *args, **kwargs)
                    with self._timed(key):
                        surrounding.__enter__()
                    stack.push(functools.partial(self._left, key, surrounding))
            return stack.pop_all()

    def _left(self, key: str, surrounding: contextlib.AbstractContextManager[None], *error: Any) -> bool | None:
        with self._timed(key):
            return surrounding.__exit__(*error)

    @contextlib.contextmanager
    def _timed(self, key: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[key] += time.perf_counter() - start


@contextlib.contextmanager
def loading(session: Session) -> Iterator[None]:
    """Surround the loading of plain weights by a trainer that goes by the parameters' names, as torch does under FSDP2.

    Args:
        session: Attached; its own state is loaded afterwards.
    """
    with contextlib.ExitStack() as stack:
        if session.context is not None:
            for technique in session.techniques.values():
                stack.enter_context(technique.loading(session.context.model))
        yield


def fits(session: Session, state: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint's weights have the structure that the model has now.

    Args:
        session: Attached, not begun.
        state: What `Session.state_dict` saved; empty if the checkpoint is of a run without techniques.

    Raises:
        CheckpointError: If a technique cannot go on from this checkpoint.
    """
    with _reading("session"):
        saved: Mapping[str, Any] = dict(state.get("techniques", {}))
    for key in REGISTRY.keys() & saved.keys() - session.techniques.keys():
        if structure := REGISTRY[key].config_class.saved_structure:
            raise CheckpointError(
                "resume", f"recipe must keep {key}, {structure[0]}, got none", f"keep it, or {structure[1]}"
            )
    _refuse_foreign(saved, session.techniques)
    if session.context is None:
        return True
    with _reading("session"):
        return all(technique.fits(saved.get(key, {})) for key, technique in session.techniques.items())


def fit_to(session: Session, state: Mapping[str, Any], run_environment: Iterable[str]) -> None:
    """Attach anew where a checkpoint's weights need another structure than the model has; no optimizer exists yet.

    Args:
        session: Attached, not begun.
        state: As in `fits`.
        run_environment: As in `Session.attach`.

    Raises:
        CheckpointError: If a technique cannot go on from this checkpoint.
    """
    if fits(session, state) or session.context is None:
        return
    model = session.context.model
    # Structure before weights: layers are put in as the checkpoint has them, then loaded.
    session.detach()
    session.attach(model, run_environment, state["techniques"])
