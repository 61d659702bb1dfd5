"""Exact resume: what Lightning does not put back by itself, so that a resumed run equals one that was never stopped.

Lightning restores weights, optimizers, schedulers and its progress. It does not restore random generators, it starts
a plain data loader over at batch 0 in the middle of an epoch, and it drops gradients accumulated so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import length_hint
from typing import Any

import torch

from lightning_eff import _plateau
from lightning_eff._loader_random import random_state, set_random_state
from lightning_eff._namespaces import callback_kinds
from lightning_eff._poisson import replay
from lightning_eff._wrapped import Wrapped
from shared_core import session_state
from shared_core.own_parts import everyones, own_buffers, own_state, put_buffers_, with_own_state
from shared_core.ranks import local_part, rank, world_size
from shared_core.session import Session
from shared_core.state_file import rng_state, set_rng_state


class ExactResume:
    """Records at every epoch where its data order came from, and replays it after a restart.

    The data order of an epoch is drawn at two moments: when the loader's iterator is made (seeds of workers, and the
    shuffle where workers prefetch), and at the first fetch (the shuffle without workers). Both are recorded.

    Args:
        trainer: A Lightning Trainer that is about to fit.
        session: Of the techniques.
    """

    def __init__(self, trainer: Any, session: Session) -> None:
        self._trainer, self._session, self._note = trainer, session, session.note
        self._saved: Mapping[str, Any] | None = None
        self._iter_rng: dict[str, Any] = self._random()
        self._fetch_rng: dict[str, Any] | None = None
        self._cycled: dict[int, tuple[int, dict[str, Any]]] = {}
        """Which loaders began again within this epoch, at which fetch, and where the generators were before it."""
        self._at_next_fetch: Mapping[str, Any] | None = None
        self._before_validation: dict[str, Any] | None = None
        """Where the generators were when the validation that is going on began."""
        self.backward_began = False
        """Whether gradients hold a part of the present batch already."""
        self._first_epoch, self._capture_fetch, self._iterate_anew = True, False, False
        self._is_marked = False
        self._batches_to_close: int | None = None
        loop = trainer.fit_loop.epoch_loop
        self._wrapped = [
            Wrapped(loop, "on_run_start", self._on_epoch_start),
            Wrapped(loop, "_on_before_fetch", self._on_fetch),
            Wrapped(loop.val_loop, "reset", self._on_validation),
            Wrapped(loop.val_loop, "_on_evaluation_end", self._on_validation_end),
            Wrapped(trainer.fit_loop._data_source, "dataloader", self._on_loader),
        ]

    def stop(self) -> None:
        """Give the Trainer's loop its own methods back."""
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
            # Lightning makes the first iterator right after, in configure_optimizers if that asks for the run's length
            self._iter_rng, self._is_marked = random_state(made), True
        return made

    def mark_fit_start(self) -> None:
        """Record the generators of a run that goes on with the loaders that it has."""
        if not self._is_marked:
            self._iter_rng = self._random()

    def state_dict(self, session: Mapping[str, Any], skipped: bool) -> dict[str, Any]:
        """Return the generators of every process, and what else only it has; Lightning writes the main one's state.

        That is its gradients in the middle of an accumulation window, and what differs in its buffers and its session's
        state (a teacher's batch norms, ranges observed on its own micro-batches).
        """
        gradients, epochs = None, self._trainer.fit_loop.epoch_progress.current
        if self._is_inside_window():
            named = self._trainer.lightning_module.named_parameters()
            gradients = {name: local_part(parameter.grad) for name, parameter in named if parameter.grad is not None}
        mine: dict[str, Any] = {
            "rng": self._random(),
            "iter_rng": self._iter_rng,
            "fetch_rng": self._fetch_rng,
            "cycled": self._cycled,
            "gradients": gradients,
            "windows": {} if gradients is None else session_state.windows(self._session.techniques),
            "cut_short": self._where_cut_short(),
            "before_validation": self._before_validation if self._trainer.validating else None,
            "epoch_begins": epochs.ready > epochs.started,
            "frozen": self._frozen(),
            "loaded_in_epoch": self._trainer.fit_loop._last_train_dl_reload_epoch,
            "metrics": self._epoch_metrics(),
            "plateau": _plateau.state(self._trainer, skipped),
        }
        if world_size() == 1:
            return {"ranks": [mine]}
        mine |= own_state(session)
        module, wrapped = self._trainer.lightning_module, self._trainer.strategy.model
        mine["buffers"] = own_buffers(module, wrapped, is_inside_window=gradients is not None)
        return {"ranks": everyones(mine)}

    def _put_buffers(self, saved: Mapping[str, Any]) -> None:
        put_buffers_(self._trainer.lightning_module, saved.get("buffers", {}))
        if saved["gradients"] is not None and hasattr(self._trainer.strategy.model, "require_forward_param_sync"):
            self._trainer.strategy.model.require_forward_param_sync = False  # as DDP's last forward left it

    def load_state_dict(self, state: Mapping[str, Any] | None, of_main: Any) -> Any:
        """Keep a saved state until training reaches its place; return this process's session.

        Args:
            state: What `state_dict` returned, None if nothing is saved.
            of_main: The main process's session.
        """
        if state is None:
            return of_main
        ranks = state["ranks"]
        if where := ranks[0].get("cut_short"):
            self._note(
                f"saved in the middle of {where}, which is run again: what its first attempt drew at random, let "
                "BatchNorm see or added to gradients of an accumulation window may differ from a run never stopped"
            )
        if len(ranks) == world_size():
            self._saved = ranks[rank()]
            return with_own_state(of_main, self._saved)
        of_its_own = {"rng": rng_state(), "gradients": self._mean_gradients(ranks), "windows": {}, "buffers": {}}
        self._saved = {**ranks[rank() % len(ranks)], **of_its_own}
        self._note(
            f"saved by {len(ranks)} processes and resumed by {world_size()}: random numbers are not restored, and the "
            "epoch goes on after as many batches as were seen; keep processes times batch size, and these are the same "
            "examples"
        )
        return of_main

    def mark_train_start(self) -> None:
        """Put back where the run was among its epochs: Lightning (2.6) has only now read its progress."""
        if self._saved is None:
            return
        self._freeze_again(self._saved.get("frozen"))
        self._put_buffers(self._saved)
        fit_loop, loop = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        fit_loop._last_train_dl_reload_epoch = self._saved.get("loaded_in_epoch", fit_loop._last_train_dl_reload_epoch)
        if self._saved.get("epoch_begins"):  # Lightning would take the batches of the epoch before for this one's
            loop.batch_progress.reset_on_run()
        if self._saved.get("cut_short"):  # as the last one of its epoch it would not be run again
            loop.batch_progress.is_last_batch = False
        ended_batch = fit_loop.restarted_mid_epoch and loop.restarted_on_train_batch_end
        if ended_batch and loop.batch_progress.is_last_batch and not any(map(_is_stateful, self._loaders())):
            # Lightning has counted the epoch as over, and would leave out its validation, its end and the next one's
            # start; without a known length it would go on counting this one's batches.
            self._batches_to_close = loop.batch_progress.current.processed
            for count in (fit_loop.epoch_progress.total, fit_loop.epoch_progress.current):
                count.processed -= 1
                count.completed -= 1

    def _close_epoch(self, fetcher: Any, saved: Mapping[str, Any], batches: int) -> None:
        """Do what comes after an epoch's last batch; its end and the next epoch then follow by themselves."""
        fit_loop, loop = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        self._first_epoch = False
        self._set_random(saved["rng"])
        device, known = self._trainer.strategy.root_device, self._trainer._logger_connector._callback_metrics
        parts: Any = saved.get("metrics") or ({}, {})
        before, means = [{key: one.to(device) for key, one in part.items()} for part in parts]
        known.update(before)
        current = loop.batch_progress.current
        current.ready = current.started = current.processed = current.completed = batches
        loop.batch_progress.is_last_batch = True
        loop._batches_that_stepped -= 1  # counted when the loop was reset, and below
        loop.restarting = fit_loop._restarting = False
        loop.on_advance_end(fetcher)
        known.update(means)

    def _epoch_metrics(self) -> list[dict[str, torch.Tensor]] | None:
        """Return after an epoch's last batch what is logged, and the means of the epoch that are about to be."""
        loop = self._trainer.fit_loop.epoch_loop
        batches = loop.batch_progress.current
        if not (self._trainer.training and loop.batch_progress.is_last_batch and batches.completed < batches.processed):
            return None
        both = self._trainer.callback_metrics, loop._results.metrics(on_step=False)["callback"]
        return [{key: one.detach().cpu() for key, one in part.items()} for part in both]

    def _freeze_again(self, frozen: list[str] | None) -> None:
        """Let the parameters train that trained when the run was saved: Lightning's finetuning callbacks forget (2.6).

        They freeze in `setup`, and unfreeze in epochs that are over.
        """
        if frozen is not None and self._frozen() is not None:
            for name, parameter in self._trainer.lightning_module.named_parameters():
                parameter.requires_grad_(name not in frozen)

    def _frozen(self) -> list[str] | None:
        if "BaseFinetuning" not in callback_kinds(self._trainer):
            return None
        return [name for name, p in self._trainer.lightning_module.named_parameters() if not p.requires_grad]

    def _mean_gradients(self, ranks: list[Mapping[str, Any]]) -> dict[str, torch.Tensor] | None:
        """Return what an unfinished window holds for every one of another number of processes, which average again."""
        found = [one["gradients"] for one in ranks if one["gradients"]]
        if not found:
            return None
        if any(hasattr(parameter, "to_local") for parameter in self._trainer.lightning_module.parameters()):
            self._note("gradients of the unfinished accumulation window are dropped: they were cut for other processes")
            return None
        return {name: sum(one[name] for one in found) / len(ranks) for name in found[0]}

    def use_up(self) -> None:
        """Restore the generators of a saved run that had nothing left to train."""
        if self._saved is not None:
            set_rng_state(self._saved["rng"])
            self._saved = None

    def _where_cut_short(self) -> str | None:
        """Return what Lightning will run again: an exception, or the user's own code, saves anywhere."""
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
        if progress.ready > progress.processed:  # this batch is run again, its share must not be there twice
            return bool(progress.processed % self._trainer.accumulate_grad_batches) and not self.backward_began
        return bool(progress.ready and loop._should_accumulate())

    def _on_epoch_start(self, original: Callable[[Any], None], fetcher: Any) -> None:
        """Around the moment in which the epoch loop makes its iterator."""
        for callback in self._trainer.callbacks:
            if type(callback).__name__ == "GradientAccumulationScheduler":
                # Lightning (2.6) asks it as an epoch starts, but not for one that it goes on within.
                accumulate = callback.get_accumulate_grad_batches(self._trainer.current_epoch)
                self._trainer.accumulate_grad_batches = accumulate
        saved, self._saved = self._saved, None
        if saved is not None and self._batches_to_close is not None:
            original(fetcher)
            self._close_epoch(fetcher, saved, self._batches_to_close)
            return
        loop, loader = self._trainer.fit_loop.epoch_loop, fetcher.combined_loader
        consumed = loop.batch_progress.current.ready
        plateau = (saved or {}).get("plateau", {})
        self._trainer._logger_connector._callback_metrics.update(plateau.get("metrics", {}))
        only_closes = consumed > 0 and loop._num_ready_batches_reached()
        has_iterator = consumed or not loop.batch_progress.total.ready  # a run's first is made before it starts
        if saved is not None and not only_closes and (has_iterator or saved.get("cut_short")):
            self._first_epoch = False
            original(fetcher)
            self._go_on_within_epoch(fetcher, saved, consumed)
            _plateau.step(self._trainer, plateau)
            return
        _plateau.step(self._trainer, plateau)
        if saved is not None:
            self._iterate_anew = True
            self._set_random(saved["rng"])
            if any(_is_stateful(part) for part in loader.flattened):
                self._note(
                    "the data loader saves its own state, and that of an epoch's end makes Lightning skip an epoch; "
                    "resume from a checkpoint inside an epoch, or from a loader without state"
                )
        now, before = self._random(), loader._iterator
        original(fetcher)
        if only_closes:
            # Lightning finishes the epoch that the checkpoint closed; the next call is the one that fetches.
            if saved is not None:
                self._set_random(self._after_validation(fetcher, saved))
            return
        if self._iterate_anew and loader._iterator is before and not any(_is_stateful(p) for p in loader.flattened):
            # Made by Lightning before the generators were restored.
            self._set_random(now)
            iter(fetcher)
        if self._iterate_anew or not self._first_epoch:
            self._iter_rng = now
        self._first_epoch = self._iterate_anew = False
        self._fetch_rng, self._capture_fetch, self._cycled = None, fetcher.length is not None, {}

    def _go_on_within_epoch(self, fetcher: Any, saved: Mapping[str, Any], consumed: int) -> None:
        self._iter_rng, self._fetch_rng = saved["iter_rng"], saved["fetch_rng"]
        if not any(_is_stateful(part) for part in fetcher.combined_loader.flattened):
            self._set_random(saved["iter_rng"])
            replay(fetcher.combined_loader.flattened, consumed)
            for part in fetcher.combined_loader.flattened:
                if self._trainer.current_epoch == 0 and getattr(part, "persistent_workers", False):
                    part._iterator = None  # a first iterator draws one number more than one that is used again
            iter(fetcher)
            if saved["fetch_rng"] is not None:
                self._set_random(saved["fetch_rng"])
            if hasattr(fetcher, "iterator_wrapper"):
                self._note("training_step fetches its own batches: the epoch starts over at its first batch")
            else:
                began_again = dict(saved.get("cycled", {}).values())
                for number in range(consumed):
                    if number in began_again:
                        self._set_random(began_again[number])
                    next(fetcher)
        if consumed:
            self._at_next_fetch = {**saved, "rng": self._after_validation(fetcher, saved)}
        else:  # Lightning (2.6) validates once more before a first batch; its fetch draws the shuffle
            self._at_next_fetch = {"rng": self._random(), "gradients": None}

    def _after_validation(self, fetcher: Any, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the generators after the validation that was due or going on when the run was saved, if one was.

        Lightning (2.6) leaves it out: the random numbers that it draws would be missing.
        """
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop
        rng: dict[str, Any] = saved["rng"]
        before: dict[str, Any] | None = saved.get("before_validation")
        was_due = loop.restarted_on_train_batch_end and loop._should_check_val_fx(fetcher)
        if before is None and not was_due:
            return rng
        self._set_random(before or rng)
        first = trainer._logger_connector._first_loop_iter
        trainer.validating, loop.restarting = True, False
        loop.val_loop.reset_restart_stage()
        loop.val_loop.run()
        trainer.training, trainer._logger_connector._first_loop_iter = True, first
        if before is not None:  # Lightning does what comes after a validation, and not the validation
            loop.restarting, loop.val_loop._has_run = True, False
        return self._random()

    def _on_fetch(self, original: Callable[[], None]) -> None:
        """Before a batch is fetched: the last moment before random numbers are drawn again."""
        original()
        if self._at_next_fetch is not None:
            saved, self._at_next_fetch = self._at_next_fetch, None
            self._set_random(saved["rng"])
            self._put_gradients(saved["gradients"])
            session_state.restore_windows(saved.get("windows", {}), self._session.techniques)
        if self._capture_fetch:
            self._capture_fetch = False
            self._fetch_rng = self._random()
        fetcher = self._trainer.fit_loop._data_fetcher
        loader = fetcher.combined_loader
        if loader._mode == "max_size_cycle" and len(loader.flattened) > 1 and fetcher.fetched and fetcher.length:
            for place, part in enumerate(loader.flattened):
                if (length := length_hint(part)) and fetcher.fetched % length == 0:
                    self._cycled[place] = fetcher.fetched, self._random()

    def _put_gradients(self, gradients: Mapping[str, torch.Tensor] | None) -> None:
        if not gradients or not self._is_inside_window():
            return
        for name, parameter in self._trainer.lightning_module.named_parameters():
            if name not in gradients:
                continue
            if hasattr(parameter, "to_local"):  # sharded: what was saved is this process's part
                parameter.grad = torch.zeros_like(parameter)
                local_part(parameter.grad).copy_(gradients[name])
            else:
                parameter.grad = gradients[name].to(parameter.device, copy=True)


def _is_stateful(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
