"""The callback of soup."""

from __future__ import annotations

from typing import Any

from lightning_eff._session_callback import EffCallback
from lightning_eff._typed_options import typed_options
from shared_core.recipe import Recipe


@typed_options("soup")
class ModelSoup(EffCallback):
    """Averages the checkpoints of this run when training ends, by its own validation metric."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"soup": options}))
