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
    """Has the processes of DDP send each other gradients in 16 bits or as products of low rank."""


class Lora(TechniqueCallback):
    """Trains low-rank adapters on frozen linear layers, and saves them in PEFT's format."""


class LowRank(TechniqueCallback):
    """Trains layers as products of two smaller ones; the model stays so, or is multiplied out at the end."""


class MatmulPrecision(TechniqueCallback):
    """Multiplies float32 matrices in TF32 or bf16 where the hardware has them, and says where it has not."""


class PrimaryWeights(TechniqueCallback):
    """Updates a model whose parameters are fp16 or bf16 in float32."""


class DifferentialPrivacy(TechniqueCallback):
    """Trains by DP-SGD: sampled batches, clipped examples, noise, and epsilon in log, progress bar and receipt."""


class Pruning(TechniqueCallback):
    """Prunes weights during training on a schedule; pruned weights stay exactly zero."""


class QuantizationAwareTraining(TechniqueCallback):
    """Trains with fake-quantised weights and activations, and leaves weights that survive their quantisation."""


class ActivationCompression(TechniqueCallback):
    """Stores what forward saves for backward smaller, or on the host."""


class ModelSoup(TechniqueCallback):
    """Averages the checkpoints of this run when training ends, by its own validation metric."""


class LotteryTicket(TechniqueCallback):
    """Trains dense or with a ticket, and leaves the next ticket; `LotterySearch` of shared_core runs a whole search."""


class WeightAverage(TechniqueCallback):
    """Averages the weights while training; validation, saved models and the final one are the average."""


class WeightClustering(TechniqueCallback):
    """Clusters the weights of each layer and trains the values that they share."""


class Fp8(TechniqueCallback):
    """Trains with linear layers that multiply FP8 values, forward and backward."""
