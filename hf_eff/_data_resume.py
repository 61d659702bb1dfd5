"""Exact resume of the training data: batches that were drawn at random ahead of a checkpoint are drawn again.

accelerate's loaders read one batch ahead. What a data set or a collator draws for that batch (masks, augmentations)
is drawn before the random state that the trainer saves. After a restart the trainer would draw it from another state,
and restore the saved state after the first window's batches, whose draws come later. So the loader is watched: it
records the random state that each batch was drawn from. Workers write their generators' states to shared memory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset, get_worker_info

from shared_core.distributed.collectives import digest, world_size
from shared_core.engine.saving.own_generators import OwnGenerators
from shared_core.engine.saving.state_file import packed, rng_snapshot, rng_state, set_rng_state, unpacked
from shared_core.front_ends.wrapped_method import Wrapped

if TYPE_CHECKING:
    from transformers import Trainer

_BYTES = 2**16
"""For the states after one batch: those of torch, numpy and Python take 16 KB, an own generator of torch 5 KB."""
_HEADER = 24


class TrackedCollator:
    """A loader's collator, after which a worker writes down where its generators are; the batch is left as it is."""

    def __init__(self, collator: Callable[[Any], Any], workers: int, ahead: int) -> None:
        self.collator, self.workers = collator, workers
        self.run = 0  # which start of the workers it is: set before they start
        self.given: Sequence[Any] = ()  # the states that workers start from, none where they are seeded by the loader
        self.counts = [0] * workers  # number of batches that each worker had made in the run that is resumed
        # one is being written, one is asked for, and one more may have been received
        # These are reused in a ring: workers run up to `ahead` batches ahead of what the trainer has taken.
        self._board = torch.zeros(workers, ahead + 3, _BYTES, dtype=torch.uint8)
        # Shared memory: a worker writes, the main process reads when it saves, and no message delays a batch.
        self._board.share_memory_()  # type: ignore[no-untyped-call]
        self._count: int | None = None
        self._own: OwnGenerators | None = None

    def __call__(self, samples: Any) -> Any:
        """Return the collator's batch."""
        batch = self.collator(samples)
        if (worker := get_worker_info()) is not None:
            self._write(worker)
        return batch

    def start(self, worker: Any) -> None:
        """Put the given state into this worker."""
        self._own = OwnGenerators(worker.dataset, self.collator)
        self._count = self.counts[worker.id]
        if self.given:
            set_rng_state(self.given[worker.id])
            self._own.restore(self.given[worker.id]["own"])

    def _write(self, worker: Any) -> None:
        if self._own is None or self._count is None:
            # A run that is not resumed has no StartOfWorker: the first batch begins the count.
            self._own, self._count = OwnGenerators(worker.dataset, self.collator), self.counts[worker.id]
        if self._count == self.counts[worker.id]:
            self._own.look()  # some are made at the first draw
        self._count += 1
        # After the batch: where the next one of this worker will be drawn from. Workers have no GPU generators of
        # use.
        state = packed({**rng_state(on_gpu=False), "own": self._own.states()})
        slots = self._board[worker.id].numpy()
        # Slot and count belong together, so that the reader knows the slot by the count alone.
        slot = slots[(self._count - 1) % len(slots)]
        # -1 tells "too long" from "not written": the state is then not known, and a note says so on resume.
        length = len(state) if len(state) <= _BYTES - _HEADER else -1
        # Three int64 in 24 bytes. The run tells states of restarted workers from those of earlier ones with equal
        # counts.
        slot[:_HEADER] = np.array([self.run, self._count, length]).view(np.uint8)
        if length > 0:
            slot[_HEADER : _HEADER + length] = np.frombuffer(state, np.uint8)

    def state_after(self, worker: int, count: int) -> dict[str, Any] | None:
        """Return where a worker's generators were after it had made so many batches, None where that is not known."""
        slots = self._board[worker].numpy()
        slot = slots[(count - 1) % len(slots)]
        # copy: the slice is a view of bytes that a worker goes on to write into.
        run, written, length = slot[:_HEADER].copy().view(np.int64).tolist()
        if (run, written) != (self.run, count) or length < 0:
            return None
        return unpacked(slot[_HEADER : _HEADER + length].tobytes())


