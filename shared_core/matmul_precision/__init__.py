"""Precision of float32 matrix products."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.matmul_precision.config import MatmulPrecisionConfig as MatmulPrecisionConfig
    from shared_core.matmul_precision.technique import MatmulPrecision as MatmulPrecision

export_lazily(__name__)
