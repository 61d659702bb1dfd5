from .config import POLICIES as POLICIES
from .config import CheckpointingConfig as CheckpointingConfig
from .policies import apply_policy as apply_policy
from .policies import find_blocks as find_blocks
from .profiler import measure_peak as measure_peak
from .segments import Handle as Handle
from .segments import apply_segments as apply_segments
from .technique import ActivationCheckpointing as ActivationCheckpointing
