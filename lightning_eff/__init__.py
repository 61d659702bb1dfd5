"""Efficient training in PyTorch Lightning: a callback per technique, one for a whole recipe, a precision plugin."""

from typing import TYPE_CHECKING

from lightning_eff._registering import register_strategies
from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from lightning_eff._trainer_hooks import EffCallback as EffCallback
    from lightning_eff.callbacks import ActivationCheckpointing as ActivationCheckpointing
    from lightning_eff.callbacks import ActivationCompression as ActivationCompression
    from lightning_eff.callbacks import DifferentialPrivacy as DifferentialPrivacy
    from lightning_eff.callbacks import Distillation as Distillation
    from lightning_eff.callbacks import Fp8 as Fp8
    from lightning_eff.callbacks import GradientCompression as GradientCompression
    from lightning_eff.callbacks import Lora as Lora
    from lightning_eff.callbacks import LotteryTicket as LotteryTicket
    from lightning_eff.callbacks import LowRank as LowRank
    from lightning_eff.callbacks import MatmulPrecision as MatmulPrecision
    from lightning_eff.callbacks import ModelSoup as ModelSoup
    from lightning_eff.callbacks import PrimaryWeights as PrimaryWeights
    from lightning_eff.callbacks import Pruning as Pruning
    from lightning_eff.callbacks import QuantizationAwareTraining as QuantizationAwareTraining
    from lightning_eff.callbacks import WeightAverage as WeightAverage
    from lightning_eff.callbacks import WeightClustering as WeightClustering
    from lightning_eff.precision import Fp8Precision as Fp8Precision
    from lightning_eff.precision import LossScalingPrecision as LossScalingPrecision
    from lightning_eff.strategies import EffDDPStrategy as EffDDPStrategy
    from lightning_eff.strategies import EffFSDPStrategy as EffFSDPStrategy

register_strategies()

export_lazily(__name__)
