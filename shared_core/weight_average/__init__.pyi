from .config import AverageConfig as AverageConfig
from .running_mean import RunningAverage as RunningAverage
from .running_mean import ema_decay as ema_decay
from .technique import WeightAverage as WeightAverage
