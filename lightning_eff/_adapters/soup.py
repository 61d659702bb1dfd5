"""Soups of a Trainer's checkpoints: what it must save and validate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_eff._adapters.adapter import Adapter
from shared_core.errors import CheckpointError, CompatibilityError


class Soup(Adapter):
    """Refuses at the start, or after the first checkpoint, what would leave nothing to average."""

    key = "soup"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._options = self.session.recipe["soup"].to_dict()
        self._services.metric = self._options["metric"]
        self._has_checked = False

    @classmethod
    def left_out(cls, trainer: Any) -> str:
        """Leave it out where the user's code is only tried."""
        return "fast_dev_run saves no checkpoints" if trainer.fast_dev_run else ""

    def start_training(self) -> None:
        """Refuse a Trainer that cannot evaluate: a greedy soup would learn of it only after training."""
        if self._options["kind"] == "greedy":
            self._services.check_validation()

    def saved(self, path: str) -> None:
        """Refuse a checkpoint that no soup would read when the first is saved, not after all training."""
        if self._has_checked or not Path(path).is_file():
            return
        self._has_checked = True
        try:
            self._services.load_weights(Path(path))
        except CheckpointError as error:
            raise CompatibilityError(
                "soup",
                f"checkpoints must be ones that can be averaged, but {error}",
                "leave out of them what cannot be read, for instance by save_hyperparameters(ignore=[...])",
            ) from error
