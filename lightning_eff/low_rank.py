"""The callback of low-rank training."""

from __future__ import annotations

from typing import Any

from lightning_eff._session_callback import EffCallback
from lightning_eff._typed_options import typed_options
from shared_core.recipe import Recipe


@typed_options("low_rank")
class LowRank(EffCallback):
    """Trains layers as products of two smaller ones; the model stays so, or is multiplied out at the end."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"low_rank": options}))
