"""float32 copies of 16-bit parameters: they follow what others write into the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shared_core.ranks import local_part
from shared_core.sharded import is_sharded

_SMALL, _TOGETHER = 1 << 14, 1 << 18


class _Bundle(NamedTuple):
    parameters: list[Tensor]
    dtype: torch.dtype
    values: Tensor
    """float32, those of all parameters one after the other; of one parameter its copy itself."""


class Copies:
    """float32 copies of parameters, which follow what others write into these.

    Copies of small parameters of one format and row shape lie one after the other, up to a megabyte: what is asked of
    every copy in every step is asked of a few tensors.

    Args:
        parameters: fp16 or bf16, each once.
        known: Copies of some of the parameters, whose values are to be kept.

    Example:
        >>> parameter = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
        >>> copies = Copies([parameter])
        >>> copies.values[0].data[0] = 1.001
        >>> parameter[1] = 3.0
        >>> copies.follow_()
        True
        >>> copies.values[0].data
        tensor([1.0010, 3.0000])
    """

    @torch.no_grad()
    def __init__(self, parameters: Iterable[Tensor] = (), known: Mapping[Tensor, Tensor] | None = None) -> None:
        self.parameters = [*parameters]
        self.is_sharded = any(map(is_sharded, self.parameters))
        self._bundles: list[_Bundle] = []
        values: dict[int, Tensor] = {}
        for together in _bundled(self.parameters):
            bundle, copies = _copied(together, known or {})
            self._bundles.append(bundle)
            values.update(zip(map(id, together), copies, strict=True))
        self.values = [values[id(parameter)] for parameter in self.parameters]

    @property
    def by_parameter(self) -> dict[Tensor, Tensor]:
        """The copy of each parameter."""
        return dict(zip(self.parameters, self.values, strict=True))

    @torch.no_grad()
    def follow_(self) -> bool:
        """Take over what was written into parameters: where a copy's rounding is not its parameter, to the bit.

        Returns:
            Whether the parameters have the formats that they had; if not, the copies are to be made anew.
        """
        for parameters, dtype, copies in self._bundles:
            now, values = _joined(parameters), local_part(copies)
            if now.dtype != dtype:
                return False
            # bits, so that a NaN equals itself
            bits, rounded = now.view(torch.int16), values.to(dtype).view(torch.int16)
            # on a CPU asking first is ten times faster than `where` (torch 2.13)
            if not (now.is_cpu and torch.equal(rounded, bits)):
                values.copy_(torch.where(rounded == bits, values, now))
        return True

    @torch.no_grad()
    def write_(self) -> None:
        """Write the copies, rounded, into the parameters."""
        parameters, values = self.parameters, self.values
        if self.is_sharded:
            parameters, values = [*map(local_part, parameters)], [*map(local_part, values)]
        if parameters:
            torch._foreach_copy_(parameters, values)


def _bundled(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    bundles: list[list[Tensor]] = []
    unfilled: dict[object, tuple[list[Tensor], int]] = {}
    for parameter in parameters:
        size = parameter.numel()
        if size > _SMALL or is_sharded(parameter) or not parameter.is_contiguous():
            bundles.append([parameter])
            continue
        key = parameter.dtype, parameter.device, parameter.dim(), parameter.shape[1:]
        bundle, filled = unfilled.get(key, ([], 0))
        if not bundle or filled + size > _TOGETHER:
            bundle, filled = [], 0
            bundles.append(bundle)
        bundle.append(parameter)
        unfilled[key] = bundle, filled + size
    return bundles


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    first = parameters[0]
    if len(parameters) == 1:
        return local_part(first)
    return torch.cat([*parameters]) if first.dim() else torch.stack([*parameters])


def _copied(parameters: list[Tensor], known: Mapping[Tensor, Tensor]) -> tuple[_Bundle, list[Tensor]]:
    first, *more = parameters
    if not more:
        copy = known[first] if first in known else nn.Parameter(first.detach().to(torch.float32, copy=True))
        return _Bundle(parameters, first.dtype, copy), [copy]
    values = _joined([known.get(parameter, parameter) for parameter in parameters]).float()
    rows = torch.split(values, [*map(len, parameters)]) if first.dim() else values.unbind()
    return _Bundle(parameters, first.dtype, values), [*map(nn.Parameter, rows)]
