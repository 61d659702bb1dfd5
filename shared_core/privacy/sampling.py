"""Poisson sampling: every example joins a step's batch by a coin of its own, on which the accounting rests."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler

from shared_core.distributed.collectives import rank, world_size
from shared_core.errors import CompatibilityError, ConfigError
from shared_core.privacy.normal import Normals

_ORDERS = ("RandomSampler", "SequentialSampler", "SeedableRandomSampler", "DistributedSampler")
_AHEAD = 16
"""Draws that are kept: loaders with workers are that many ahead, and draw again beyond."""


class Secret:
    """Random numbers of any step, as a function of a key alone: a resumed run, or another process, draws the same.

    Philox (Salmon et al. 2011) counts in 256 bits, of which a step has its own 2¹⁹². Neither it nor SFC64, which it
    seeds, is a cryptographic generator, and noise in floating point can be told apart by its last bits (Mironov 2012):
    both need an attacker who sees gradients, and neither is accounted for.

    Args:
        key: The key, 16 bytes.
    """

    def __init__(self, key: bytes) -> None:
        self.key = key

    def stream(self, name: str, step: int) -> np.random.Generator:
        """Return the random numbers of this name at this step."""
        # Philox is a function of key and counter: any step can be drawn again, without drawing those before it.
        key = int.from_bytes(hashlib.sha256(self.key + name.encode()).digest()[:16], "little")
        return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, step]))

    def noise(self, like: Iterable[Tensor], std: float, step: int) -> Iterator[Tensor]:
        """Yield N(0, std²) in the shape, dtype and place of each of these tensors; in the whole shape of a sharded one.

        All processes draw the same: each adds its part of it, which is none of another's, once. Of complex numbers
        both parts are drawn.
        """
        host = self.stream("noise", step)
        asked = [
            ((*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape), tensor.dtype, tensor.device)
            for tensor in like
        ]
        in_float32 = [math.prod(shape) for shape, dtype, device in asked if _is_float32_on_cpu(dtype, device)]
        # SFC64 makes numbers in a third of Philox's time. It cannot skip to a step, and is made anew for each.
        normals = Normals(np.random.SFC64(host.bit_generator.random_raw(4)), sum(in_float32))
        for shape, dtype, device in asked:
            # The same bits on every platform, which torch's CPU generator is not promised to draw.
            if _is_float32_on_cpu(dtype, device):
                drawn = torch.from_numpy(normals.take(math.prod(shape), std)).view(shape)
            elif device.type == "cpu":
                drawn = torch.from_numpy(np.asarray(host.standard_normal(shape))).mul_(std)
            else:
                # On a GPU the seed is drawn on the host: the noise is the same after a resume, on that kind of
                # device.
                generator = torch.Generator(device).manual_seed(int(host.integers(2**63)))
                drawn = torch.empty(shape, dtype=dtype.to_real(), device=device).normal_(0, std, generator=generator)
            yield torch.view_as_complex(drawn) if dtype.is_complex else drawn


def _is_float32_on_cpu(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and dtype.to_real() == torch.float32


class PoissonBatches(Sampler[list[int]]):
    """Batches for a DataLoader: one draw over all examples a step, cut into its micro-batches on all processes.

    Each example is in a step's batch with probability ``q = batch_size · accumulate · processes / num_examples``. A
    micro-batch that none fell into holds example 0, whose gradient the technique drops: code that makes batches never
    meets an empty one.

    Args:
        num_examples: N.
        batch_size: Expected examples of a micro-batch.
        accumulate: Micro-batches of a step.
        secret: Whose numbers decide, a function because a resume replaces it.
        drawn: Returns how many micro-batches were trained on before: iterating goes on from there.

    Raises:
        ConfigError: If a step would expect more examples than there are.

    Example:
        >>> batches = PoissonBatches(1000, 10, 2, lambda: Secret(bytes(16)), lambda: 0)
        >>> len(batches), batches.sample_rate
        (100, 0.02)
    """

    def __init__(
        self,
        num_examples: int,
        batch_size: int,
        accumulate: int,
        secret: Callable[[], Secret],
        drawn: Callable[[], int],
    ) -> None:
        self.num_examples, self.accumulate = num_examples, accumulate
        # The sum is divided by what a step expects, not by what it drew: the draw must not be visible in the
        # division.
        self.expected = batch_size * accumulate * world_size()
        """Examples that a step expects: what sums are divided by, whatever the draw was."""
        if self.expected > num_examples:
            raise ConfigError(
                "dp",
                f"a step must expect at most the {num_examples} examples of the data set, got {self.expected} = "
                f"{batch_size} x {accumulate} micro-batches x {world_size()} processes",
                "take smaller batches",
            )
        self.sample_rate = self.expected / num_examples
        self.steps_per_epoch = -(-num_examples // self.expected)
        self._secret, self._drawn = secret, drawn
        self._known: dict[tuple[int, bytes], np.ndarray[Any, Any]] = {}
        self.replayed = 0
        """Micro-batches that a resumed loop will skip at the next iteration, because it begins its epoch again."""
        self.is_read = False
        """True once a loop has begun to read the batches."""

    def __len__(self) -> int:
        return self.steps_per_epoch * self.accumulate

    def begin_epoch_again(self) -> None:
        """Have the next iteration begin at the epoch's first step: a resumed loop will skip what it has trained on."""
        self.replayed = self._drawn() % len(self)

    def chosen(self, step: int) -> np.ndarray[Any, Any]:
        """Return the examples of a step, those of all processes."""
        secret = self._secret()
        found = self._known.get((step, secret.key))
        if found is None:
            # other rates draw by other numbers: a run that goes on with another batch size repeats none of its draws
            coins = secret.stream(f"sample {self.num_examples} {self.expected}", step).random(self.num_examples)
            found = self._known[step, secret.key] = np.flatnonzero(coins < self.sample_rate)
            if len(self._known) > _AHEAD:
                self._known.pop(next(iter(self._known)))
        return found

    def part(self, step: int, micro_batch: int) -> list[int]:
        """Return this process's examples of a micro-batch of a step; there may be none."""
        found: list[int] = self.chosen(step)[
            # Micro-batches and ranks share one draw: strided, so that each example is in exactly one part.
            micro_batch * world_size() + rank() :: self.accumulate * world_size()
        ].tolist()
        return found

    def __iter__(self) -> Iterator[list[int]]:
        first, self.replayed, self.is_read = self._drawn() - self.replayed, 0, True
        # to the end of a step: behind a resume from inside of one the rest of its draw comes first
        for number in range(first, first + len(self) - first % self.accumulate):
            # Poisson sampling may draw nobody: a batch of one example, which counts with factor 0.
            yield self.part(*divmod(number, self.accumulate)) or [0]


