"""Efficient-training techniques in the Hugging Face Trainer. Names load on first use: `eff run` must stay cheap."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from hf_eff._attach import attach as attach
    from hf_eff._technique_callback import EffCallback as EffCallback
    from hf_eff.activation_checkpointing import ActivationCheckpointing as ActivationCheckpointing
    from hf_eff.distillation import Distillation as Distillation
    from hf_eff.fp8 import Fp8 as Fp8
    from hf_eff.gradient_compression import GradientCompression as GradientCompression
    from hf_eff.lora import QLora as QLora
    from hf_eff.loss_scaling import LossScaling as LossScaling
    from hf_eff.low_rank import LowRank as LowRank
    from hf_eff.matmul_precision import MatmulPrecision as MatmulPrecision
    from hf_eff.primary_weights import PrimaryWeights as PrimaryWeights
    from hf_eff.privacy import DifferentialPrivacy as DifferentialPrivacy
    from hf_eff.pruning import Pruning as Pruning
    from hf_eff.quantization import QuantizationAwareTraining as QuantizationAwareTraining
    from hf_eff.saved_activations import CompressedActivations as CompressedActivations
    from hf_eff.soup import ModelSoup as ModelSoup
    from hf_eff.ticket import LotteryTicket as LotteryTicket
    from hf_eff.trainer import EffTrainer as EffTrainer
    from hf_eff.trainer import EffTrainerMixin as EffTrainerMixin
    from hf_eff.training_args import EffFlags as EffFlags
    from hf_eff.training_args import EffTrainingArguments as EffTrainingArguments
    from hf_eff.training_args import with_eff as with_eff
    from hf_eff.weight_average import WeightAverage as WeightAverage
    from hf_eff.weight_sharing import WeightSharing as WeightSharing

export_lazily(__name__)
