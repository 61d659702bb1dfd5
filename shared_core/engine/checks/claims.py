"""Claims of a receipt about the final weights, checked per tensor in the model and in every saved file.

The checks are independent of the code that made the weights: they count zeros, values and grid points on their own.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum

import torch
from torch import Tensor, nn

from shared_core.distributed.collectives import digest
from shared_core.distributed.sharded_tensors import is_sharded, reshard_, whole
from shared_core.errors import ReceiptError
from shared_core.modules.matching import plain_name


class Where(IntEnum):
    """Weights that a claim applies to."""

    END = 0
    """The final model, and what is saved from it."""
    SAVED = 1
    """Also plain weights saved after the last step, but before the end of training."""
    TRAINED = 2
    """Also training checkpoints of the last step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim(ABC):
    """Base class: a claim about one whole tensor."""

    holds: Where = Where.END

    @abstractmethod
    def wrong(self, tensor: Tensor, where: Where) -> str | None:
        """Return how the tensor differs from the claim, or None if it matches.

        Args:
            tensor: The whole (gathered) tensor.
            where: Where the tensor comes from. Before the end, the receipt's figures may still change.
        """


@dataclasses.dataclass(frozen=True)
class Zeros(Claim):
    """Pruned weights are exactly 0, and there are as many zeros as the receipt says.

    Example:
        >>> from eff_kernels.masks import pack_bits
        >>> claim = Zeros(pack_bits(torch.tensor([True, False])), 1)
        >>> claim.wrong(torch.tensor([0.5, 0.1]), Where.END)
        '1 of 1 pruned weights are not 0'
        >>> claim.wrong(torch.tensor([0.5, 0.0]), Where.END) is None
        True
    """

    mask: Tensor
    """Packed, 1 = keep."""
    counted: int | None
    """Number of zeros in the receipt; None if it has no count for this tensor."""

    def wrong(self, tensor: Tensor, where: Where) -> str | None:
        """Return how many pruned weights are not 0, or a number of zeros that differs from the receipt."""
        from eff_kernels.masks import unpack_bits  # it loads kernels

        keep = unpack_bits(self.mask.to(tensor.device), tensor.shape)
        # masked_fill leaves only the pruned weights. NaN counts as not 0.
        pruned, live = int((~keep).sum()), int((tensor.masked_fill(keep, 0) != 0).sum())
        if live:
            return f"{live:,} of {pruned:,} pruned weights are not 0"
        zeros = int((tensor == 0).sum())
        if where == Where.END and self.counted is not None and zeros != self.counted:
            return f"{zeros:,} weights are 0, the receipt says {self.counted:,}"
        return None


@dataclasses.dataclass(frozen=True)
class FewValues(Claim):
    """Nonzero weights have a limited number of distinct values.

    Example:
        >>> FewValues(2, 2).wrong(torch.tensor([0.0, 1.0, 2.0, 3.0]), Where.END)
        '3 distinct values besides 0, at most 2 are allowed'
    """

    most: int
    counted: int
    """Number of values in the receipt."""

    def wrong(self, tensor: Tensor, where: Where) -> str | None:
        """Return the number of values if it is too large or differs from the receipt."""
        values = len(torch.unique(tensor[tensor != 0]))
        if values > self.most:
            return f"{values:,} distinct values besides 0, at most {self.most:,} are allowed"
        if where == Where.END and values != self.counted:
            return f"{values:,} distinct values besides 0, the receipt says {self.counted:,}"
        return None


