"""Whether Triton can be imported, found without importing it."""

from __future__ import annotations

import functools
import importlib.util


@functools.cache
def has_triton() -> bool:
    """Return whether `triton` can be found: CUDA builds of torch bring it on Linux."""
    return importlib.util.find_spec("triton") is not None
