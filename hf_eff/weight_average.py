"""Running averages as a callback of the Hugging Face Trainer."""

from __future__ import annotations

from typing import ClassVar

from hf_eff._technique_callback import TechniqueCallback


class WeightAverage(TechniqueCallback):
    """Averages the weights while training; validation, the best model and the final one are the average.

    Args:
        options: Those of `shared_core.soup.AverageConfig`.

    Example:
        ``Trainer(..., callbacks=[WeightAverage(kind="ema", decay=0.999)])``
    """

    key: ClassVar[str] = "average"
