"""Reduce gradients over processes in fewer bytes: in 16 bits, or as low-rank matrices with error feedback."""

from shared_core.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
