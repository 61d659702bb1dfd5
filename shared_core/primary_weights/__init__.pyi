from .config import PrimaryWeightsConfig as PrimaryWeightsConfig
from .optimizer_swap import replace_parameters_ as replace_parameters_
from .technique import PrimaryWeights as PrimaryWeights
