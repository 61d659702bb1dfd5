"""Poisson sampling: each example joins a step's batch independently, as the accounting assumes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler

from shared_core.distributed.collectives import rank, world_size
from shared_core.errors import CompatibilityError, ConfigError

_ORDERS = ("RandomSampler", "SequentialSampler", "SeedableRandomSampler", "DistributedSampler")
_AHEAD = 16
"""Number of cached draws. Loaders with workers prefetch about this many; older ones are drawn again."""
_WORDS, _FIRST_WORD = 624, 24
"""Number of 32-bit words (stored in 64 bits) in a CPU generator, and their byte offset in torch's `get_state`."""


class Secret:
    """Random numbers that depend only on a key and the step, so a resumed run or another process draws the same.

    torch's generators draw them. These are not cryptographic: enough of a tensor's noise reveals the rest of it. Each
    tensor and step has a separate generator, which reveals nothing about the key (16 bytes).
    """

    def __init__(self, key: bytes) -> None:
        self.key = key

    def generator(self, name: str, step: int, device: torch.device | str = "cpu") -> torch.Generator:
        """Return the generator for this name and step."""
        made = torch.Generator(device)
        seed = hashlib.shake_256(self.key + f"{name} {step}".encode()).digest(4 * _WORDS)
        if made.device.type != "cpu":
            return made.manual_seed(int.from_bytes(seed[:8], "little") >> 1)
        # On a CPU `manual_seed` uses only 32 bits of a seed (torch 2.13), which can be guessed: fill the whole state.
        state = made.get_state()
        words = torch.frombuffer(bytearray(seed), dtype=torch.int32).long() & 0xFFFFFFFF
        state[_FIRST_WORD : _FIRST_WORD + 8 * _WORDS] = words.view(torch.uint8)
        made.set_state(state)
        return made

    def noise(self, like: Iterable[Tensor], std: float, step: int, *, secure_mode: bool = False) -> Iterator[Tensor]:
        """Yield N(0, std²) in the shape, dtype and device of each tensor; for a sharded one in its full shape.

        All processes draw the same noise, and each adds only the part for its own shard. For complex numbers real and
        imaginary parts are drawn.
        """
        for number, tensor in enumerate(like):
            generator = self.generator(f"noise {number}", step, tensor.device)
            shape = (*tensor.shape, 2) if tensor.is_complex() else tensor.shape
            kind: Any = {"dtype": tensor.dtype.to_real(), "device": tensor.device}
            if secure_mode:
                from opacus.optimizers.optimizer import _generate_noise

                drawn = _generate_noise(std, torch.empty((), **kind).expand(shape), generator, secure_mode=True)
            else:
                drawn = torch.normal(0.0, std, shape, generator=generator, **kind)
            yield torch.view_as_complex(drawn) if tensor.is_complex() else drawn


class PoissonBatches(Sampler[list[int]]):
    """Batches for a DataLoader: one draw over all examples per step, split into micro-batches on all processes.

    Each example is in a step's batch with probability ``q = batch_size · accumulate · processes / num_examples``. An
    empty micro-batch gets example 0, whose gradient is dropped, so that collators never see an empty batch.

    Args:
        num_examples: N.
        batch_size: Expected number of examples per micro-batch.
        accumulate: Micro-batches per step.
        secret: Returns the source of random numbers; a function, because a resume replaces it.
        drawn: Returns how many micro-batches were trained on. Iteration continues from there.

    Raises:
        ConfigError: If a step would expect more examples than exist.

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
        # Sums are divided by the expected number of examples, because dividing by the drawn number would reveal the
        # draw.
        self.expected = batch_size * accumulate * world_size()
        """Expected number of examples per step, the divisor of all sums."""
        if self.expected > num_examples:
            raise ConfigError(
                "dp",
                f"a step draws {self.expected} examples ({batch_size} x {accumulate} micro-batches x {world_size()} "
                f"processes), but the data set has only {num_examples}",
                "use smaller batches",
            )
        self.sample_rate = self.expected / num_examples
        self.steps_per_epoch = -(-num_examples // self.expected)
        self._secret, self._drawn = secret, drawn
        self._known: dict[tuple[int, bytes], Tensor] = {}
        self.replayed = 0
        """Micro-batches that a resumed loop will skip in the next iteration, because it restarts its epoch."""
        self.is_read = False
        """True once a loop has started to read batches."""

    def __len__(self) -> int:
        return self.steps_per_epoch * self.accumulate

    def begin_epoch_again(self) -> None:
        """Start the next iteration at the epoch's first step, for a resumed loop that skips trained batches itself."""
        self.replayed = self._drawn() % len(self)

    def chosen(self, step: int) -> Tensor:
        """Return a step's examples on all processes."""
        secret = self._secret()
        found = self._known.get((step, secret.key))
        if found is None:
            # The name includes the rate, so a run resumed with another batch size does not repeat earlier draws.
            generator = secret.generator(f"sample {self.num_examples} {self.expected}", step)
            # In float64, because 24 random bits would select slightly too often at small rates.
            coins = torch.rand(self.num_examples, generator=generator, dtype=torch.float64)
            found = self._known[step, secret.key] = (coins < self.sample_rate).nonzero().flatten()
            if len(self._known) > _AHEAD:
                self._known.pop(next(iter(self._known)))
        return found

    def part(self, step: int, micro_batch: int) -> list[int]:
        """Return this process's examples of a step's micro-batch; possibly none."""
        found: list[int] = self.chosen(step)[
            # Micro-batches and ranks share one draw. Striding puts each example into exactly one part.
            micro_batch * world_size() + rank() :: self.accumulate * world_size()
        ].tolist()
        return found

    def __iter__(self) -> Iterator[list[int]]:
        first, self.replayed, self.is_read = self._drawn() - self.replayed, 0, True
        # Ends at a step's end: after a resume within a step, the rest of its draw comes first.
        for number in range(first, first + len(self) - first % self.accumulate):
            # If no example was drawn, return one example, which counts with factor 0.
            yield self.part(*divmod(number, self.accumulate)) or [0]


def check_loader(loader: Any) -> None:
    """Raise if Poisson sampling cannot replace the batches of this loader."""
    data, batches = getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "batch_sampler", batches)
    kind = type(getattr(sampler, "sampler", sampler)).__name__
    if not hasattr(loader, "dataset") or not hasattr(loader, "batch_sampler"):
        rule, remedy = f"come from one DataLoader, got {type(loader).__name__}", "dp draws the batches itself"
    elif isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        rule = f"be a data set with a length and an index, got {type(data).__name__}, which is read in its own order"
        remedy = "Poisson sampling must be able to pick any example at any step"
    elif kind not in _ORDERS:
        rule = f"be shuffled by the DataLoader with equal probabilities, got {kind}"
        remedy = "leave the sampler out: Poisson sampling does not support weights, lengths or subsets"
    else:
        return
    raise CompatibilityError("dp", f"training data must {rule}", remedy)


def loader_options(loader: Any) -> dict[str, Any]:
    """Return a DataLoader's options except those that define batches."""
    names = (
        "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
        "prefetch_factor", "persistent_workers", "pin_memory_device",
    )  # fmt: skip
    return {name: getattr(loader, name) for name in names}
