"""Efficient-training techniques in the Hugging Face Trainer. Names load on first use: `eff run` must stay cheap."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from hf_eff._attach import attach as attach
    from hf_eff.callbacks import ActivationCheckpointing as ActivationCheckpointing
    from hf_eff.callbacks import ActivationCompression as ActivationCompression
    from hf_eff.callbacks import DifferentialPrivacy as DifferentialPrivacy
    from hf_eff.callbacks import Distillation as Distillation
    from hf_eff.callbacks import EffCallback as EffCallback
    from hf_eff.callbacks import Fp8 as Fp8
    from hf_eff.callbacks import GradientCompression as GradientCompression
    from hf_eff.callbacks import Lora as Lora
    from hf_eff.callbacks import LossScaling as LossScaling
    from hf_eff.callbacks import LotteryTicket as LotteryTicket
    from hf_eff.callbacks import LowRank as LowRank
    from hf_eff.callbacks import MatmulPrecision as MatmulPrecision
    from hf_eff.callbacks import ModelSoup as ModelSoup
    from hf_eff.callbacks import PrimaryWeights as PrimaryWeights
    from hf_eff.callbacks import Pruning as Pruning
    from hf_eff.callbacks import QuantizationAwareTraining as QuantizationAwareTraining
    from hf_eff.callbacks import WeightAverage as WeightAverage
    from hf_eff.callbacks import WeightClustering as WeightClustering
    from hf_eff.trainer import EffTrainer as EffTrainer
    from hf_eff.trainer import EffTrainerMixin as EffTrainerMixin
    from hf_eff.training_args import EffFlags as EffFlags
    from hf_eff.training_args import EffTrainingArguments as EffTrainingArguments
    from hf_eff.training_args import with_eff as with_eff

export_lazily(__name__)
