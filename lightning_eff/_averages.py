"""Combine Lightning's weight averages with techniques: averages keep the same masks and shared values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shared_core.front_ends.session import Session
from shared_core.front_ends.wrapped_method import Wrapped

AVERAGING = {"StochasticWeightAveraging", "WeightAveraging"}


def averaging(trainer: Any) -> list[Any]:
    """Return the callbacks that average weights, including subclasses of Lightning's."""
    return [one for one in trainer.callbacks if AVERAGING & {kind.__name__ for kind in type(one).__mro__}]


class Averages:
    """Keeps the averages of other callbacks within the techniques' constraints: masks and shared values.

    These callbacks run before ours, so their average is in the module when techniques finish it. What they save later
    is the finished module.
    """

    def __init__(self, trainer: Any, module: Any, session: Session) -> None:
        self._trainer, self._module, self._session = trainer, module, session
        self._callbacks = averaging(trainer)
        if self._callbacks:  # a new list, because Lightning is iterating over the old one
            trainer.callbacks = [*self._callbacks, *(one for one in trainer.callbacks if one not in self._callbacks)]

    def wrapped(self) -> list[Wrapped]:
        """Return wrappers for the moments when an average is used."""
        uses = ("on_validation_epoch_start", "on_save_checkpoint")
        return [
            wrapped
            for one in self._callbacks
            for wrapped in (
                *(Wrapped(one, name, self._use) for name in uses),
                Wrapped(one, "transfer_weights" if hasattr(one, "transfer_weights") else "on_train_end", self._put_in),
            )
        ]

    @contextlib.contextmanager
    def planned_epochs(self) -> Iterator[None]:
        """Let the Trainer plan without the extra epoch of SWA, in which only batch norms see the data."""
        loop = self._trainer.fit_loop
        # SWA runs one more epoch for batch norms, and has already raised max_epochs.
        added = sum(
            hasattr(one, "pl_module_contains_batch_norm") and one.pl_module_contains_batch_norm(self._module)
            for one in self._callbacks
        )
        if not added or loop.max_epochs == -1:
            yield
            return
        loop.max_epochs -= added
        try:
            yield
        finally:
            loop.max_epochs += added

    def take_over(self) -> None:
        """From now on, make the callbacks save the finished module."""
        # After training the callbacks still save their average: it must be the finished module.
        live = _tensors(self._module)
        for callback in self._callbacks:
            for name, value in _tensors(_average_of(callback)).items():
                if name in live and live[name].shape == value.shape:
                    value.copy_(live[name])

    def _use(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._project()
        return original(*args, **kwargs)

    def _put_in(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._project()
        result = original(*args, **kwargs)
        context = self._session.context
        if self._session.is_live and context is not None:
            context.report_weights_replaced()
        return result

    def _project(self) -> None:
        context = self._session.context
        if context is None or not context.projections or not self._session.is_attached:
            return
        parameters = dict(self._module.named_parameters())
        for callback in self._callbacks:
            averages = {name: value for name, value in _tensors(_average_of(callback)).items() if name in parameters}
            # an average may be on another device than the masks
            there = {name: value.to(parameters[name].device) for name, value in averages.items()}
            context.project({parameters[name]: value for name, value in there.items()})
            for name, value in averages.items():
                if there[name] is not value:
                    value.copy_(there[name])


def _average_of(callback: Any) -> Any:
    average = callback._average_model
    return getattr(average, "module", average) if type(average).__name__ == "AveragedModel" else average


def _tensors(model: Any) -> Mapping[str, Tensor]:
    if model is None:
        return {}
    with torch.no_grad():
        return {name: value.detach() for name, value in [*model.named_parameters(), *model.named_buffers()]}
