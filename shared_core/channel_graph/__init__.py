"""Find the channels, neurons and heads of a model that can be removed, by tracing one forward."""

from shared_core.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
