"""Lottery tickets: sparse networks that train as well as dense ones if they start from the right weights."""

from shared_core.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
