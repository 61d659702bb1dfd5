"""Translate the Trainer's events into a session's hooks. `_wire` installs all wrappers of Trainer methods."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from transformers import IntervalStrategy, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_eff._adapters import Adapter
from hf_eff._checkpoints import clean_run, resumed_from, save_whole
from hf_eff._data_resume import DataResume
from hf_eff._epoch_end import EpochEnd
from hf_eff._loss_normalization import TaskLoss, Window
from hf_eff._private_names import OlderLoop, check_private_names, second_division
from hf_eff._run_environment import (
    GivenCallbacks,
    check_output_folder,
    check_sharding,
    forget_optimizer,
    run_environment,
)
from hf_eff._saving import Loading, Saving
from hf_eff._services import TrainerServices, preflight
from hf_eff._watched_steps import WatchedSteps
from shared_core.engine.checks import compatibility
from shared_core.engine.recipe import Recipe
from shared_core.errors import TrainingError
from shared_core.front_ends.session import Session
from shared_core.front_ends.wrapped_method import Wrapped


class SessionCallback(TrainerCallback):
    """Drives one session through one trainer. Registered as the first callback; also wraps the instance's methods."""

    def __init__(self, trainer: Trainer, recipe: Recipe) -> None:
        self._older = OlderLoop.of(trainer)
        check_private_names(trainer)
        self._trainer = trainer
        self.args_recipe: Recipe | None = None
        """The recipe switched on by flags in the trainer's arguments, None if they have no flags."""
        self.given = GivenCallbacks(trainer, self)
        self._services = TrainerServices(trainer)
        self._window = Window(trainer)
        self._task = TaskLoss(trainer, self._window)
        self._adapters = [kind(trainer, self._window, self._services) for kind in Adapter.registered()]
        self._data, self._epoch_end, self._steps = DataResume(trainer), EpochEnd(trainer), WatchedSteps(trainer)
        self._loading = Loading(trainer, self._services, self._steps.optimizer)
        self._saving = Saving(trainer, self.given, self._services, self._state)
        self._made_optimizer: Any = None
        self._training = False  # True while train() runs
        self._is_over = False  # True if a resumed run had taken its last step
        self._wrapped: list[Wrapped] = []
        self._new_session(recipe)
        self._watch_accelerator()
        # A new list, since this may run while the handler iterates over the old one. First, so that loggers see our
        # figures and other callbacks' last events see the finished model.
        trainer.callback_handler.callbacks = [self, *trainer.callback_handler.callbacks]

    def _new_session(self, recipe: Recipe) -> None:
        self.session = Session(recipe, front_end="hf", services=self._services, seed=self._trainer.args.seed)
        self._services.note = self._data.note = self.session.note
        for part in (self._task, self._steps, self._loading, self._saving):
            part.session = self.session
        self._window.is_weighed = any(one.needs_window_mean for one in self.session.techniques.values())
        for adapter in self._adapters:
            adapter.join(self.session)
        self._asked = [adapter for adapter in self._adapters if adapter.applies(recipe)]
        for callback in self.given.callbacks:
            callback.session = self.session
        self._attach()
        self._wire()

    def join(self, recipe: Recipe) -> None:
        """Add techniques before training."""
        if self._training:
            raise TrainingError("hf", "techniques must join before training starts", "pass all callbacks together")
        merged = self.session.recipe.merged(recipe)
        # Before the new session attaches: the old one's hooks and replaced modules must be gone from the model.
        self.session.detach()
        self._new_session(merged)

    def _attach(self) -> None:
        trainer = self._trainer
        check_sharding(trainer)
        check_output_folder(trainer.args)
        for adapter in self._asked:
            adapter.check()
        if trainer.model is None:
            return  # a search dropped the model of its last trial; `model_init` makes another
            # Without torch.compile's wrapper, so that names and modules match the checkpoints.
        model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        if self.session.context is not None and self.session.context.model is not model:
            self.session.detach()  # `model_init` made a new model
        self.session.attach(model, run_environment(trainer))

    def _wire(self) -> None:
        trainer = self._trainer
        self._unwire()
        around: dict[str, Callable[..., Any]] = {
            "train": self.train,
            "_inner_training_loop": self._inner_training_loop,
            "call_model_init": self._call_model_init,
            "_hp_search_setup": self._set_up_trial,
            "get_eval_dataloader": self._data.evaluation_loader,
            "get_batch_samples": self._batches,
            "_load_rng_state": self._data.load_rng_state,
            "_maybe_log_save_evaluate": self._epoch_end.log_save_evaluate,
            "compute_loss": self._compute_loss,
            "_clip_grad_norm": self._steps.before_norm,
            "_get_grad_norm": self._steps.before_norm,
            "evaluate": self._evaluate,
            "predict": self._evaluate,
            "_save_checkpoint": self._save_checkpoint,
            **self._saving.around(),
            **self._loading.around(),
        }
        # Later wrappers are outside: the session's wrap the adapters', so that an adapter sees a forward in progress.
        for methods in (*(adapter.around() for adapter in self._asked), around):
            self._wrapped += [Wrapped(trainer, name, outer, keep_signature=True) for name, outer in methods.items()]
        if self._older is not None:
            self._wrapped += self._older.watch()

    def _unwire(self) -> None:
        while self._wrapped:
            self._wrapped.pop().undo()

    def _watch_accelerator(self) -> None:
        self._around_accelerator = [self._steps.watch()]
        if self._older is not None:
            self._around_accelerator.append(self._older.watch_accelerator())

    # --- the whole of training

    def train(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A subclass may call train recursively: wrap only the outermost call.
        if self._training:
            return method(*args, **kwargs)
        if self.given.gone() and not self._drop_removed_callbacks():
            return method(*args, **kwargs)
        # `eff run` adds its techniques in `Trainer.train`, which a callback of the script has wrapped
        getattr(Trainer.train, "eff_join", lambda trainer: None)(self._trainer)
        self._training = True
        try:
            self._attach()
            for adapter in self._asked:
                adapter.check_data()
            resume = args[0] if args else kwargs.pop("resume_from_checkpoint", None)
            # Remove half-written files of a killed run before anything in the folder is read.
            clean_run(str(self._trainer.args.output_dir))
            trial = args[1] if len(args) > 1 else kwargs.get("trial")
            path = resumed_from(resume, self._trainer, trial, self.session)
            # Passed as given, by position or name, since subclasses may take other arguments.
            if args:
                output = method(path, *args[1:], **kwargs)
            else:
                output = method(**kwargs, **({} if path is None else {"resume_from_checkpoint": path}))
            if not self.session.is_finished:
                self.given.check(self.session.step)
        # However training stopped, the user's model must be left without hooks and wrappers.
        except BaseException:
            self.session.detach()
            raise
        finally:
            self._training = False
            self._steps.stop()
            self._data.stop()
        self._saving.trained()
        return output

    def _drop_removed_callbacks(self) -> bool:
        """Return True if techniques are left after dropping those of callbacks removed since the last training."""
        left = self.given.left_of(self.session.recipe)
        self.session.detach()
        if left:
            self._new_session(left)
            return True
        self._unwire()
        for wrapped in self._around_accelerator:
            wrapped.undo()
        handler = self._trainer.callback_handler
        handler.callbacks = [callback for callback in handler.callbacks if callback is not self]
        return False

    def _inner_training_loop(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # also called for a new attempt of `auto_find_batch_size`
        if self.session.has_begun:
            self.session.detach()
        self._attach()
        makes_optimizer = self._trainer.optimizer is self._made_optimizer  # no optimizer, or that of an earlier `train`
        if makes_optimizer:
            forget_optimizer(self._trainer)
        resumed = kwargs.get("resume_from_checkpoint")
        self._loading.resumed_from = Path(resumed) if resumed else None
        self._epoch_end.trial, self._epoch_end.ignored_keys = kwargs.get("trial"), kwargs.get("ignore_keys_for_eval")
        try:
            return method(*args, **kwargs)
        finally:
            self._steps.leave_engine()
            self._made_optimizer = self._trainer.optimizer if makes_optimizer else None

    def _call_model_init(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model = method(*args, **kwargs)
        # `model_init` returns a new model for each trial, without techniques so far.
        self.session.detach()
        self.session.attach(model, run_environment(self._trainer))
        return model

    def _set_up_trial(self, method: Callable[..., None], trial: Any) -> None:
        # a search writes its values into the arguments, including flags, and makes a new accelerator
        accelerator, self._services.trial = self._trainer.accelerator, trial
        method(trial)
        if self._trainer.accelerator is not accelerator:
            self._watch_accelerator()
        args = cast(Any, self._trainer.args)
        if self.args_recipe is not None and args.recipe != self.args_recipe:
            others = {key: config for key, config in self.session.recipe.items() if key not in self.args_recipe}
            self.session.detach()
            self.args_recipe = args.recipe
            partial = self.session.recipe.allow_partial
            self._new_session(Recipe(others, allow_partial=partial).merged(self.args_recipe))
            args.mark_taken()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the state of a resumed run and begin."""
        session = self.session
        # Check again: the model was wrapped and the optimizer made after `attach`, and some rules depend on them.
        compatibility.check(session.recipe, run_environment(self._trainer))
        mine = self._loading.state()
        loader = kwargs.get("train_dataloader")
        try:
            # Count steps as the trainer does: a short last window is a step too.
            steps_per_epoch = max(math.ceil(len(cast(Any, loader)) / args.gradient_accumulation_steps), 1)
        except TypeError:  # a data set without length
            steps_per_epoch = None
        self._saving.settle()
        session.begin(
            [self._steps.optimizer()],
            total_steps=state.max_steps,
            steps_per_epoch=steps_per_epoch,
            clips_gradients=args.max_grad_norm > 0,
        )
        self._steps.follow()
        if (note := second_division(self._trainer)) is not None:
            session.note(note)
        for adapter in self._asked:
            adapter.begin(loader)
        self._is_over = 0 < state.max_steps <= state.global_step
        if self._is_over:
            # otherwise the trainer (transformers 5.23) would train one more step before it checks
            control.should_training_stop = True
            session.note(f"the resumed run had already taken its {state.max_steps} steps: nothing is left to train")
        self._task.follows = None
        self._epoch_end.resume(mine.get("epoch_end"), self._is_over)
        folder = self._loading.resumed_from
        self._data.start(loader, mine.get("data"), None if folder is None else str(folder))
        preflight(self._trainer, session, self._services)

    def on_epoch_begin(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Catch up on the previous epoch's end if a resumed run had not finished it."""
        if self._epoch_end.is_due:
            self._epoch_end.catch_up(self._data.restore)
            self._is_over = self._epoch_end.is_silent = control.should_training_stop
        self._epoch_end.begin()

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        """Record that later saves are after the epoch's end."""
        self._epoch_end.end()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Bake on every process, after the best model was loaded. Then evaluate if the weights changed since."""
        session = self.session
        self._loading.note_best()
        session.finish()
        self._steps.follow()
        if self._trainer.args.eval_strategy != IntervalStrategy.NO:
            session.validation.of_final(self._services.evaluate)

    # --- loss

    def _batches(self, method: Callable[..., Any], batches: Any, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        if self._is_over:
            return [], None
        window, num_items = method(self._data.batches(batches), *args, **kwargs)
        # Only if a technique weights the loss by tokens: otherwise a window's batches would be held for nothing.
        self._window.open(window if self._window.is_weighed else [], num_items)
        return window, num_items

    def _compute_loss(self, method: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        session = self.session
        if not (model.training and session.is_live):
            return method(model, inputs, *args, **kwargs)
        # Record that `compute_loss` is called: a subclass that computes its loss elsewhere would train without
        # techniques.
        self._steps.computed = True
        self.given.check(self.session.step)
        self._task.look(method, model, inputs, *args, **kwargs)
        with session.forward():
            return self._training_loss(method, model, inputs, *args, **kwargs)

    def _training_loss(self, method: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        # The last adapter's function is outermost, the trainer's own innermost.
        task = functools.partial(self._task.of, method)
        for adapter in self._asked:
            task = functools.partial(adapter.loss, task)
        result = task(model, inputs, *args, **kwargs)
        if not self.session.hooks.acts_on_loss:
            return result
        # accelerate puts only the model's forward under autocast; other models need it too
        with self._trainer.accelerator.autocast():
            loss = self.session.loss(result[0] if isinstance(result, tuple) else result, self._window.normalize)
        self._services.compute_loss = None  # holds the batch
        return (loss, *result[1:]) if isinstance(result, tuple) else loss

    # --- optimizer step

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Raise an error if a step bypassed the hooks."""
        self._steps.before_step()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Tell the session whether the step was applied."""
        self._steps.after_step()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Check now and then if steps are applied as planned: many may be skipped."""
        # At powers of two, where n & (n - 1) is 0: often enough early on, when a warning still helps.
        if state.global_step & (state.global_step - 1) == 0 and state.max_steps > 0:
            self.session.progress.look_ahead(min(state.global_step / state.max_steps, 1.0))

    # --- evaluation, saving, logging

    def _evaluate(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.session.swapped("evaluate"):
            return method(*args, **kwargs)

    def _save_checkpoint(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        trainer, session = self._trainer, self.session
        with session.swapped("checkpoint"):
            # Inside `swapped`: on every process, since sharded state is gathered by all.
            save_whole(trainer, method, *args, **kwargs)
        for adapter in self._asked:
            adapter.saved(args[1])

    def on_evaluate(self, *args: Any, metrics: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Pass an evaluation's metrics to the session, unless a technique asked for the evaluation."""
        self.session.evaluated(metrics or {})

    def _state(self) -> dict[str, Any]:
        return {"data": self._data.state(), "epoch_end": self._epoch_end.state()}

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        """Add the techniques' figures to what the trainer logs while training."""
        if not self.session.is_live:
            return
        if logs is None or logs.keys().isdisjoint({"loss", "learning_rate"}):  # a subclass may rename its loss
            return
        figures = {name: float(value) for name, value in self.session.figures().items()}
        logs.update(figures)
        state.log_history[-1].update(figures)  # the trainer put a copy there before this event
