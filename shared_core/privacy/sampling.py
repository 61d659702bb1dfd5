"""Poisson sampling: every example joins a step's batch by a coin of its own, on which the accounting rests."""

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
"""Draws that are kept: loaders with workers are that many ahead, and draw again beyond."""
_WORDS, _FIRST_WORD = 624, 24
"""Words of a CPU generator, of 32 bits in 64, and the byte where they begin in torch's `get_state`."""


class Secret:
    """Random numbers of any step, as a function of a key alone: a resumed run, or another process, draws the same.

    torch's generators draw them. They are not cryptographic ones: whoever sees enough of a tensor's noise can tell the
    rest of it. Each tensor and step has a generator of its own, which tells nothing of the key, 16 bytes.
    """

    def __init__(self, key: bytes) -> None:
        self.key = key

    def generator(self, name: str, step: int, device: torch.device | str = "cpu") -> torch.Generator:
        """Return the generator of this name at this step."""
        made = torch.Generator(device)
        seed = hashlib.shake_256(self.key + f"{name} {step}".encode()).digest(4 * _WORDS)
        if made.device.type != "cpu":
            return made.manual_seed(int.from_bytes(seed[:8], "little") >> 1)
        # `manual_seed` keeps 32 bits of a seed on a CPU (torch 2.13), which can be tried out: fill the whole state.
        state = made.get_state()
        words = torch.frombuffer(bytearray(seed), dtype=torch.int32).long() & 0xFFFFFFFF
        state[_FIRST_WORD : _FIRST_WORD + 8 * _WORDS] = words.view(torch.uint8)
        made.set_state(state)
        return made

    def noise(self, like: Iterable[Tensor], std: float, step: int, *, secure_mode: bool = False) -> Iterator[Tensor]:
        """Yield N(0, std²) in the shape, dtype and place of each of these tensors; in the whole shape of a sharded one.

        All processes draw the same: each adds its part of it, which is none of another's, once. Of complex numbers
        both parts are drawn.
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
        self._known: dict[tuple[int, bytes], Tensor] = {}
        self.replayed = 0
        """Micro-batches that a resumed loop will skip at the next iteration, because it begins its epoch again."""
        self.is_read = False
        """True once a loop has begun to read the batches."""

    def __len__(self) -> int:
        return self.steps_per_epoch * self.accumulate

    def begin_epoch_again(self) -> None:
        """Have the next iteration begin at the epoch's first step: a resumed loop will skip what it has trained on."""
        self.replayed = self._drawn() % len(self)

    def chosen(self, step: int) -> Tensor:
        """Return the examples of a step, those of all processes."""
        secret = self._secret()
        found = self._known.get((step, secret.key))
        if found is None:
            # other rates draw by other numbers: a run that goes on with another batch size repeats none of its draws
            generator = secret.generator(f"sample {self.num_examples} {self.expected}", step)
            # In float64: a coin of 24 bits would land a little more often than a small rate says.
            coins = torch.rand(self.num_examples, generator=generator, dtype=torch.float64)
            found = self._known[step, secret.key] = (coins < self.sample_rate).nonzero().flatten()
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
    """Refuse what Poisson sampling cannot take the place of."""
    data, batches = getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "batch_sampler", batches)
    kind = type(getattr(sampler, "sampler", sampler)).__name__
    if not hasattr(loader, "dataset") or not hasattr(loader, "batch_sampler"):
        rule, remedy = f"come from one DataLoader, got {type(loader).__name__}", "batches are drawn anew"
    elif isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        rule = f"be a data set with a length and an index, got {type(data).__name__}, which is read in its own order"
        remedy = "Poisson sampling has to pick any example at any step"
    elif kind not in _ORDERS:
        rule = f"be shuffled by the DataLoader, all examples alike, got {kind}"
        remedy = "Poisson sampling cannot keep weights, lengths or subsets: leave the sampler out"
    else:
        return
    raise CompatibilityError("dp", f"training data must {rule}", remedy)


def loader_options(loader: Any) -> dict[str, Any]:
    """Return a DataLoader's options other than those that say what a batch is."""
    names = (
        "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
        "prefetch_factor", "persistent_workers", "pin_memory_device",
    )  # fmt: skip
    return {name: getattr(loader, name) for name in names}
