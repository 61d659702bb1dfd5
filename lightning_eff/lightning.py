"""Everything for Trainers imported from ``lightning.pytorch``."""

from typing import TYPE_CHECKING

from lightning_eff import *  # noqa: F403
from lightning_eff._run_environment import LIGHTNING
from lightning_eff.precision import fp8_precision_class, precision_class
from lightning_eff.strategies import ddp_class, fsdp_class

if not TYPE_CHECKING:
    LossScalingPrecision = precision_class(LIGHTNING)
    Fp8Precision = fp8_precision_class(LIGHTNING)
    EffDDPStrategy = ddp_class(LIGHTNING)
    EffFSDPStrategy = fsdp_class(LIGHTNING)
