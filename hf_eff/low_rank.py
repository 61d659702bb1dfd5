"""Low-rank training as a callback of the Hugging Face Trainer."""

from __future__ import annotations

from typing import ClassVar

from hf_eff._technique_callback import TechniqueCallback


class LowRank(TechniqueCallback):
    """Trains layers as products of two smaller ones; the model stays so, or is multiplied out at the end.

    Args:
        options: Those of `shared_core.low_rank.LowRankConfig`.

    Example:
        ``Trainer(..., callbacks=[LowRank(rank="energy:0.9")])``
    """

    key: ClassVar[str] = "low_rank"