@dataclasses.dataclass(frozen=True)
class Grid(Claim):
    """Weights that share a scale are multiples of it, with no more distinct values than there are codes.

    Example:
        >>> claim = Grid(lambda weight: weight, levels=256, largest=127)
        >>> claim.wrong(torch.tensor([[1.27, 0.01, 0.5]]), Where.END) is None
        True
        >>> claim.wrong(torch.tensor([[1.27, 0.015, 0.5]]), Where.END)
        'a weight is 0.5 steps away from the nearest code'
    """

    rows: Callable[[Tensor], Tensor]
    """Return the weights with one or more whole groups that share a scale per row."""
    levels: int
    """Number of codes."""
    group: int = 0
    """Number of weights that share a scale; 0: one scale per row."""
    largest: int | None = None
    """Largest code; None if codes are not multiples of a step."""
    scale: Tensor | None = None
    """Scale per group, or one; None if the largest weight of a group has the largest code."""
    codes: str | None = None
    """Small float format of codes; None for integers."""
    any_step: bool = False
    """True if the largest weight may have any code, as with a learned scale that is not in `scale`."""
    zeros: Tensor | None = None
    """Code of zero per group, with `scale`."""

    def wrong(self, tensor: Tensor, where: Where) -> str | None:
        """Return how far the worst weight is from its code, or a number of values above `levels`."""
        if not tensor.numel():
            return None
        rows = self.rows(tensor)
        groups = rows.reshape(len(rows), -1) if not self.group else _cut(rows, self.group)
        # Values can only exceed the codes if more weights than codes share a scale.
        if groups.shape[1] > self.levels:
            # After sorting, each change is a new value: faster than one `unique` per row.
            ordered = groups.sort(dim=1).values
            most = 1 + int((ordered[:, 1:] != ordered[:, :-1]).sum(dim=1).max())
            if most > self.levels:
                return f"{most:,} values share a scale, but it has {self.levels:,} codes"
        return None if self.largest is None else self._off(groups.double(), self.largest, torch.finfo(tensor.dtype).eps)

    def _off(self, wide: Tensor, largest: int, rounding: float) -> str | None:
        if not bool(wide.isfinite().all()):
            return "a weight is not finite"
        if self.scale is not None:
            off = self._distance(wide, self.scale.to(wide), largest, rounding)
        else:
            peak, off = wide.abs().amax(dim=1), wide.new_full((len(wide),), math.inf)
            # The largest weight has the largest code. With a learned scale, which may not reach it, try each code.
            for code in range(largest, 0 if self.any_step else largest - 1, -1):
                left = off > 0
                off[left] = torch.minimum(off[left], self._distance(wide[left], peak[left] / code, largest, rounding))
        return f"a weight is {off.max().item():.2g} steps away from the nearest code" if bool(off.any()) else None

    def _distance(self, rows: Tensor, scale: Tensor, largest: int, rounding: float) -> Tensor:
        """Return the largest distance to a code per row, in steps; 0 within rounding. Codes out of range count as 1."""
        # With a scale of 0 all weights are 0.
        codes = rows / scale.where(scale != 0, 1.0).unsqueeze(1)
        off = (codes - _nearest(codes, self.codes)).abs()
        # Allow four roundings of a weight of that size (scale, product, casts), and 1e-4 steps for a rounded scale.
        allowed = 4 * rounding * codes.abs() + 1e-4
        size = (codes if self.zeros is None else codes + self.zeros.to(codes).unsqueeze(1)).abs()
        # Allow one code beyond the largest: two's complement has one more negative code.
        return off.where(off > allowed, 0.0).where(size <= largest + 1 + allowed, 1.0).amax(dim=1)


def _nearest(codes: Tensor, format: str | None) -> Tensor:
    """Return the nearest code: a whole number, or a value of a small float format."""
    if format is None:
        return codes.round()
    from shared_core.numerics.rounding import round_to  # loads kernels, so not at the import of `Session`

    return round_to(codes, format)


@dataclasses.dataclass(frozen=True)
class Fits(Claim):
    """Every weight is a value of this dtype.

    Example:
        >>> Fits(torch.bfloat16).wrong(torch.tensor([1.0, 0.1]), Where.END)
        '1 of 2 weights are not values of bfloat16'
    """

    dtype: torch.dtype

    def wrong(self, tensor: Tensor, where: Where) -> str | None:
        """Return how many weights a cast changes, or None."""
        odd = int((tensor.to(self.dtype).to(tensor.dtype) != tensor).sum())
        named = str(self.dtype).removeprefix("torch.")
        return f"{odd:,} of {tensor.numel():,} weights are not values of {named}" if odd else None