def check_loader(loader: Any) -> None:
    """Refuse what Poisson sampling cannot take the place of.

    Raises:
        CompatibilityError: Naming what must change.
    """
    if not hasattr(loader, "dataset") or not hasattr(loader, "batch_sampler"):
        raise CompatibilityError(
            "dp", f"training data must come from one DataLoader, got {type(loader).__name__}", "batches are drawn anew"
        )
    data: Dataset[Any] = loader.dataset
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        raise CompatibilityError(
            "dp",
            f"training data must be a data set with a length and an index, got {type(data).__name__}, which is read "
            "in its own order: Poisson sampling has to pick any example at any step",
        )
    sampler = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)
    kind = type(getattr(sampler, "sampler", sampler)).__name__
    if kind not in _ORDERS:
        raise CompatibilityError(
            "dp",
            f"training DataLoader must shuffle all examples alike, got {kind}",
            "Poisson sampling takes the place of the order, and cannot keep weights, lengths or subsets: leave the "
            "sampler out",
        )


def loader_options(loader: Any) -> dict[str, Any]:
    """Return a DataLoader's options other than those that say what a batch is."""
    names = (
        "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
        "prefetch_factor", "persistent_workers", "pin_memory_device",
    )  # fmt: skip
    return {name: getattr(loader, name) for name in names}
