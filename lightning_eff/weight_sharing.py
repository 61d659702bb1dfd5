"""The callback of weight sharing."""

from __future__ import annotations

from typing import Any

from lightning_eff._session_callback import EffCallback
from lightning_eff._typed_options import typed_options
from shared_core.recipe import Recipe


@typed_options("share")
class WeightSharing(EffCallback):
    """Clusters the weights of each layer and trains the values that they share."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"share": options}))
