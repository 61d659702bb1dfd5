from .config import ActivationsConfig as ActivationsConfig
from .technique import ActivationCompression as ActivationCompression
