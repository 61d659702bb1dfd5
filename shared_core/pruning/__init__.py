"""Pruning: which weights to zero, when, keeping them zero, removing them, and storing what is left."""

from shared_core.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
