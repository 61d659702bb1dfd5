"""Loss scaling: fp16 gradients kept in range, overflowing steps skipped openly, a scale that never dies."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.loss_scaling.activation_flush import FlushProbe as FlushProbe
    from shared_core.loss_scaling.config import LossScaleConfig as LossScaleConfig
    from shared_core.loss_scaling.histograms import HistogramProbe as HistogramProbe
    from shared_core.loss_scaling.histograms import Log2Histogram as Log2Histogram
    from shared_core.loss_scaling.histograms import log2_histogram as log2_histogram
    from shared_core.loss_scaling.scaler import LossScaleError as LossScaleError
    from shared_core.loss_scaling.scaler import LossScaler as LossScaler
    from shared_core.loss_scaling.technique import LossScaling as LossScaling
    from shared_core.loss_scaling.telemetry import UnderflowTelemetry as UnderflowTelemetry

export_lazily(__name__)
