from .config import AverageConfig as AverageConfig
from .technique import RunningAverage as RunningAverage
from .technique import WeightAverage as WeightAverage
from .technique import ema_decay as ema_decay
