"""The user's own training loop: code shared by Accelerate, Fabric and plain PyTorch loops around a session."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from shared_core.config.training_time import StepsPerEpoch
from shared_core.distributed.collectives import is_main, local_part
from shared_core.distributed.sharded_tensors import is_sharded, place_gradients_, put_gradient
from shared_core.engine.checks.model_guards import kinds_of
from shared_core.engine.checks.optimizer_parameters import attach_with
from shared_core.engine.protocols import DrawsBatches, MakesScaler, offering
from shared_core.engine.saving.session_state import fits, gathered, load_of_rank, load_window_state, window_state
from shared_core.engine.services import Services
from shared_core.engine.technique import Purpose
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, EffError, TrainingError
from shared_core.front_ends.services import LoopServices
from shared_core.front_ends.session import Session
from shared_core.front_ends.wrapped_method import UntilEnd
from shared_core.modules.calls import around_forwards

T = TypeVar("T")
_LOOPS: weakref.WeakSet[LoopDriver] = weakref.WeakSet()
"""Loops that were set up. A loop lives as long as the script's objects, whose methods call it."""
_TRAINED = nn.Module, torch.optim.Optimizer


@dataclass(frozen=True, kw_only=True)
class LoopPlan:
    """Length of a loop: optimizer steps of the run and per epoch (None: unknown), micro-batches per step."""

    total_steps: int
    steps_per_epoch: StepsPerEpoch | None = None
    accumulate: int = 1
    clips_gradients: bool = True


