"""Efficient training in PyTorch Lightning: a callback per technique, one for a whole recipe, a precision plugin."""

from typing import TYPE_CHECKING

from lightning_eff._registering import register_strategies
from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from lightning_eff._session_callback import EffCallback as EffCallback
    from lightning_eff.activation_checkpointing import ActivationCheckpointing as ActivationCheckpointing
    from lightning_eff.distillation import Distillation as Distillation
    from lightning_eff.fp8 import Fp8 as Fp8
    from lightning_eff.fp8 import Fp8Precision as Fp8Precision
    from lightning_eff.gradient_compression import GradientCompression as GradientCompression
    from lightning_eff.lora import QLora as QLora
    from lightning_eff.loss_scaling import LossScalingPrecision as LossScalingPrecision
    from lightning_eff.low_rank import LowRank as LowRank
    from lightning_eff.matmul_precision import MatmulPrecision as MatmulPrecision
    from lightning_eff.primary_weights import PrimaryWeights as PrimaryWeights
    from lightning_eff.privacy import DifferentialPrivacy as DifferentialPrivacy
    from lightning_eff.pruning import Pruning as Pruning
    from lightning_eff.quantization import QuantizationAwareTraining as QuantizationAwareTraining
    from lightning_eff.saved_activations import CompressedActivations as CompressedActivations
    from lightning_eff.soup import ModelSoup as ModelSoup
    from lightning_eff.strategies import EffDDPStrategy as EffDDPStrategy
    from lightning_eff.strategies import EffFSDPStrategy as EffFSDPStrategy
    from lightning_eff.ticket import LotteryTicket as LotteryTicket
    from lightning_eff.weight_average import WeightAverage as WeightAverage
    from lightning_eff.weight_sharing import WeightSharing as WeightSharing

register_strategies()

export_lazily(__name__)
