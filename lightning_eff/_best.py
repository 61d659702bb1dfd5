"""Which checkpoints compete for the best of a run, and when early stopping counts: where the model is as asked for."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_eff._wrapped import Wrapped
from shared_core.session import Session


class BestCheckpoints:
    """Surrounds the comparisons of a Trainer's ``ModelCheckpoint`` and ``EarlyStopping``.

    Args:
        trainer: Its callbacks are complete.
        session: Tells whether the model holds what was asked for.
    """

    def __init__(self, trainer: Any, session: Session) -> None:
        self._trainer, self._session = trainer, session
        self._passed_over: list[Any] = []
        self._savers = [callback for callback in trainer.checkpoint_callbacks if getattr(callback, "monitor", None)]
        self._stoppers = list(trainer.early_stopping_callbacks)
        self.wrapped = [
            *(Wrapped(each, "_save_monitor_checkpoint", functools.partial(self._save, each)) for each in self._savers),
            *(
                Wrapped(each, "_evaluate_stopping_criteria", functools.partial(self._stop, each))
                for each in self._stoppers
            ),
        ]

    def forget(self) -> None:
        """Compare anew: what a resumed run had found so far was of another recipe."""
        if any(callback.best_model_path for callback in self._savers):
            self._session.note("the best checkpoint until now was of another recipe: the comparison starts anew")
        for callback in self._savers:
            callback.best_k_models, callback.best_model_path, callback.kth_best_model_path = {}, "", ""
            callback.best_model_score = None
        for callback in self._stoppers:
            callback.wait_count, callback.best_score = 0, _worst(callback)

    def _save(self, callback: Any, original: Callable[..., None], trainer: Any, candidates: dict[str, Tensor]) -> None:
        """Save what is not compared too, for a run to go on from, with the worst score: any other replaces it.

        Lightning (2.6) writes the last checkpoint only where it has saved one of the best.
        """
        if self._session.may_be_best() or callback.monitor not in candidates:
            original(trainer, candidates)
            return
        if callback not in self._passed_over:
            self._passed_over.append(callback)
        callback._update_best_and_save(_worst(callback), trainer, candidates)

    def _stop(self, callback: Any, original: Callable[..., Any], current: Tensor) -> Any:
        """Stop for what is not finite or diverges alone: neither patience nor the best score count."""
        if self._session.may_be_best():
            return original(current)
        names = ("best_score", "wait_count", "patience", "stopping_threshold")
        before = {name: getattr(callback, name) for name in names}
        callback.patience, callback.stopping_threshold = math.inf, None
        try:
            return original(current)
        finally:
            vars(callback).update(before)

    @property
    def is_missing(self) -> bool:
        """Whether a callback has no best checkpoint because none held what was asked for."""
        return any(callback.best_model_score == _worst(callback) for callback in self._passed_over)

    def save_last(self) -> None:
        """Save the finished model as the best where there is none: `trainer.test(ckpt_path="best")` finds the run's."""
        for callback in self._passed_over:
            candidates = callback._monitor_candidates(self._trainer)
            if (
                callback.best_model_score == _worst(callback)
                and (metric := candidates.get(callback.monitor)) is not None
            ):
                callback._update_best_and_save(metric, self._trainer, candidates)
                self._session.note(
                    "no checkpoint that was compared held what was asked for: the model of the last step is saved as "
                    f"the best, {callback.best_model_path}"
                )


def _worst(callback: Any) -> Tensor:
    return torch.tensor(math.inf if callback.mode == "min" else -math.inf)
