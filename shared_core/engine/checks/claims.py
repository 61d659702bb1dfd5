"""Claims of a receipt about final weights, tensor by tensor, counted again wherever these turn up.

Nothing here is used to make the weights: zeros, values and grids are found by other code than that which left them.
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
    """Of which weights a claim holds."""

    END = 0
    """The final model, and what is saved once it is final."""
    SAVED = 1
    """Also plain weights that were saved after the last step, but before the end."""
    TRAINED = 2
    """Also weights to go on from of that step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim(ABC):
    """The claim about one tensor, as a whole."""

    holds: Where = Where.END

    @abstractmethod
    def wrong(self, tensor: Tensor, where: Where) -> str | None:
        """Return how a tensor differs from what is said of it, None if it does not.

        Args:
            tensor: Whole, of the final weights.
            where: What it is of: before the end, figures of the receipt may be others.
        """


@dataclasses.dataclass(frozen=True)
class Zeros(Claim):
    """Pruned weights are exactly 0, and as many as the receipt counts.

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
    """Zeros by the receipt, None where it counts none of this tensor."""

    def wrong(self, tensor: Tensor, where: Where) -> str | None:
        """Return how many pruned weights are not 0, or how many zeros there are and should be."""
        from eff_kernels.masks import unpack_bits  # it loads kernels

        keep = unpack_bits(self.mask.to(tensor.device), tensor.shape)
        # masked_fill keeps only what was pruned: NaN counts as not 0.
        pruned, live = int((~keep).sum()), int((tensor.masked_fill(keep, 0) != 0).sum())
        if live:
            return f"{live:,} of {pruned:,} pruned weights are not 0"
        zeros = int((tensor == 0).sum())
        if where == Where.END and self.counted is not None and zeros != self.counted:
            return f"{zeros:,} weights are 0, the receipt says {self.counted:,}"
        return None


@dataclasses.dataclass(frozen=True)
class FewValues(Claim):
    """Nonzero weights have few values.

    Example:
        >>> FewValues(2, 2).wrong(torch.tensor([0.0, 1.0, 2.0, 3.0]), Where.END)
        '3 distinct values beside 0, at most 2 were asked for'
    """

    most: int
    counted: int
    """Values by the receipt."""

    def wrong(self, tensor: Tensor, where: Where) -> str | None:
        """Return how many values there are, if that is too many or not what the receipt says."""
        values = len(torch.unique(tensor[tensor != 0]))
        if values > self.most:
            return f"{values:,} distinct values beside 0, at most {self.most:,} were asked for"
        if where == Where.END and values != self.counted:
            return f"{values:,} distinct values beside 0, the receipt says {self.counted:,}"
        return None


@dataclasses.dataclass(frozen=True)
class Grid(Claim):
    """Weights that share a scale have no more values than there are codes, and lie on multiples of the scale.

    Example:
        >>> claim = Grid(lambda weight: weight, levels=256, largest=127)
        >>> claim.wrong(torch.tensor([[1.27, 0.01, 0.5]]), Where.END) is None
        True
        >>> claim.wrong(torch.tensor([[1.27, 0.015, 0.5]]), Where.END)
        'a weight is 0.5 of a step away from the nearest code'
    """

    rows: Callable[[Tensor], Tensor]
    """Weights that share a scale, or a whole number of such groups, in each row."""
    levels: int
    """Number of codes."""
    group: int = 0
    """Number of weights that share a scale; 0: a row."""
    largest: int | None = None
    """The largest code; None: codes are not multiples of a step."""
    scale: tuple[float, ...] | None = None
    """Of each row; None: its largest weight has the largest code."""
    codes: torch.dtype | None = None
    """Of codes that are numbers of a small format; None: they are integers."""
    any_step: bool = False
    """True if the largest weight may have any code, as under a learned scale that `scale` does not tell."""

    def wrong(self, tensor: Tensor, where: Where) -> str | None:
        """Return how far a weight is from its code, or how many values there are."""
        if not tensor.numel():
            return None
        rows = self.rows(tensor)
        groups = rows.reshape(len(rows), -1) if not self.group else _cut(rows, self.group)
        # More weights than codes share a scale: then values can be counted. Fewer always fit.
        if groups.shape[1] > self.levels:
            # Sorted, each change of value is a new one: no unique a row.
            ordered = groups.sort(dim=1).values
            most = 1 + int((ordered[:, 1:] != ordered[:, :-1]).sum(dim=1).max())
            if most > self.levels:
                return f"{most:,} values share a scale, but it has {self.levels:,} codes"
        return None if self.largest is None else self._off(groups.double(), self.largest, torch.finfo(tensor.dtype).eps)

    def _off(self, wide: Tensor, largest: int, rounding: float) -> str | None:
        if not bool(wide.isfinite().all()):
            return "a weight is not finite"
        if self.scale is not None:
            scale = torch.tensor(self.scale, dtype=torch.float64, device=wide.device)
            off = self._distance(wide, scale, largest, rounding)
        else:
            peak, off = wide.abs().amax(dim=1), wide.new_full((len(wide),), math.inf)
            # The largest weight has the largest code, unless a learned scale clips: then any code may be its own, and
            # each is tried.
            for code in range(largest, 0 if self.any_step else largest - 1, -1):
                left = off > 0
                off[left] = torch.minimum(off[left], self._distance(wide[left], peak[left] / code, largest, rounding))
        return f"a weight is {off.max().item():.2g} of a step away from the nearest code" if bool(off.any()) else None

    def _distance(self, rows: Tensor, scale: Tensor, largest: int, rounding: float) -> Tensor:
        """Return of each row how far its weights are from codes of a scale at most, in steps; 0: as rounding leaves it.

        A code beyond the largest one counts as a whole step. A product of code and scale is rounded to the weight's
        format, and so is the scale.
        """
        # A scale of 0 has zeros only.
        codes = rows / scale.where(scale != 0, 1.0).unsqueeze(1)
        nearest = codes.round() if self.codes is None else codes.float().to(self.codes).double()
        off, size = (codes - nearest).abs(), codes.abs()
        # Four roundings of a weight of that size (scale, product, casts), and 1e-4 of a step for a scale that was
        # itself rounded.
        allowed = 4 * rounding * size + 1e-4
        # One code beyond the largest: two's complement has one more below 0 than above.
        return off.where(off > allowed, 0.0).where(size <= largest + 1 + allowed, 1.0).amax(dim=1)


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
        """Return that the rank is larger: random vectors, one more than it, have independent images then."""
        matrix = self.matrix(tensor.detach()).double()
        rows, columns = matrix.shape
        if self.rank >= min(rows, columns):
            return None
        if not bool(matrix.isfinite().all()):
            return "a weight is not finite"
        # A matrix of rank r maps r + 1 random vectors to dependent images (with probability 1): r + 1 products and a
        # thin SVD, in the place of an SVD of the whole.
        probes = torch.randn(columns, self.rank + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        found = torch.linalg.svdvals(matrix @ probes.to(matrix.device))
        # Rounding of entries makes a matrix of full rank, with singular values of about eps * (1/sqrt(rows) +
        # 1/sqrt(columns)) of the largest. 8 leaves room.
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
        """Return its shape, if that is another."""
        found = tuple(tensor.shape)
        return None if found == self.shape else f"its shape is {found}, it should be {self.shape}"


@dataclasses.dataclass(frozen=True)
class Same(Claim):
    """A tensor is, bit for bit, what training ended with; a technique says so before it is known what that is.

    Example:
        >>> Same.as_(torch.ones(2)).wrong(torch.zeros(2), Where.END)
        'it is not what training ended with'
    """

    dtype: torch.dtype | None = None
    digest: str = ""

    @classmethod
    def as_(cls, tensor: Tensor) -> Same:
        """Return the claim that a tensor is what this one is now."""
        return cls(tensor.dtype, digest(tensor))

    def wrong(self, tensor: Tensor, where: Where) -> str | None:
        """Return that it differs; of a tensor that was cast to be saved nothing can be said."""
        differs = tensor.dtype == self.dtype and digest(tensor) != self.digest
        return "it is not what training ended with" if differs else None


@dataclasses.dataclass(frozen=True)
class Gone(Claim):
    """There is no tensor of this name any more.

    Example:
        >>> Gone().wrong(torch.ones(2), Where.END)
        'it should not be there any more'
    """

    def wrong(self, tensor: Tensor, where: Where) -> str | None:
        """Return that it is there."""
        return "it should not be there any more"


def _cut(rows: Tensor, group: int) -> Tensor:
    """Return groups of a row's weights in a row each; a last one that is shorter is filled up with its first weight."""
    short = -rows.shape[1] % group
    if short:
        # Filled up by a weight of the group itself: no new value, and no larger one.
        start = rows.shape[1] - rows.shape[1] % group
        rows = torch.cat([rows, rows[:, start : start + 1].expand(-1, short)], dim=1)
    return rows.reshape(-1, group)


