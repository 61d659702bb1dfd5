"""Weight clustering: weights that share a few values, so that they compress well."""

from shared_core.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
