"""Saved activations: what autograd keeps for backward, packed smaller or kept on the host."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.activation_compression.config import ActivationsConfig as ActivationsConfig
    from shared_core.activation_compression.technique import ActivationCompression as ActivationCompression

export_lazily(__name__)
