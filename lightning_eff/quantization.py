"""The callback of quantization."""

from __future__ import annotations

from typing import Any

from lightning_eff._session_callback import EffCallback
from lightning_eff._typed_options import typed_options
from shared_core.recipe import Recipe


@typed_options("qat")
class QuantizationAwareTraining(EffCallback):
    """Trains with fake-quantised weights and activations, and leaves weights that survive their quantisation."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"qat": options}))
