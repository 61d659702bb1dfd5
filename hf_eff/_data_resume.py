"""Exact resume of the training data: batches drawn at random before a checkpoint are drawn again.

accelerate's loaders read one batch ahead. The random draws of a data set or collator for that batch (masks,
augmentations) happen before the trainer saves the random state. After a restart the trainer would draw it from another
state, and restore the saved state after the first window's batches, which are drawn later. So we watch the loader and
record the random state before each batch. Workers write their generators' states to shared memory.
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
"""Bytes for the states after one batch: torch, numpy and Python need 16 KB, each further torch generator 5 KB."""
_HEADER = 24


class TrackedCollator:
    """Wraps a loader's collator: a worker records its generators after each batch. The batch is unchanged."""

    def __init__(self, collator: Callable[[Any], Any], workers: int, ahead: int) -> None:
        self.collator, self.workers = collator, workers
        self.run = 0  # counts starts of the workers; set before they start
        self.given: Sequence[Any] = ()  # start states of the workers, empty if the loader seeds them
        self.counts = [0] * workers  # batches that each worker had made in the run that is resumed
        # A ring of slots: workers run up to `ahead` batches ahead of the trainer. One more slot is being written, one
        # read, and one may have been received.
        self._board = torch.zeros(workers, ahead + 3, _BYTES, dtype=torch.uint8)
        # Shared memory: a worker writes, the main process reads when it saves. No message delays a batch.
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
        """Set this worker's generators to the given state."""
        self._own = OwnGenerators(worker.dataset, self.collator)
        self._count = self.counts[worker.id]
        if self.given:
            set_rng_state(self.given[worker.id])
            self._own.restore(self.given[worker.id]["own"])

    def _write(self, worker: Any) -> None:
        if self._own is None or self._count is None:
            # A new run has no StartOfWorker: its count starts with the first batch.
            self._own, self._count = OwnGenerators(worker.dataset, self.collator), self.counts[worker.id]
        if self._count == self.counts[worker.id]:
            self._own.look()  # some are created at the first draw
        self._count += 1
        # After the batch: the state that this worker draws its next batch from. Workers use no GPU generators.
        state = packed({**rng_state(on_gpu=False), "own": self._own.states()})
        slots = self._board[worker.id].numpy()
        # The count alone determines the slot, so the reader finds it.
        slot = slots[(self._count - 1) % len(slots)]
        # -1 means "too long", not "not written": the state is then unknown, and a note says so on resume.
        length = len(state) if len(state) <= _BYTES - _HEADER else -1
        # Three int64 in 24 bytes. The run number tells restarted workers from earlier ones with equal counts.
        slot[:_HEADER] = np.array([self.run, self._count, length]).view(np.uint8)
        if length > 0:
            slot[_HEADER : _HEADER + length] = np.frombuffer(state, np.uint8)

    def state_after(self, worker: int, count: int) -> dict[str, Any] | None:
        """Return a worker's generators after `count` batches, None if unknown."""
        slots = self._board[worker].numpy()
        slot = slots[(count - 1) % len(slots)]
        # copy: the slice is a view of bytes that a worker keeps overwriting
        run, written, length = slot[:_HEADER].copy().view(np.int64).tolist()
        if (run, written) != (self.run, count) or length < 0:
            return None
        return unpacked(slot[_HEADER : _HEADER + length].tobytes())


class StartOfWorker:
    """A `worker_init_fn` that starts workers from given states."""

    def __init__(self, stock: Callable[[int], None] | None, tracked: TrackedCollator) -> None:
        self._stock, self._tracked = stock, tracked

    def __call__(self, number: int) -> None:
        """Start a worker."""
        if self._stock is not None:
            self._stock(number)
        self._tracked.start(get_worker_info())


