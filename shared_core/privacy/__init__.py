"""Training with differential privacy (DP-SGD): sampled batches, clipped gradients, noise and accounting."""

from shared_core.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
