"""FP8 training: linear layers whose three products per step are multiplied in 8-bit floating point, or narrower."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.fp8.config import Fp8Config as Fp8Config
    from shared_core.fp8.layers import Fp8Linear as Fp8Linear
    from shared_core.fp8.layers import convert_to_fp8 as convert_to_fp8
    from shared_core.fp8.technique import Fp8 as Fp8

export_lazily(__name__)
