"""The Trainer's events translated into a session's hooks. No other file replaces methods of a Trainer in training."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from transformers import IntervalStrategy, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_eff._adapters.adapter import Adapter
from hf_eff._checkpoints import (
    clean_run,
    factors_renamed,
    load_renamed_,
    resumed_from,
    save_whole,
    step_of,
)
from hf_eff._data_resume import DataResume
from hf_eff._epoch_end import EpochEnd
from hf_eff._given_callbacks import GivenCallbacks
from hf_eff._loss_normalisation import TaskLoss, Window
from hf_eff._model_card import leave_section, tell_in_card
from hf_eff._private_names import OlderLoop, check_private_names, second_division
from hf_eff._recount import Recount
from hf_eff._run_environment import (
    check_output_folder,
    check_sharding,
    forget_optimizer,
    is_peft,
    run_environment,
)
from hf_eff._services import TrainerServices, preflight
from hf_eff._watched_steps import WatchedSteps
from shared_core.checkpoint_formats.plain import write_deployment
from shared_core.engine import compatibility, rank_states
from shared_core.engine.claims import Where
from shared_core.engine.recipe import Recipe
from shared_core.engine.session import Session
from shared_core.engine.session_state import fit_to, loading
from shared_core.engine.state_file import load_state, save_state
from shared_core.errors import TrainingError
from shared_core.front_ends.wrapped_method import Wrapped


class SessionCallback(TrainerCallback):
    """Drives one session through one trainer: the first of its callbacks, and wrappers on the instance's methods."""

    def __init__(self, trainer: Trainer, recipe: Recipe) -> None:
        self._older = OlderLoop.of(trainer)
        check_private_names(trainer)
        self._trainer = trainer
        self.args_recipe: Recipe | None = None
        """The recipe that the flags of the trainer's arguments switched on, None if it has no flags."""
        self.given = GivenCallbacks(trainer, self)
        self._services = TrainerServices(trainer)
        self._window = Window(trainer)
        self._task = TaskLoss(trainer, self._window)
        self._adapters = [kind(trainer, self._window, self._services) for kind in Adapter.registered()]
        self._recount, self._steps = Recount(trainer, self.given, self._services), WatchedSteps(trainer)
        self._data, self._epoch_end = DataResume(trainer), EpochEnd(trainer)
        self._made_optimizer: Any = None
        self._training = False  # between train() and its end
        self._baking = False  # what is being saved is the user's model
        self._passed_over = False  # an evaluated model was not compared: it did not hold what was asked for
        self._is_over = False  # a resumed run had taken its last step
        self._resumed_from: Path | None = None
        self._wrapped: list[Wrapped] = []
        self._new_session(recipe)
        self._watch_accelerator()
        # Rebound, not changed: this may run while the handler goes through its list. First, so that loggers see our
        # figures and other callbacks' last events see the finished model.
        trainer.callback_handler.callbacks = [self, *trainer.callback_handler.callbacks]

    def _new_session(self, recipe: Recipe) -> None:
        self.session = Session(recipe, front_end="hf", services=self._services, seed=self._trainer.args.seed)
        self._services.note = self._data.note = self.session.note
        self._task.session = self._recount.session = self._steps.session = self.session
        self._window.is_weighed = any(one.weighs_loss for one in self.session.techniques.values())
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
        # Before the new one attaches: hooks and replaced modules of the old session must be gone from the model.
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
        # Without torch.compile's wrapper: names and modules must be those that checkpoints have.
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
            "save_model": self._save_model,
            "_save": self._save,
            "_load_from_checkpoint": self._load_from_checkpoint,
            "_load_optimizer_and_scheduler": self._load_optimizer_and_scheduler,
            "_determine_best_metric": self._determine_best_metric,
            "_load_best_model": self._load_best_model,
            "create_model_card": functools.partial(tell_in_card, self),
        }
        # Later wrappers stand outside: the session's own around the adapters', so that an adapter sees a forward in
        # progress.
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
        # Called within itself by a subclass: once, around the outermost.
        if self._training:
            return method(*args, **kwargs)
        if self.given.gone() and not self._drop_removed_callbacks():
            return method(*args, **kwargs)
        self._training = True
        try:
            self._attach()
            for adapter in self._asked:
                adapter.check_data()
            resume = args[0] if args else kwargs.pop("resume_from_checkpoint", None)
            # What a killed run left half-written goes before anything in the folder is read.
            clean_run(str(self._trainer.args.output_dir))
            trial = args[1] if len(args) > 1 else kwargs.get("trial")
            path = resumed_from(resume, self._trainer, trial, self.session)
            # As it was given, in position or by name, since subclasses may take other arguments.
            if args:
                output = method(path, *args[1:], **kwargs)
            else:
                output = method(**kwargs, **({} if path is None else {"resume_from_checkpoint": path}))
            if not self.session.is_finished:
                self.given.check(self.session.step)
        # Whatever stopped training: the user's model must be left without hooks and wrappers.
        except BaseException:
            self.session.detach()
            raise
        finally:
            self._training = False
            self._steps.stop()
            self._data.stop()
        try:
            self._recount.trained()
        finally:
            self._write_receipt()
        return output

    def _drop_removed_callbacks(self) -> bool:
        """Return whether techniques are left without those of callbacks that were removed since the last training."""
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
        # also a new attempt of `auto_find_batch_size`
        if self.session.has_begun:
            self.session.detach()
        self._attach()
        makes_optimizer = self._trainer.optimizer is self._made_optimizer  # none, or that of an earlier `train`
        if makes_optimizer:
            forget_optimizer(self._trainer)
        resumed = kwargs.get("resume_from_checkpoint")
        self._resumed_from = Path(resumed) if resumed else None
        self._epoch_end.trial, self._epoch_end.ignored_keys = kwargs.get("trial"), kwargs.get("ignore_keys_for_eval")
        try:
            return method(*args, **kwargs)
        finally:
            self._steps.leave_engine()
            self._made_optimizer = self._trainer.optimizer if makes_optimizer else None

    def _call_model_init(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model = method(*args, **kwargs)
        # `model_init` gives a new model for each trial: techniques have nothing of it yet.
        self.session.detach()
        self.session.attach(model, run_environment(self._trainer))
        return model

    def _set_up_trial(self, method: Callable[..., None], trial: Any) -> None:
        # a search puts its values into the arguments, flags among them, and makes a new accelerator
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
        # Again: wrapping and the optimizer have come since `attach`, and some rules are about these.
        compatibility.check(session.recipe, run_environment(self._trainer))
        self._services.saved_steps, self._passed_over = [], False
        mine: Mapping[str, Any] = {}
        if self._resumed_from is not None:
            saved = load_state(self._resumed_from)
            mine = rank_states.load(session, saved)
            # A metric of a model with other sparsity or bits cannot be compared: else the old one would be loaded at
            # the end.
            if session.is_changed and state.best_global_step is not None:
                state.best_metric = state.best_global_step = state.best_model_checkpoint = None
                session.note("the best checkpoint until now was of another recipe: the comparison starts anew")
            self._services.saved_steps = [int(step) for step in saved["saved_steps"]]
        loader = kwargs.get("train_dataloader")
        try:
            # As the trainer counts steps: a short last window is a step too.
            steps_per_epoch = max(math.ceil(len(cast(Any, loader)) / args.gradient_accumulation_steps), 1)
        except TypeError:  # a data set without length
            steps_per_epoch = None
        session.begin(
            [self._steps.optimizer()],
            total_steps=state.max_steps,
            steps_per_epoch=steps_per_epoch,
            clips_gradients=args.max_grad_norm > 0,
        )
        self._steps.follow()
        if (told := second_division(self._trainer)) is not None:
            session.note(told)
        for adapter in self._asked:
            adapter.begin(loader)
        self._is_over = 0 < state.max_steps <= state.global_step
        if self._is_over:
            # the trainer (transformers 5.23) would train one step more before it looks
            control.should_training_stop = True
            session.note(f"the run that is resumed had taken its {state.max_steps} steps: none is added")
        self._task.follows = None
        self._epoch_end.resume(mine.get("epoch_end"), self._is_over)
        self._data.start(loader, mine.get("data"), None if self._resumed_from is None else str(self._resumed_from))
        preflight(self._trainer, session, self._services)

    def on_epoch_begin(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Catch up on the end of the epoch before, if a resumed run had that before it."""
        if self._epoch_end.is_due:
            self._epoch_end.catch_up(self._data.restore)
            self._is_over = self._epoch_end.is_silent = control.should_training_stop
        self._epoch_end.begin()

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        """Note it: what is saved from now on lies behind the epoch."""
        self._epoch_end.end()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Bake, on every process; the best model has been loaded. Then evaluate what no validation has seen."""
        session, trainer = self.session, self._trainer
        if self._passed_over and trainer.state.best_global_step is None:
            session.note("no checkpoint that was compared held what was asked for: the model is that of the last step")
        session.finish()
        self._steps.follow()
        if trainer.args.eval_strategy != IntervalStrategy.NO:
            session.validate_final(self._services.evaluate)

    def _load_from_checkpoint(self, method: Callable[..., Any], folder: Any, *args: Any, **kwargs: Any) -> None:
        if not self.session.has_begun:
            fit_to(self.session, load_state(Path(folder)), run_environment(self._trainer))
        with loading(self.session):
            method(folder, *args, **kwargs)
        # After the trainer's own, which compares names as they stand in the file and only warns of what it did not
        # find.
        self._load_renamed(Path(folder))

    def _load_renamed(self, folder: Path) -> None:
        # FSDP has files of its own, under the model's own names
        if self.session.context is not None and not self._trainer.is_fsdp_enabled:
            load_renamed_(self.session.context.model, folder)

    def _load_optimizer_and_scheduler(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        # Before the state is loaded: torch casts what it loads to the parameters that it finds in the groups.
        if self.session.is_attached:
            self.session.prepare_optimizers([self._steps.optimizer()])
        if not self._trainer.is_fsdp_enabled:
            method(*args, **kwargs)
            return
        # torch (2.13) first makes the state that it loads into by a step with zero gradients and learning rate, which
        # accelerate (1.15) hands to the scaler, and that fails before the first loss
        optimizer = cast(Any, self._trainer.optimizer)
        scaler, optimizer.scaler = optimizer.scaler, None
        try:
            method(*args, **kwargs)
        finally:
            optimizer.scaler = scaler

    def _determine_best_metric(self, method: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        """Compare models that hold what was asked for; early stopping waits for the first of them, too."""
        state, session = self._trainer.state, self.session
        # The trainer writes both before it returns; a model that may not be the best must leave them as they were.
        before = state.best_metric, state.best_global_step
        is_best = method(*args, **kwargs)
        compared = self._trainer.args.metric_for_best_model is not None and session.is_attached
        if not compared or session.may_be_best():
            return is_best
        self._passed_over = True
        state.best_metric, state.best_global_step = before
        return False

    def _load_best_model(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        best, session = Path(str(self._trainer.state.best_model_checkpoint)), self.session
        session.settle_optimizers()  # the optimizer's own other weights are those of the last step
        with loading(session):
            method(*args, **kwargs)
        self._load_renamed(best)
        session.note(f"the model is the best one, {best.name}, not that of the last step")
        # Techniques go to the state of that checkpoint: its masks and ranges belong to its weights.
        session.load_state_dict(load_state(best))
        session.begin_again()

    def _write_receipt(self) -> None:
        trainer = self._trainer
        if trainer.args.should_save:
            receipt = self.session.receipt()
            receipt.write(self._services.run_folder)
            self._services.say(receipt.told())

    # --- loss

    def _batches(self, method: Callable[..., Any], batches: Any, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        if self._is_over:
            return [], None
        window, num_items = method(self._data.batches(batches), *args, **kwargs)
        # Only if something weighs the loss by tokens: else batches of a window would be held for nothing.
        self._window.open(window if self._window.is_weighed else [], num_items)
        return window, num_items

    def _compute_loss(self, method: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        session = self.session
        if not (model.training and session.is_attached and session.has_begun):
            return method(model, inputs, *args, **kwargs)
        # Proof that `compute_loss` is called: a subclass that computes a loss elsewhere would train without
        # techniques.
        self._steps.computed = True
        self.given.check(self.session.step)
        self._task.look(method, model, inputs, *args, **kwargs)
        with session.forward():
            return self._training_loss(method, model, inputs, *args, **kwargs)

    def _training_loss(self, method: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        # The outermost function is that of the last adapter; the trainer's own is innermost.
        task = functools.partial(self._task.of, method)
        for adapter in self._asked:
            task = functools.partial(adapter.loss, task)
        result = task(model, inputs, *args, **kwargs)
        if not self.session.needs_forward:
            return result
        # accelerate puts the model's forward alone under autocast; that of other models belongs there too
        with self._trainer.accelerator.autocast():
            loss = self.session.loss(result[0] if isinstance(result, tuple) else result, self._window.normalise)
        self._services.compute_loss = None  # holds the batch
        return (loss, *result[1:]) if isinstance(result, tuple) else loss

    # --- optimizer step

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Refuse a step that passed the hooks by."""
        self._steps.before_step()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Tell the session whether the step was applied."""
        self._steps.after_step()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Look now and then whether steps are applied as planned: many may be skipped."""
        # At powers of two, where n & (n - 1) is 0: often enough early, where a plan that cannot be met should be told.
        if state.global_step & (state.global_step - 1) == 0 and state.max_steps > 0:
            self.session.look_ahead(min(state.global_step / state.max_steps, 1.0))

    # --- evaluation, saving, logging

    def _evaluate(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.session.swapped("evaluate"):
            return method(*args, **kwargs)

    def _save_checkpoint(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        trainer, session = self._trainer, self.session
        with session.swapped("checkpoint"):
            # Inside `swapped`: on every process, as sharded state is gathered by all.
            save_whole(trainer, method, *args, **kwargs)
        for adapter in self._asked:
            adapter.saved(args[1])

    def on_evaluate(self, *args: Any, metrics: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Tell the session what an evaluation found; nobody hears of those that a technique asks for."""
        self.session.evaluated(metrics or {})

    def _save_model(
        self, method: Callable[..., Any], output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        # The trainer's own checkpoints keep the latent weights that training goes on from; what a user saves is baked.
        trainer, session = self._trainer, self.session
        self._baking = not _internal_call and session.is_attached and not is_peft(trainer.model)
        folder = Path(output_dir or str(trainer.args.output_dir))
        is_complete = not _internal_call and trainer.args.should_save and session.has_begun
        with factors_renamed(folder, cast(nn.Module, trainer.model)) if is_complete else contextlib.nullcontext():
            try:
                with session.swapped("checkpoint" if _internal_call else "export"):
                    method(output_dir, _internal_call)
                    if is_complete:
                        write_deployment(folder, session.deployment())
            finally:
                self._baking = False
            if not _internal_call and session.is_finished:
                self._recount.saved(folder, Where.END)
                if trainer.is_world_process_zero():
                    leave_section(folder, session.receipt())
        # `_save_checkpoint` calls save_model internally with a folder named after the step: the state goes there.
        step = step_of(output_dir) if output_dir and _internal_call else None
        if step is not None and self.session.is_attached and self.session.has_begun:
            self._save_state(Path(str(output_dir)), step)

    def _save(
        self, method: Callable[..., Any], output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        # FSDP and others hand in what they gathered; else the model's own tensors are baked into copies.
        if self._baking and self._trainer.args.should_save and self.session.context is not None:
            state_dict = self.session.bake(state_dict or self.session.context.model.state_dict())
        method(output_dir, state_dict=state_dict)

    def _save_state(self, folder: Path, step: int) -> None:
        # Right after the weights and before the trainer's own state, so that a checkpoint that looks complete is.
        saved = self._services.saved_steps
        self._services.saved_steps = [*(earlier for earlier in saved if earlier < step), step]
        more = {"data": self._data.state(), "epoch_end": self._epoch_end.state()}
        state = rank_states.gathered(self.session, self._trainer.model_wrapped, **more)
        if self._trainer.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)  # sharded weights are only saved after this
            save_state(folder, {**state, "saved_steps": self._services.saved_steps})

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        """Add the techniques' figures to what the trainer logs while training."""
        if not (self.session.is_attached and self.session.has_begun):
            return
        if logs is None or logs.keys().isdisjoint({"loss", "learning_rate"}):  # a subclass may rename its loss
            return
        figures = {name: float(value) for name, value in self.session.figures().items()}
        logs.update(figures)
        state.log_history[-1].update(figures)  # the trainer put a copy there before this event
