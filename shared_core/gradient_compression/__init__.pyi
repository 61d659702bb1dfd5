from .config import CommConfig as CommConfig
from .power_sgd import PowerSgd as PowerSgd
from .technique import GradientCompression as GradientCompression
