"""The callback of the precision of float32 products."""

from __future__ import annotations

from typing import Any

from lightning_eff._session_callback import EffCallback
from lightning_eff._typed_options import typed_options
from shared_core.recipe import Recipe


@typed_options("matmul")
class MatmulPrecision(EffCallback):
    """Multiplies float32 matrices in TF32 or bf16 where the hardware has them, and says where it has not."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"matmul": options}))
