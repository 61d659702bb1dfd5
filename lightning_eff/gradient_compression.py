"""The callback of gradient compression."""

from __future__ import annotations

from typing import Any

from lightning_eff._session_callback import EffCallback
from lightning_eff._typed_options import typed_options
from shared_core.recipe import Recipe


@typed_options("comm")
class GradientCompression(EffCallback):
    """Has the processes of DDP send each other gradients in 16 bits or as products of low rank."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"comm": options}))
