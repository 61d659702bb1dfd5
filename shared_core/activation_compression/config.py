"""The options of compressed and offloaded activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from shared_core.config.options import TechniqueConfig, option


@dataclass(frozen=True, kw_only=True)
class ActivationsConfig(TechniqueConfig):
    """How the tensors that forward keeps for backward are stored in between.

    Example:
        >>> ActivationsConfig(pack="exact").rounds, ActivationsConfig(pack="int8").rounds
        (False, True)
    """

    key: ClassVar[str] = "activations"
    switch: ClassVar[str] = "pack"

    pack: Literal["none", "exact", "bf16", "fp16", "int8"] = option(
        help="Store what backward needs smaller: exact (masks as bits, zeros left out, small integers; gradients stay "
        "the same to the bit), and beyond that bf16, fp16 or int8 (rounds activations); none: only with offload."
    )
    offload: bool = option(False, help="Keep it in pinned host memory, copied beside the computation (CUDA).")
    min_size: int = option(1024, help="Tensors with fewer elements are left alone.", low=1)
    group_size: int = option(256, help="Values that share a scale in int8.", low=8, only_with={"pack": ("int8",)})
    sparse: bool = option(
        True,
        help="Look for zeros and two-valued masks in floating-point tensors; a GPU is waited for at each.",
    )

    def validate(self) -> None:
        """Refuse what would do nothing."""
        if self.pack == "none" and not self.offload:
            raise self._error("pack", "must be exact, bf16, fp16 or int8 without offload, as nothing else is done")

    @property
    def rounds(self) -> bool:
        """Whether gradients are no longer exact."""
        return self.pack in ("bf16", "fp16", "int8")
