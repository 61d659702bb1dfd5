"""A loader of accelerate that is watched: from where its batches were drawn, and what is to be put back before some."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset

from hf_eff._wrapped import Wrapped
from shared_core.own_generators import OwnGenerators
from shared_core.own_parts import digest
from shared_core.ranks import world_size
from shared_core.state_file import rng_state, set_rng_state


class WatchedLoader:
    """Records the generators before each fetch of the loader under accelerate's, which fetches one batch ahead.

    Args:
        loader: A prepared loader.
        own: Those of the loader that this one was made from.
    """

    def __init__(self, loader: Any, own: OwnGenerators | None = None) -> None:
        self.loader = loader
        self.own = own or OwnGenerators(loader.dataset, loader.collate_fn, _of_samplers(loader))
        """What the data set, the collator and samplers keep for themselves."""
        self.before: dict[int, Callable[[], None]] = {}
        """What is done before a fetch, by its number in the iteration that comes; -1 is when that was begun."""
        self.after: dict[int, Callable[[], None]] = {}
        """What is done after it."""
        self._ahead: Any = None
        self._before_ahead: dict[str, Any] = {}
        self._iteration = 0
        self._is_recording = False
        self._wrapped = Wrapped(loader.base_dataloader, "__iter__", self._iterate)

    def stop(self) -> None:
        """Give the loader its own method back."""
        self._wrapped.undo()

    @property
    def fetches(self) -> int:
        """How many batches of the loader under it this process reads for one of accelerate's."""
        if not isinstance(self.loader, DataLoaderDispatcher):
            return 1
        return 1 if self.loader.split_batches else world_size()

    @property
    def can_skip(self) -> bool:
        """Whether batches can be left out without being read."""
        is_stream = isinstance(self.loader.dataset, IterableDataset) or self.loader.batch_sampler is None
        return not is_stream and not isinstance(self.loader, DataLoaderDispatcher) and self.loader.num_workers == 0

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Take what is read now for the training's own; others may iterate the same loader."""
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def random(self) -> dict[str, Any]:
        """Return where all generators are that a batch may be drawn from."""
        self.own.look()
        return {**rng_state(), "own": self.own.states()}

    def put(self, state: Mapping[str, Any]) -> None:
        """Put generators back to where `random` found them."""
        set_rng_state(state)
        self.own.restore(state["own"])

    def state(self) -> dict[str, Any]:
        """Return which iteration this is, what the batch read ahead was drawn from, and a mark of it."""
        return {"iteration": self._iteration, "before_ahead": self._before_ahead, "mark": self.mark()}

    def mark(self) -> str | None:
        """Return a text that tells the batch read ahead from others, None where there is none."""
        if self._ahead is None:
            return None
        return hashlib.sha256("\n".join(map(digest, _values(self._ahead))).encode()).hexdigest()

    def _iterate(self, method: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        batches = method()
        if not self._is_recording:
            return batches
        self._iteration = self.loader.iteration
        self._ahead, self._before_ahead = None, {}
        before, self.before, after, self.after = self.before, {}, self.after, {}
        before.pop(-1, _nothing)()
        return self._recorded(batches, before, after)

    def _recorded(
        self,
        batches: Iterator[Any],
        before: Mapping[int, Callable[[], None]],
        after: Mapping[int, Callable[[], None]],
    ) -> Iterator[Any]:
        number = 0
        while True:
            before.get(number, _nothing)()
            if self.loader.num_workers == 0 and number % self.fetches == 0:
                self._before_ahead = {**rng_state(), "own": self.own.states()}
            try:
                self._ahead = next(batches)
            except StopIteration:
                self._ahead = None
                return
            if number == 0:
                self.own.look()  # some are made at the first draw
            after.get(number, _nothing)()
            number += 1
            yield self._ahead


def _nothing() -> None:
    pass


def _values(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping | list | tuple):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _values(part)
    elif isinstance(batch, Tensor | str | int | float):
        yield batch


def _of_samplers(loader: Any) -> list[Any]:
    owners = [loader, loader.sampler, loader.batch_sampler]
    for name in ("batch_sampler", "sampler"):
        owners += [getattr(owner, name, None) for owner in owners[2:]]
    return [getattr(owner, "generator", None) for owner in owners]


class ReplayedBatches(BatchSampler):
    """Batches of an epoch without the first ones.

    Args:
        batches: The loader's.
        skip: How many were trained on.
        before_ahead: Called before the first that is left is drawn.
    """

    def __init__(self, batches: Any, skip: int, before_ahead: Callable[[], None]) -> None:
        self._batches, self._skip, self._before_ahead = batches, skip, before_ahead

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches) - self._skip

    def __iter__(self) -> Iterator[list[int]]:
        batches = iter(self._batches)
        for _ in itertools.islice(batches, self._skip):
            pass
        self._before_ahead()
        yield from batches
