"""Gradients reduced over processes in fewer bytes: in 16 bits, or as matrices of low rank with error feedback."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.gradient_compression.config import CommConfig as CommConfig
    from shared_core.gradient_compression.power_sgd import PowerSgd as PowerSgd
    from shared_core.gradient_compression.technique import GradientCompression as GradientCompression

export_lazily(__name__)