_TOLD = 5


class Claims:
    """What a receipt says of final weights, tensor by tensor.

    Args:
        said: Technique → name in the model's state dict → the claim.

    Example:
        >>> Claims({"cluster": {"w": FewValues(1, 1)}}).differences({"w": torch.tensor([1.0, 2.0])})
        ['cluster: w: 2 distinct values beside 0, at most 1 were asked for']
    """

    def __init__(self, said: Mapping[str, Mapping[str, Claim]]) -> None:
        self._said = said

    @classmethod
    def settled(cls, said: Mapping[str, Mapping[str, Claim]], model: nn.Module) -> Claims:
        """Return claims with what tensors are now where it is said that they stay so.

        Those of tensors that were merged into others when techniques were detached are left out. Sharded tensors are
        gathered one by one; then every process must call it.

        Args:
            said: By techniques when they had finished.
            model: As training leaves it.
        """
        there = {plain_name(name): value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        wanted = {name for claims in said.values() for name, one in claims.items() if isinstance(one, Same)}
        # After all techniques have finished: this is what training ended with.
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
        """Return True if anything is said that weights of such a moment can be compared with."""
        return any(claim.holds >= where for claims in self._said.values() for claim in claims.values())

    def differences(
        self,
        weights: Mapping[str, Tensor],
        where: Where = Where.END,
        *,
        lacking: bool = True,
        gather: bool = True,
    ) -> list[str]:
        """Return how weights differ from what is said of them, a line each; a tensor at a time is looked at.

        Args:
            weights: Under the names of the model's state dict; values may be read only when asked for.
            where: What the weights are of.
            lacking: Whether a tensor that is not there is a difference: a file may leave some out.
            gather: Whether sharded tensors are gathered, for which every process must call; else they are left out.
        """
        there, lines = {plain_name(name): name for name in weights}, []
        for name in dict.fromkeys(name for claims in self._said.values() for name in claims):
            said = [
                (key, claims[name])
                for key, claims in self._said.items()
                if name in claims and claims[name].holds >= where
            ]
            if not said or name not in there:
                lines += [f"{key}: {name} is not there" for key, one in said if lacking and not isinstance(one, Gone)]
                continue
            tensor = weights[there[name]].detach()
            if not is_sharded(tensor) or gather:
                # One tensor at a time: sharded ones are gathered whole.
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
        """Count again in final weights what is said of them.

        Args:
            model: As training left it.
            weights: Of a file, under the names of the model's state dict; None: those of the model itself.
            what: The model or the file, for the message.
            changed_by: Classes of the callbacks that may have changed them.
            where: Of which moment they are.
            gather: As in `differences`.

        Raises:
            ReceiptError: If they are not what the receipt says.
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
        who = f"it may have been changed by {others}; a callback" if others else "no other callback was there; a hook"
        more = f"; and {len(lines) - _TOLD} more" if len(lines) > _TOLD else ""
        raise ReceiptError(
            what,
            f"weights must be what the receipt says, got {'; '.join(lines[:_TOLD])}{more}",
            f"{who} that writes into weights must do so before training ends",
        )
