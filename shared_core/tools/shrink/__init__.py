"""Masks become smaller tensors: which positions of which tensors belong together, and cutting them out."""

from shared_core.tools.shrink.shrink import ShrinkResult as ShrinkResult
from shared_core.tools.shrink.shrink import shrink as shrink
from shared_core.tools.shrink.sizes import CutResult as CutResult
from shared_core.tools.shrink.sizes import shrink_to as shrink_to
