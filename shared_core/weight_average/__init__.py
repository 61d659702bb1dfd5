"""Running averages of the weights in training: exponential, uniform, of the last few."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.weight_average.config import AverageConfig as AverageConfig
    from shared_core.weight_average.running_mean import RunningAverage as RunningAverage
    from shared_core.weight_average.running_mean import ema_decay as ema_decay
    from shared_core.weight_average.technique import WeightAverage as WeightAverage

export_lazily(__name__)
