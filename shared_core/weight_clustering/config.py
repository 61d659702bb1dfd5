"""The options of weight clustering."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from shared_core.config.environments import NO_WHOLE_WEIGHTS
from shared_core.config.options import Figure, TechniqueConfig, option
from shared_core.config.training_time import Position

MIN_BITS, MAX_BITS = 2, 8


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(TechniqueConfig):
    """Lets the weights of a tensor share a few values.

    Example:
        >>> ClusterConfig(bits=5, bits_of=["conv*=8"]).widths()
        {'conv*': 8}
    """

    about: ClassVar[str] = "Shares few values among the weights of a layer."
    key: ClassVar[str] = "cluster"
    switch: ClassVar[str] = "bits"

    finishes_after: ClassVar[tuple[str, ...]] = ("average",)
    conflicts: ClassVar[Mapping[str, str]] = {
        "tensor_parallel": "centroids are sums over all processes and would count whole layers several times; use DDP "
        "or FSDP2, or `eff compress` after training",
        "lora": "merging the adapters would separate shared weights; merge first, then cluster in a second run or with"
        " `eff compress`",
        "qat": "qat scales each channel on its own, which separates shared weights; drop one",
        "lottery": "the next masks rank magnitudes, and sharing makes most of them equal; cluster the winning ticket",
        "deepspeed": "a centroid starts with optimizer state of its own, and DeepSpeed counts steps of many weights at "
        "once; use DDP or FSDP2, or `eff compress` after training",
        **NO_WHOLE_WEIGHTS,
    }
    figures: ClassVar[Mapping[str, Figure]] = {
        "values": Figure("total number of distinct shared values; 0 before clustering")
    }

    bits: int = option(help="Bits per code: at most 2**bits values per tensor, in [2, 8].", low=MIN_BITS, high=MAX_BITS)
    bits_of: tuple[str, ...] = option(
        (), help="Bits of single modules, as PATTERN=BITS: name globs, types, first, last."
    )
    begin: Position = option(0.75, help="When to cluster: a fraction of the run (0.75), a step (500) or epochs (2ep).")
    include: tuple[str, ...] = option(
        (), help="Modules to include: name globs, types, first, last. Default: all. Frozen ones must be named."
    )
    skip: tuple[str, ...] = option((), help="Modules to skip: name globs, types, first, last.")
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
