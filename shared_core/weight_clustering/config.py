"""The options of weight clustering."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from shared_core.config.conflicts import NO_WHOLE_WEIGHTS
from shared_core.config.options import Figure, TechniqueConfig, option
from shared_core.config.training_time import Position

MIN_BITS, MAX_BITS = 2, 8


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(TechniqueConfig):
    """How many values the weights of a tensor share, and from when on.

    Example:
        >>> ClusterConfig(bits=5, bits_of=["conv*=8"]).widths()
        {'conv*': 8}
    """

    key: ClassVar[str] = "cluster"
    switch: ClassVar[str] = "bits"

    finishes_after: ClassVar[tuple[str, ...]] = ("average",)
    conflicts: ClassVar[Mapping[str, str]] = {
        "tensor_parallel": "centroids are sums over all processes, in which layers that are not split would count "
        "once per process. Use DDP or FSDP version 2, or share the weights of the trained model with `eff compress`",
        "lora": "the base is frozen, and merging adapters would give members of a cluster different values. Merge "
        "first, then share the weights in a separate run or with `eff compress`",
        "qat": "qat rounds weights to grids with one scale per channel, which gives members of a cluster different "
        "values. Drop one",
        "lottery": "the next masks rank magnitudes, and sharing makes most of them equal. Share the weights of the "
        "winning ticket",
        "deepspeed": "a centroid starts with new optimizer state, but DeepSpeed counts the steps of many weights "
        "together. Use DDP or FSDP version 2, or share the weights of the trained model with `eff compress`",
        **NO_WHOLE_WEIGHTS,
    }
    figures: ClassVar[Mapping[str, Figure]] = {
        "values": Figure("total number of distinct shared values; 0 before clustering")
    }

    bits: int = option(help="Bits per code: at most 2**bits values per tensor, in [2, 8].", low=MIN_BITS, high=MAX_BITS)
    bits_of: tuple[str, ...] = option(
        (), help="Other bits, as PATTERN=BITS: for modules of a name (glob) or type, or first, last."
    )
    begin: Position = option(
        0.75, help="When weights are clustered: a fraction of the run (0.75), a step (500) or epochs (2ep)."
    )
    include: tuple[str, ...] = option(
        (), help="Only modules of these names (globs), types, or first, last. Frozen ones must be named here."
    )
    skip: tuple[str, ...] = option((), help="No modules of these names (globs), types, or first, last.")
    min_size: int = option(256, help="Leave tensors with fewer weights unchanged.", low=0)

    def validate(self) -> None:
        """Raise `ConfigError` if an entry of bits_of is invalid."""
        for entry in self.bits_of:
            pattern, _, bits = entry.rpartition("=")
            if not pattern or not bits.isdecimal() or not MIN_BITS <= int(bits) <= MAX_BITS:
                raise self._error("bits_of", f"must be PATTERN=BITS with bits in [{MIN_BITS}, {MAX_BITS}]")

    def widths(self) -> dict[str, int]:
        """Return the bits of each pattern of `bits_of`, in the given order. The first match wins."""
        pairs = (entry.rpartition("=") for entry in self.bits_of)
        return {pattern: int(bits) for pattern, _, bits in pairs}
