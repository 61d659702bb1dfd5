"""Quantization: fake quantization in training, ranges, and conversion to an integer model."""

from shared_core.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
