"""The callback of one run of a lottery ticket search."""

from __future__ import annotations

from typing import Any

from lightning_eff._session_callback import EffCallback
from lightning_eff._typed_options import typed_options
from shared_core.recipe import Recipe


@typed_options("ticket")
class LotteryTicket(EffCallback):
    """Trains dense or with a ticket, and leaves the next ticket; `shared_core.pruning.LotteryTicket` runs a search."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"ticket": options}))
