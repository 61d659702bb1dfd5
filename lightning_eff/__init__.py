"""Efficient training in PyTorch Lightning: a callback per technique, one for a whole recipe, a precision plugin."""

from typing import TYPE_CHECKING, Any

from lightning_eff._registering import register_strategies

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

_HOME = {
    "ActivationCheckpointing": "activation_checkpointing",
    "CompressedActivations": "saved_activations",
    "DifferentialPrivacy": "privacy",
    "Distillation": "distillation",
    "EffCallback": "_session_callback",
    "EffDDPStrategy": "strategies",
    "EffFSDPStrategy": "strategies",
    "Fp8": "fp8",
    "Fp8Precision": "fp8",
    "GradientCompression": "gradient_compression",
    "LossScalingPrecision": "loss_scaling",
    "LotteryTicket": "ticket",
    "LowRank": "low_rank",
    "MatmulPrecision": "matmul_precision",
    "ModelSoup": "soup",
    "PrimaryWeights": "primary_weights",
    "Pruning": "pruning",
    "QLora": "lora",
    "QuantizationAwareTraining": "quantization",
    "WeightAverage": "weight_average",
    "WeightSharing": "weight_sharing",
}
__all__ = sorted(_HOME)


register_strategies()


def __getattr__(name: str) -> Any:
    # Every Trainer of the environment loads an entry point of this package, and must not pay for what it does not use.
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module 'lightning_eff' has no attribute {name!r}")
    return getattr(importlib.import_module(f"lightning_eff.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
