"""Compression: weights that share few values, stored in one small file."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.pruning.compression.config import ShareConfig as ShareConfig
    from shared_core.pruning.compression.kmeans import kmeans_1d as kmeans_1d
    from shared_core.pruning.compression.reader import CompressedFile as CompressedFile
    from shared_core.pruning.compression.reader import decompress as decompress
    from shared_core.pruning.compression.sharing import SharedValues as SharedValues
    from shared_core.pruning.compression.sharing import share_values as share_values
    from shared_core.pruning.compression.technique import WeightSharing as WeightSharing
    from shared_core.pruning.compression.writer import Compression as Compression
    from shared_core.pruning.compression.writer import compress as compress

export_lazily(__name__)
