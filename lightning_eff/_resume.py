"""Exact resume: restore what Lightning does not, so that a resumed run equals an uninterrupted one.

Lightning restores weights, optimizers, schedulers and its progress. It does not restore random generators, including
those of data loaders. In the middle of an epoch it restarts a plain data loader at batch 0. It drops the gradients of
an open accumulation window.

Lightning (2.6) also infers from its counters where a checkpoint was saved, and changes them on resume: an epoch saved
after its last batch counts as finished, an interrupted batch counts twice, validations and optimizer steps are counted
again. With several stops these errors add up. So we save the position, and set the loops to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import length_hint
from typing import Any, Literal, TypedDict

import torch
from torch.utils._pytree import tree_leaves

from lightning_eff._adapters import Adapter
from lightning_eff._run_environment import callback_kinds
from shared_core.distributed.collectives import (
    all_gather_object,
    local_part,
    other_processes,
    own_buffers,
    own_state,
    put_buffers_,
    rank,
    with_own_state,
    world_size,
)
from shared_core.distributed.sharded_tensors import place_gradients_, put_gradient
from shared_core.engine.saving.session_state import load_window_state, window_state
from shared_core.engine.saving.state_file import rng_state, set_rng_state
from shared_core.errors import CheckpointError
from shared_core.front_ends.session import Session
from shared_core.front_ends.wrapped_method import Wrapped


def random_state(loaders: Any) -> dict[str, Any]:
    """Return the state of every random generator that training draws from, including those of these loaders."""
    return {**rng_state(), "loaders": [generator.get_state() for generator in _generators(loaders)]}


def set_random_state(state: Mapping[str, Any], loaders: Iterable[Any]) -> None:
    """Restore generators to the states that `random_state` returned. Other loaders are unchanged."""
    set_rng_state(state)
    # By position: generators have no names. strict=False, since a resumed run may have other loaders.
    for generator, saved in zip(_generators(loaders), state.get("loaders", ()), strict=False):
        generator.set_state(saved)


def _generators(loaders: Any) -> list[torch.Generator]:
    found: dict[int, torch.Generator] = {}
    # By identity: sampler and batch sampler may share one generator, which must be saved once.
    for loader in tree_leaves(getattr(loaders, "flattened", loaders)):
        batches = getattr(loader, "batch_sampler", None)
        for owner in (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
            if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
                found[id(generator)] = generator
    return list(found.values())


class Place(TypedDict):
    """A saved position in a run."""

    epoch: Literal["begins", "within", "ended"]
    """Before an epoch, inside one, or at its end, when only plateau schedulers are left to step."""
    left: Literal["batch", "end", "validation", "rest", ""]
    """What is left of the last batch: all of it; a validation that was due or is run again; the steps after a
    validation; or nothing."""


def place_of(trainer: Any, is_validating: bool) -> Place:
    """Return the Trainer's current position."""
    # Lightning counts ready, started, processed, completed in this order. Which of them are equal tells the position.
    epochs, batches = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress.current
    if epochs.started == epochs.processed:
        # `completed` lags behind while the hooks of an epoch's end run, in which callbacks save.
        return {"epoch": "ended" if epochs.completed < epochs.processed == epochs.ready else "begins", "left": ""}
    if batches.ready > batches.processed:
        return {"epoch": "within", "left": "batch"}
    if is_validating:
        return {"epoch": "within", "left": "validation"}
    if batches.completed < batches.processed:
        return {"epoch": "within", "left": "end"}
    # A checkpoint callback saves within validation's last hooks: what follows a validation is still left.
    return {"epoch": "within", "left": "rest" if trainer.validating else ""}


