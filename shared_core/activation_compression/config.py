"""The options of compressed and offloaded activations."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shared_core.config.environments import Ability
from shared_core.config.options import Figure, TechniqueConfig, option

if TYPE_CHECKING:
    import torch

NO_USE = "activations are already in host memory"
"""Why activations on a CPU are not offloaded."""


@dataclass(frozen=True, kw_only=True)
class ActivationsConfig(TechniqueConfig):
    """Options for storing activations in fewer bytes.

    Example:
        >>> ActivationsConfig(pack="exact").rounds, ActivationsConfig(pack="int8").rounds
        (False, True)
    """

    about: ClassVar[str] = "Saves activations in fewer bytes."
    key: ClassVar[str] = "activations"
    switch: ClassVar[str] = "pack"

    finishes_after: ClassVar[tuple[str, ...]] = ("soup",)
    conflicts: ClassVar[Mapping[str, str]] = {
        "tensor_parallel": "parts of activations look like parts of weights; use checkpointing, DDP or FSDP2",
        "zero3": "gathered weights look like activations and would be compressed too; use stage 2, or checkpointing",
        "fsdp1": "weights are views of flat buffers and look like activations; use DDP or FSDP2",
    }
    works_in: ClassVar[tuple[str, ...]] = ("pruning_callback",)
    figures: ClassVar[Mapping[str, Figure]] = {"saved": Figure("share of the activations' bytes saved so far")}

    pack: Literal["none", "exact", "bf16", "fp16", "int8"] = option(
        help="How to store activations: exact (masks as bits, no zeros, small integers; gradients stay bit-identical), "
        "or also rounded to bf16, fp16 or int8.",
        each={"none": {"offload": (True,)}},
    )
    offload: bool = option(
        False, help="Keep stored tensors in pinned host memory, copied during the computation (CUDA)."
    )
    min_size: int = option(1024, help="Do not compress tensors with fewer elements.", low=1)
    group_size: int = option(256, help="Values per scale in int8.", low=8, only_with={"pack": ("int8",)})
    sparse: bool = option(
        True, help="Look for zeros and two-valued masks in float tensors. Each search waits for the GPU."
    )

    @classmethod
    def ability(cls, device: torch.device) -> Ability:
        """Return "native", with a note if offload is useless on this device."""
        return Ability("native", "" if device.type == "cuda" else f"offload is refused: {NO_USE}")

    @property
    def rounds(self) -> bool:
        """True if gradients are no longer exact."""
        return self.pack in ("bf16", "fp16", "int8")

    def refusals(self, recipe: Mapping[str, Any], environment: Collection[str]) -> Iterator[str]:
        """Yield a line for each combination that these options rule out."""
        if self.rounds and "checkpointing" in recipe:
            yield (
                f"activations with pack {self.pack} cannot be combined with checkpointing: a region keeps only "
                "its inputs, and recomputing from rounded inputs would not match the forward; use pack exact"
            )
        if "checkpointing" in recipe and recipe["checkpointing"].has_budget:
            yield (
                "activations cannot be combined with a budget of checkpointing: its profile measures uncompressed "
                "activations, and would recompute too much; use policy every_k, sublayer or selective"
            )
