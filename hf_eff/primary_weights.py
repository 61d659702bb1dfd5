"""Primary weights as a callback of the Hugging Face Trainer."""

from __future__ import annotations

from typing import ClassVar

from hf_eff._technique_callback import TechniqueCallback


class PrimaryWeights(TechniqueCallback):
    """Updates a model that was loaded in 16 bit in float32.

    Args:
        options: Those of `shared_core.primary_weights.PrimaryWeightsConfig`.

    Example:
        ``Trainer(..., callbacks=[PrimaryWeights(kind="fp32_copy")])``
    """

    key: ClassVar[str] = "primary_weights"
