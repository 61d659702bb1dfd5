"""A command's work shared by the processes that a launcher (torchrun) started, through its key-value store alone.

No process group is made: a function of the user's that finds one (torchmetrics, accelerate, a trainer) would talk to
the other processes, which are at other work. So the launcher's variables are taken out of the environment, too.
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

from shared_core.errors import CompatibilityError, EffError

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_VARIABLES = (
    *_NEEDED, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME",
)  # fmt: skip
_FAILED = "failed"
_POLL_SECONDS = 0.02
_TIMEOUT = timedelta(minutes=10)  # of one request to the store, and of the start of the last process


class Job:
    """The part of one process in work that several share; alone, the default, it does all of it.

    Work is shared by tickets: a process that is done with one takes the next number. What is to be the same as in one
    process is put together by these numbers. As a context manager it tells the others of an error, which they raise
    when they next wait for something.
    """

    def __init__(self, store: Any = None, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size, self._store = rank, size, store
        self._taken: dict[str, int] = {}

    @classmethod
    def joined(cls) -> Job:
        """Return this process's part in the job of its launcher, and hide the launcher from what runs afterwards."""
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
        """True for the process that writes and prints."""
        return self.rank == 0

    def ticket(self, what: str) -> int:
        """Return the next number that no process has taken, from 0."""
        if self._store is None:
            self._taken[what] = self._taken.get(what, -1) + 1
            return self._taken[what]
        return int(self._ask(lambda: self._store.add(f"ticket {what}", 1))) - 1

    def tickets(self, what: str, count: int) -> Iterator[int]:
        """Yield the numbers below `count` that are this process's to work on."""
        while (number := self.ticket(what)) < count:
            yield number

    def set(self, name: str, value: bytes) -> None:
        """Give the others a value under a name that was not used before."""
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
        """Wait until every process has come here."""
        self.exchange(name, b"1")

    def check(self) -> None:
        """Raise the error of another process, if one failed."""
        if self._store is not None and self._ask(lambda: self._store.check([_FAILED])):
            raise EffError(self._store.get(_FAILED).decode())

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:  # of torch's store, whose own words name sockets
            line = (str(error).splitlines() or [""])[0]
            raise EffError("job", f"processes must live to the end, but the store of them is gone ({line})") from error

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._store is None or error is None:
            return
        said = str(error) if isinstance(error, EffError) else f"{type(error).__name__}: {error}"
        try:  # the first error is the one that counts
            self._store.compare_set(_FAILED, "", f"rank {self.rank} of {self.size} failed: {said}")
        except RuntimeError:  # nobody is left to tell
            return


def launched() -> int:
    """Return the number of processes that torchrun, or a launcher like it, started; 1 without one."""
    is_one_of_several = all(name in os.environ for name in _NEEDED) and os.environ["WORLD_SIZE"].isdecimal()
    return int(os.environ["WORLD_SIZE"]) if is_one_of_several else 1


def check_alone(where: str, why: str = "", size: int | None = None) -> None:
    """Refuse to be one of several processes, each of which would do all the work and write over the others' files.

    `why` names the options, as ``" with --jobs"``; `size` is by default what a launcher started.
    """
    size = launched() if size is None else size
    if size > 1:
        raise CompatibilityError(
            where, f"processes must be one{why}, got {size} of a launcher", "start it without torchrun"
        )
