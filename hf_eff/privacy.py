"""Differential privacy as a callback of the Hugging Face Trainer."""

from __future__ import annotations

from typing import ClassVar

from hf_eff._technique_callback import TechniqueCallback


class DifferentialPrivacy(TechniqueCallback):
    """Trains by DP-SGD: sampled batches, clipped examples, noise, and epsilon in log and receipt.

    Args:
        options: Those of `shared_core.privacy.PrivacyConfig`.

    Example:
        ``Trainer(..., callbacks=[DifferentialPrivacy(noise_multiplier=1.0, max_grad_norm=1.0)])``
    """

    key: ClassVar[str] = "dp"
