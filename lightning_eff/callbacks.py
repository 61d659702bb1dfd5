"""One callback for each technique: ``pl.Trainer(callbacks=[Pruning(sparsity=0.8)])``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from lightning_eff._trainer_hooks import EffCallback
from lightning_eff._typed_options import typed_options
from shared_core.engine.recipe import Recipe


@typed_options("checkpointing")
class ActivationCheckpointing(EffCallback):
    """Recomputes activations in backward in place of keeping them; gradients stay the same to the bit."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"checkpointing": options}))


@typed_options("distill")
class Distillation(EffCallback):
    """Adds a teacher's soft term to the loss that training_step returns."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"distill": options}))


@typed_options("comm")
class GradientCompression(EffCallback):
    """Has the processes of DDP send each other gradients in 16 bits or as products of low rank."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"comm": options}))


@typed_options("lora")
class Lora(EffCallback):
    """Trains low-rank adapters on linear layers frozen in 4 or 8 bits, and merges them at the end."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"lora": options}))


@typed_options("low_rank")
class LowRank(EffCallback):
    """Trains layers as products of two smaller ones; the model stays so, or is multiplied out at the end."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"low_rank": options}))


@typed_options("matmul")
class MatmulPrecision(EffCallback):
    """Multiplies float32 matrices in TF32 or bf16 where the hardware has them, and says where it has not."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"matmul": options}))


@typed_options("primary_weights")
class PrimaryWeights(EffCallback):
    """Updates a model whose parameters are fp16 or bf16 in float32."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"primary_weights": options}))


@typed_options("dp")
class DifferentialPrivacy(EffCallback):
    """Trains by DP-SGD: sampled batches, clipped examples, noise, and epsilon in log, progress bar and receipt."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"dp": options}))


@typed_options("prune")
class Pruning(EffCallback):
    """Prunes weights during training on a schedule; pruned weights stay exactly zero."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"prune": options}))


@typed_options("qat")
class QuantizationAwareTraining(EffCallback):
    """Trains with fake-quantised weights and activations, and leaves weights that survive their quantisation."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"qat": options}))


@typed_options("activations")
class ActivationCompression(EffCallback):
    """Stores what forward saves for backward smaller, or on the host."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"activations": options}))


@typed_options("soup")
class ModelSoup(EffCallback):
    """Averages the checkpoints of this run when training ends, by its own validation metric."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"soup": options}))


@typed_options("lottery")
class LotteryTicket(EffCallback):
    """Trains dense or with a ticket, and leaves the next ticket; `LotterySearch` of shared_core runs a whole search."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"lottery": options}))


@typed_options("average")
class WeightAverage(EffCallback):
    """Averages the weights while training; validation, saved models and the final one are the average."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"average": options}))


@typed_options("cluster")
class WeightClustering(EffCallback):
    """Clusters the weights of each layer and trains the values that they share."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"cluster": options}))


if TYPE_CHECKING:
    from lightning_eff._environment import MixedPrecision

    class Fp8Precision(MixedPrecision):  # noqa: D101
        def __init__(self, precision: Literal["bf16-mixed", "32-true"] = ..., **options: Any) -> None: ...


@typed_options("fp8")
class Fp8(EffCallback):
    """Trains with linear layers that multiply FP8 values, forward and backward."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"fp8": options}))
