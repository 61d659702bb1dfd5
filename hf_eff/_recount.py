"""The receipt compared with the trained model and what is saved of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hf_eff._checkpoints import checkpoint_folder, weights_of
from hf_eff._run_environment import is_peft
from shared_core.distributed.collectives import from_main
from shared_core.engine.claims import Where
from shared_core.errors import CheckpointError, ReceiptError

if TYPE_CHECKING:
    from transformers import Trainer

    from hf_eff._given_callbacks import GivenCallbacks
    from hf_eff._services import TrainerServices
    from shared_core.engine.session import Session


class Recount:
    """Counts again what the receipt claims."""

    session: Session
    """The trainer's."""

    def __init__(self, trainer: Trainer, given: GivenCallbacks, services: TrainerServices) -> None:
        self._trainer, self._given, self._services = trainer, given, services

    def trained(self) -> None:
        """Count in the model and in the last checkpoint, after every callback's last event."""
        session = self.session
        if not session.is_finished or session.context is None:
            return
        session.verify(None, "the trained model", self._given.others())
        folder = checkpoint_folder(self._services.run_folder, session.step)
        found = ""
        try:
            if folder.is_dir():
                self.saved(folder, Where.TRAINED)
        except ReceiptError as error:
            found = str(error)
        # One process reads the folder, all must raise: those that go on would hang in the next collective.
        if found := from_main(found):
            raise ReceiptError(found)

    def saved(self, folder: Path, where: Where) -> None:
        """Count in a saved folder, on the process that saves; a folder of PEFT holds adapters alone."""
        session, trainer = self.session, self._trainer
        if session.context is None or not session.claims.any_hold(where) or not trainer.args.should_save:
            return
        if is_peft(trainer.model):
            return
        try:
            weights = weights_of(folder, session.context.model)
        except CheckpointError as error:
            session.note(f"not counted again in {folder}, whose weights cannot be read as this model's: {error}")
            return
        session.verify(weights, str(folder), self._given.others(), where=where)
