"""FP8 training: linear layers that compute their three products per step in 8-bit floating point or narrower."""

from shared_core.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
