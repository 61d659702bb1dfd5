"""Exact resume: what Lightning does not put back by itself, so that a resumed run equals one that was never stopped.

Lightning restores weights, optimizers, schedulers and its progress. It does not restore random generators, it starts
a plain data loader over at batch 0 in the middle of an epoch, and it drops gradients accumulated so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from lightning_eff._poisson import replay
from lightning_eff._wrapped import Wrapped
from shared_core.ranks import local_part, rank, world_size
from shared_core.state_file import rng_state, set_rng_state


class ExactResume:
    """Records at every epoch where its data order came from, and replays it after a restart.

    The data order of an epoch is drawn at two moments: when the loader's iterator is made (seeds of workers, and the
    shuffle where workers prefetch), and at the first fetch (the shuffle without workers). Both are recorded.

    Args:
        trainer: A Lightning Trainer that is about to fit.
        note: Tells the user one line.
    """

    def __init__(self, trainer: Any, note: Callable[[str], None]) -> None:
        self._trainer, self._note = trainer, note
        self._saved: Mapping[str, Any] | None = None
        self._iter_rng: dict[str, Any] = rng_state()
        self._fetch_rng: dict[str, Any] | None = None
        self._at_next_fetch: Mapping[str, Any] | None = None
        self._first_epoch, self._capture_fetch, self._iterate_anew = True, False, False
        loop = trainer.fit_loop.epoch_loop
        self._wrapped = [
            Wrapped(loop, "on_run_start", self._on_epoch_start),
            Wrapped(loop, "_on_before_fetch", self._on_fetch),
        ]

    def stop(self) -> None:
        """Give the Trainer's loop its own methods back."""
        for wrapped in self._wrapped:
            wrapped.undo()

    def mark_fit_start(self) -> None:
        """Record the generators before Lightning makes the first iterator."""
        self._iter_rng = rng_state()

    def state_dict(self, session: Mapping[str, Any], applied: bool) -> dict[str, Any]:
        """Return the generators of every process, and in the middle of an accumulation window what only it has seen.

        That is its gradients, and its session's state (ranges observed on its own micro-batches); Lightning writes the
        main process's state alone.
        """
        gradients = None
        if self._is_inside_window():
            named = self._trainer.lightning_module.named_parameters()
            gradients = {name: local_part(parameter.grad) for name, parameter in named if parameter.grad is not None}
        mine: dict[str, Any] = {
            "rng": rng_state(),
            "iter_rng": self._iter_rng,
            "fetch_rng": self._fetch_rng,
            "gradients": gradients,
            "plateau": self._plateau(applied),
        }
        if world_size() == 1:
            return {"ranks": [mine]}
        if gradients is not None:
            mine["session"] = session
        everyone: list[Any] = [None] * world_size()
        dist.all_gather_object(everyone, mine)
        return {"ranks": everyone}

    def _plateau(self, applied: bool) -> dict[str, Any]:
        """Return what schedulers on a plateau go by, and which of them have yet to take their step of this batch.

        Lightning (2.6) steps them behind the hooks that save, and never after a restart; it restores no metric.
        """
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop
        configs = {i: config for i, config in enumerate(trainer.lr_scheduler_configs) if config.reduce_on_plateau}
        if not configs or not trainer.lightning_module.automatic_optimization:
            return {}
        batch, metrics = loop.batch_progress.current, trainer.callback_metrics
        is_due = applied and (batch.processed > batch.completed or trainer.validating)
        return {
            "due": [
                i for i, config in configs.items()
                if is_due and config.interval == "step" and batch.ready % config.frequency == 0
            ],
            "metrics": {
                config.monitor: metrics[config.monitor].clone()
                for config in configs.values() if config.monitor in metrics
            },
        }  # fmt: skip

    def _step_plateau(self, plateau: Mapping[str, Any]) -> None:
        """Take the steps that were due, by the metrics that there are now."""
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop
        for i in plateau.get("due", ()):
            config = trainer.lr_scheduler_configs[i]
            if (value := trainer.callback_metrics.get(config.monitor)) is not None:
                loop.scheduler_progress.increment_ready()
                module = trainer.lightning_module  # its class's own: wrapped, it asks whether this process has stepped
                type(module).lr_scheduler_step(module, config.scheduler, value)
                loop.scheduler_progress.increment_completed()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Keep a saved state until training reaches its place; return this process's session, if saved."""
        if state is None:
            return None
        ranks = state["ranks"]
        if len(ranks) == world_size():
            self._saved = ranks[rank()]
            return self._saved.get("session")
        self._saved = {**ranks[rank() % len(ranks)], "rng": rng_state(), "gradients": self._mean_gradients(ranks)}
        self._note(
            f"saved by {len(ranks)} processes and resumed by {world_size()}: random numbers are not restored, and the "
            "epoch goes on after as many batches as were seen; keep processes times batch size, and these are the same "
            "examples"
        )
        return None

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

    def _is_inside_window(self) -> bool:
        loop = self._trainer.fit_loop
        return bool(loop.epoch_loop.batch_progress.current.ready and loop._should_accumulate())

    def _on_epoch_start(self, original: Callable[[Any], None], fetcher: Any) -> None:
        """Around the moment in which the epoch loop makes its iterator."""
        saved, self._saved = self._saved, None
        loop, loader = self._trainer.fit_loop.epoch_loop, fetcher.combined_loader
        consumed = loop.batch_progress.current.ready
        plateau = (saved or {}).get("plateau", {})
        self._trainer._logger_connector._callback_metrics.update(plateau.get("metrics", {}))
        only_closes = consumed > 0 and loop._num_ready_batches_reached()
        if saved is not None and consumed and not only_closes:
            self._first_epoch = False
            original(fetcher)
            self._go_on_within_epoch(fetcher, saved, consumed)
            self._step_plateau(plateau)
            return
        self._step_plateau(plateau)
        if saved is not None:
            self._iterate_anew = True
            set_rng_state(saved["rng"])
            if any(_is_stateful(part) for part in loader.flattened):
                self._note(
                    "the data loader saves its own state, and that of an epoch's end makes Lightning skip an epoch; "
                    "resume from a checkpoint inside an epoch, or from a loader without state"
                )
        now, before = rng_state(), loader._iterator
        original(fetcher)
        if only_closes:
            # Lightning finishes the epoch that the checkpoint closed; the next call is the one that fetches.
            return
        if self._iterate_anew and loader._iterator is before and not any(_is_stateful(p) for p in loader.flattened):
            # Made by Lightning before the generators were restored.
            set_rng_state(now)
            iter(fetcher)
        if self._iterate_anew or not self._first_epoch:
            self._iter_rng = now
        self._first_epoch = self._iterate_anew = False
        self._fetch_rng, self._capture_fetch = None, fetcher.length is not None

    def _go_on_within_epoch(self, fetcher: Any, saved: Mapping[str, Any], consumed: int) -> None:
        self._iter_rng, self._fetch_rng = saved["iter_rng"], saved["fetch_rng"]
        if not any(_is_stateful(part) for part in fetcher.combined_loader.flattened):
            set_rng_state(saved["iter_rng"])
            replay(fetcher.combined_loader.flattened, consumed)
            iter(fetcher)
            if saved["fetch_rng"] is not None:
                set_rng_state(saved["fetch_rng"])
            if hasattr(fetcher, "iterator_wrapper"):
                self._note("training_step fetches its own batches: the epoch starts over at its first batch")
            else:
                for _ in range(consumed):
                    next(fetcher)
        self._at_next_fetch = {**saved, "rng": self._after_validation(fetcher, saved["rng"])}

    def _after_validation(self, fetcher: Any, rng: dict[str, Any]) -> dict[str, Any]:
        """Return the generators after the validation that was due when the last batch had been saved, if one was.

        Lightning (2.6) leaves it out where it was saved before: the random numbers that it draws would be missing.
        """
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop
        if not (loop.restarted_on_train_batch_end and loop._should_check_val_fx(fetcher)):
            return rng
        set_rng_state(rng)
        first = trainer._logger_connector._first_loop_iter
        trainer.validating, loop.restarting = True, False
        loop.val_loop.run()
        trainer.training, trainer._logger_connector._first_loop_iter = True, first
        return rng_state()

    def _on_fetch(self, original: Callable[[], None]) -> None:
        """Before a batch is fetched: the last moment before random numbers are drawn again."""
        original()
        if self._at_next_fetch is not None:
            saved, self._at_next_fetch = self._at_next_fetch, None
            set_rng_state(saved["rng"])
            self._put_gradients(saved["gradients"])
        if self._capture_fetch:
            self._capture_fetch = False
            self._fetch_rng = rng_state()

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
