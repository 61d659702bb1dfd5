"""The option for the precision of float32 matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from shared_core.config.environments import Ability
from shared_core.config.options import TechniqueConfig, option

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class MatmulPrecisionConfig(TechniqueConfig):
    """Options for the precision of float32 matrix products.

    Example:
        >>> MatmulPrecisionConfig(precision="high").precision
        'high'
    """

    about: ClassVar[str] = "Multiplies float32 in TF32 or bfloat16."
    key: ClassVar[str] = "matmul"
    switch: ClassVar[str] = "precision"

    finishes_after: ClassVar[tuple[str, ...]] = ("low_rank",)
    works_in: ClassVar[tuple[str, ...]] = (
        "tensor_parallel",
        "pruning_callback",
        "deepspeed_fp16",
        "lightning_deepspeed",
    )
    logs_nothing: ClassVar[str] = "the same in every step"

    precision: Literal["highest", "high", "medium"] = option(
        help="precision; highest: float32; high: TF32 (10 bits) on GPUs with it; medium: also bfloat16 (7 bits) on CPUs"
    )

    @classmethod
    def ability(cls, device: torch.device) -> Ability:
        """Measure products, and return "inactive" if neither TF32 nor bfloat16 replaces float32."""
        from shared_core.hardware import tried_matmul

        reason = ""
        for precision in ("high", "medium"):
            found, reason = tried_matmul(precision, device)
            if not reason:
                return Ability("native", f"{precision} multiplies in {found}")
        return Ability("inactive", reason)
