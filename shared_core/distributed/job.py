"""Share a command's work between the processes of a launcher (torchrun), using only its key-value store.

There is no process group: the user's code (torchmetrics, Accelerate, a trainer) would use it to talk to the other
processes, which do other work. For the same reason the launcher's environment variables are removed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
from torch.distributed.rendezvous import rendezvous

from shared_core.errors import CompatibilityError, EffError, first_line

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_VARIABLES = (
    *_NEEDED, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME",
)  # fmt: skip
_FAILED = "failed"
_POLL_SECONDS = 0.02
_TIMEOUT = timedelta(minutes=10)  # for one request to the store, and until the last process has started


class Job:
    """One process's view of shared work. By default a single process does all of it.

    Work is distributed by tickets: a process that is done takes the next number. Results are combined in the order of
    the numbers, so they do not depend on the number of processes. As a context manager, it reports an error to the
    other processes, which raise it the next time they wait.
    """

    def __init__(self, store: Any = None, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size, self._store = rank, size, store
        self._taken: dict[str, int] = {}

    @classmethod
    def joined(cls) -> Job:
        """Join the job of the launcher, and hide the launcher from code that runs afterwards."""
        size = launched()
        if size == 1:
            return cls()
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        store, rank, size = next(iter(rendezvous("env://", timeout=_TIMEOUT)))
        for name in [name for name in os.environ if name in _VARIABLES or name.startswith("TORCHELASTIC_")]:
            del os.environ[name]
        return cls(store, rank, size)

    @property
    def is_main(self) -> bool:
        """True for the process that writes files and prints."""
        return self.rank == 0

    def ticket(self, what: str) -> int:
        """Return the next number that no process has taken, starting at 0."""
        if self._store is None:
            self._taken[what] = self._taken.get(what, -1) + 1
            return self._taken[what]
        return int(self._ask(lambda: self._store.add(f"ticket {what}", 1))) - 1

    def tickets(self, what: str, count: int) -> Iterator[int]:
        """Yield the numbers below `count` that this process should work on."""
        while (number := self.ticket(what)) < count:
            yield number

    def set(self, name: str, value: bytes) -> None:
        """Share a value with the other processes, under a new name."""
        if self._store is not None:
            self._ask(lambda: self._store.set(name, value))

    def has(self, name: str) -> bool:
        """Return True if there is a value under this name."""
        self.check()
        return bool(self._ask(lambda: self._store.check([name])))

    def get(self, name: str) -> bytes:
        """Wait for the value under a name and return it."""
        while not self.has(name):
            time.sleep(_POLL_SECONDS)
        return bytes(self._ask(lambda: self._store.get(name)))

    def exchange(self, name: str, mine: bytes) -> list[bytes]:
        """Return what every process gave under this name, by rank; each must call it, once."""
        if self._store is None:
            return [mine]
        self.set(f"{name} {self.rank}", mine)
        return [self.get(f"{name} {rank}") for rank in range(self.size)]

    def meet(self, name: str) -> None:
        """Wait until every process has reached this call."""
        self.exchange(name, b"1")

    def check(self) -> None:
        """Raise the error of another process, if one failed."""
        if self._store is not None and self._ask(lambda: self._store.check([_FAILED])):
            raise EffError(self._store.get(_FAILED).decode())

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:  # from torch's store, whose message is about sockets
            rule = f"lost the connection to the other processes ({first_line(error)}); one has ended early"
            raise EffError("job", rule) from error

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._store is None or error is None:
            return
        said = str(error) if isinstance(error, EffError) else f"{type(error).__name__}: {error}"
        try:  # keep only the first error
            self._store.compare_set(_FAILED, "", f"rank {self.rank} of {self.size} failed: {said}")
        except RuntimeError:  # no other process is left
            return


def launched() -> int:
    """Return the number of processes that torchrun or a similar launcher started; 1 without one."""
    is_one_of_several = all(name in os.environ for name in _NEEDED) and os.environ["WORLD_SIZE"].isdecimal()
    return int(os.environ["WORLD_SIZE"]) if is_one_of_several else 1


def check_alone(where: str, why: str = "", size: int | None = None) -> None:
    """Refuse to run in several processes, which would all do the same work and overwrite each other's files.

    `why` names the options, such as ``" with --jobs"``. `size` is by default the launcher's number of processes.
    """
    size = launched() if size is None else size
    if size > 1:
        raise CompatibilityError(
            where, f"must run in one process{why}, but a launcher started {size}", "start it without torchrun"
        )
