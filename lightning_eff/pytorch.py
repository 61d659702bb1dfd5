"""Everything for Trainers imported from ``pytorch_lightning``."""

from typing import TYPE_CHECKING

from lightning_eff import *  # noqa: F403
from lightning_eff._run_environment import PYTORCH_LIGHTNING
from lightning_eff.precision import fp8_precision_class, precision_class
from lightning_eff.strategies import ddp_class, fsdp_class

if not TYPE_CHECKING:
    LossScalingPrecision = precision_class(PYTORCH_LIGHTNING)
    Fp8Precision = fp8_precision_class(PYTORCH_LIGHTNING)
    EffDDPStrategy = ddp_class(PYTORCH_LIGHTNING)
    EffFSDPStrategy = fsdp_class(PYTORCH_LIGHTNING)
