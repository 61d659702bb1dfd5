"""A teacher's outputs on disk: written once, then looked up by example in any order, padding or size of batch."""

from shared_core.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
