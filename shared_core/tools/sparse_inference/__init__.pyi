from .convert import LayerChoice as LayerChoice
from .convert import SparseSpeed as SparseSpeed
from .convert import measure_sparse_speed as measure_sparse_speed
from .convert import sparse_layers as sparse_layers
from .convert import to_semi_structured as to_semi_structured
