"""The callback of FP8 training."""

from __future__ import annotations

from typing import Any

from lightning_eff._session_callback import EffCallback
from lightning_eff._typed_options import typed_options
from shared_core.recipe import Recipe


@typed_options("fp8")
class Fp8(EffCallback):
    """Trains with linear layers that multiply FP8 values, forward and backward."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"fp8": options}))
