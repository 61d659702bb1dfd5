"""Replace layers by products of two smaller ones, chosen by the weights or also by their inputs."""

from shared_core.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
