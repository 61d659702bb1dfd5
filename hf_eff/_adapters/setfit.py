"""SetFit's trainer, which trains its body by a Trainer of its own."""

from __future__ import annotations

from typing import Any

from hf_eff._adapters.adapter import Adapter
from shared_core.errors import CompatibilityError


class SetFit(Adapter):
    """Finds the Trainer inside, and refuses what would undo the techniques after it."""

    @staticmethod
    def trainer_in(trainer: Any) -> Any:
        """Return ``st_trainer`` of SetFit's own class, which is none of transformers'."""
        return getattr(trainer, "st_trainer", trainer)

    def check(self) -> None:
        """Refuse `end_to_end`."""
        if getattr(getattr(self._trainer, "setfit_args", None), "end_to_end", False):
            raise CompatibilityError(
                "hf",
                "SetFit's end_to_end must be False, got True: it trains the sentence model on after its trainer has "
                "ended, which undoes what the techniques did to the weights",
                "train the head alone",
            )
