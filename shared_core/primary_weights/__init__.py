"""Train models loaded in 16 bit: the optimizer updates float32 values instead of the 16-bit weights."""

from shared_core.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
