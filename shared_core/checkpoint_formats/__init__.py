"""Read model weights from Hugging Face folders, Lightning, distributed and plain checkpoints, and adapters."""

from shared_core.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
