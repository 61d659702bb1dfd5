"""Callbacks that a trainer was given, which must stay while it trains."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

from shared_core.engine.recipe import Recipe
from shared_core.errors import TrainingError


class GivenCallbacks:
    """Watches that what was given stays while the trainer trains."""

    def __init__(self, trainer: Trainer, driver: TrainerCallback) -> None:
        self._trainer, self._driver = trainer, driver
        self.callbacks: list[Any] = []

    def gone(self) -> list[Any]:
        """Return the callbacks that the user removed, the driver among them."""
        # By identity: callbacks of users may define __eq__.
        there = {id(callback) for callback in self._trainer.callback_handler.callbacks}
        return [callback for callback in (self._driver, *self.callbacks) if id(callback) not in there]

    def others(self) -> list[str]:
        """Return the classes of callbacks that are neither ours nor transformers' own, none of which writes weights."""
        kinds = [type(callback) for callback in self._trainer.callback_handler.callbacks]
        own = [type(self._driver), *map(type, self.callbacks)]
        return [kind.__name__ for kind in kinds if kind not in own and not kind.__module__.startswith("transformers.")]

    def check(self, step: int) -> None:
        """Refuse that one is taken away in mid-training."""
        if gone := self.gone():
            raise TrainingError(
                "hf",
                f"{type(gone[0]).__name__} must stay until training ends, got remove_callback by step {step}",
                "remove it before training or after it",
            )

    def left_of(self, recipe: Recipe) -> Recipe:
        """Return the techniques of a session without those of callbacks that were removed, which forget it."""
        gone = self.gone()
        out = {key for callback in gone if callback is not self._driver for key in callback.recipe}
        # The driver itself removed: nothing drives the session, so nothing is left of it.
        left = {key: config for key, config in recipe.items() if key not in out and self._driver not in gone}
        for callback in gone if left else self.callbacks:
            callback.session = None
        self.callbacks = [callback for callback in self.callbacks if callback not in gone]
        return Recipe(left, allow_partial=recipe.allow_partial)
