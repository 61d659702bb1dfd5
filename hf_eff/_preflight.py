"""One batch through the user's own `evaluate` before the first step, and no trace of it."""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, Subset
from transformers import IntervalStrategy, Trainer

from hf_eff._services import TrainerServices, is_used_up
from shared_core.engine.preflight import without_trace
from shared_core.front_ends.wrapped_method import Wrapped

if TYPE_CHECKING:
    from shared_core.engine.session import Session

_WITHOUT_WORKERS = {
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": None,
    "dataloader_persistent_workers": False,
    "dataloader_multiprocessing_context": None,
}


class NotTriedError(Exception):
    """One batch cannot be evaluated by itself."""


def preflight(trainer: Trainer, session: Session, services: TrainerServices) -> None:
    """Check that evaluation reports what techniques, and the choice of the best checkpoint, go by."""
    args, best = trainer.args, trainer.args.metric_for_best_model
    also = {}
    if session.recipe and best is not None and args.eval_strategy != IntervalStrategy.NO:
        also["hf: metric_for_best_model"] = best if best.startswith("eval_") else f"eval_{best}"
    if trainer.state.global_step == 0:
        session.validation.preflight(lambda: _names(trainer, services), also)


def _names(trainer: Trainer, services: TrainerServices) -> list[str]:
    model: Any = trainer.model
    if getattr(trainer, "evaluator", None) is not None:
        raise NotTriedError("its evaluator reads all of its own data")
    accelerator, count = trainer.accelerator, trainer.args.eval_batch_size * trainer.args.world_size
    loaders = list(accelerator._dataloaders)
    references = list(accelerator.gradient_state.dataloader_references)
    data = [trainer.eval_dataset, trainer.data_collator, trainer.compute_metrics]
    owners = [trainer, trainer.args, trainer.callback_handler]
    with tempfile.TemporaryDirectory() as folder, without_trace(model, *owners, data=data):
        # states of a run and what a post-processing writes are of this batch
        trainer.state, trainer.control = copy.deepcopy(trainer.state), copy.copy(trainer.control)
        trainer.eval_dataset = _first(trainer.eval_dataset, count)
        # A folder that is thrown away, and no workers: these would outlive the batch.
        vars(trainer.args).update(output_dir=folder, **_WITHOUT_WORKERS)
        Wrapped(trainer, "get_eval_dataloader", _only_one_batch)
        try:
            return list(services.evaluate())
        finally:
            # accelerate registers each loader, and takes the latest one for that of training.
            accelerator._dataloaders[:] = loaders
            accelerator.gradient_state.dataloader_references = references


def _only_one_batch(method: Any, *args: Any, **kwargs: Any) -> Any:
    loader = method(*args, **kwargs)
    length = len(loader) if hasattr(getattr(loader, "dataset", None), "__len__") else 1
    # The trainer's loader is the user's own: it might read everything.
    if length > 1:
        raise NotTriedError("get_eval_dataloader does not go by eval_dataset")
    return loader


def _first(data: Any, count: int) -> Any:
    """Return the first examples of a data set, or of each of a dict of them."""
    if isinstance(data, dict):
        return {name: _first(part, count) for name, part in data.items()}
    # datasets' own selection keeps columns and formats.
    if hasattr(data, "select") and hasattr(data, "__len__"):
        return data.select(range(min(count, len(data))))
    if is_used_up(data):
        raise NotTriedError("the evaluation data are an iterator, which would start behind the batch")
    if hasattr(data, "take"):
        return data.take(count)
    if isinstance(data, IterableDataset):
        return _Head(data, count)
    return Subset(data, range(min(count, len(data))))


class _Head(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, data: Any, count: int) -> None:
        self._data, self._count = data, count

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._data), self._count)
