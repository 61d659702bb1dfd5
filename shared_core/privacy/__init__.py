"""Training with differential privacy (DP-SGD): sampled batches, clipped examples, noise, and what it all adds up to."""

from shared_core.privacy.accountant import classic_epsilon, epsilon, noise_multiplier_for
from shared_core.privacy.config import PrivacyConfig
from shared_core.privacy.sampling import PoissonBatches
from shared_core.privacy.technique import DifferentialPrivacy

__all__ = [
    "DifferentialPrivacy",
    "PoissonBatches",
    "PrivacyConfig",
    "classic_epsilon",
    "epsilon",
    "noise_multiplier_for",
]
