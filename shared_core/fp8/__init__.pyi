from .config import Fp8Config as Fp8Config
from .layers import Fp8Linear as Fp8Linear
from .layers import convert_to_fp8 as convert_to_fp8
from .technique import Fp8 as Fp8
