"""Channel graph."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.channel_graph.groups import ChannelGroup as ChannelGroup
    from shared_core.channel_graph.groups import Slice as Slice
    from shared_core.channel_graph.groups import find_groups as find_groups

export_lazily(__name__)