def put_back(trainer: Any, place: Place) -> None:
    """Set every counter of the loops to a position, and keep the loops from assuming a restart."""
    fit_loop, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    # Lightning resets the counters of a restarting loop to the last completed step. Here the exact position is known,
    # so no loop may reset anything.
    for one in (fit_loop, loop, loop.val_loop, loop.automatic_optimization, loop.manual_optimization):
        one._restarting = False
    is_within = place["epoch"] == "within"
    # Within an epoch: it is ready and started but not processed.
    for count in (fit_loop.epoch_progress.total, fit_loop.epoch_progress.current):
        count.completed = count.processed
        count.ready = count.started = count.processed + is_within
    if not is_within:
        return
    # A started batch is run again from its start: set counters to what was processed.
    for count in (loop.batch_progress.total, loop.batch_progress.current):
        count.ready = count.started = count.completed = count.processed
    # Attempted but incomplete steps count as not attempted.
    steps = loop.automatic_optimization.optim_progress.optimizer
    for progress in (steps.step, steps.zero_grad, loop.manual_optimization.optim_step_progress):
        progress.total.reset_on_restart()
        progress.current.reset_on_restart()
    if place["left"] == "batch":  # otherwise the last batch of its epoch would not be run again
        loop.batch_progress.is_last_batch = False
    if place["left"] == "validation":
        total, current = loop.val_loop.batch_progress.total, loop.val_loop.batch_progress.current
        # The validation is run again: subtract its share from the totals, then reset the current counters.
        for name, number in vars(current).items():
            setattr(total, name, getattr(total, name) - number)
        loop.val_loop.batch_progress.reset_on_run()


def finish_batch(trainer: Any, place: Place, fetcher: Any) -> None:
    """Do what follows the last batch: a due validation, plateau schedulers, its count for loggers."""
    if place["left"] in ("end", "validation", "rest"):
        loop = trainer.fit_loop.epoch_loop
        # `on_advance_end` does validation and what follows. After a finished validation only the latter is left.
        loop._skip_next_val = place["left"] == "rest"
        loop.on_advance_end(fetcher)


def has_all_batches(trainer: Any) -> bool:
    """Return True if all batches of the current epoch are done."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return bool(progress.is_last_batch or progress.current.ready >= trainer.num_training_batches)


def finish_epoch(trainer: Any) -> None:
    """Step the plateau schedulers, which Lightning does after the hooks of an epoch's end."""
    epochs = trainer.fit_loop.epoch_progress.current
    epochs.completed -= 1  # they use this count
    if has_all_batches(trainer):
        trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    epochs.completed += 1


