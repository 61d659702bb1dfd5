"""Saved activations: store the tensors that autograd keeps for backward in fewer bytes, or on the host."""

from shared_core.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
