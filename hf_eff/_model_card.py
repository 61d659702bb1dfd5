"""The model card, README.md, of what was trained with techniques: a section of ours in it, and the rest as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared_core.checkpoint_formats.model_card import CARD, add_section
from shared_core.checkpoint_formats.plain import DEPLOYMENT_FILE
from shared_core.engine.receipt import RECEIPT_FILE, Receipt
from shared_core.files.atomic import atomic_write
from shared_core.reports.run_page import card_section

if TYPE_CHECKING:
    from hf_eff._trainer_hooks import SessionCallback


def tell_in_card(callback: SessionCallback, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Let the trainer, or its subclass, write the model card, and add a section; the rest stays as it is."""
    output = method(*args, **kwargs)
    trainer, session = callback._trainer, callback.session
    folder = Path(str(trainer.args.output_dir))
    if session.recipe and session.has_begun and trainer.is_world_process_zero() and (folder / CARD).is_file():
        ended = session.is_finished and (folder / RECEIPT_FILE).is_file()
        leave_section(folder, Receipt.read(folder) if ended else session.receipt())
    return output


def leave_section(folder: Path, receipt: Receipt) -> None:
    """Say in the card of a saved model what was done and how it is loaded; a card is made where there is none."""
    card = folder / CARD
    if not card.is_file():
        if not folder.is_dir():  # what saved it wrote elsewhere
            return
        with atomic_write(card) as temporary:
            temporary.write_text("# Model card\n", encoding="utf-8")
    add_section(card, card_section(receipt.values, has_deployment=(folder / DEPLOYMENT_FILE).is_file()))
