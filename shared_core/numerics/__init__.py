"""Number formats: one table, and rounding, encoding and decoding by it."""

from shared_core.numerics.encoding import decode as decode
from shared_core.numerics.encoding import encode as encode
from shared_core.numerics.formats import FORMATS as FORMATS
from shared_core.numerics.formats import Format as Format
from shared_core.numerics.formats import lookup as lookup
from shared_core.numerics.rounding import round_to as round_to
from shared_core.numerics.rounding import stochastic_round_ as stochastic_round_
