"""2:4 as hardware stores it: half of the values, and two bits for the place of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from shared_core.errors import ConfigError

Backend = Literal["cusparselt", "cutlass"]
_MULTIPLES: dict[Backend, tuple[int, int]] = {"cusparselt": (16, 16), "cutlass": (32, 64)}
_TYPES = (torch.float16, torch.bfloat16)
# Where fewer than two of four are not zero, zeros are stored, in the order CUTLASS takes them: places 2, 3, 0, 1.
_FILL = (2, 3, 0, 1)


@torch.no_grad()
def is_two_four(weight: Tensor) -> bool:
    """Return whether of every four neighbours along the last axis at most two are not zero.

    Args:
        weight: Any dtype; other than two dimensions, or a last one that four does not divide, is False.

    Example:
        >>> is_two_four(torch.tensor([[1.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 3.0]]))
        True
    """
    if weight.ndim != 2 or weight.shape[1] % 4:
        return False
    return bool((weight.ne(0).view(-1, 4).sum(1) <= 2).all())


@torch.no_grad()
def pack_two_four(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values that a 2:4 weight keeps, and the place of each: 9/16 of the bytes of 16-bit weights.

    Of every four inputs two values are stored, in order, and four bits: the place of the first in the lower two, of the
    second in the upper two. Four groups fill one int16, the first in its lowest bits (PTX ISA, ``mma.sp``; CUTLASS
    stores the same words in another order).

    Args:
        weight: ``(outputs, inputs)``, at most two of every four neighbours not zero, inputs a multiple of 16.

    Returns:
        Values ``(outputs, inputs/2)`` of the weight's type, and metadata ``(outputs, inputs/16)``, int16.

    Raises:
        ConfigError: If the shape or the pattern is another.

    Example:
        >>> values, metadata = pack_two_four(torch.tensor([[0.0, 5.0, 0.0, 7.0] * 4]))
        >>> values.tolist(), bin(metadata.item() & 0b1111)
        ([[5.0, 7.0, 5.0, 7.0, 5.0, 7.0, 5.0, 7.0]], '0b1101')
    """
    if weight.ndim != 2 or weight.shape[1] % 16:
        raise ConfigError("pack_two_four", f"weight must have inputs in sixteens, got shape {tuple(weight.shape)}")
    if not is_two_four(weight):
        raise ConfigError(
            "pack_two_four", "of four neighbours at most two must not be zero", "prune with nm_mask first"
        )
    groups = weight.reshape(-1, 4)
    # Zeros get a positive key by place, others 0: a stable sort puts the live ones first, then zeros in CUTLASS's
    # order.
    order = torch.tensor([_FILL.index(place) + 1 for place in range(4)], device=weight.device)
    # At most two live: the first two places are those, filled up with zeros, in rising order.
    places = groups.eq(0).long().mul_(order).argsort(dim=1, stable=True)[:, :2].sort(dim=1).values
    values = groups.gather(1, places).view(weight.shape[0], -1)
    # Four bits a group of four: two places of two bits. Four groups make a word of 16 bits.
    bits = (places[:, 0] | places[:, 1] << 2).view(weight.shape[0], -1, 4)
    shifts = torch.tensor([0, 4, 8, 12], device=weight.device)
    words = (bits << shifts).sum(2)
    # torch has no uint16 arithmetic: the upper half of its range is the negative numbers of int16.
    return values, torch.where(words < 1 << 15, words, words - (1 << 16)).to(torch.int16)


@torch.no_grad()
def unpack_two_four(values: Tensor, metadata: Tensor) -> Tensor:
    """Return the weight that `pack_two_four` packed.

    Args:
        values: ``(outputs, inputs/2)``.
        metadata: ``(outputs, inputs/16)``, int16.

    Raises:
        ConfigError: If the shapes do not fit.

    Example:
        >>> weight = torch.tensor([[0.0, 5.0, 0.0, 7.0] * 4])
        >>> torch.equal(unpack_two_four(*pack_two_four(weight)), weight)
        True
    """
    if values.ndim != 2 or metadata.shape != (values.shape[0], values.shape[1] // 8) or values.shape[1] % 8:
        raise ConfigError(
            "unpack_two_four",
            f"metadata must be (outputs, inputs/16) beside values (outputs, inputs/2), got {tuple(metadata.shape)} "
            f"and {tuple(values.shape)}",
        )
    shifts = torch.arange(0, 16, 2, device=values.device)
    # & binds after >>: eight fields of two bits a word.
    places = (metadata.long().unsqueeze(2) >> shifts & 0b11).view(-1, 2)
    groups = values.new_zeros(places.shape[0], 4)
    groups.scatter_(1, places, values.reshape(-1, 2))
    return groups.view(values.shape[0], -1)


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
