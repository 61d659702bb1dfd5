"""The callback of running averages."""

from __future__ import annotations

from typing import Any

from lightning_eff._session_callback import EffCallback
from lightning_eff._typed_options import typed_options
from shared_core.recipe import Recipe


@typed_options("average")
class WeightAverage(EffCallback):
    """Averages the weights while training; validation, saved models and the final one are the average."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"average": options}))
