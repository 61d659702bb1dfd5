"""Efficient-training techniques for the Hugging Face Trainer. Names load on first use, which keeps `eff run` fast."""

from hf_eff._packed_loading import load_packed_in_float
from shared_core.front_ends.after_import import after_import
from shared_core.lazy_exports import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)

after_import("transformers.quantizers.auto", load_packed_in_float)
