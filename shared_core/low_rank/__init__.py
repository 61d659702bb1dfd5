"""Layers as products of two smaller ones: by singular values, of weights or of what they make of inputs."""

from shared_core.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
