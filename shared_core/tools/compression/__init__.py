"""Compression."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.tools.compression.reader import CompressedFile as CompressedFile
    from shared_core.tools.compression.reader import decompress as decompress
    from shared_core.tools.compression.writer import Compression as Compression
    from shared_core.tools.compression.writer import compress as compress

export_lazily(__name__)
