"""Training with differential privacy (DP-SGD): sampled batches, clipped examples, noise, and what it all adds up to."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.privacy.accountant import classic_epsilon as classic_epsilon
    from shared_core.privacy.accountant import epsilon as epsilon
    from shared_core.privacy.accountant import noise_multiplier_for as noise_multiplier_for
    from shared_core.privacy.config import PrivacyConfig as PrivacyConfig
    from shared_core.privacy.sampling import PoissonBatches as PoissonBatches
    from shared_core.privacy.technique import DifferentialPrivacy as DifferentialPrivacy

export_lazily(__name__)
