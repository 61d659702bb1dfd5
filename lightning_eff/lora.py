"""The callback of QLoRA."""

from __future__ import annotations

from typing import Any

from lightning_eff._session_callback import EffCallback
from lightning_eff._typed_options import typed_options
from shared_core.recipe import Recipe


@typed_options("lora")
class QLora(EffCallback):
    """Trains low-rank adapters on linear layers frozen in 4 or 8 bits, and merges them at the end."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"lora": options}))
