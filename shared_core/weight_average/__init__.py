"""Running averages of the weights during training: exponential, uniform, or of the last few."""

from shared_core.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
