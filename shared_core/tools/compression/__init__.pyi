from .reader import CompressedFile as CompressedFile
from .reader import decompress as decompress
from .writer import Compression as Compression
from .writer import compress as compress
