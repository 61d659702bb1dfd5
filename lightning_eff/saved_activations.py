"""The callback of compressed and offloaded activations."""

from __future__ import annotations

from typing import Any

from lightning_eff._session_callback import EffCallback
from lightning_eff._typed_options import typed_options
from shared_core.recipe import Recipe


@typed_options("activations")
class CompressedActivations(EffCallback):
    """Stores what forward saves for backward smaller, or on the host."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"activations": options}))
