"""Training of models loaded in 16 bit: the optimizer updates float32 values, not the 16-bit weights."""

from shared_core.primary_weights.config import PrimaryWeightsConfig as PrimaryWeightsConfig
from shared_core.primary_weights.optimizer_swap import replace_parameters_ as replace_parameters_
from shared_core.primary_weights.technique import PrimaryWeights as PrimaryWeights
