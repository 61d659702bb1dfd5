"""Layers as products of two smaller ones: by singular values, of weights or of what they make of inputs."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.low_rank.config import LowRankConfig as LowRankConfig
    from shared_core.low_rank.factorize import LowRankReport as LowRankReport
    from shared_core.low_rank.factorize import factorize as factorize
    from shared_core.low_rank.layers import LowRankLayer as LowRankLayer
    from shared_core.low_rank.layers import merge as merge
    from shared_core.low_rank.saving import load as load
    from shared_core.low_rank.technique import LowRank as LowRank

export_lazily(__name__)
