"""QuantizationAwareTraining as a callback of the Hugging Face Trainer."""

from __future__ import annotations

from typing import ClassVar

from hf_eff._technique_callback import TechniqueCallback


class QuantizationAwareTraining(TechniqueCallback):
    """Trains with fake-quantised weights and activations.

    Args:
        options: Those of `shared_core.quantization.QatConfig`.

    Example:
        ``Trainer(..., callbacks=[QuantizationAwareTraining(scheme="int8", begin=0.6)])``
    """

    key: ClassVar[str] = "qat"
