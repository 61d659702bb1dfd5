"""Sparse inference."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.tools.sparse_inference.convert import LayerChoice as LayerChoice
    from shared_core.tools.sparse_inference.convert import SparseSpeed as SparseSpeed
    from shared_core.tools.sparse_inference.convert import measure_sparse_speed as measure_sparse_speed
    from shared_core.tools.sparse_inference.convert import sparse_layers as sparse_layers
    from shared_core.tools.sparse_inference.convert import to_semi_structured as to_semi_structured
    from shared_core.tools.sparse_inference.semi_structured import is_two_four as is_two_four
    from shared_core.tools.sparse_inference.semi_structured import pack_two_four as pack_two_four
    from shared_core.tools.sparse_inference.semi_structured import unpack_two_four as unpack_two_four

export_lazily(__name__)
