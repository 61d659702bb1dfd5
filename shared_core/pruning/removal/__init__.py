"""Masks become smaller tensors: which positions of which tensors belong together, and cutting them out."""

from shared_core.pruning.removal.groups import ChannelGroup as ChannelGroup
from shared_core.pruning.removal.groups import Slice as Slice
from shared_core.pruning.removal.groups import find_groups as find_groups
from shared_core.pruning.removal.shrink import ShrinkResult as ShrinkResult
from shared_core.pruning.removal.shrink import shrink as shrink
