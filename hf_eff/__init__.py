"""Efficient-training techniques for the Hugging Face Trainer. Names load on first use, which keeps `eff run` fast."""

from shared_core.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
