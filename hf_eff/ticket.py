"""One run of a lottery ticket search as a callback of the Hugging Face Trainer."""

from __future__ import annotations

from typing import ClassVar

from hf_eff._technique_callback import TechniqueCallback


class LotteryTicket(TechniqueCallback):
    """Trains dense or with a ticket, and leaves the next ticket; `shared_core.pruning.LotteryTicket` runs a search.

    Args:
        options: Those of `shared_core.pruning.TicketConfig`.

    Example:
        ``Trainer(..., callbacks=[LotteryTicket(out="runs/sparse", ticket="lottery/round-04/ticket.safetensors")])``
    """

    key: ClassVar[str] = "ticket"
