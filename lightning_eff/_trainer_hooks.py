"""Translate Lightning's hooks into a session's. Only this file knows when Lightning calls what."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

from torch import Tensor

from lightning_eff import _joining, _run_environment
from lightning_eff._adapters import Adapter
from lightning_eff._averages import Averages
from lightning_eff._checkpoints import whole_files, wrap_loading
from lightning_eff._private_names import check_private_names
from lightning_eff._resume import ExactResume
from lightning_eff._run_environment import Callback
from lightning_eff._saving import Saving
from lightning_eff._services import LightningServices, preflight
from lightning_eff._watched_steps import WatchedSteps
from shared_core.distributed.collectives import world_size
from shared_core.engine.checks.compatibility import check
from shared_core.engine.receipt import Receipt
from shared_core.engine.recipe import Recipe
from shared_core.engine.registry import is_in_bar
from shared_core.errors import EffError
from shared_core.front_ends.flags import as_recipe
from shared_core.front_ends.session import Session
from shared_core.front_ends.wrapped_method import Wrapped


class EffCallback(Callback):
    """Switches on every technique of a recipe. Runs resume exactly and save plain checkpoints.

    Several callbacks of this package in one Trainer, in any order, act as one with their recipes merged. An empty
    recipe changes nothing.

    Args:
        recipe: The recipe, a mapping like ``{"prune": {"sparsity": 0.8}}``, or the path of a YAML file.

    Raises:
        ConfigError: If the recipe is wrong.

    Example:
        >>> EffCallback({"prune": {"sparsity": 0.8}}).recipe["prune"].sparsity
        0.8
    """

    num_started: ClassVar[int] = 0
    """Number of runs with a recipe that were started in this process."""

    def __init__(self, recipe: dict[str, Any] | str | Recipe) -> None:
        super().__init__()
        self.recipe = as_recipe(recipe)
        self.session: Session | None = None
        """The run that this callback drives. None before `fit`, and in all but a Trainer's first callback."""
        self._trainer: Any = None
        self._wrapped: list[Wrapped] = []
        self._steps: WatchedSteps | None = None
        # made in `setup`, with the session
        self._resume, self._averages = cast(ExactResume, None), cast(Averages, None)
        self._saving = cast(Saving, None)
        self._adapters: list[Adapter] = []
        self._leader: EffCallback | None = None
        self._joined: list[EffCallback] = []
        self._tries_first = False
        self._seen: set[str] = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.recipe!r})"

    @property
    def receipt(self) -> Receipt | None:
        """The receipt so far, of all callbacks together: what was requested, changed and run; None before `fit`."""
        session = (self._leader or self).session
        return session.receipt() if session else None

    # -- attach: before the optimizer exists and before any wrapping

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Prepare a `fit`. Evaluation alone needs nothing."""
        if stage != "fit":
            return
        self._undo()
        mine = _callbacks(trainer)
        _joining.refuse_other_module(trainer, mine[0].session, pl_module)
        before, self.session = self.session, None
        self._leader = mine[0]
        # All callbacks of a run share the first one's session. The others only provide their recipes.
        if mine[0] is not self:
            return
        recipe = _joining.joined_recipe(trainer, [callback.recipe for callback in mine])
        EffCallback.num_started += bool(recipe or any(callback.recipe for callback in mine))
        if not recipe:
            # Each callback costs about 12 µs per step. A new list, because Lightning is iterating over the old one.
            trainer.callbacks = [callback for callback in trainer.callbacks if callback not in mine]
            return
        check_private_names(_run_environment.namespace_of(trainer))
        self._trainer, self._joined, self._tries_first = trainer, mine, _joining.tries_first(trainer, recipe)
        services = self._open_session(trainer, recipe, before)
        self._adapters = [
            kind(trainer, pl_module, self._session, services) for kind in Adapter.registered() if kind.applies(recipe)
        ]
        self._resume = ExactResume(trainer, self._session, self._adapters)
        self._averages = Averages(trainer, pl_module, self._session)
        check(recipe, _run_environment.run_environment(trainer, pl_module))
        self._wrap_methods(trainer, pl_module)

    def _open_session(self, trainer: Any, recipe: Recipe, before: Session | None) -> LightningServices:
        """Make the run's session. On the same Trainer it continues from the finished one (`before`)."""
        earlier, last = _joining.replaced(trainer, recipe), self._saving
        if earlier is not None and before is None:
            before, last = earlier.session, earlier._saving
        # Stop checking an earlier run's checkpoints: the module's weights change from now on.
        for one in (self, earlier):
            if one is not None and one._saving is not None:
                one._saving.close()
        # `fit` again on the same Trainer after an end: it continues from baked weights.
        trains_on = before is not None and before.is_finished and trainer.global_step > 0
        # Broadcast: a run's checkpoints share one id, but each process would draw its own.
        run = cast(Any, before)._services.run if trains_on else trainer.strategy.broadcast(uuid.uuid4().hex)
        services = LightningServices(trainer, run)
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        self.session = Session(recipe, front_end="lightning", services=services, seed=seed)
        self._saving = Saving(trainer, self.session, services, last and last.final, trains_on)
        return services

    def _wrap_methods(self, trainer: Any, pl_module: Any) -> None:
        for adapter in self._adapters:
            self._wrapped += adapter.set_up()
        self._wrapped += whole_files(trainer, self._session.note) + wrap_loading(trainer.strategy, self._session)
        # On the instance: patching the class would affect all its models.
        self._wrapped.append(Wrapped(pl_module, "configure_model", self._configure_model))
        self._wrapped.append(Wrapped(pl_module, "on_train_end", self._module_ends))
        self._wrapped += [*self._saving.wrapped(pl_module, self._adapters), *self._averages.wrapped()]
        if self._tries_first:
            self._wrapped.append(Wrapped(trainer.strategy, "on_exception", self._trial_failed))
        # keep_signature: Lightning inspects the parameters of `training_step` (batch_idx, dataloader_iter).
        self._wrapped.append(Wrapped(pl_module, "training_step", self._training_step, keep_signature=True))

    def _configure_model(self, original: Callable[[], None]) -> None:
        # The user may create layers only here, and techniques must see them. Wrappers (DDP) come later.
        original()
        module = self._trainer.lightning_module
        self._session.attach(module, _run_environment.run_environment(self._trainer, module))

    @classmethod
    def join_late(cls, trainer: Any, pl_module: Any) -> None:
        """Count the steps of the plugin's Trainer if it has no callback of ours."""
        if trainer.state.fn != "fit" or _callbacks(trainer):
            return
        callback = cls({})
        # In front: ours must run before user callbacks of the same event.
        trainer.callbacks.insert(0, callback)
        callback.setup(trainer, pl_module, "fit")
        callback._session.attach(pl_module, _run_environment.run_environment(trainer, pl_module))
        # The checkpoint was read before this callback existed.
        loaded = trainer._checkpoint_connector._loaded_checkpoint
        if loaded:
            callback.on_load_checkpoint(trainer, pl_module, loaded)

    @property
    def _session(self) -> Session:
        if self.session is None:
            raise RuntimeError("EffCallback: setup must run before training; add it to Trainer(callbacks=...)")
        return self.session

    # -- begin: the optimizer exists, saved state is restored

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Check the techniques against the optimizers, and prepare for their state."""
        if self.session is None:
            return
        # Check again: the model was wrapped and optimizers made after `setup`, and some rules depend on them.
        check(self.session.recipe, _run_environment.run_environment(trainer, pl_module))
        self._saving.find_place()
        for adapter in self._adapters:
            adapter.start_fit()
        if self._session.is_attached:
            # Optimizer states are loaded next: techniques with other tensors must provide these now.
            self._session.prepare_optimizers(trainer.optimizers)
        self._resume.mark_fit_start()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the session. Only now have sharded strategies restored callbacks."""
        self._check_set_up(trainer)
        if self.session is None:
            return
        # Lightning has restored loops and run callbacks such as finetuning by now.
        self._resume.mark_train_start()
        for adapter in self._adapters:
            adapter.start_training()
        self._begin(trainer, pl_module)
        preflight(trainer, self.session, self._services, self._seen)
        if self.session.is_changed:
            # Best checkpoints of another recipe are not comparable with new ones.
            self._saving.best.forget()
        self._steps = WatchedSteps(trainer, self.session, skipped=self._resume.step_was_skipped)

    def _begin(self, trainer: Any, pl_module: Any) -> None:
        session = self._session
        if self._saving.begins_with is not None:
            session.load_state_dict(self._saving.begins_with)
        # The learning rate schedule and Lightning's averaging may shorten the run: use the steps that will really come.
        with self._averages.planned_epochs():
            total_steps = _run_environment.total_steps(trainer, pl_module)
        session.begin(
            trainer.optimizers,
            total_steps=total_steps,
            steps_per_epoch=_run_environment.steps_per_epoch(trainer, pl_module),
            clips_gradients=_run_environment.clips_by_norm(trainer, pl_module),
            wrappers=wrappers if isinstance(wrappers := pl_module.optimizers(), list) else [wrappers],
        )

    # -- one step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Reset what was tried and applied in this batch."""
        self._check_set_up(trainer)
        if self._steps is not None:
            # Before the batch's forward: otherwise flags of the previous batch would count twice.
            self._steps.next_batch()
            self._resume.backward_began = False

    def _check_set_up(self, trainer: Any) -> None:
        leader = self._leader
        if self.recipe and (leader is None or leader._trainer is not trainer or self not in leader._joined):
            raise _joining.came_late(self)

    def on_after_setup(self, *_: Any, **__: Any) -> None:
        """Raise an error under Fabric, which calls this when a module is set up."""
        raise _joining.not_of_fabric(self)

    on_after_optimizer_step = on_after_setup  # for an optimizer that was set up without its module

    def on_init_end(self, *_: Any, **__: Any) -> None:
        """Raise an error under the Hugging Face Trainer, which calls this first."""
        raise _joining.not_of_hugging_face(self)

    on_train_begin = on_init_end  # for a callback that was added later

    def _check_there(self) -> None:
        # A tuner's trials remove callbacks on purpose, and restore them.
        if self._tries_first and not self._session.has_begun:
            return
        error = _joining.removed_in_training(self._joined, self._trainer.callbacks, self._session.step)
        if error is not None:
            self._cut_short()  # a removed callback gets no further events
            raise error

    def _module_ends(self, original: Callable[[], None]) -> None:
        self._check_there()
        original()

    def _training_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._check_there()
        for adapter in self._adapters:
            # Adapters replace only arguments, so the signature that Lightning saw stays.
            args = adapter.arguments(original, args, kwargs)
        self._services.step_arguments = (args, kwargs)
        with self._session.forward():
            output = original(*args, **kwargs)
            if isinstance(output, Tensor):
                # Lightning takes a tensor or a mapping with "loss". Pass on anything else (None skips the batch).
                output = self._session.loss(output)
            elif isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
                output = {**output, "loss": self._session.loss(output["loss"])}
        self._services.step_arguments = (), {}  # they hold the batch
        return output

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Record that from here on gradients include a part of this batch."""
        if self.session is not None:
            self._resume.backward_began = True

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Handle gradients that are unscaled but not clipped yet."""
        # SWA's last epoch updates only BatchNorm: no backward, no step.
        if self.session is not None and self._steps is not None and not trainer.fit_loop._skip_backward:
            self._steps.before_step()
            self.session.before_step()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count a skipped step, log figures when the Trainer logs, and sometimes check that steps come as planned."""
        session = self.session
        if session is None or self._steps is None:
            return
        # At powers of two, as in the other front end, and at the epoch's last batch, since its length may be unknown
        # before.
        seen = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        looks = seen & (seen - 1) == 0 or trainer.is_last_batch
        if looks and (done := _run_environment.share_done(trainer, pl_module, batch_idx)) is not None:
            session.progress.look_ahead(done, stops_as_planned=trainer.max_steps >= 0)
        # After the window: figures are of applied steps, and Lightning logs at its own interval.
        if self._steps.batch_ended() and trainer._logger_connector.should_update_logs:
            for name, value in session.figures().items():
                pl_module.log(name, value, prog_bar=is_in_bar(name), on_step=True, on_epoch=False)

    # -- evaluation

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a validation, or the sanity check, which comes before `begin` and changes nothing."""
        if self.session is not None:
            self._saving.validates()
            self.session.swaps.begin_evaluation()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """End a validation. Checkpoint callbacks save after this."""
        if self.session is not None:
            self.session.swaps.leave_evaluation()
            if not trainer.sanity_checking:
                self.session.evaluated(trainer.callback_metrics)
            else:
                self._seen = set(trainer.callback_metrics)

    # -- checkpoints

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add what an exact resume needs, except to files with weights only."""
        if self.session is not None and self.session.context is not None:
            self._saving.add_state(checkpoint, self._resume, bool(self._steps and self._steps.skipped))

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep the saved state until training starts. An evaluation after `fit` loads only weights."""
        if self.session is None:
            return
        if trainer.state.fn != "fit":
            self._saving.close()  # the module gets a checkpoint's weights
            return
        _joining.refuse_trials_on_resume(trainer, checkpoint)
        self._saving.take_state(checkpoint, self._resume)

    @property
    def _services(self) -> Any:
        return self._session._services

    # -- the end

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Bake the model in place on every process and write the receipt."""
        session = self.session
        if session is None:
            return
        # A resumed run without batches left never restored its generators, but callbacks after this one may draw.
        self._resume.use_up()
        session.finish()
        self._averages.take_over()
        # Kept separately: a later test with a checkpoint writes that one's state into the precision plugin.
        self._saving.final, trainer._eff_leader = session.state_dict(), self
        self._saving.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Restore a plain model after an interruption, but let other callbacks save the run first."""
        if self.session is not None:
            # An interrupted validation has swapped weights or quantizers in: swap them out first.
            self.session.swaps.leave_evaluation()
        # Other callbacks save on exceptions (OnExceptionCheckpoint): detach after the last of them, so that they save
        # a model with state.
        last = _joining.last_on_exception(trainer.callbacks, self)
        if self.session is None or last is None:
            self._cut_short()
        else:
            self._wrapped.append(Wrapped(last, "on_exception", self._cut_short_after))

    def _cut_short_after(self, original: Callable[..., None], *args: Any) -> None:
        try:
            original(*args)
        except EffError as error:  # perhaps the one that ended training, which is reported instead
            self._services.say(f"efftrain: nothing saved: {error}")
        finally:
            self._cut_short()

    def _trial_failed(self, original: Callable[..., None], exception: BaseException) -> None:
        if self not in self._trainer.callbacks:  # Lightning (2.6) does not restore those removed for a tuner's trial
            self._trainer.callbacks[:0] = self._joined
            self._cut_short()
        original(exception)

    def _cut_short(self) -> None:
        if self.session is not None:
            # In this process only: gathering would wait for others that may not have raised.
            if self.session.is_live and world_size() == 1:
                self._saving.final = self.session.state_dict()  # in a notebook, training may continue
            self.session.detach()
        vars(self._trainer or self).pop("_eff_leader", None)
        if self._saving is not None:
            self._saving.close()
        self._undo()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """End a run that was resumed at its very end: its weights in training were loaded, but no step followed."""
        session = self.session
        if session is None or not session.is_attached or session.has_begun:
            return
        if self._saving.begins_with is None:
            # Lightning skips training and its end if a Timer has no time left.
            session.finish()
            self._saving.leave_receipt()
        else:
            self._begin(trainer, pl_module)
            self.on_train_end(trainer, pl_module)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Restore the methods of module and Trainer, also after a tuner's trials, which never call `on_fit_end`."""
        if stage == "fit" and self.session is not None:
            self.session.detach()
            self._undo()

    def _undo(self) -> None:
        # In reverse: see `WatchedSteps.stop`.
        for wrapped in reversed(self._wrapped):
            wrapped.undo()
        if self._steps is not None:
            self._steps.stop()
        if self._resume is not None:
            self._resume.stop()
        for adapter in self._adapters:
            adapter.undo()
        self._wrapped, self._adapters, self._steps = [], [], None

    def __getstate__(self) -> dict[str, Any]:
        # Processes are spawned before `fit` begins, and an earlier one's Trainer must not be pickled.
        empty = dict.fromkeys(("session", "_trainer", "_resume", "_steps", "_saving", "_averages"))
        return {**self.__dict__, **empty, "_wrapped": [], "_joined": [], "_adapters": []}


def _callbacks(trainer: Any) -> list[EffCallback]:
    return [callback for callback in trainer.callbacks if isinstance(callback, EffCallback)]
