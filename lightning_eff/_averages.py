"""Lightning's own averages of weights beside techniques: what must hold of weights holds of their average too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shared_core.engine.session import Session
from shared_core.front_ends.wrapped_method import Wrapped

AVERAGING = {"StochasticWeightAveraging", "WeightAveraging"}


def averaging(trainer: Any) -> list[Any]:
    """Return the callbacks that average weights, those that derive from Lightning's included."""
    return [one for one in trainer.callbacks if AVERAGING & {kind.__name__ for kind in type(one).__mro__}]


class Averages:
    """Keeps the averages of other callbacks within what techniques hold: masks and shared values.

    They come before ours, so that their average is in the module when techniques finish it, and what they save later
    is what techniques made of it.
    """

    def __init__(self, trainer: Any, module: Any, session: Session) -> None:
        self._trainer, self._module, self._session = trainer, module, session
        self._callbacks = averaging(trainer)
        if self._callbacks:  # rebound, because Lightning is going through it
            trainer.callbacks = [*self._callbacks, *(one for one in trainer.callbacks if one not in self._callbacks)]

    def wrapped(self) -> list[Wrapped]:
        """Return wrappers of the moments at which an average is used."""
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
        """Let the Trainer plan without the epoch that SWA adds, in which batch norms alone look at the data."""
        loop = self._trainer.fit_loop
        # SWA lets the Trainer run one epoch more for batch norms, and has raised max_epochs by then.
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
        """Let the callbacks save from now on what techniques left in the module."""
        # After training the callbacks still save their average: it must be the module that techniques finished.
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
        if self._session.is_attached and self._session.has_begun and context is not None:
            context.weights_replaced()
        return result

    def _project(self) -> None:
        context = self._session.context
        if context is None or not context.projections or not self._session.is_attached:
            return
        parameters = dict(self._module.named_parameters())
        for callback in self._callbacks:
            averages = {name: value for name, value in _tensors(_average_of(callback)).items() if name in parameters}
            # an average may lie on another device than the masks
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
