"""float32 copies of 16-bit parameters: they follow what others write into the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

_SMALL, _TOGETHER = 1 << 14, 1 << 18


def groups_of(parameters: Sequence[Tensor]) -> list[slice]:
    """Return where to cut a list so that small tensors of one format are together, up to a megabyte of float32.

    Example:
        >>> groups_of([torch.ones(2), torch.ones(3), torch.ones(2).half(), torch.ones(10**6).half()])
        [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    cuts, size = [0], 0
    for place, parameter in enumerate(parameters):
        more, before = parameter.numel(), parameters[place - 1]
        if place and (more > _SMALL or size + more > _TOGETHER or parameter.dtype != before.dtype):
            cuts.append(place)
            size = 0
        size += more
    return [slice(start, end) for start, end in pairwise([*cuts, len(parameters)])] if parameters else []


@torch.no_grad()
def follow_(copies: Sequence[Tensor], parameters: Sequence[Tensor], groups: Iterable[slice]) -> None:
    """Take over what was written into parameters: wherever a copy's rounding is not its parameter, to the bit.

    Args:
        copies: float32, one for each parameter, changed in place.
        parameters: fp16 or bf16.
        groups: What `groups_of` says of the parameters.

    Example:
        >>> copy, parameter = torch.tensor([1.001, 2.0]), torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
        >>> follow_([copy], [parameter], groups_of([parameter]))
        >>> copy
        tensor([1.0010, 3.0000])
    """
    for group in groups:
        if parameters[group.start].is_cpu and _are_rounded(copies[group], parameters[group]):
            continue
        for copy, parameter in zip(copies[group], parameters[group], strict=True):
            # Bits, so that a NaN equals itself; on a CPU asking first is ten times faster than `where` (torch 2.13).
            is_same = copy.to(parameter.dtype).view(torch.int16) == parameter.view(torch.int16)
            copy.copy_(torch.where(is_same, copy, parameter))


def _are_rounded(copies: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
    """Return whether all copies round to their parameters; one call for many small tensors."""
    copy, parameter = copies[0], parameters[0]
    if len(copies) > 1:
        copy, parameter = map(_flatten_dense_tensors, (copies, parameters))
    return torch.equal(copy.to(parameter.dtype).view(torch.int16), parameter.view(torch.int16))
