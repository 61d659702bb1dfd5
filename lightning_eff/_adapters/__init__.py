"""Adapters between a Lightning Trainer and single techniques, one module each, and their base class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shared_core.front_ends import adapters
from shared_core.front_ends.session import Session

if TYPE_CHECKING:
    from lightning_eff._services import LightningServices
    from shared_core.front_ends.wrapped_method import Wrapped


class Adapter(adapters.Adapter):
    """Base class: all methods do nothing. Override those that the technique needs. Made in the setup of a `fit`."""

    def __init__(self, trainer: Any, module: Any, session: Session, services: LightningServices) -> None:
        self._trainer, self._module, self.session, self._services = trainer, module, session, services

    @classmethod
    def left_out(cls, trainer: Any) -> str:
        """Return why this Trainer's run leaves out the technique, empty if it does not."""
        return ""

    @classmethod
    def check_trials(cls, tuner: str) -> None:
        """Raise an error for a tuner's trials before training."""

    def set_up(self) -> list[Wrapped]:
        """Prepare Trainer and module. Return wrappers of their methods, active until the end."""
        return []

    def start_fit(self) -> None:
        """Prepare for optimizers, which exist, and for their state, which is not loaded yet."""

    def start_training(self) -> None:
        """Raise an error for unsupported settings, before the session begins."""

    def arguments(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the positional arguments of `training_step`, instead of `args`."""
        return args

    def replay(self, loaders: list[Any], batches: int) -> None:
        """Make these loaders start so many batches earlier at the next iteration, which skips them."""

    def saved(self, path: str) -> None:
        """Check the checkpoint that was just saved."""

    def undo(self) -> None:
        """Undo what `set_up` changed in the Trainer besides methods."""
