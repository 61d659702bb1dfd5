"""Whether this processor multiplies bytes exactly: without VNNI, kernels for x86 add pairs of products in 16 bits."""

import platform

import pytest
import torch

HAS_VNNI = platform.machine() not in ("x86_64", "AMD64") or any(
    getattr(torch.cpu, f"_is_{name}_supported")() for name in ("vnni", "amx_tile")
)
WIDEST = 8 if HAS_VNNI else 7
"""The widest codes of weights whose products no kernel here saturates."""
needs_vnni = pytest.mark.skipif(not HAS_VNNI, reason="without VNNI, pairs of products of 8-bit codes saturate 16 bits")