class LoopDriver(UntilEnd):
    """Drives one session through a script's loop. A subclass adapts it to a library and calls its events.

    `on_backward` starts a step's accumulation window, `complete` passes its gradients to the techniques, and `on_step`
    or `on_zero_grad` ends it.

    Args:
        recipe: The recipe.
        inner: The user's model.
        optimizer: The torch optimizer of its parameters.
        plan: Length of the loop.
        services: Services for techniques; by default those of every loop.
        seed: Seed for the random numbers of techniques.
    """

    library: Any = None
    """The library's object, which trains one model with techniques at a time; None for plain loops."""
    name: ClassVar[str]
    """Name of the front end, also in errors."""
    owner: ClassVar[str]
    """Object on which the script calls ``backward``."""
    accumulates: ClassVar[str]
    """How the script sets several micro-batches per step."""
    gives_batches: ClassVar[str]
    """How the script gives batches to techniques that need some."""
    trainer: ClassVar[str]
    """What to use for techniques that need a trainer."""
    ends_by: ClassVar[str] = ""
    """The missing call, in the note about a model that was not finished."""
    divides_loss: ClassVar[bool] = False
    """True if the script itself divides the loss by the number of micro-batches."""

    def __init__(
        self, recipe: Mapping[str, Any], inner: nn.Module, optimizer: torch.optim.Optimizer, plan: LoopPlan,
        services: Services | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.inner, self.optimizer, self.plan = inner, optimizer, plan
        self.services = services or LoopServices(self)
        self.session = Session(recipe, seed=seed, front_end=self.name, services=self.services)
        self.wrapped: Any = None  # the library's wrapper of the model
        self.wrappers: list[Any] = []  # of the optimizer
        self.batches: Iterable[Any] | None = None
        self.folder: Path | None = None  # of the receipt
        self.start = Path.cwd()  # folder of the receipt if nothing is saved
        self.micro_batches = 0  # since the last step
        self.is_complete = False  # True once the techniques have processed a step's gradients
        self.is_filing = self.evaluates = self._has_stepped = self._is_stepping = False
        self.autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext  # of a forward
        self.to_device: Callable[[Any], Any] = lambda batch: batch
        self.loaded_state: Mapping[str, Any] | None = None
        self._window: Mapping[str, Any] = {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        # torch drops the hooks of a copied optimizer, so its steps would go unseen.
        raise TrainingError(
            self.name,
            "a loop cannot be copied or pickled",
            "copy the model, optimizer.state_dict() and loop.session.state_dict(), and pass the last one as "
            "resumed= to another training",
        )

    # --- overridden by adapters

    @property
    def accumulate(self) -> int:
        """Micro-batches of a step."""
        return self.plan.accumulate

    @property
    def is_last_micro_batch(self) -> bool:
        """True unless the library only accumulates gradients now."""
        return True

    def unscale(self) -> None:
        """Divide the gradients by the loss scale, if not done yet."""

    def applied(self) -> bool:
        """Return True if the optimizer stepped. A scaler skips the step after an overflow."""
        has_stepped, self._has_stepped = self._has_stepped, False
        return has_stepped

    def hold_schedule(self) -> None:
        """Do not advance the learning rate schedule: the step was discarded."""

    def watch(self, prepared: Any) -> Any:
        """Add hooks to the objects that the library prepared, and return those for the script."""
        return prepared

    def end_reached(self) -> None:
        """Called after the planned number of steps."""

    # --- before training

    @property
    def is_live(self) -> bool:
        """True if the session has begun and is not finished."""
        return self.session.is_live

    @property
    def is_done(self) -> bool:
        """True after the planned number of steps."""
        return self.session.step + self.session.skipped >= self.plan.total_steps

    def attach(self, environment: Iterable[str]) -> None:
        """Attach the techniques to the model, and add their parameters to the optimizer."""
        if self.library is not None and "lbfgs" in kinds_of([self.optimizer]):
            raise CompatibilityError(
                self.name, "LBFGS is not supported, because it evaluates the loss in its step", "use AdamW"
            )
        self._parameters = attach_with(self.session, self.inner, [self.optimizer], environment)

    def make_scaler(self, device: str) -> torch.amp.GradScaler | None:
        """Return a technique's gradient scaler for a device type, or None to use the script's."""
        made = [one.make_scaler(device) for _, one in offering(self.session.techniques, MakesScaler)]
        return next((scaler for scaler in made if scaler is not None), None)

    @property
    def draws_batches(self) -> bool:
        """True if a technique draws the training batches. Then call `draw` before `begin`."""
        return bool(offering(self.session.techniques, DrawsBatches))

    def draw(self, loader: Any, batch_size: int | None = None, **more: Any) -> Any:
        """Return the DataLoader to train on: the script's or a technique's, see `DrawsBatches.loader`."""
        for _, drawing in offering(self.session.techniques, DrawsBatches):
            loader = drawing.loader(loader, self.accumulate, batch_size, **more)
        return loader

    def set_up(self, prepare: Callable[[], T]) -> T:
        """Return the library's prepared objects, with hooks. On an error, restore the user's model."""
        try:
            self._check_positions()
            with self._parameters.sharding():
                prepared = prepare()
            watched: T = self.watch(prepared)
        except BaseException:
            self.cut_short()
            raise
        atexit.register(self.at_exit)
        _LOOPS.add(self)
        return watched

    @staticmethod
    def leave_earlier(library: Any, objects: Iterable[Any]) -> None:
        """Leave the loops that trained with this object or one of these models. A script may have stopped within them.

        Raises:
            ConfigError: If one has not begun, because then the script is about to train both.
        """
        models = {id(part) for one in objects if isinstance(one, nn.Module) for part in one.modules()}
        for loop in [*_LOOPS]:
            if loop.library is not library and id(loop.inner) not in models:
                continue
            if not (loop.session.has_begun or loop.session.is_finished):
                raise ConfigError(
                    loop.name,
                    f"{type(library).__name__} must train one model with techniques at a time, got a second one before "
                    "the first was trained",
                    f"train the first to its end, or make another {type(library).__name__} and another model",
                )
            loop.leave()

    def leave(self) -> None:
        """Restore the user's model, and write the receipt of a run that the script has not finished."""
        _LOOPS.discard(self)
        if not self.session.is_finished:
            self.at_exit()
            self.cut_short()

    def on_prepare(self, method: Callable[..., Any], *objects: Any, **options: Any) -> Any:
        """Prepare other objects. A model with its optimizer begins another run, without techniques."""
        if self.session.has_begun and all(any(isinstance(one, kind) for one in objects) for kind in _TRAINED):
            self.leave()
        return method(*objects, **options)

    def _check_positions(self) -> None:
        """Refuse positions that do not fit the run, before it begins with the first micro-batch."""
        context: Any = self.session.context
        context.total_steps, context.steps_per_epoch = self.plan.total_steps, self.plan.steps_per_epoch
        context.ask_plans()

    def watch_forward(self, model: nn.Module) -> None:
        """Hook a model's forwards and its changes of mode until the end."""
        self.until_end(around_forwards(model, self.on_forward))
        self.wrap(self.inner, train=self.on_train)  # library wrappers pass the mode on to it

    def watch_steps(self) -> None:
        """Register a hook so that `applied` knows when the optimizer steps."""

        def stepped(*_: Any) -> None:
            self._has_stepped = True

        if not hasattr(self.optimizer, "register_step_post_hook"):
            name = type(self.optimizer).__name__
            rule = f"optimizer must be a torch.optim.Optimizer, whose steps are seen, got {name}"
            raise CompatibilityError(self.name, rule, "use an optimizer that is a subclass of it")
        self.until_end(self.optimizer.register_step_post_hook(stepped).remove)

    def restore_at_end(self, owner: Any, **values: Any) -> None:
        """Set attributes of an object until the end."""
        for name, value in values.items():
            self.until_end(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

    # --- a step

    def begin(self) -> None:
        """Begin at the first micro-batch or save. By then the script has loaded its weights."""
        if self.session.has_begun:
            return
        self.session.begin(
            [self.optimizer],
            total_steps=self.plan.total_steps,
            steps_per_epoch=self.plan.steps_per_epoch,
            clips_gradients=self.plan.clips_gradients,
            wrappers=self.wrappers,
        )
        self._restore_window()

    def on_forward(self, module: nn.Module, args: Any, kwargs: Any) -> contextlib.AbstractContextManager[Any]:
        """Return the session's context of a training forward, which may be the first of the run."""
        if self.session.is_finished:
            return contextlib.nullcontext()
        if not self.session.has_begun:
            self._begin_inside(module, args, kwargs)
        self._refuse_undrawn()
        return self.session.forward()

    def _begin_inside(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        known = {*module._forward_pre_hooks}
        self.begin()
        # torch has already listed this call's hooks. Call new hooks of techniques here, or they miss the first batch.
        for number, hook in [*module._forward_pre_hooks.items()]:
            if number not in known:
                hook(module, args, *((kwargs,) if number in module._forward_pre_hooks_with_kwargs else ()))

    def on_backward(self, method: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call the script's ``backward`` with the loss that includes the techniques' terms."""
        self.begin()
        # Ignore the optimizer's own evaluations, as in LBFGS.
        weighing = not self._is_stepping and self._count_micro_batch()
        # The script may have divided by the number of micro-batches, but a technique adds to the undivided loss.
        parts = self.accumulate if self.divides_loss and weighing else 1
        with self.autocast():  # as in the forward, since techniques may run other models for their loss
            loss = self.session.loss(loss) if parts == 1 else self.session.loss(loss * parts) / parts
        return method(loss, *args, **kwargs)

    def _count_micro_batch(self) -> bool:
        """Count a micro-batch. Return True if a technique weighs losses, which needs the planned number of them."""
        if self.is_complete:
            raise TrainingError(
                self.name,
                "gradients must be clipped after the last backward of a step, but a backward followed the clipping",
                f"clip where the optimizer steps; {self.accumulates}",
            )
        self.micro_batches += 1
        weighing = [key for key, technique in self.session.techniques.items() if technique.needs_window_mean]
        if weighing and self.micro_batches > self.accumulate:
            raise TrainingError(
                self.name,
                f"a step has {self.micro_batches} backward calls, but {', '.join(weighing)} expects at most "
                f"{self.accumulate}: the terms added to the loss would not be divided by the number of micro-batches "
                "as the script's own loss is",
                self.accumulates,
            )
        return bool(weighing)

    def _refuse_undrawn(self) -> None:
        if self.draws_batches and self.micro_batches >= self.accumulate:
            raise TrainingError(
                self.name,
                f"a step must use one drawn batch in {self.accumulate} parts, got another forward after "
                f"{self.micro_batches}",
                self.accumulates,
            )

    def trains(self, parameters: Iterable[Tensor]) -> bool:
        """Return True if some of these are this loop's. A script may clip another model's gradients, too."""
        held = [one for group in self.optimizer.param_groups for one in group["params"]]
        return not {*map(id, held), *map(id, self.inner.parameters())}.isdisjoint(map(id, parameters))

    def complete(self) -> None:
        """Unscale the complete, unclipped gradients and pass them to the techniques, once per step."""
        if self.micro_batches and self.is_last_micro_batch and not self.is_complete:
            self.is_complete = True
            self.unscale()
            self.session.before_step()

    def on_step(self, method: Callable[..., Any], closure: Any = None) -> Any:
        """Step the optimizer if gradients are complete, and report to the session if the step was applied."""
        if self.is_filing or not self.is_last_micro_batch:
            return method(closure)
        if self.session.is_finished:
            raise TrainingError(
                self.name,
                f"the optimizer stepped after the end of its run, at step {self.session.step} of "
                f"{self.plan.total_steps}",
                "pass the true total_steps, and prepare another model or finish this one only after the last step",
            )
        if closure is not None or not self.micro_batches:
            raise TrainingError(
                self.name,
                f"optimizer.step must follow {self.owner}.backward(loss), got "
                + ("a closure" if closure is not None else "a step without it"),
                f"call {self.owner}.backward instead of loss.backward, then step without a closure",
            )
        self.complete()
        self._has_stepped = False  # torch may have stepped it to save an optimizer without state
        self._is_stepping = True
        try:
            result = method()
        finally:
            self._is_stepping = False
        self._count(self.applied())
        return result

    def on_zero_grad(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Clear gradients. A step that was prepared but not made counts as skipped."""
        if self.micro_batches and self.is_last_micro_batch and not (self.is_filing or self._is_stepping):
            if self.is_complete:
                self.applied()
                self._count(False)
            self.micro_batches = 0
        return method(*args, **kwargs)

    def _count(self, applied: bool) -> None:
        self.is_complete, self.micro_batches = False, 0
        if not applied:
            self.session.after_step(applied=False)
        elif not self.session.after_step():
            self.hold_schedule()
        if self.is_done:
            self.end_reached()

    def on_train(self, method: Callable[..., Any], mode: bool = True) -> Any:
        """Call the model's ``train``. A validation begins and ends with it."""
        result = method(mode)
        if self.is_live and mode == self.evaluates:
            self.evaluates = not mode
            (self.session.swaps.leave_evaluation if mode else self.session.swaps.begin_evaluation)()
        return result

    def on_log(self, method: Callable[..., Any], values: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Log the techniques' figures together with the script's."""
        return method({**values, **self.session.figures()} if self.is_live else values, *args, **kwargs)

    # --- files

    @contextlib.contextmanager
    def filing(self) -> Iterator[None]:
        """Return a context manager for saving the training weights, which an open validation may have replaced."""
        if self.is_filing:
            yield
            return
        self.is_filing = True
        if self.evaluates:
            self.session.swaps.leave_evaluation()
        try:
            yield
        finally:
            self.is_filing = False
            if self.evaluates:
                self.session.swaps.begin_evaluation()

    @contextlib.contextmanager
    def saving(self, *, baked: bool = False) -> Iterator[None]:
        """Return a context manager for saving a checkpoint or the plain (`baked`) model, on every process."""
        if not baked:
            self.begin()
        # After `finish`, a single process may save.
        purpose: Purpose = "export" if baked else "checkpoint"
        with self.filing(), self.session.swapped(purpose) if self.is_live else contextlib.nullcontext():
            yield

    def state(self) -> dict[str, Any]:
        """Return the session's part of a checkpoint; every process must call it."""
        return gathered(self.session, self.wrapped, window=self._open_window())

    def read(self, state: Mapping[str, Any], source: Any) -> None:
        """Check a saved state before its weights are loaded."""
        if not fits(self.session, state):
            raise CheckpointError(
                self.name,
                f"the layers in {source} differ from those of the recipe, and the optimizer exists already",
                "start with the weights and the recipe that it was saved with",
            )
        if not self.session.has_begun:
            self.session.prepare_optimizers([self.optimizer])
        self.loaded_state = state

    def loaded(self) -> None:
        """Resume from the state that was read, once weights and optimizer are loaded."""
        if self.loaded_state is None:
            return
        self._window = load_of_rank(self.session, self.loaded_state).get("window", {})
        if self.session.has_begun:
            self.session.begin_again()
            self._restore_window()

    def _open_window(self) -> dict[str, Any]:
        """Return this process's state of an unfinished accumulation window."""
        place_gradients_(self.inner)
        named = dict(self.inner.named_parameters()) if self.micro_batches else {}
        held = {name: local_part(one.grad) for name, one in named.items() if one.grad is not None}
        parts = [name for name, one in named.items() if is_sharded(one) and one.requires_grad]
        if parts and held.keys().isdisjoint(parts):  # FSDP2 hides gradients until they are reduced
            self.session.note("the checkpoint lacks gradients of an unfinished window that are not reduced yet")
        return {"count": self.micro_batches, "gradients": held, "windows": window_state(self.session)}

    def _restore_window(self) -> None:
        window, self._window = self._window, {}
        self.micro_batches = int(window.get("count", 0))
        if not self.micro_batches:
            return
        parameters = dict(self.inner.named_parameters())
        for name, gradient in window["gradients"].items():
            put_gradient(parameters[name], gradient)
        load_window_state(self.session, window["windows"])

    # --- the end

    def finish(self) -> None:
        """Finish the model, which is a plain model from now on."""
        if self.session.is_finished:
            return
        if self.loaded_state:
            self.begin()  # a run that was resumed after its last step
        self.session.finish()
        self.evaluates = False
        self.ends.close()

    def cut_short(self) -> None:
        """Restore the user's own model after a failed run."""
        self.ends.close()
        self.session.detach()

    def leave_receipt(self, fallback: Path | None, *, gather: bool) -> None:
        """Check the trained model against the receipt, and write the receipt where files are saved.

        Args:
            fallback: Folder if nothing was saved; None to write no file.
            gather: True if every process calls this, so that sharded weights can be gathered.
        """
        folder = self.folder or fallback
        try:
            if self.session.is_finished:
                self.session.files.verify(None, "the trained model", gather=gather)
        finally:
            if is_main():
                receipt = self.session.receipt()
                if folder is not None:
                    receipt.write(folder)
                self.services.say(receipt.final_text())
            if folder is not None:
                atexit.unregister(self.at_exit)

    def at_exit(self) -> None:
        """Note if the model was not finished, and write a receipt. Called when the script ends or starts anew."""
        if not self.session.has_begun:
            self.session.finish()  # notes that training never began
        elif not self.session.is_finished:
            self.session.progress.note_unfinished(self.ends_by)
        with contextlib.suppress(EffError):  # printed, and in the receipt
            self.leave_receipt(self.start, gather=False)
