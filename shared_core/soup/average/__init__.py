"""Running averages of the weights in training: exponential, uniform, of the last few."""

from shared_core.soup.average.config import AverageConfig as AverageConfig
from shared_core.soup.average.running import RunningAverage as RunningAverage
from shared_core.soup.average.running import ema_decay as ema_decay
from shared_core.soup.average.technique import WeightAverage as WeightAverage