class WatchedLoader:
    """Records the generators before each fetch of the loader inside accelerate's, which fetches one batch ahead."""

    def __init__(self, loader: Any, own: OwnGenerators | None = None) -> None:
        self.loader = loader
        self.own = own or OwnGenerators(loader.dataset, loader.collate_fn, _of_samplers(loader))
        """Random state that the data set, the collator and samplers own."""
        self.before: dict[int, Callable[[], None]] = {}
        """Calls before a fetch, by its number in the next iteration; -1 is when the iteration starts."""
        self.after: dict[int, Callable[[], None]] = {}  # calls after a fetch
        self.length = length_of(loader)
        self.made: list[int] | None = None
        """Batches that each persistent worker had made before this epoch, None if unknown."""
        self.is_fresh = True  # True if workers were started for this epoch
        self._ahead: Any = None
        self._before_ahead: Callable[[], dict[str, Any]] = dict
        self._iteration = self._runs = 0
        self._is_recording = self._is_complete = False
        base = loader.base_dataloader
        self._wrapped = Wrapped(base, "__iter__", self._iterate)
        self.collator, self.tracked = base.collate_fn, None
        # With in_order=False, a batch's worker does not follow from its number.
        if loader.num_workers and self.is_indexed and getattr(base, "in_order", True):
            # Patch the base loader: accelerate's __iter__ runs the base's, which passes the collator to its workers.
            base.collate_fn = self.tracked = TrackedCollator(self.collator, loader.num_workers, base.prefetch_factor)
            self.made = [0] * loader.num_workers

    def stop(self) -> None:
        """Restore the loader's own method and collator."""
        self._wrapped.undo()
        self.loader.base_dataloader.collate_fn = self.collator

    @property
    def fetches(self) -> int:
        """Number of base batches that this process reads per accelerate batch."""
        # A dispatcher reads on the main process for all: one batch per process, or one that is then split.
        if not isinstance(self.loader, DataLoaderDispatcher):
            return 1
        return 1 if self.loader.split_batches else world_size()

    @property
    def is_indexed(self) -> bool:
        """True if batches can be skipped without reading them."""
        is_stream = isinstance(self.loader.dataset, IterableDataset) or self.loader.batch_sampler is None
        return not is_stream and not isinstance(self.loader, DataLoaderDispatcher)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Treat batches read in this block as training batches. Others may iterate the same loader."""
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def random(self) -> dict[str, Any]:
        """Return the states of all generators that a batch may be drawn from."""
        # Some generators are created at the first draw, so look for them each time.
        self.own.look()
        return {**rng_state(), "own": self.own.states()}

    def put(self, state: Mapping[str, Any]) -> None:
        """Restore generators to the states that `random` returned."""
        set_rng_state(state)
        self.own.restore(state["own"])

    def state(self, taken: int) -> dict[str, Any]:
        """Return the iteration, the state and mark of the batch read ahead, and the workers' states."""
        found = {"iteration": self._iteration, "before_ahead": self._before_ahead(), "mark": self.mark()}
        return {**found, "is_fresh": self.is_fresh, "made": self.made, "in_workers": self._in_workers(taken)}

    def _in_workers(self, taken: int) -> list[dict[str, Any]] | None:
        """Return each worker's generators before its first batch of the current round, None if unknown."""
        if self.tracked is None or self.made is None:
            return None
        # Counted at the start of the round: a resumed loader starts each worker there, at its first batch of the round.
        counts = self.counts(self.made, taken)
        if not any(counts):
            return []
        states = [self.tracked.state_after(worker, count) for worker, count in enumerate(counts)]
        return None if None in states else [state for state in states if state is not None]

    def counts(self, made: Sequence[int], taken: int) -> list[int]:
        """Return how many batches each worker has made at the start of a round, or at the epoch's end."""
        # Batches are dealt round-robin: after whole rounds, each worker has made the same number.
        workers = self.loader.num_workers
        # At the end the last round may be short: worker `one` has made ceil((length - one) / workers).
        if self.length is not None and taken >= self.length:
            return [made[one] + (self.length - one + workers - 1) // workers for one in range(workers)]
        return [one + taken // workers for one in made]

    def mark(self) -> str | None:
        """Return a text that identifies the batch read ahead, None if there is none."""
        if self._ahead is None:
            # If the next batch has equal bits, the data, their order and the random draws match the stopped run.
            return None
        return hashlib.sha256("\n".join(map(digest, _values(self._ahead))).encode()).hexdigest()

    def _iterate(self, method: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        # An iteration outside training (len, a debug loop) must not count as a start of workers.
        base, before_it = self.loader.base_dataloader, self.tracked.run if self.tracked else 0
        # Persistent workers live in the base loader's `_iterator`: if it exists, no process is started.
        is_fresh = not self.loader.persistent_workers or base._iterator is None
        self._runs += is_fresh
        if self.tracked is not None and is_fresh:
            self.tracked.run = self._runs
        # Draws the workers' seeds in `DataLoader.__iter__`, and the shuffle with the first batch.
        batches = method()
        if not self._is_recording:
            if self.tracked is not None:
                self.tracked.run = before_it
            return batches
        if not is_fresh:  # persistent workers also made the last epoch's batches, if it was read to its end
            self.made = self.counts(self.made, self.length) if self.made and self.length and self._is_complete else None
            self.is_fresh = False
        elif self.tracked is not None and not self.tracked.given:
            self.made, self.is_fresh = [0] * self.loader.num_workers, True
        self._iteration = self.loader.iteration
        self._ahead, self._before_ahead, self._is_complete = None, dict, False
        # Remove them first: they may start another iteration, which has no calls of its own.
        before, self.before, after, self.after = self.before, {}, self.after, {}
        # The iterator exists and has drawn its seeds: continue from the checkpoint's state.
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
            # Without workers, batches are drawn in this process. accelerate holds one batch that the trainer has not
            # seen, so a resumed run redraws it from the state before the newest fetch. One batch of a dispatcher is
            # several fetches.
            if self.loader.num_workers == 0 and number % self.fetches == 0:
                self._before_ahead = functools.partial(_with, rng_snapshot(), self.own.states())
            try:
                self._ahead = next(batches)
            except StopIteration:
                self._ahead, self._is_complete = None, True
                return
            if number == 0:
                self.own.look()  # some are created at the first draw
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
    """Return the number of batches of a loader, None for a stream."""
    try:
        return len(loader)
    except TypeError:
        return None


def _of_samplers(loader: Any) -> list[Any]:
    # accelerate nests samplers (BatchSamplerShard, SeedableRandomSampler). Each level may have a generator.
    owners = [loader, loader.sampler, loader.batch_sampler]
    for name in ("batch_sampler", "sampler"):
        owners += [getattr(owner, name, None) for owner in owners[2:]]
    return [getattr(owner, "generator", None) for owner in owners]


class ReplayedBatches(BatchSampler):
    """An epoch's batches without the first ones. A second iteration yields all of them."""

    def __init__(self, batches: Any, skip: int, before_ahead: Callable[[], None] | None = None) -> None:
        self._batches, self._skip, self._before_ahead = batches, skip, before_ahead

    def __getattr__(self, name: str) -> Any:
        # Unpickling reads attributes before any exist: without this check it would recurse forever.
        if name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches) - self._skip

    def __iter__(self) -> Iterator[list[int]]:
        # Indices of skipped batches are drawn, as in the stopped run, but no sample is read.
        batches = iter(self._batches)
        for _ in itertools.islice(batches, self._skip):
            pass
        # For this epoch only: a later iteration has all batches.
        self._skip = 0
        if self._before_ahead is not None:
            # Between the last skipped batch and the next: the generators must be as they were before the read-ahead.
            self._before_ahead()
        yield from batches


class DataResume:
    """Records the random states that batches are drawn from, and restores them in a resumed epoch."""

    note: Callable[[str], None]
    """Reports a message to the user."""

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
        """Watch the loader of a run. A resumed run continues from the saved `state` of a checkpoint."""
        self.stop()
        self._saved, self._checkpoint, self._is_restored = saved or {}, checkpoint, False
        if isinstance(loader, DataLoaderShard | DataLoaderDispatcher):
            self._now = self._stock = WatchedLoader(loader)
        elif checkpoint is not None:
            self.note(
                f"the batches come from a {type(loader).__name__} that accelerate did not prepare: random draws made "
                "for batches read ahead cannot be repeated, so the run may differ from an uninterrupted one"
            )

    def stop(self) -> None:
        """Restore the loader."""
        for one in (self._now, self._stock):
            if one is not None:
                one.stop()
        self._now = self._stock = self._given = None
        self._batches, self._taken = iter(()), 0

    def state(self) -> dict[str, Any]:
        """Return the random states of the current epoch's data and of the next batch."""
        if self._now is None or self._given is None:
            return {}
        drawn = {"begin": self._begin, "own": self._now.own.states(), **self._now.state(self._taken)}
        return {"taken": self._taken, "evaluating": self._evaluating(), **drawn, **self._layout()}

    def _evaluating(self) -> list[str]:
        """Return the evaluation loaders with persistent workers, whose seeds are not drawn again."""
        loaders = getattr(self._trainer, "_eval_dataloaders", {})
        return [key for key, loader in loaders.items() if getattr(loader, "_iterator", None) is not None]

    def evaluation_loader(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the trainer's loader. If its workers persisted in the stopped run, it draws no seeds for them."""
        loader = method(*args, **kwargs)
        known = getattr(self._trainer, "_eval_dataloaders", {})
        # In the stopped run these workers existed already and drew no seed. Draw from a separate generator, so that the
        # global one keeps the checkpoint's state.
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
        """Restore a checkpoint's generators once; the trainer would do it after further draws."""
        # The trainer restores them after it has skipped batches. Here `batches` chooses the moment.
        if self._is_restored:
            return
        method(checkpoint)
        self._is_restored = True
        if self._now is not None:
            self._now.own.restore(self._saved.get("own", []))

    def restore(self) -> None:
        """Restore the checkpoint's generators now."""
        self._trainer._load_rng_state(self._checkpoint)

    # --- batches

    def batches(self, given: Iterator[Any]) -> Iterator[Any]:
        """Return an epoch's batches: the trainer's iterator, or one that continues a resumed epoch."""
        if self._now is None:
            return given
        # The trainer calls this per accumulation window with the same iterator: a new iterator means a new epoch.
        if given is not self._given:
            is_first, self._given = self._given is None, given
            if not (is_first and self._checkpoint is not None and self._goes_on()):
                self._begin_epoch(given)
        return self._counted(self._now)

    def _begin_epoch(self, given: Iterator[Any]) -> None:
        # The resumed epoch's loader has running workers in the right states: keep it, as an uninterrupted run would.
        if self._now is not self._stock and self._now.loader.persistent_workers:
            self._now.loader.set_epoch(self._stock.loader.iteration)
            given = iter(self._now.loader)  # has the persistent workers
        elif self._now is not self._stock:
            self._now.stop()
            self._now = self._stock
        # The state that this epoch's shuffle and worker seeds are drawn from, for a resume within it.
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
        """Move to the checkpoint's position. Return True if the data continue exactly from there."""
        args, layout, saved = self._trainer.args, self._layout(), self._saved
        # Count as the trainer does: an epoch's last window may be short (ceil). A stream has one epoch of max_steps.
        steps = None if layout["length"] is None else max(-(-layout["length"] // args.gradient_accumulation_steps), 1)
        trained = self._trainer.state.global_step % (steps or self._trainer.state.max_steps)
        lives_on = bool(layout["persistent"] and layout["workers"])
        if args.ignore_data_skip or (trained == 0 and not lives_on):
            return False  # the trainer starts an epoch
        expected = layout["length"] if trained == 0 else trained * args.gradient_accumulation_steps
        # The layout of batches and processes must be the same. The first difference is reported.
        reason = next((name for name, value in layout.items() if saved and saved.get(name) != value), None)
        if not saved:
            reason = "it was saved without random states"
        elif reason is not None:
            reason = f"{reason} was {saved[reason]}, now {layout[reason]}"
        elif steps is not None and saved["taken"] != expected:
            reason = f"it had read {saved['taken']} batches in {trained} steps of its epoch"
        if reason is not None:
            self.note(
                f"random draws for batches read ahead cannot be repeated ({reason}): if a data set or a collator "
                "draws random numbers, the run differs from an uninterrupted one"
            )
            return False
        if lives_on and not saved["in_workers"] and not (saved["is_fresh"] and trained):
            self.note(
                "the random states of persistent workers (dataloader_persistent_workers) are unknown: "
                "what they draw may differ from an uninterrupted run"
            )
        if trained:
            self._replay(saved)
        elif saved["in_workers"]:
            self._now = self._with_workers(saved)
            self._begin_epoch(iter(()))
        return trained > 0 or bool(saved["in_workers"])

    def _replay(self, saved: Mapping[str, Any]) -> None:
        stock, taken = self._stock, int(saved["taken"])
        # Seedable samplers shuffle by epoch number: use that of the stopped run.
        stock.loader.set_epoch(saved["iteration"])
        before_ahead: Callable[[], None] = functools.partial(stock.put, saved["before_ahead"])
        # The batch read ahead has a different fetch number in each of the three cases below. Each case sets the
        # generators before the fetch that drew from them, checks the batch, and restores the checkpoint's state after
        # it.
        check: Callable[[], None] = functools.partial(self._check, saved["mark"])
        now, read, per = stock, taken, stock.fetches
        # In this process: skip the batches already taken by index. Fetch 0 is the batch that was read ahead.
        if stock.loader.num_workers == 0 and stock.is_indexed:
            now, read = WatchedLoader(self._skipping(taken, before_ahead, saved["iteration"]), stock.own), 0
            now.before, now.after = {1: self.restore}, {0: check}
        # With workers: this process draws nothing once the iterator exists, so restore its generators at once (-1).
        elif stock.loader.num_workers:
            if saved["in_workers"]:
                # With known states, only the current round is read again: at most one batch per worker.
                now, read = self._with_workers(saved), taken % stock.loader.num_workers
            now.before, now.after = {-1: self.restore}, {read: check}
        else:
            # A stream cannot be skipped: read it again from the start of the epoch.
            stock.before = {taken * per: before_ahead, (taken + 1) * per: self.restore}
            stock.after = {(taken + 1) * per - 1: check}
        # Shuffle and seeds are drawn from here when `iter` runs.
        stock.put(saved["begin"])
        self._now, self._batches = now, iter(now.loader)
        for _ in itertools.islice(self._counted(now), read):
            pass
        if read:
            self.restore()  # a process that receives its batches makes none
        self._begin, self._taken = saved["begin"], taken

    def _skipping(self, taken: int, before_ahead: Callable[[], None] | None, iteration: int) -> Any:
        # accelerate's own skipping loader, skipping no batches: it adds the wrappers that a shard needs around our
        # sampler.
        loader = skip_first_batches(self._stock.loader)
        skipping: Any = loader.batch_sampler
        skipping.batch_sampler = ReplayedBatches(skipping.batch_sampler, taken, before_ahead)
        loader.iteration = iteration
        return loader

    def _with_workers(self, saved: Mapping[str, Any]) -> WatchedLoader:
        """Return a loader that continues at the workers' round that holds the next batch."""
        stock, taken = self._stock, int(saved["taken"])
        is_end = taken == stock.length
        # Whole rounds: each worker then starts with its own first batch of the round.
        loader = self._skipping(0 if is_end else taken - taken % stock.loader.num_workers, None, saved["iteration"])
        base = loader.base_dataloader
        # Use the stock loader's collator: skip_first_batches copied the watched one, and the new watcher adds its own.
        base.collate_fn = stock.collator
        now = WatchedLoader(loader, stock.own)
        now.length, now.made, now.is_fresh = stock.length, saved["made"], saved["is_fresh"]
        tracked: Any = now.tracked
        tracked.given, tracked.counts = saved["in_workers"], now.counts(saved["made"], taken)
        base.worker_init_fn = StartOfWorker(base.worker_init_fn, tracked)
        # At an epoch's end the workers' next batches belong to the next epoch.
        if is_end:
            now.made = tracked.counts
        if is_end or not saved["is_fresh"]:
            base.generator, now.is_fresh = torch.Generator(), False  # no seeds were drawn in that epoch
        return now

    def _check(self, mark: str | None) -> None:
        if self._now is not None and self._now.mark() != mark:
            self.note(
                "the batch read ahead differs from the stopped run's: the training data, their order or their random "
                "draws have changed, so the run differs from an uninterrupted one"
            )
