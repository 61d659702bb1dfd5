"""The base of adapters of a Lightning Trainer, which registers what derives from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shared_core.engine.session import Session
from shared_core.front_ends import adapters

if TYPE_CHECKING:
    from lightning_eff._services import LightningServices
    from shared_core.front_ends.wrapped_method import Wrapped


class Adapter(adapters.Adapter):
    """Does nothing by itself; override what the technique needs. Made in the setup of a `fit` that it applies to."""

    def __init__(self, trainer: Any, module: Any, session: Session, services: LightningServices) -> None:
        self._trainer, self._module, self.session, self._services = trainer, module, session, services

    @classmethod
    def left_out(cls, trainer: Any) -> str:
        """Return why the technique is left out of what this Trainer does, nothing if it is not."""
        return ""

    @classmethod
    def check_trials(cls, tuner: str) -> None:
        """Refuse a tuner's trials before training."""

    def set_up(self) -> list[Wrapped]:
        """Prepare Trainer and module; return what surrounds their methods until the end."""
        return []

    def start_fit(self) -> None:
        """Prepare for optimizers, which exist, and for their state, which is not loaded yet."""

    def start_training(self) -> None:
        """Refuse what could not work, before the session begins."""

    def arguments(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the positional arguments of `training_step`, in place of `args`."""
        return args

    def replay(self, loaders: list[Any], batches: int) -> None:
        """Have these loaders begin so many batches earlier at the next iteration, which skips them."""

    def saved(self, path: str) -> None:
        """Look at the checkpoint that was just saved."""

    def undo(self) -> None:
        """Give the Trainer back what `set_up` changed beside methods."""
