"""Running averages of the weights in training: exponential, uniform, of the last few."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.soup.average.config import AverageConfig as AverageConfig
    from shared_core.soup.average.running import RunningAverage as RunningAverage
    from shared_core.soup.average.running import ema_decay as ema_decay
    from shared_core.soup.average.technique import WeightAverage as WeightAverage

export_lazily(__name__)
