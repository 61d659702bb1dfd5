"""The callback of activation checkpointing."""

from __future__ import annotations

from typing import Any

from lightning_eff._session_callback import EffCallback
from lightning_eff._typed_options import typed_options
from shared_core.recipe import Recipe


@typed_options("checkpointing")
class ActivationCheckpointing(EffCallback):
    """Recomputes activations in backward in place of keeping them; gradients stay the same to the bit."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"checkpointing": options}))