class ExactResume:
    """Records the random states behind every epoch's data order, and replays them after a restart.

    An epoch's data order is drawn at two moments: when the loader's iterator is made (seeds of workers, and the
    shuffle if workers prefetch), and at the first fetch (the shuffle without workers). Both are recorded.
    """

    def __init__(self, trainer: Any, session: Session, adapters: Sequence[Adapter]) -> None:
        self._trainer, self._session, self._note, self._adapters = trainer, session, session.note, adapters
        self._saved: Mapping[str, Any] | None = None
        self._fetcher: Any = None
        self._iter_rng: dict[str, Any] = self._random()
        self._fetch_rng: dict[str, Any] | None = None
        self._cycled: dict[int, tuple[int, dict[str, Any]]] = {}
        """Which loaders restarted within this epoch, at which fetch, and the random state before it."""
        self._before_validation: dict[str, Any] | None = None
        """The random state when the current validation began."""
        self.backward_began = False  # True if gradients already include a part of the current batch
        self._first_epoch, self._capture_fetch, self._iterate_anew = True, False, False
        self._is_marked = self._goes_on_within = False
        self.step_was_skipped = False
        """True if the optimizer step of a resumed run's last batch was tried and not applied."""
        loop = trainer.fit_loop.epoch_loop
        self._wrapped = [
            # Wrap the methods in which Lightning makes an iterator, fetches, or counts. Random numbers are drawn there,
            # and no callback hook runs right before them.
            Wrapped(trainer.fit_loop, "reset", self._on_run_reset),
            Wrapped(trainer.fit_loop, "on_advance_start", self._before_epoch),
            Wrapped(loop, "reset", self._on_epoch_reset),
            Wrapped(loop, "on_run_start", self._on_epoch_start),
            Wrapped(loop, "_on_before_fetch", self._on_fetch),
            Wrapped(loop.val_loop, "reset", self._on_validation),
            Wrapped(loop.val_loop, "_on_evaluation_end", self._on_validation_end),
            Wrapped(trainer.fit_loop._data_source, "dataloader", self._on_loader),
        ]

    def stop(self) -> None:
        """Restore the methods of the Trainer's loop."""
        for wrapped in self._wrapped:
            wrapped.undo()

    def _loaders(self) -> list[Any]:
        combined = self._trainer.fit_loop._combined_loader
        return [] if combined is None else combined.flattened

    def _random(self) -> dict[str, Any]:
        return random_state(self._loaders())

    def _set_random(self, state: Mapping[str, Any]) -> None:
        set_random_state(state, self._loaders())

    def _on_loader(self, original: Callable[[], Any]) -> Any:
        made = original()
        if self._first_epoch:
            # Lightning makes the first iterator right after, or in configure_optimizers if that needs the run's length
            self._iter_rng, self._is_marked = random_state(made), True
        return made

    def mark_fit_start(self) -> None:
        """Record the random state of a run that continues with its existing loaders."""
        if not self._is_marked:
            self._iter_rng, self._is_marked = self._random(), True

    def state_dict(self, session: Mapping[str, Any], skipped: bool) -> dict[str, Any]:
        """Return every process's random state and its other own state. Lightning writes only the main process's.

        Own state is: gradients in the middle of an accumulation window, and differing buffers and session state (a
        teacher's batch norms, ranges observed on its own micro-batches).
        """
        # A run that was loaded but has not reached its position (a crash in setup) saves the loaded state unchanged.
        if self._saved is not None:  # position not reached yet
            return {"ranks": [self._saved] if world_size() == 1 else all_gather_object(dict(self._saved))}
        gradients, trainer = None, self._trainer
        is_validating = trainer.validating and self._before_validation is not None
        # Only inside an accumulation window: otherwise gradients are zeroed before the next batch.
        if self._is_inside_window():
            place_gradients_(trainer.lightning_module)
            named = trainer.lightning_module.named_parameters()
            # This process's part: what was reduced so far. Every process saves its own.
            gradients = {name: local_part(parameter.grad) for name, parameter in named if parameter.grad is not None}
        mine: dict[str, Any] = {
            "rng": self._random(),
            "iter_rng": self._iter_rng if self._is_marked else None,  # a tuner's trial saves before that
            "fetch_rng": self._fetch_rng,
            "cycled": self._cycled,
            "gradients": gradients,
            "windows": {} if gradients is None else window_state(self._session),
            "cut_short": self._where_cut_short(),
            "place": place_of(trainer, is_validating),
            "before_validation": self._before_validation if is_validating else None,
            "frozen": self._frozen(),
            "loaded_in_epoch": trainer.fit_loop._last_train_dl_reload_epoch,
            "metrics": self._metrics(),
            "skipped": skipped,
            "stopped_early": trainer.should_stop and self._stops_early(),
        }
        if world_size() == 1:
            return {"ranks": [mine]}
        # Buffers differ between processes (BatchNorm without sync), and Lightning saves only the main process's.
        mine |= own_state(session)
        module, wrapped = trainer.lightning_module, trainer.strategy.model
        mine["buffers"] = own_buffers(module, wrapped, is_inside_window=gradients is not None)
        return {"ranks": all_gather_object(mine)}

    def _put_buffers(self, saved: Mapping[str, Any]) -> None:
        put_buffers_(self._trainer.lightning_module, saved.get("buffers", {}))
        # DDP broadcasts buffers in the first forward after a step, but not inside a window, where it would overwrite
        # the restored ones.
        if saved["gradients"] is not None and hasattr(self._trainer.strategy.model, "require_forward_param_sync"):
            self._trainer.strategy.model.require_forward_param_sync = False  # as after DDP's last forward

    def load_state_dict(self, state: Mapping[str, Any] | None, of_main: Any) -> Any:
        """Keep a saved state until training reaches its position. Return this process's session state."""
        if state is None:
            return of_main
        ranks = state.get("ranks") if isinstance(state, Mapping) else None
        if not isinstance(ranks, list) or not ranks or not all(isinstance(one, Mapping) for one in ranks):
            raise CheckpointError(
                "resume",
                "checkpoint's eff_resume must hold the state of every process, got another value: it is damaged",
                "resume from another checkpoint",
            )
        if "place" not in ranks[0]:
            raise CheckpointError(
                "resume",
                "checkpoint must hold its position in the epoch, got one of an earlier efftrain without it",
                "resume with the version that wrote it, or start from its weights only",
            )
        if where := ranks[0].get("cut_short"):
            self._note(
                f"saved in the middle of {where}, which is run again: random draws, BatchNorm updates and accumulated "
                "gradients of the first attempt may make the run differ from an uninterrupted one"
            )
        if len(ranks) == world_size():
            self._saved = ranks[rank()]
            return with_own_state(of_main, self._saved)
        # Generators, windows and buffers of other processes do not apply here. Fresh ones differ between processes, as
        # they must. The mean gradients are those of all ranks together.
        of_its_own = {"rng": rng_state(), "gradients": self._mean_gradients(ranks), "windows": {}, "buffers": {}}
        self._saved = {**ranks[rank() % len(ranks)], **of_its_own}
        self._note(other_processes(len(ranks)))
        return of_main

    def _on_run_reset(self, original: Callable[[], None]) -> None:
        if self._saved is None:
            original()
            return
        place = self._saved["place"]
        put_back(self._trainer, place)
        original()
        self._goes_on_within = place["epoch"] == "within"
        if self._goes_on_within:
            self._trainer.fit_loop._restart_stage = "restarted_mid_epoch"  # callbacks have had the epoch's start

    def _on_epoch_reset(self, original: Callable[[], None]) -> None:
        # Inside an epoch Lightning's reset would zero the counters that `put_back` has set.
        if not self._goes_on_within:
            original()
        self._goes_on_within = False

    def mark_train_start(self) -> None:
        """Restore what Lightning (2.6) does not restore at the start of training."""
        if self._saved is None:
            return
        self._freeze_again(self._saved.get("frozen"))
        self._put_buffers(self._saved)
        fit_loop = self._trainer.fit_loop
        fit_loop._last_train_dl_reload_epoch = self._saved.get("loaded_in_epoch", fit_loop._last_train_dl_reload_epoch)
        self.step_was_skipped = self._saved["skipped"]
        if self._saved["stopped_early"] and self._stops_early():
            self._trainer.should_stop = True
            self._note("EarlyStopping had ended this run when it was saved: nothing is left to train")

    def _stops_early(self) -> bool:
        # Lightning 2.5 has no message, and its epoch starts at 0
        return any(
            getattr(one, "stopping_reason_message", getattr(one, "stopped_epoch", 0)) for one in self._trainer.callbacks
        )

    def _metrics(self) -> list[dict[str, torch.Tensor]]:
        """Return logged metrics, and after an epoch's last batch the epoch means that are about to be logged."""
        loop, means = self._trainer.fit_loop.epoch_loop, {}
        # Schedulers and callbacks at the epoch's end read means over the epoch, whose sums are not saved.
        if loop.batch_progress.is_last_batch:
            means = loop._results.metrics(on_step=False)["callback"]
        return [
            {key: one.detach().to("cpu", copy=True) for key, one in part.items() if isinstance(one, torch.Tensor)}
            for part in (self._trainer.callback_metrics, means)
        ]

    def _know(self, metrics: Mapping[str, torch.Tensor]) -> None:
        device = self._trainer.strategy.root_device
        self._trainer.callback_metrics.update({key: one.to(device) for key, one in metrics.items()})

    def _freeze_again(self, frozen: list[str] | None) -> None:
        """Unfreeze parameters that trained when the run was saved: Lightning's finetuning callbacks (2.6) do not."""
        # They freeze in `setup`, and unfreeze in epochs that are already done.
        if frozen is not None and self._frozen() is not None:
            for name, parameter in self._trainer.lightning_module.named_parameters():
                parameter.requires_grad_(name not in frozen)

    def _frozen(self) -> list[str] | None:
        if "BaseFinetuning" not in callback_kinds(self._trainer):
            return None
        return [name for name, p in self._trainer.lightning_module.named_parameters() if not p.requires_grad]

    def _mean_gradients(self, ranks: list[Mapping[str, Any]]) -> dict[str, torch.Tensor] | None:
        """Return the mean of an unfinished window's gradients for another number of processes."""
        found = [one["gradients"] for one in ranks if one["gradients"]]
        if not found:
            return None
        # FSDP: a part of a gradient is useless to processes with other parts.
        if any(hasattr(parameter, "to_local") for parameter in self._trainer.lightning_module.parameters()):
            self._note(
                "gradients of the unfinished accumulation window are dropped: they were split for other processes"
            )
            return None
        # Each new process gets the mean, and averaging equal gradients again keeps it.
        return {name: sum(one[name] for one in found) / len(ranks) for name in found[0]}

    def use_up(self) -> None:
        """Restore the random state of a saved run that had nothing left to train."""
        if self._saved is not None:
            # No batch is left, so no fetch restores it: set counters and generators to the end of the saved run.
            set_rng_state(self._saved["rng"])
            put_back(self._trainer, self._saved["place"])
            if self._saved["place"]["epoch"] == "ended":
                self._know(self._saved["metrics"][0])
                finish_epoch(self._trainer)
            self._saved = None

    def _where_cut_short(self) -> str | None:
        """Return what Lightning will run again. Exceptions and user code can save anywhere."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress.current
        return f"batch {progress.processed} of an epoch" if progress.ready > progress.processed else None

    def _on_validation(self, original: Callable[[], None]) -> None:
        self._before_validation = self._random()
        original()

    def _on_validation_end(self, original: Callable[[], None]) -> None:
        self._before_validation = None
        original()

    def _is_inside_window(self) -> bool:
        loop, progress = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop.batch_progress.current
        if progress.ready > progress.processed:  # this batch is run again, so its share must not count twice
            # The batch's own gradients must not be saved. Once backward has started, they are mixed with the window's.
            return bool(progress.processed % self._trainer.accumulate_grad_batches) and not self.backward_began
        return bool(progress.ready and loop._should_accumulate())

    def _on_epoch_start(self, original: Callable[[Any], None], fetcher: Any) -> None:
        """Wrap the moment when the epoch loop makes its iterator."""
        for callback in self._trainer.callbacks:
            if type(callback).__name__ == "GradientAccumulationScheduler":
                # Lightning (2.6) checks it when an epoch starts, but not when it continues one.
                accumulate = callback.get_accumulate_grad_batches(self._trainer.current_epoch)
                self._trainer.accumulate_grad_batches = accumulate
        self._fetcher = fetcher
        # From here on the run is at its position, and saving means the current state.
        saved, self._saved = self._saved, None
        loop, loader = self._trainer.fit_loop.epoch_loop, fetcher.combined_loader
        if saved is not None or self._iterate_anew:
            self._note_workers(loader.flattened, self._trainer.current_epoch)
        if saved is not None:
            self._know(saved["metrics"][0])
            # A run saved before its first batch is within its first epoch too: its iterator was made from iter_rng.
            is_first = not loop.batch_progress.total.ready and saved["iter_rng"] is not None
            if saved["place"]["epoch"] == "within" or is_first:
                self._first_epoch = False
                original(fetcher)
                self._go_on_within_epoch(fetcher, saved)
                return
            # Between epochs: the next epoch's shuffle comes from the saved generators.
            self._set_random(saved["rng"])
            self._iterate_anew = True
        if self._iterate_anew and any(_is_stateful(part) for part in loader.flattened):
            self._note(
                "the data loader saves its own state, and at an epoch's end Lightning then skips an epoch; "
                "resume from a checkpoint inside an epoch, or use a loader without state"
            )
        now, before = self._random(), loader._iterator
        original(fetcher)
        if self._iterate_anew and loader._iterator is before and not any(_is_stateful(p) for p in loader.flattened):
            # Lightning made it before the generators were restored.
            self._set_random(now)
            iter(fetcher)
        # In the first epoch Lightning made the iterator earlier (`_on_loader`); in later ones it does in `original`.
        if self._iterate_anew or not self._first_epoch:
            self._iter_rng = now
        self._first_epoch = self._iterate_anew = False
        # With a known length nothing is fetched ahead. Other hooks may draw before the first fetch, so `_on_fetch`
        # records that moment.
        self._fetch_rng, self._capture_fetch, self._cycled = None, fetcher.length is not None, {}

    def _note_workers(self, loaders: Iterable[Any], epoch: int) -> None:
        """Report what is not resumed exactly if workers of the stopped run persisted from an earlier epoch."""
        lives_on = self._trainer.fit_loop._last_train_dl_reload_epoch < epoch
        if lives_on and any(part.persistent_workers for part in loaders if hasattr(part, "persistent_workers")):
            self._note(
                "the random states of persistent workers (persistent_workers) are unknown: what they draw may differ "
                "from an uninterrupted run; without persistent_workers the resume is exact"
            )

    def _before_epoch(self, original: Callable[[], None]) -> None:
        """Finish an epoch that was saved at its end, before the next one draws random numbers."""
        if self._saved is not None and self._saved["place"]["epoch"] == "ended":
            saved, self._saved = self._saved, None
            self._set_random(saved["rng"])
            self._know(saved["metrics"][0])
            finish_epoch(self._trainer)
            self._iterate_anew = True
        original()

    def _go_on_within_epoch(self, fetcher: Any, saved: Mapping[str, Any]) -> None:
        loop, place = self._trainer.fit_loop.epoch_loop, saved["place"]
        # Batches already done in this epoch. `_fetch_again` draws and discards their data.
        consumed: int = loop.batch_progress.current.processed
        self._iter_rng, self._fetch_rng, self._cycled = saved["iter_rng"], saved["fetch_rng"], saved["cycled"]
        is_over = consumed > 0 and has_all_batches(self._trainer)
        # A stateful loader continues by itself: Lightning has restored its state.
        if is_over:
            self._note_workers(fetcher.combined_loader.flattened, self._trainer.current_epoch + 1)
        elif not any(_is_stateful(part) for part in fetcher.combined_loader.flattened):
            self._fetch_again(fetcher, consumed)
        self._capture_fetch = not consumed and fetcher.length is not None
        # an interrupted first batch is fetched again, which draws the shuffle
        fetches_first = place["left"] == "batch" and not consumed and saved["fetch_rng"] is not None
        # Three moments of one epoch: before a validation that is run again, before the first fetch, or at saving.
        self._set_random(saved["before_validation"] or (saved["fetch_rng"] if fetches_first else saved["rng"]))
        # After the generators: zeros_like and copies draw nothing, and a window's gradients must be there before its
        # next batch.
        self._put_gradients(saved["gradients"])
        load_window_state(self._session, saved.get("windows", {}))
        finish_batch(self._trainer, place, fetcher)
        self._know(saved["metrics"][1])

    def _fetch_again(self, fetcher: Any, consumed: int) -> None:
        """Iterate over the epoch's data again, up to the next batch."""
        loaders = fetcher.combined_loader.flattened
        # From the state when the iterator was made: shuffle and worker seeds are drawn as before.
        self._set_random(self._iter_rng)
        for adapter in self._adapters:
            adapter.replay(loaders, consumed)
        for part in loaders:
            if self._trainer.current_epoch == 0 and getattr(part, "persistent_workers", False):
                part._iterator = None  # a new iterator draws one number more than a reused one
        iter(fetcher)
        # Other code may have drawn between making the iterator and the first fetch (sanity checks, hooks): use the
        # latter state.
        if self._fetch_rng is not None:
            self._set_random(self._fetch_rng)
        if hasattr(fetcher, "iterator_wrapper"):
            self._note("training_step fetches its own batches: the epoch starts over at its first batch")
            return
        # By fetch number: a loader that ends before the others restarts with a new shuffle.
        began_again = dict(self._cycled.values())
        for number in range(consumed):
            if number in began_again:
                self._set_random(began_again[number])
            next(fetcher, None)  # the data may be shorter now: a StopIteration would end the fit

    def _on_fetch(self, original: Callable[[], None]) -> None:
        """Record the state before a batch is fetched, the last moment before random numbers are drawn."""
        original()
        if self._capture_fetch:
            self._capture_fetch = False
            self._fetch_rng = self._random()
        fetched, loaders = self._fetcher.fetched, self._fetcher.combined_loader.flattened
        # max_size_cycle: shorter loaders restart within the epoch, and each start draws a shuffle from the generators.
        if len(loaders) > 1 and fetched and self._fetcher.length:
            for place, part in enumerate(loaders):
                if (length := length_hint(part)) and fetched % length == 0:
                    self._cycled[place] = fetched, self._random()

    def _put_gradients(self, gradients: Mapping[str, torch.Tensor] | None) -> None:
        if not gradients or not self._is_inside_window():
            return
        for name, parameter in self._trainer.lightning_module.named_parameters():
            if name in gradients:
                put_gradient(parameter, gradients[name])


def _is_stateful(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
