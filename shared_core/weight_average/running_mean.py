"""Averages that are kept up to date while the values go on: what they are, apart from where the values come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from shared_core.modules.running_average import move_towards_


def ema_decay(decay: float, num_updates: int, *, warmup: bool = True) -> float:
    """Return the decay of the update that follows `num_updates` earlier ones.

    ``min(decay, (1 + n) / (10 + n))`` with warm-up, so that the first weights, which are far off, are soon forgotten.

    Args:
        decay: The final one, in [0, 1).
        num_updates: ``n``, 0 or more.
        warmup: Whether it begins low.

    Source: TensorFlow's ``ExponentialMovingAverage(num_updates=...)``, Abadi et al., 2016, arXiv:1605.08695.

    Example:
        >>> ema_decay(0.999, 0), ema_decay(0.999, 90), ema_decay(0.999, 10**6), ema_decay(0.999, 0, warmup=False)
        (0.1, 0.91, 0.999, 0.999)
    """
    # A first average of the random start would otherwise be remembered for 1 / (1 - decay) updates.
    return min(decay, (1 + num_updates) / (10 + num_updates)) if warmup else decay


class RunningAverage:
    """The average of tensors of the same names, shown one after another.

    ``ema``: ``m ← m + (1 − d)(x − m)``; ``swa``: ``m ← m + (x − m) / (n + 1)``; both begin with the first values
    themselves. ``last_k``: the mean of the last k values, which are kept as they are. Averages are of float32 at least
    (float64 for float64 values), and of equal values they are that value to the bit.

    Args:
        kind: Which of the three.
        decay: Of ``ema``, as of `ema_decay`.
        warmup: Of ``ema``, as of `ema_decay`.
        k: Of ``last_k``.

    Source: ``swa``: Izmailov et al., 2018, arXiv:1803.05407; ``ema``: Tarvainen and Valpola, 2017, arXiv:1703.01780;
    ``last_k``: Kaddour, 2022, arXiv:2209.14981.

    Example:
        >>> means = {kind: RunningAverage(kind, decay=0.5, warmup=False, k=2) for kind in ("ema", "swa", "last_k")}
        >>> for value in (0.0, 4.0, 8.0):
        ...     for mean in means.values():
        ...         mean.update({"w": torch.tensor(value)})
        >>> [mean.average("w").item() for mean in means.values()]
        [5.0, 4.0, 6.0]
    """

    def __init__(
        self, kind: Literal["ema", "swa", "last_k"], *, decay: float = 0.999, warmup: bool = True, k: int = 5
    ) -> None:
        self.kind, self._decay, self._warmup, self._k = kind, decay, warmup, k
        self.num_updates = 0
        self.kept: list[dict[str, Tensor]] = []
        """The average alone, or the last values, oldest first."""

    @torch.no_grad()
    def update(self, values: Mapping[str, Tensor]) -> None:
        """Take the next values into the average."""
        if self.kind == "last_k":
            # the oldest copy's memory is written over
            into = self.kept.pop(0) if len(self.kept) == self._k else {}
            self.kept.append(
                {name: into[name].copy_(value) if name in into else value.clone() for name, value in values.items()}
            )
        elif not self.kept:
            self.kept = [{name: value.to(_wide(value), copy=True) for name, value in values.items()}]
        else:
            decay = ema_decay(self._decay, self.num_updates, warmup=self._warmup)
            # swa: m + (x - m) / (n + 1), the plain mean of n + 1 values (Izmailov et al. 2018, arXiv:1803.05407,
            # algorithm 1).
            weight = 1 - decay if self.kind == "ema" else 1 / (self.num_updates + 1)
            move_towards_(self.kept[0].values(), (values[name] for name in self.kept[0]), weight)
        self.num_updates += 1

    @torch.no_grad()
    def add(self, values: Mapping[str, Tensor]) -> None:
        """Take in the names that are new, as if their values had been these at all updates so far."""
        new = {name: value for name, value in values.items() if self.kept and name not in self.kept[0]}
        for kept in self.kept:
            for name, value in new.items():
                kept[name] = value.to(value.dtype if self.kind == "last_k" else _wide(value), copy=True)

    @torch.no_grad()
    def average(self, name: str) -> Tensor:
        """Return the average of one name: for ``ema`` and ``swa`` the tensor that updates write to, else a new one."""
        mean, *later = (values[name] for values in self.kept)
        if self.kind != "last_k":
            return mean
        mean = mean.to(_wide(mean), copy=True)
        # The mean of k values by running means: no sum that could overflow, and one tensor of memory.
        for number, value in enumerate(later, 2):
            mean.lerp_(value.to(mean.dtype), 1 / number)
        return mean

    @property
    def nbytes(self) -> int:
        """The memory of all that is kept."""
        return sum(tensor.nbytes for values in self.kept for tensor in values.values())


def _wide(value: Tensor) -> torch.dtype:
    # float32 at least: with decay 0.999, a 16-bit mean would not move by a thousandth of a difference.
    return torch.promote_types(value.dtype, torch.float32)
