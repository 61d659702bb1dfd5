"""Saved tensors in pinned host memory, copied beside the computation and fetched ahead of backward."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from shared_core.errors import TrainingError

Parts = tuple[Tensor, ...]
_IN_FLIGHT = 4
_AHEAD = 2


class Lane(Protocol):
    """Where copies run beside the computation."""

    def host_like(self, part: Tensor) -> Tensor:
        """Return host memory that a copy can write without the computation waiting for it."""
        ...

    def run(self, copy: Callable[[], None]) -> Any:
        """Start a copy after everything the computation has started so far; return its event."""
        ...

    def wait(self, event: Any) -> None:
        """Let the computation go on only after the copy."""
        ...


class CudaLane:
    """A stream of its own on a CUDA device.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host_like(self, part: Tensor) -> Tensor:
        """Return pinned memory; torch keeps and reuses it."""
        # Pinned: only then is copy_(non_blocking=True) asynchronous. torch's allocator of pinned memory reuses
        # blocks.
        return torch.empty(part.shape, dtype=part.dtype, pin_memory=True)

    def run(self, copy: Callable[[], None]) -> Any:
        """Start a copy on the stream."""
        # The values that are to be copied may still be in computation on the present stream.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy()
        return self._stream.record_event()

    def wait(self, event: Any) -> None:
        """Let the present stream wait for the copy."""
        torch.cuda.current_stream(self._device).wait_event(event)


class Moved:
    """Tensors on the host; `parts` brings them back, as often as it is called."""

    def __init__(self, mover: HostMover, parts: Parts, before: weakref.ref[Moved] | None) -> None:
        self._mover, self._device = mover, parts[0].device
        self._before = before
        self.host = tuple(mover.lane.host_like(part) for part in parts)
        self.source: Parts | None = parts
        """Tensors that are being copied: kept until that is done, as the allocator knows nothing of the stream."""
        # A version counts in-place writes: what backward gets must be what forward saved.
        self._versions = [part._version for part in parts]
        self._was_changed = False
        self._fetched: tuple[Parts, Any] | None = None

    def release(self) -> None:
        """The computation waits for the copy from here on: what it does to the source later changes nothing."""
        self._check_source()
        self.source = None

    def _check_source(self) -> None:
        self._was_changed |= [part._version for part in self.source or ()] != self._versions

    def __del__(self) -> None:
        # the allocator must not give memory away that a copy is still writing
        if self._fetched is not None:
            self._mover.lane.wait(self._fetched[1])

    def fetch(self) -> None:
        """Start copying back, unless the source is still there."""
        if self.source is not None or self._fetched is not None:
            # The device's tensor is still held: nothing to fetch.
            return
        # allocated where the computation runs, which waits for the copy before it uses or frees them
        parts = tuple(torch.empty_like(part, device=self._device) for part in self.host)
        # Started as early as possible: the copy runs beside the backward of later layers.
        self._fetched = parts, self._mover.lane.run(lambda: _copy(self.host, parts))

    def parts(self) -> Parts:
        """Return the tensors on their device, and start fetching those that backward will want next."""
        if self.source is not None:
            self._check_source()
        if self._was_changed:
            raise TrainingError(
                "activations",
                "a tensor that backward needs must not be modified in place after forward saved it, got one that was "
                "modified while it was copied to the host",
                "leave out the in-place operation",
            )
        self.fetch()
        # Backward goes through what was saved from the last to the first: what was saved before this one is wanted
        # next.
        earlier: Moved | None = self
        for _ in range(_AHEAD):
            earlier = earlier._before() if earlier is not None and earlier._before is not None else None
            if earlier is not None:
                earlier.fetch()
        if self._fetched is None:
            return self.source or ()
        # Handed over, so that __del__ does not wait again.
        (parts, event), self._fetched = self._fetched, None
        self._mover.lane.wait(event)
        return parts


class HostMover:
    """Takes tensors to the host while forward goes on.

    At most four copies are under way: their sources stay on the device, and the computation waits for the oldest one
    before a fifth begins. Backward wants them in reverse order, so that each one that it asks for starts the copies
    of the two before it.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        # weakly: once backward is through with one, its copy is of no interest, and its memory is
        self._under_way: deque[tuple[weakref.ref[Moved], Any]] = deque()
        self._latest: weakref.ref[Moved] | None = None

    def out(self, parts: Parts) -> Moved:
        """Start copying tensors to the host."""
        moved = Moved(self, parts, self._latest)
        self._latest = weakref.ref(moved)
        self._under_way.append((weakref.ref(moved), self.lane.run(lambda: _copy(parts, moved.host))))
        # At most so many copies at once hold their source: else the device's memory would grow as without offload.
        if len(self._under_way) > _IN_FLIGHT:
            self._settle()
        return moved

    def start(self) -> None:
        """A forward begins: nothing of the one before is prefetched or held."""
        self._latest = None
        while self._under_way:
            self._settle()

    def _settle(self) -> None:
        reference, event = self._under_way.popleft()
        if (moved := reference()) is not None:
            # The stream waits, not the host: forward goes on being launched.
            self.lane.wait(event)
            moved.release()


def _copy(sources: Parts, targets: Parts) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)
