"""Weight sharing as a callback of the Hugging Face Trainer."""

from __future__ import annotations

from typing import ClassVar

from hf_eff._technique_callback import TechniqueCallback


class WeightSharing(TechniqueCallback):
    """Clusters the weights of each layer and trains the values that they share.

    Args:
        options: Those of `shared_core.pruning.ShareConfig`.

    Example:
        ``Trainer(..., callbacks=[WeightSharing(bits=5, begin=0.75)])``
    """

    key: ClassVar[str] = "share"