class StartOfWorker:
    """A loader's `worker_init_fn` that goes on from given states."""

    def __init__(self, stock: Callable[[int], None] | None, tracked: TrackedCollator) -> None:
        self._stock, self._tracked = stock, tracked

    def __call__(self, number: int) -> None:
        """Start a worker."""
        if self._stock is not None:
            self._stock(number)
        self._tracked.start(get_worker_info())


class WatchedLoader:
    """Records the generators before each fetch of the loader under accelerate's, which fetches one batch ahead."""

    def __init__(self, loader: Any, own: OwnGenerators | None = None) -> None:
        self.loader = loader
        self.own = own or OwnGenerators(loader.dataset, loader.collate_fn, _of_samplers(loader))
        """State that the data set, the collator and samplers keep for themselves."""
        self.before: dict[int, Callable[[], None]] = {}
        """Calls before a fetch, by its number in the next iteration; -1 is when that was begun."""
        self.after: dict[int, Callable[[], None]] = {}  # calls after a fetch
        self.length = length_of(loader)
        self.made: list[int] | None = None
        """Number of batches that each worker that lives on had made before this epoch, None if unknown."""
        self.is_fresh = True  # whether workers were started for this epoch
        self._ahead: Any = None
        self._before_ahead: Callable[[], dict[str, Any]] = dict
        self._iteration = self._runs = 0
        self._is_recording = self._is_complete = False
        base = loader.base_dataloader
        self._wrapped = Wrapped(base, "__iter__", self._iterate)
        self.collator, self.tracked = base.collate_fn, None
        # Out of order (in_order=False), a batch's worker cannot be told from its number.
        if loader.num_workers and self.is_indexed and getattr(base, "in_order", True):
            # In the base loader: accelerate's own __iter__ runs the base's, which hands the collator to its workers.
            base.collate_fn = self.tracked = TrackedCollator(self.collator, loader.num_workers, base.prefetch_factor)
            self.made = [0] * loader.num_workers

    def stop(self) -> None:
        """Give the loader its own method and collator back."""
        self._wrapped.undo()
        self.loader.base_dataloader.collate_fn = self.collator

    @property
    def fetches(self) -> int:
        """How many batches of the loader under it this process reads for one of accelerate's."""
        # A dispatcher reads on the main process for all: one batch a process, or one that is then split.
        if not isinstance(self.loader, DataLoaderDispatcher):
            return 1
        return 1 if self.loader.split_batches else world_size()

    @property
    def is_indexed(self) -> bool:
        """True if batches can be left out without being read."""
        is_stream = isinstance(self.loader.dataset, IterableDataset) or self.loader.batch_sampler is None
        return not is_stream and not isinstance(self.loader, DataLoaderDispatcher)

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
        # Some generators are made at the first draw, so they are looked for again each time.
        self.own.look()
        return {**rng_state(), "own": self.own.states()}

    def put(self, state: Mapping[str, Any]) -> None:
        """Put generators back to where `random` found them."""
        set_rng_state(state)
        self.own.restore(state["own"])

    def state(self, taken: int) -> dict[str, Any]:
        """Return which iteration this is, what the batch read ahead was drawn from, a mark of it, and the workers'."""
        found = {"iteration": self._iteration, "before_ahead": self._before_ahead(), "mark": self.mark()}
        return {**found, "is_fresh": self.is_fresh, "made": self.made, "in_workers": self._in_workers(taken)}

    def _in_workers(self, taken: int) -> list[dict[str, Any]] | None:
        """Return each worker's generators before its first batch of the round that goes on, None where not known."""
        if self.tracked is None or self.made is None:
            return None
        # Counted to the beginning of the round: that is where a resumed loader starts its workers, each with a first
        # batch.
        counts = self.counts(self.made, taken)
        if not any(counts):
            return []
        states = [self.tracked.state_after(worker, count) for worker, count in enumerate(counts)]
        return None if None in states else [state for state in states if state is not None]

    def counts(self, made: Sequence[int], taken: int) -> list[int]:
        """Return how many batches each worker has made at the beginning of a round, or at the epoch's end."""
        # Batches are dealt round-robin: in whole rounds, each worker has made the same number.
        workers = self.loader.num_workers
        # At the end the last round may be short: worker `one` has made ceil((length - one) / workers).
        if self.length is not None and taken >= self.length:
            return [made[one] + (self.length - one + workers - 1) // workers for one in range(workers)]
        return [one + taken // workers for one in made]

    def mark(self) -> str | None:
        """Return a text that tells the batch read ahead from others, None where there is none."""
        if self._ahead is None:
            # Equal bits of the next batch show that the data, their order and what is drawn are those of the stopped
            # run.
            return None
        return hashlib.sha256("\n".join(map(digest, _values(self._ahead))).encode()).hexdigest()

    def _iterate(self, method: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        # A look at the loader that is not the training's own (len, a debug loop) must not count as a start of
        # workers.
        base, before_it = self.loader.base_dataloader, self.tracked.run if self.tracked else 0
        # Persistent workers live in the base loader's `_iterator`: with one there, no process is started.
        is_fresh = not self.loader.persistent_workers or base._iterator is None
        self._runs += is_fresh
        if self.tracked is not None and is_fresh:
            self.tracked.run = self._runs
        # Draws the seeds of the workers, in `DataLoader.__iter__`, and the shuffle, with the first batch.
        batches = method()
        if not self._is_recording:
            if self.tracked is not None:
                self.tracked.run = before_it
            return batches
        if not is_fresh:  # those that live on have made the last epoch's as well, if that was read to its end
            self.made = self.counts(self.made, self.length) if self.made and self.length and self._is_complete else None
            self.is_fresh = False
        elif self.tracked is not None and not self.tracked.given:
            self.made, self.is_fresh = [0] * self.loader.num_workers, True
        self._iteration = self.loader.iteration
        self._ahead, self._before_ahead, self._is_complete = None, dict, False
        # Taken out first: what they do may begin another iteration, with none of its own.
        before, self.before, after, self.after = self.before, {}, self.after, {}
        # The iterator is made and has drawn its seeds: what follows begins from where the checkpoint says.
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
            # Without workers, batches are drawn in this process: the state before the newest fetch is what a resumed
            # run redraws it from, since accelerate holds one batch that the trainer has not seen. A dispatcher's one
            # batch is several fetches.
            if self.loader.num_workers == 0 and number % self.fetches == 0:
                self._before_ahead = functools.partial(_with, rng_snapshot(), self.own.states())
            try:
                self._ahead = next(batches)
            except StopIteration:
                self._ahead, self._is_complete = None, True
                return
            if number == 0:
                self.own.look()  # some are made at the first draw
            after.get(number, _nothing)()
            number += 1
            yield self._ahead


def _with(generators: Callable[[], dict[str, Any]], own: list[dict[str, Any]]) -> dict[str, Any]:
    return {**generators(), "own": own}


def _nothing() -> None:
    pass


def _values(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping | list | tuple):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _values(part)
    elif isinstance(batch, Tensor | str | int | float):
        yield batch


def length_of(loader: Any) -> int | None:
    """Return how many batches a loader has, None for a stream."""
    try:
        return len(loader)
    except TypeError:
        return None


def _of_samplers(loader: Any) -> list[Any]:
    # accelerate nests samplers (BatchSamplerShard, SeedableRandomSampler), and each level may have a generator.
    owners = [loader, loader.sampler, loader.batch_sampler]
    for name in ("batch_sampler", "sampler"):
        owners += [getattr(owner, name, None) for owner in owners[2:]]
    return [getattr(owner, "generator", None) for owner in owners]


class ReplayedBatches(BatchSampler):
    """Batches of an epoch without the first ones; all of them when it is iterated again."""

    def __init__(self, batches: Any, skip: int, before_ahead: Callable[[], None] | None = None) -> None:
        self._batches, self._skip, self._before_ahead = batches, skip, before_ahead

    def __getattr__(self, name: str) -> Any:
        # Unpickling asks for attributes before there are any: without this, endless recursion.
        if name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches) - self._skip

    def __iter__(self) -> Iterator[list[int]]:
        # The indices of left-out batches are drawn, as in the stopped run, but no sample is read.
        batches = iter(self._batches)
        for _ in itertools.islice(batches, self._skip):
            pass
        # For this epoch alone: a later iteration has all batches.
        self._skip = 0
        if self._before_ahead is not None:
            # Between the last left-out batch and the next: here the generators must be where they were before the
            # read-ahead.
            self._before_ahead()
        yield from batches


class DataResume:
    """Records where the generators were when batches were drawn, and draws those of a resumed epoch from there."""

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
        """Watch the loader of a run; a resumed one goes on from what `state` returned, saved in a checkpoint."""
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
        drawn = {"begin": self._begin, "own": self._now.own.states(), **self._now.state(self._taken)}
        return {"taken": self._taken, "evaluating": self._evaluating(), **drawn, **self._layout()}

    def _evaluating(self) -> list[str]:
        """Return the evaluation loaders whose workers live on: the seeds of those are not drawn again."""
        loaders = getattr(self._trainer, "_eval_dataloaders", {})
        return [key for key, loader in loaders.items() if getattr(loader, "_iterator", None) is not None]

    def evaluation_loader(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the trainer's; one whose workers lived on in the stopped run draws no seeds for them."""
        loader = method(*args, **kwargs)
        known = getattr(self._trainer, "_eval_dataloaders", {})
        # In the stopped run these workers lived already and no seed was drawn. A generator of its own takes the draw,
        # so that the global one stays where the checkpoint left it.
        if any(known.get(key) is loader for key in self._saved.get("evaluating", ())) and loader._iterator is None:
            loader.base_dataloader.generator = torch.Generator()
        return loader

    def _layout(self) -> dict[str, Any]:
        loader = self._stock.loader
        accumulate = self._trainer.args.gradient_accumulation_steps
        kind, length = type(loader).__name__, self._stock.length
        workers = {"workers": loader.num_workers, "persistent": bool(loader.persistent_workers)}
        return {"loader": kind, "length": length, **workers, "accumulate": accumulate}

    # --- generators

    def load_rng_state(self, method: Callable[[Any], None], checkpoint: Any) -> None:
        """Put the generators of a checkpoint back, once: the trainer does it when draws have followed."""
        # The trainer restores after its own skipping of batches; here the moment is chosen by `batches`.
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
        # The trainer calls once for each accumulation window with one iterator: another one is another epoch.
        if given is not self._given:
            is_first, self._given = self._given is None, given
            if not (is_first and self._checkpoint is not None and self._goes_on()):
                self._begin_epoch(given)
        return self._counted(self._now)

    def _begin_epoch(self, given: Iterator[Any]) -> None:
        # The resumed epoch's loader has its workers running with the right states: stay with it, as a stopped run
        # would.
        if self._now is not self._stock and self._now.loader.persistent_workers:
            self._now.loader.set_epoch(self._stock.loader.iteration)
            given = iter(self._now.loader)  # whose workers live on
        elif self._now is not self._stock:
            self._now.stop()
            self._now = self._stock
        # What the shuffle and the workers' seeds of this epoch are drawn from, for a resume within it.
        self._batches, self._begin, self._taken = given, self._now.random(), 0

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
        """Go to the place of the checkpoint; return whether the data go on from there."""
        args, layout, saved = self._trainer.args, self._layout(), self._saved
        # As the trainer counts: the last window of an epoch may be short (ceil). A stream has one epoch of max_steps.
        steps = None if layout["length"] is None else max(-(-layout["length"] // args.gradient_accumulation_steps), 1)
        trained = self._trainer.state.global_step % (steps or self._trainer.state.max_steps)
        lives_on = bool(layout["persistent"] and layout["workers"])
        if args.ignore_data_skip or (trained == 0 and not lives_on):
            return False  # the trainer begins an epoch
        expected = layout["length"] if trained == 0 else trained * args.gradient_accumulation_steps
        # What decides how batches and processes meet must be the same; the first difference is told.
        reason = next((name for name, value in layout.items() if saved and saved.get(name) != value), None)
        if not saved:
            reason = "it was saved without them"
        elif reason is not None:
            reason = f"{reason} was {saved[reason]}, now {layout[reason]}"
        elif steps is not None and saved["taken"] != expected:
            reason = f"it had read {saved['taken']} batches in {trained} steps of its epoch"
        if reason is not None:
            self.note(
                f"what was drawn at random while batches were made cannot be drawn again ({reason}): where a data set "
                "or a collator draws, the run is not that which was stopped"
            )
            return False
        if lives_on and not saved["in_workers"] and not (saved["is_fresh"] and trained):
            self.note(
                "what workers that live on from epoch to epoch (dataloader_persistent_workers) draw at random is not "
                "what those of the stopped run would have drawn: their generators are not known"
            )
        if trained:
            self._replay(saved)
        elif saved["in_workers"]:
            self._now = self._with_workers(saved)
            self._begin_epoch(iter(()))
        return trained > 0 or bool(saved["in_workers"])

    def _replay(self, saved: Mapping[str, Any]) -> None:
        stock, taken = self._stock, int(saved["taken"])
        # Seedable samplers shuffle by epoch number: that of the stopped run.
        stock.loader.set_epoch(saved["iteration"])
        before_ahead: Callable[[], None] = functools.partial(stock.put, saved["before_ahead"])
        # The number of fetch that the read-ahead batch is at differs in the three ways below; each puts generators in
        # before the fetch that drew from them, checks the batch, and goes to the checkpoint's state after it.
        check: Callable[[], None] = functools.partial(self._check, saved["mark"])
        now, read, per = stock, taken, stock.fetches
        # In this process: leave the taken batches out by index. Fetch 0 is the batch that had been read ahead.
        if stock.loader.num_workers == 0 and stock.is_indexed:
            now, read = WatchedLoader(self._skipping(taken, before_ahead, saved["iteration"]), stock.own), 0
            now.before, now.after = {1: self.restore}, {0: check}
        # In workers: this process draws nothing once the iterator is there, so its generators are put back at once
        # (-1).
        elif stock.loader.num_workers:
            if saved["in_workers"]:
                # With known states, only the begun round is read again: at most one batch a worker.
                now, read = self._with_workers(saved), taken % stock.loader.num_workers
            now.before, now.after = {-1: self.restore}, {read: check}
        else:
            # A stream cannot be skipped: all is read again, from where the epoch began.
            stock.before = {taken * per: before_ahead, (taken + 1) * per: self.restore}
            stock.after = {(taken + 1) * per - 1: check}
        # Shuffle and seeds are drawn from here when `iter` runs.
        stock.put(saved["begin"])
        self._now, self._batches = now, iter(now.loader)
        for _ in itertools.islice(self._counted(now), read):
            pass
        if read:
            self.restore()  # a process that is sent its batches makes none
        self._begin, self._taken = saved["begin"], taken

    def _skipping(self, taken: int, before_ahead: Callable[[], None] | None, iteration: int) -> Any:
        # accelerate's own skipping loader of no batches: it has the wrappers that a shard needs, around a sampler of
        # ours.
        loader = skip_first_batches(self._stock.loader)
        skipping: Any = loader.batch_sampler
        skipping.batch_sampler = ReplayedBatches(skipping.batch_sampler, taken, before_ahead)
        loader.iteration = iteration
        return loader

    def _with_workers(self, saved: Mapping[str, Any]) -> WatchedLoader:
        """Return a loader that goes on at the round of its workers that the next batch is in."""
        stock, taken = self._stock, int(saved["taken"])
        is_end = taken == stock.length
        # In whole rounds: each worker then begins with its own first batch of the round, as it was dealt.
        loader = self._skipping(0 if is_end else taken - taken % stock.loader.num_workers, None, saved["iteration"])
        base = loader.base_dataloader
        # The stock loader's collator, as skip_first_batches copied the watched one; the new watcher puts its own
        # around it.
        base.collate_fn = stock.collator
        now = WatchedLoader(loader, stock.own)
        now.length, now.made, now.is_fresh = stock.length, saved["made"], saved["is_fresh"]
        tracked: Any = now.tracked
        tracked.given, tracked.counts = saved["in_workers"], now.counts(saved["made"], taken)
        base.worker_init_fn = StartOfWorker(base.worker_init_fn, tracked)
        # At an epoch's end the workers' next batches are those of the next epoch.
        if is_end:
            now.made = tracked.counts
        if is_end or not saved["is_fresh"]:
            base.generator, now.is_fresh = torch.Generator(), False  # of the seeds, which nothing drew in that epoch
        return now

    def _check(self, mark: str | None) -> None:
        if self._now is not None and self._now.mark() != mark:
            self.note(
                "the batch that the stopped run had read ahead is another one now: the training data, their order or "
                "what they are drawn from has changed, so the run is not that which was stopped"
            )
