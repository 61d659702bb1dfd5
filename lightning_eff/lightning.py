"""Everything for Trainers imported from ``lightning.pytorch``."""

from typing import TYPE_CHECKING

from lightning_eff import ActivationCheckpointing as ActivationCheckpointing
from lightning_eff import ActivationCompression as ActivationCompression
from lightning_eff import DifferentialPrivacy as DifferentialPrivacy
from lightning_eff import Distillation as Distillation
from lightning_eff import EffCallback as EffCallback
from lightning_eff import Fp8 as Fp8
from lightning_eff import GradientCompression as GradientCompression
from lightning_eff import Lora as Lora
from lightning_eff import LotteryTicket as LotteryTicket
from lightning_eff import LowRank as LowRank
from lightning_eff import MatmulPrecision as MatmulPrecision
from lightning_eff import ModelSoup as ModelSoup
from lightning_eff import PrimaryWeights as PrimaryWeights
from lightning_eff import Pruning as Pruning
from lightning_eff import QuantizationAwareTraining as QuantizationAwareTraining
from lightning_eff import WeightAverage as WeightAverage
from lightning_eff import WeightClustering as WeightClustering
from lightning_eff._environment import LIGHTNING
from lightning_eff.precision import fp8_precision_class, precision_class
from lightning_eff.strategies import ddp_class, fsdp_class

if TYPE_CHECKING:
    from lightning_eff import EffDDPStrategy as EffDDPStrategy
    from lightning_eff import EffFSDPStrategy as EffFSDPStrategy
    from lightning_eff import Fp8Precision as Fp8Precision
    from lightning_eff import LossScalingPrecision as LossScalingPrecision
else:
    LossScalingPrecision = precision_class(LIGHTNING)
    Fp8Precision = fp8_precision_class(LIGHTNING)
    EffDDPStrategy = ddp_class(LIGHTNING)
    EffFSDPStrategy = fsdp_class(LIGHTNING)
