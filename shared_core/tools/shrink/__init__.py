"""Turn masks into smaller tensors: find positions that belong together, and cut them out."""

from shared_core.tools.shrink.shrink import ShrinkResult as ShrinkResult
from shared_core.tools.shrink.shrink import shrink as shrink
from shared_core.tools.shrink.sizes import CutResult as CutResult
from shared_core.tools.shrink.sizes import shrink_to as shrink_to
