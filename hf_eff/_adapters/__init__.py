"""Adapters of the Trainer for single techniques and other libraries' trainers, one module each; their base class."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shared_core.front_ends import adapters
from shared_core.front_ends.session import Session

if TYPE_CHECKING:
    from transformers import Trainer

    from hf_eff._loss_normalization import Window
    from hf_eff._services import TrainerServices


class Adapter(adapters.Adapter):
    """Base class: its methods do nothing. Override those that the technique needs."""

    def __init__(self, trainer: Trainer, window: Window, services: TrainerServices) -> None:
        self._trainer, self._window, self._services = trainer, window, services

    @staticmethod
    def trainer_in(trainer: Any) -> Any:
        """Return the transformers Trainer inside a trainer of another library."""
        return trainer

    def join(self, session: Session) -> None:
        """Take the trainer's session, new or with another recipe. Called even if the technique is off."""
        self.session = session

    def around(self) -> dict[str, Callable[..., Any]]:
        """Return wrappers of trainer methods for a run with the technique. Each gets the original method first."""
        return {}

    def check(self) -> None:
        """Raise an error for unsupported settings, before anything is attached."""

    def check_data(self) -> None:
        """Raise an error for unsupported training data, when training starts."""

    def begin(self, loader: Any) -> None:
        """Prepare for the first step of a new or resumed run. The session has begun."""

    def loss(self, method: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return ``compute_loss`` of a training micro-batch."""
        return method(model, inputs, *args, **kwargs)

    def saved(self, trial: Any) -> None:
        """Check the checkpoint that was just saved. Called on every process."""
