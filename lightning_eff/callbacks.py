"""One callback for each technique: ``pl.Trainer(callbacks=[Pruning(sparsity=0.8)])``."""

from __future__ import annotations

from lightning_eff._trainer_hooks import EffCallback
from shared_core.front_ends.typed_options import OneTechnique


class TechniqueCallback(OneTechnique, EffCallback):  # type: ignore[misc]
    """One technique, with its options as keyword arguments."""


class ActivationCheckpointing(TechniqueCallback):
    """Recomputes activations in backward instead of keeping them. Gradients stay bit-equal."""


class Distillation(TechniqueCallback):
    """Adds a teacher's soft term to the loss that training_step returns."""


class GradientCompression(TechniqueCallback):
    """Compresses the gradients that DDP processes exchange: 16 bits, or products of low rank."""


class Lora(TechniqueCallback):
    """Trains low-rank adapters on frozen linear layers, and saves them in PEFT's format."""


class LowRank(TechniqueCallback):
    """Trains layers as products of two smaller ones, which are kept or multiplied out at the end."""


class MatmulPrecision(TechniqueCallback):
    """Multiplies float32 matrices in TF32 or bf16 if the hardware supports it, and reports if not."""


class PrimaryWeights(TechniqueCallback):
    """Updates fp16 or bf16 weights in float32."""


class DifferentialPrivacy(TechniqueCallback):
    """Trains with DP-SGD: sampled batches, clipped examples, noise, and epsilon in log, progress bar and receipt."""


class Pruning(TechniqueCallback):
    """Prunes weights during training on a schedule; pruned weights stay exactly zero."""


class QuantizationAwareTraining(TechniqueCallback):
    """Trains with fake-quantized weights and activations, so that the weights tolerate quantization."""


class ActivationCompression(TechniqueCallback):
    """Stores activations for the backward pass compressed, or on the host."""


class ModelSoup(TechniqueCallback):
    """Averages this run's checkpoints when training ends, selected by its validation metric."""


class LotteryTicket(TechniqueCallback):
    """Trains dense or with a ticket, and saves the next ticket. `LotterySearch` of shared_core runs a whole search."""


class WeightAverage(TechniqueCallback):
    """Averages the weights during training. Validation, saved models and the final model use the average."""


class WeightClustering(TechniqueCallback):
    """Clusters the weights of each layer and trains the shared values."""


class Fp8(TechniqueCallback):
    """Trains with linear layers that multiply FP8 values, forward and backward."""
