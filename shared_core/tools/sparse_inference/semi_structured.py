"""Which weights and devices have 2:4 products in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Backend = Literal["cusparselt", "cutlass"]
_MULTIPLES: dict[Backend, tuple[int, int]] = {"cusparselt": (16, 16), "cutlass": (32, 64)}
_TYPES = (torch.float16, torch.bfloat16)


def has_two_four_kernels(device: torch.device) -> bool:
    """Return whether torch multiplies 2:4 weights on a device: NVIDIA of compute capability 8.0 and newer."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def two_four_here(device: torch.device) -> str:
    """Return whether 2:4 weights are multiplied as such on a device, in words."""
    if has_two_four_kernels(device):
        return f"2:4 weights are multiplied by {compressor()[1]}"
    return "masks train everywhere; 2:4 products need a GPU of compute capability 8.0 or later"


@torch.no_grad()
def two_four_obstacle(weight: Tensor, backend: Backend) -> str:
    """Return why a weight cannot be compressed for a library of sparse products, or ``""`` if it can.

    Args:
        weight: Of a linear layer, on any device.
        backend: ``cusparselt``, or ``cutlass`` where torch was built without it.

    Example:
        >>> two_four_obstacle(torch.ones(32, 64, dtype=torch.float16), "cusparselt")
        'it holds no 2:4 pattern: up to 4 of four neighbours are not zero'
    """
    if weight.dtype not in _TYPES:
        return f"2:4 products are of float16 and bfloat16, not {weight.dtype}; convert the model first"
    rows, columns = _MULTIPLES[backend]
    if weight.ndim != 2 or weight.shape[0] % rows or weight.shape[1] % columns or not weight.numel():
        return f"{backend} takes outputs in multiples of {rows} and inputs of {columns}, got {tuple(weight.shape)}"
    most = int(weight.ne(0).reshape(-1, 4).sum(1).max())
    return f"it holds no 2:4 pattern: up to {most} of four neighbours are not zero" if most > 2 else ""


def compressor() -> tuple[Callable[[Tensor], Tensor], Backend]:
    """Return what compresses a 2:4 weight on this machine's GPU, and the library that multiplies it."""
    from torch.sparse import SparseSemiStructuredTensorCUSPARSELT, SparseSemiStructuredTensorCUTLASS

    if torch.backends.cusparselt.is_available():
        return SparseSemiStructuredTensorCUSPARSELT.from_dense, "cusparselt"
    return SparseSemiStructuredTensorCUTLASS.from_dense, "cutlass"
