"""The callback of primary weights."""

from __future__ import annotations

from typing import Any

from lightning_eff._session_callback import EffCallback
from lightning_eff._typed_options import typed_options
from shared_core.recipe import Recipe


@typed_options("primary_weights")
class PrimaryWeights(EffCallback):
    """Updates a model whose parameters are fp16 or bf16 in float32."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"primary_weights": options}))
