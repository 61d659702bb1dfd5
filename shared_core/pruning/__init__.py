"""Pruning: choose which weights to zero and when, keep them zero, and remove pruned units."""

from shared_core.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
