"""The table of techniques: recipe key, room, config, technique. A new technique is one row here."""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any, cast

from shared_core.config.options import TechniqueConfig
from shared_core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from shared_core.engine.technique import Technique  # it imports torch, for which `eff prune --help` must not wait


@dataclasses.dataclass(frozen=True)
class Room:
    """Where a technique lives: `shared_core.<name>` with its config and its state class."""

    key: str
    name: str
    config_name: str
    technique_name: str

    @property
    def config_class(self) -> type[TechniqueConfig]:
        """The dataclass of its options."""
        return cast(
            "type[TechniqueConfig]",
            getattr(importlib.import_module(f"shared_core.{self.name}"), self.config_name),
        )

    @property
    def technique_class(self) -> type[Technique]:
        """The class that a session drives."""
        return cast(
            "type[Technique]",
            getattr(importlib.import_module(f"shared_core.{self.name}"), self.technique_name),
        )


ROOMS = {
    room.key: room
    for room in (
        Room("matmul", "matmul_precision", "MatmulPrecisionConfig", "MatmulPrecision"),
        Room("low_rank", "low_rank", "LowRankConfig", "LowRank"),
        Room("lora", "lora", "LoraConfig", "Lora"),
        Room("primary_weights", "primary_weights", "PrimaryWeightsConfig", "PrimaryWeights"),
        Room("prune", "pruning", "PruneConfig", "Pruning"),
        Room("lottery", "lottery_ticket", "LotteryConfig", "LotteryTicket"),
        Room("cluster", "weight_clustering", "ClusterConfig", "WeightClustering"),
        Room("qat", "quantization", "QatConfig", "QuantizationAwareTraining"),
        Room("fp8", "fp8", "Fp8Config", "Fp8"),
        Room("checkpointing", "activation_checkpointing", "CheckpointingConfig", "ActivationCheckpointing"),
        Room("activations", "activation_compression", "ActivationsConfig", "ActivationCompression"),
        Room("distill", "distillation", "DistillConfig", "Distillation"),
        Room("loss_scale", "loss_scaling", "LossScaleConfig", "LossScaling"),
        Room("comm", "gradient_compression", "CommConfig", "GradientCompression"),
        Room("dp", "privacy", "PrivacyConfig", "DifferentialPrivacy"),
        Room("average", "weight_average", "AverageConfig", "WeightAverage"),
        Room("soup", "soup", "SoupConfig", "ModelSoup"),
    )
}


def room(key: str) -> Room:
    """Return the room of a recipe key.

    Raises:
        ConfigError: If there is none; names the nearest.
    """
    if key not in ROOMS:
        of_room = [repr(room.key) for room in ROOMS.values() if room.name == key]
        hint = f"; did you mean {' or '.join(of_room)}?" if of_room else nearest(str(key), ROOMS)
        raise ConfigError(f"recipe: {key!r} is not a technique{hint}")
    return ROOMS[key]


def flags(*keys: str) -> dict[str, tuple[str, dataclasses.Field[Any]]]:
    """Return every flag, ``prune_sparsity`` → (``prune``, its field), in the order of the table.

    Args:
        keys: Of the techniques whose flags are wanted; none: all.
    """
    return {
        f"{key}_{field.name}": (key, field)
        for key in keys or ROOMS
        for field in dataclasses.fields(ROOMS[key].config_class)
    }
