"""What the Trainer's model card says about efficient training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared_core.atomic import atomic_write
from shared_core.receipt import RECEIPT_FILE, Receipt
from shared_core.receipt_page import card_section

if TYPE_CHECKING:
    from hf_eff._session_callback import SessionCallback

_BEGIN, _END = "<!-- efftrain: begin -->", "<!-- efftrain: end -->"


def tell_in_card(callback: SessionCallback, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Let the trainer, or its subclass, write the model card, and add a section; the rest stays as it is."""
    output = method(*args, **kwargs)
    trainer, session = callback._trainer, callback.session
    folder = Path(str(trainer.args.output_dir))
    card = folder / "README.md"
    if session.recipe and session.has_begun and trainer.is_world_process_zero() and card.is_file():
        ended = session.is_finished and (folder / RECEIPT_FILE).is_file()
        receipt = Receipt.read(folder) if ended else session.receipt()
        add_section(card, card_section(receipt.values))
    return output


def add_section(card: Path, section: str) -> None:
    """Put a section at the end of a card, in place of an earlier one of ours."""
    text = card.read_text(encoding="utf-8")
    before, begin, rest = text.partition(_BEGIN)
    after = rest.partition(_END)[2] if begin else ""
    kept = (before.rstrip() + after).rstrip()
    with atomic_write(card) as temporary:
        temporary.write_text(f"{kept}\n\n{_BEGIN}\n{section}\n{_END}\n", encoding="utf-8")
