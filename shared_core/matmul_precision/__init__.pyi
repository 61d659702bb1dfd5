from .config import MatmulPrecisionConfig as MatmulPrecisionConfig
from .technique import MatmulPrecision as MatmulPrecision
