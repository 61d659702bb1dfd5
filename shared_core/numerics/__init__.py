"""Number formats: one table, and rounding, encoding and decoding, per element or in blocks."""

from shared_core.numerics.block_formats import Blocks as Blocks
from shared_core.numerics.block_formats import mx_encode as mx_encode
from shared_core.numerics.block_formats import mx_round_to as mx_round_to
from shared_core.numerics.block_formats import nvfp4_encode as nvfp4_encode
from shared_core.numerics.block_formats import nvfp4_round_to as nvfp4_round_to
from shared_core.numerics.block_formats import nvfp4_tensor_scale as nvfp4_tensor_scale
from shared_core.numerics.formats import FORMATS as FORMATS
from shared_core.numerics.formats import Format as Format
from shared_core.numerics.formats import lookup as lookup
from shared_core.numerics.rounding import decode as decode
from shared_core.numerics.rounding import encode as encode
from shared_core.numerics.rounding import round_to as round_to
from shared_core.numerics.rounding import stochastic_round_ as stochastic_round_
