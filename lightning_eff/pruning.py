"""The callback of pruning."""

from __future__ import annotations

from typing import Any

from lightning_eff._session_callback import EffCallback
from lightning_eff._typed_options import typed_options
from shared_core.recipe import Recipe


@typed_options("prune")
class Pruning(EffCallback):
    """Prunes weights during training on a schedule; pruned weights stay exactly zero."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"prune": options}))
