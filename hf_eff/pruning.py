"""Pruning as a callback of the Hugging Face Trainer."""

from __future__ import annotations

from typing import ClassVar

from hf_eff._technique_callback import TechniqueCallback


class Pruning(TechniqueCallback):
    """Prunes weights on a schedule, and keeps them zero.

    Args:
        options: Those of `shared_core.pruning.PruneConfig`.

    Example:
        ``Trainer(..., callbacks=[Pruning(sparsity=0.8, begin=0.1, end=0.6)])``
    """

    key: ClassVar[str] = "prune"
