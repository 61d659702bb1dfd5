from .groups import ChannelGroup as ChannelGroup
from .groups import Slice as Slice
from .groups import find_groups as find_groups
