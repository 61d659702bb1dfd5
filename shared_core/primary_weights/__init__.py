"""Training of models loaded in 16 bit: the optimizer updates float32 values, not the 16-bit weights."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.primary_weights.config import PrimaryWeightsConfig as PrimaryWeightsConfig
    from shared_core.primary_weights.optimizer_swap import replace_parameters_ as replace_parameters_
    from shared_core.primary_weights.technique import PrimaryWeights as PrimaryWeights

export_lazily(__name__)