@dataclasses.dataclass(frozen=True)
class Rank(Claim):
    """A matrix has at most this rank.

    Example:
        >>> torch.manual_seed(0) and Rank(lambda weight: weight, 1).wrong(torch.eye(3), Where.END)
        'its rank is above 1'
    """

    matrix: Callable[[Tensor], Tensor]
    rank: int

    def wrong(self, tensor: Tensor, where: Where) -> str | None:
        """Return a line if the rank is larger: then ``rank + 1`` random vectors have independent images."""
        matrix = self.matrix(tensor.detach()).double()
        rows, columns = matrix.shape
        if self.rank >= min(rows, columns):
            return None
        if not bool(matrix.isfinite().all()):
            return "a weight is not finite"
        # A matrix of rank r maps r + 1 random vectors to dependent images (with probability 1). So r + 1 products and
        # a thin SVD replace an SVD of the whole matrix.
        probes = torch.randn(columns, self.rank + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        found = torch.linalg.svdvals(matrix @ probes.to(matrix.device))
        # Rounded entries give full rank, with singular values of about eps * (1/sqrt(rows) + 1/sqrt(columns)) times
        # the largest. The factor 8 is a margin.
        rounding = torch.finfo(tensor.dtype).eps * math.sqrt(self.rank) * (rows**-0.5 + columns**-0.5)
        return f"its rank is above {self.rank}" if found[-1] > 8 * rounding * found[0] else None


@dataclasses.dataclass(frozen=True)
class Shape(Claim):
    """A tensor has this shape.

    Example:
        >>> Shape((2, 8)).wrong(torch.zeros(8, 8), Where.END)
        'its shape is (8, 8), it should be (2, 8)'
    """

    shape: tuple[int, ...]

    def wrong(self, tensor: Tensor, where: Where) -> str | None:
        """Return the tensor's shape if it differs."""
        found = tuple(tensor.shape)
        return None if found == self.shape else f"its shape is {found}, it should be {self.shape}"


@dataclasses.dataclass(frozen=True)
class Same(Claim):
    """A tensor is bit-identical to the end of training. `Claims.settled` fills in the digest then.

    Example:
        >>> Same.as_(torch.ones(2)).wrong(torch.zeros(2), Where.END)
        'it differs from the end of training'
    """

    dtype: torch.dtype | None = None
    digest: str = ""

    @classmethod
    def as_(cls, tensor: Tensor) -> Same:
        """Return the claim that a tensor equals this one."""
        return cls(tensor.dtype, digest(tensor))

    def wrong(self, tensor: Tensor, where: Where) -> str | None:
        """Return a line if the tensor differs. A tensor that was cast to another dtype is not compared."""
        differs = tensor.dtype == self.dtype and digest(tensor) != self.digest
        return "it differs from the end of training" if differs else None


@dataclasses.dataclass(frozen=True)
class Gone(Claim):
    """The model no longer has a tensor of this name.

    Example:
        >>> Gone().wrong(torch.ones(2), Where.END)
        'it should no longer exist'
    """

    def wrong(self, tensor: Tensor, where: Where) -> str | None:
        """Return that the tensor still exists."""
        return "it should no longer exist"


def _cut(rows: Tensor, group: int) -> Tensor:
    """Return one group per row. A shorter last group is padded with its own first weight."""
    short = -rows.shape[1] % group
    if short:
        # Padding with a weight of the group adds no new value and no larger one.
        start = rows.shape[1] - rows.shape[1] % group
        rows = torch.cat([rows, rows[:, start : start + 1].expand(-1, short)], dim=1)
    return rows.reshape(-1, group)


_TOLD = 5


class Claims:
    """The claims of a receipt about the final weights, per tensor.

    Args:
        said: Technique → name in the model's state dict → claim.

    Example:
        >>> Claims({"cluster": {"w": FewValues(1, 1)}}).differences({"w": torch.tensor([1.0, 2.0])})
        ['cluster: w: 2 distinct values besides 0, at most 1 are allowed']
    """

    def __init__(self, said: Mapping[str, Mapping[str, Claim]]) -> None:
        self._said = said

    @classmethod
    def settled(cls, said: Mapping[str, Mapping[str, Claim]], model: nn.Module) -> Claims:
        """Return the claims with the present digest in each `Same`.

        Claims about tensors that were merged into others when techniques were detached are dropped. Sharded tensors
        are gathered one by one, so every process must call this.

        Args:
            said: Claims of the techniques after `finish`.
            model: The model at the end of training.
        """
        there = {plain_name(name): value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        wanted = {name for claims in said.values() for name, one in claims.items() if isinstance(one, Same)}
        # All techniques have finished, so these are the final values.
        found = {name: Same.as_(whole(value.detach())) for name, value in there.items() if name in wanted}
        return cls(
            {
                key: {
                    name: found.get(name, one) if isinstance(one, Same) else one
                    for name, one in claims.items()
                    if name in found or not isinstance(one, Same)
                }
                for key, claims in said.items()
            }
        )

    def any_hold(self, where: Where) -> bool:
        """Return True if any claim applies to such weights."""
        return any(claim.holds >= where for claims in self._said.values() for claim in claims.values())

    def differences(
        self,
        weights: Mapping[str, Tensor],
        where: Where = Where.END,
        *,
        lacking: bool = True,
        gather: bool = True,
    ) -> list[str]:
        """Return how the weights differ from the claims, one line each. Reads one tensor at a time.

        Args:
            weights: By their names in the model's state dict. Values may be loaded lazily.
            where: Where the weights come from.
            lacking: True if a missing tensor counts as a difference. A file may leave some out.
            gather: True to gather sharded tensors, which every process must call. Otherwise they are skipped.
        """
        there, lines = {plain_name(name): name for name in weights}, []
        for name in dict.fromkeys(name for claims in self._said.values() for name in claims):
            said = [
                (key, claims[name])
                for key, claims in self._said.items()
                if name in claims and claims[name].holds >= where
            ]
            if not said or name not in there:
                lines += [f"{key}: {name} is missing" for key, one in said if lacking and not isinstance(one, Gone)]
                continue
            tensor = weights[there[name]].detach()
            if not is_sharded(tensor) or gather:
                # One tensor at a time, since sharded ones are gathered.
                tensor = whole(tensor)
                lines += [f"{key}: {name}: {wrong}" for key, one in said if (wrong := one.wrong(tensor, where))]
        return lines

    def verify(
        self,
        model: nn.Module,
        weights: Mapping[str, Tensor] | None,
        what: str,
        changed_by: Iterable[str],
        where: Where,
        *,
        gather: bool,
    ) -> None:
        """Recount the final weights and compare them with the receipt.

        Args:
            model: The model at the end of training.
            weights: Weights of a file, by their names in the model's state dict; None for those of the model itself.
            what: Name of the model or file in the message.
            changed_by: Classes of the callbacks that may have changed the weights.
            where: Where the weights come from.
            gather: As in `differences`.

        Raises:
            ReceiptError: If the weights differ from the receipt.
        """
        if not self.any_hold(where):
            return
        if weights is None and gather:
            reshard_(model)
        found = model.state_dict() if weights is None else weights
        lines = self.differences(found, where, lacking=weights is None, gather=gather)
        if not lines:
            return
        others = ", ".join(dict.fromkeys(changed_by))
        who = f"{others} may have changed them; a callback" if others else "no other callback was registered; a hook"
        more = f"; and {len(lines) - _TOLD} more" if len(lines) > _TOLD else ""
        raise ReceiptError(
            what,
            f"the weights differ from the receipt: {'; '.join(lines[:_TOLD])}{more}",
            f"{who} that changes weights must do so before training ends",
        )
