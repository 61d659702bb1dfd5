"""Efficient training in PyTorch Lightning: a callback per technique, one for a whole recipe, a precision plugin."""

from lightning_eff.front_end import register_strategies
from shared_core.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)

register_strategies()
