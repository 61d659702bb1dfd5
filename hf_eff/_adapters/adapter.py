"""The base of adapters of the Trainer, which registers what derives from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shared_core.engine.session import Session
from shared_core.front_ends import adapters

if TYPE_CHECKING:
    from transformers import Trainer

    from hf_eff._loss_normalisation import Window
    from hf_eff._services import TrainerServices


class Adapter(adapters.Adapter):
    """Does nothing by itself; override what the technique needs."""

    def __init__(self, trainer: Trainer, window: Window, services: TrainerServices) -> None:
        self._trainer, self._window, self._services = trainer, window, services

    @staticmethod
    def trainer_in(trainer: Any) -> Any:
        """Return the Trainer that trains for a trainer of another library."""
        return trainer

    def join(self, session: Session) -> None:
        """Take the trainer's session, new or with another recipe; called whether the technique is on or off."""
        self.session = session

    def around(self) -> dict[str, Callable[..., Any]]:
        """Return what surrounds methods of the trainer, of a run with the technique; each gets the method first."""
        return {}

    def check(self) -> None:
        """Refuse what could not work, before anything is attached."""

    def check_data(self) -> None:
        """Refuse what could not work with the training data, as training starts."""

    def begin(self, loader: Any) -> None:
        """Prepare for the first step of a run, new or resumed; the session has begun."""

    def loss(self, method: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what ``compute_loss`` returns for a micro-batch in training."""
        return method(model, inputs, *args, **kwargs)

    def saved(self, trial: Any) -> None:
        """Look at the checkpoint that was just saved; every process is asked."""
