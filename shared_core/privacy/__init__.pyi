from .accountant import classic_epsilon as classic_epsilon
from .accountant import epsilon as epsilon
from .accountant import noise_multiplier_for as noise_multiplier_for
from .config import PrivacyConfig as PrivacyConfig
from .sampling import PoissonBatches as PoissonBatches
from .technique import DifferentialPrivacy as DifferentialPrivacy
