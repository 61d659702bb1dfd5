"""The precision of float32 products as a callback of the Hugging Face Trainer."""

from __future__ import annotations

from typing import ClassVar

from hf_eff._technique_callback import TechniqueCallback


class MatmulPrecision(TechniqueCallback):
    """Multiplies float32 matrices in TF32 or bf16 where the hardware has them, and says where it has not.

    Args:
        options: Those of `shared_core.matmul_precision.MatmulPrecisionConfig`.

    Example:
        ``Trainer(..., callbacks=[MatmulPrecision(precision="high")])``
    """

    key: ClassVar[str] = "matmul"
