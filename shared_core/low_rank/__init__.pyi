from .config import LowRankConfig as LowRankConfig
from .factorize import LowRankReport as LowRankReport
from .factorize import factorize as factorize
from .factorize import load as load
from .layers import LowRankLayer as LowRankLayer
from .layers import merge as merge
from .technique import LowRank as LowRank
