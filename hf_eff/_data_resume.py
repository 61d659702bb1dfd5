"""A loader of accelerate that is watched: from where its batches were drawn, and what is to be put back before some.

Exact resume of the training data: batches that were drawn at random ahead of a checkpoint are drawn again.

accelerate's loaders read one batch ahead: what a data set or a collator draws for it (masks, augmentations) was drawn
before the random state that the trainer saves. After a restart the trainer would draw it from another state, and put
the saved one back after the first window's batches, whose draws belong behind it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from accelerate import skip_first_batches
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset

from hf_eff._wrapped import Wrapped
from shared_core.distributed.collectives import digest, world_size
from shared_core.engine.own_generators import OwnGenerators
from shared_core.engine.state_file import rng_state, set_rng_state

if TYPE_CHECKING:
    from transformers import Trainer


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


class DataResume:
    """Records where the generators were when batches were drawn, and draws those of a resumed epoch from there.

    Args:
        trainer: The trainer.
    """

    note: Callable[[str], None]
    """Tells a line."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._stock: Any = None
        self._now: Any = None
        self._given: Any = None
        self._batches: Iterator[Any] = iter(())
        self._begin: dict[str, Any] = {}
        self._taken = 0
        self._saved: Mapping[str, Any] = {}
        self._checkpoint: str | None = None
        self._is_restored = False

    def start(self, loader: Any, saved: Mapping[str, Any] | None, checkpoint: str | None) -> None:
        """Watch the loader of a run.

        Args:
            loader: The trainer's.
            saved: What `state` returned in the run that is resumed.
            checkpoint: Its folder, None where nothing is resumed.
        """
        self.stop()
        self._saved, self._checkpoint, self._is_restored = saved or {}, checkpoint, False
        if isinstance(loader, DataLoaderShard | DataLoaderDispatcher):
            self._now = self._stock = WatchedLoader(loader)
        elif checkpoint is not None:
            self.note(
                f"batches come from a {type(loader).__name__}, which accelerate has not prepared: what was drawn at "
                "random while they were made is not drawn again as in the stopped run"
            )

    def stop(self) -> None:
        """Leave the loader as it was."""
        for one in (self._now, self._stock):
            if one is not None:
                one.stop()
        self._now = self._stock = self._given = None
        self._batches, self._taken = iter(()), 0

    def state(self) -> dict[str, Any]:
        """Return what the present epoch's data were drawn from, and from where the next will be."""
        if self._now is None or self._given is None:
            return {}
        own = self._now.own.states()
        return {"taken": self._taken, "begin": self._begin, "own": own, **self._now.state(), **self._layout()}

    def _layout(self) -> dict[str, Any]:
        loader = self._stock.loader
        accumulate = self._trainer.args.gradient_accumulation_steps
        kind, workers = type(loader).__name__, loader.num_workers
        return {"loader": kind, "length": _length(loader), "workers": workers, "accumulate": accumulate}

    # --- generators

    def load_rng_state(self, method: Callable[[Any], None], checkpoint: Any) -> None:
        """Put the generators of a checkpoint back, once: the trainer does it when draws have followed."""
        if self._is_restored:
            return
        method(checkpoint)
        self._is_restored = True
        if self._now is not None:
            self._now.own.restore(self._saved.get("own", []))

    def restore(self) -> None:
        """Put the generators of the checkpoint back now."""
        self._trainer._load_rng_state(self._checkpoint)

    # --- batches

    def batches(self, given: Iterator[Any]) -> Iterator[Any]:
        """Return an epoch's batches: the trainer's own iterator, or in a resumed epoch one that goes on."""
        if self._now is None:
            return given
        if given is not self._given:
            if self._now is not self._stock:
                self._now.stop()
                self._now = self._stock
            is_first, self._given = self._given is None, given
            if not (is_first and self._checkpoint is not None and self._goes_on()):
                self._batches, self._begin, self._taken = given, self._now.random(), 0
        return self._counted(self._now)

    def _counted(self, watched: WatchedLoader) -> Iterator[Any]:
        while True:
            with watched.recording():
                try:
                    batch = next(self._batches)
                except StopIteration:
                    return
            self._taken += 1
            yield batch

    def _goes_on(self) -> bool:
        """Go to the place of the checkpoint if that lies within an epoch; return whether the data go on from there."""
        args, layout, saved = self._trainer.args, self._layout(), self._saved
        steps = None if layout["length"] is None else max(-(-layout["length"] // args.gradient_accumulation_steps), 1)
        trained = self._trainer.state.global_step % (steps or self._trainer.state.max_steps)
        if args.ignore_data_skip or trained == 0:
            return False
        reason = next((name for name, value in layout.items() if saved and saved.get(name) != value), None)
        if not saved:
            reason = "it was saved without them"
        elif reason is not None:
            reason = f"{reason} was {saved[reason]}, now {layout[reason]}"
        elif steps is not None and saved["taken"] != trained * args.gradient_accumulation_steps:
            reason = f"it had read {saved['taken']} batches in {trained} steps of its epoch"
        if reason is not None:
            self.note(
                f"what was drawn at random while batches were made cannot be drawn again ({reason}): where a data set "
                "or a collator draws, the run is not that which was stopped"
            )
            return False
        self._replay(saved)
        return True

    def _replay(self, saved: Mapping[str, Any]) -> None:
        stock, taken = self._stock, int(saved["taken"])
        stock.loader.set_epoch(saved["iteration"])
        before_ahead: Callable[[], None] = functools.partial(stock.put, saved["before_ahead"])
        check: Callable[[], None] = functools.partial(self._check, saved["mark"])
        now, read, per = stock, taken, stock.fetches
        if stock.can_skip:
            now, read = WatchedLoader(self._skipping(taken, before_ahead, saved["iteration"]), stock.own), 0
            now.before, now.after = {1: self.restore}, {0: check}
        elif stock.loader.num_workers:
            stock.before, stock.after = {-1: self.restore}, {taken: check}
        else:
            stock.before = {taken * per: before_ahead, (taken + 1) * per: self.restore}
            stock.after = {(taken + 1) * per - 1: check}
        stock.put(saved["begin"])
        self._now, self._batches = now, iter(now.loader)
        for _ in itertools.islice(self._counted(now), read):
            pass
        if read:
            self.restore()  # a process that is sent its batches makes none
        self._begin, self._taken = saved["begin"], taken

    def _skipping(self, taken: int, before_ahead: Callable[[], None], iteration: int) -> Any:
        loader = skip_first_batches(self._stock.loader)
        skipping: Any = loader.batch_sampler
        skipping.batch_sampler = ReplayedBatches(skipping.batch_sampler, taken, before_ahead)
        loader.iteration = iteration
        return loader

    def _check(self, mark: str | None) -> None:
        if self._now is not None and self._now.mark() != mark:
            self.note(
                "the batch that the stopped run had read ahead is another one now: the training data, their order or "
                "what they are drawn from has changed, so the run is not that which was stopped"
            )


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # a stream
        return None
