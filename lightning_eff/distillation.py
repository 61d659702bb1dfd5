"""The callback of distillation."""

from __future__ import annotations

from typing import Any

from lightning_eff._session_callback import EffCallback
from lightning_eff._typed_options import typed_options
from shared_core.recipe import Recipe


@typed_options("distill")
class Distillation(EffCallback):
    """Adds a teacher's soft term to the loss that training_step returns."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"distill": options}))
