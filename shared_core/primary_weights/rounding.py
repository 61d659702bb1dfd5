"""Round float32 values to 16-bit weights without a float32 copy: by chance, or with the rest kept beside."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from shared_core.distributed.sharded_tensors import is_sharded, place_of
from shared_core.numerics import stochastic_round_

_CHUNK = 1 << 22


class Draws:
    """The random numbers of one step: of each tensor its own, so that the order of tensors and parts does not matter.

    A process draws those for what other processes hold of a sharded tensor too: so each part is what one process would
    make of it on a CPU, and no two parts are rounded by the same numbers.

    Example:
        >>> weight, seed = torch.zeros(4, dtype=torch.bfloat16), torch.Generator().manual_seed(0)
        >>> draws = Draws(seed, {id(weight): 0})
        >>> draws.round_(weight, "weight", weight, torch.full((4,), 1 + 2**-8)).tolist()  # half way between neighbours
        [1.0078125, 1.0, 1.0, 1.0]
    """

    def __init__(self, generator: torch.Generator, places: Mapping[int, int]) -> None:
        self._seed = int(torch.randint(2**62, (), generator=generator))
        self._places = places
        self._generators: dict[int, dict[str, torch.Generator]] = {}

    def round_(self, parameter: Tensor, name: str, target: Tensor, source: Tensor) -> Tensor:
        """Write float32 values, stochastically rounded, into the next rows of a tensor; return these.

        Args:
            parameter: Whose weights or state that is.
            name: What of it: each has its numbers.
            target: 16 bit, what this process holds; the first call for a tensor is of its first rows.
            source: Of the target's shape.
        """
        begun = self._generators.setdefault(id(parameter), {})
        if name not in begun:
            begun[name] = self._begun(parameter, name, target)
        return stochastic_round_(target, source, generator=begun[name])

    def end(self, parameter: Tensor) -> None:
        """Forget a parameter whose rows are all rounded: a generator takes five kilobytes."""
        self._generators.pop(id(parameter), None)

    def _begun(self, parameter: Tensor, name: str, target: Tensor) -> torch.Generator:
        salt = zlib.crc32(f"{self._places[id(parameter)]} {name}".encode())
        generator = torch.Generator(target.device).manual_seed((self._seed + salt) % 2**62)
        for count in _elements_before(parameter):
            values = torch.zeros(count, device=target.device)
            stochastic_round_(torch.empty_like(values, dtype=target.dtype), values, generator=generator)
        return generator


def _elements_before(parameter: Tensor) -> Iterator[int]:
    # In chunks: the numbers are drawn for nothing, and a large embedding would need as much memory again.
    rows = place_of(parameter)[:1] if is_sharded(parameter) else ()
    before = rows[0].start * math.prod(parameter.shape[1:]) if rows else 0
    for start in range(0, before, _CHUNK):
        yield min(_CHUNK, before - start)


def compensated(weight: Tensor, lost: Tensor) -> Tensor:
    """Return the float32 sum of a 16-bit weight and what its rounding lost: ``w + c``.

    Where someone else has written the weight since (a mask, a clamp), c is of another value, and w counts alone: where
    half of it would move the rounded weight.

    Args:
        weight: fp16 or bf16.
        lost: Same shape, bf16.

    Example:
        >>> weight, lost = torch.tensor([1.0, 0.0]).bfloat16(), torch.tensor([0.001, 0.001]).bfloat16()
        >>> compensated(weight, lost)
        tensor([1.0010, 0.0000])
    """
    wide, extra = weight.float(), lost.float()
    # Half of it: c may be half an ulp, and a tie would round to the other neighbour.
    is_own = torch.add(wide, extra, alpha=0.5).to(weight.dtype) == weight
    return wide.add_(extra.mul_(is_own))


def round_compensated_(weight: Tensor, lost: Tensor, values: Tensor) -> None:
    """Write float32 values P, rounded, into a weight, and what that loses beside it: ``w ← rn(P), c ← rn(P - w)``.

    Kahan's compensated sum, with the sum of both in float32: from step to step w + c has 16 significant bits or more
    in bf16, so that updates above ``2^-18·|w|`` are not lost.

    Args:
        weight: fp16 or bf16; written.
        lost: bf16, same shape; written.
        values: float32, same shape.

    Source: Kahan, 1965, *Further remarks on reducing truncation errors*; for weights: Zamirai et al., 2020,
    *Revisiting BFloat16 Training*, arXiv:2010.06192.

    Example:
        >>> weight, lost = torch.ones(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)
        >>> for _ in range(8):  # bfloat16's neighbour of 1 is 0.0078125 away
        ...     round_compensated_(weight, lost, compensated(weight, lost) + 0.001)
        >>> weight.item(), round(lost.item(), 5)
        (1.0078125, 0.00021)
    """
    weight.copy_(values)
    # Beyond the largest value there is nothing to keep.
    lost.copy_((values - weight).nan_to_num_(0.0, 0.0, 0.0))
