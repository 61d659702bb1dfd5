"""Activation checkpointing: keep some activations and recompute the others in backward."""

from shared_core.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
