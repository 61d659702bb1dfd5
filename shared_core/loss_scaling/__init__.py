"""Loss scaling: keep fp16 gradients in range, skip overflowing steps visibly, and never let the scale reach 0."""

from shared_core.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
