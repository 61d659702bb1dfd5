"""Loss scaling: fp16 gradients kept in range, overflowing steps skipped openly, a scale that never dies."""

from shared_core.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
