"""The callback of differential privacy."""

from __future__ import annotations

from typing import Any

from lightning_eff._session_callback import EffCallback
from lightning_eff._typed_options import typed_options
from shared_core.recipe import Recipe


@typed_options("dp")
class DifferentialPrivacy(EffCallback):
    """Trains by DP-SGD: sampled batches, clipped examples, noise, and epsilon in log, progress bar and receipt."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"dp": options}))
