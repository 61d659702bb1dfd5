"""Faults on purpose: a process killed at a chosen moment of its writing, a call or a write of the system that fails."""

import contextlib
import errno
import os
import random
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType

import pytest

SLOW = pytest.mark.slow
QUICK_POINTS, ALL_POINTS = 5, 20
"""Moments at which every writer is killed: in every run of the tests, and in the long ones."""
_OF_FILES = {"posix", "_io", "safetensors._safetensors_rust", "torch._C"}
_CALLS = {"fsync", "replace", "rename", "mkdir", "open", "fdopen"}
LIMIT = resource.getrlimit(resource.RLIMIT_FSIZE)


def dice():
    """Random numbers, the same in every run."""
    return random.Random(0)


def _count_calls(then):
    """Call `then` with the number of each call of C code that may touch files."""
    calls = 0

    def profile(frame, event, function):
        nonlocal calls
        owner = getattr(function, "__self__", None)
        if event == "c_call" and (owner.__name__ if type(owner) is ModuleType else type(owner).__module__) in _OF_FILES:
            calls += 1
            then(calls)

    sys.setprofile(profile)


def in_child(work):
    """Run `work` in a forked process; return its exit code, negative for a signal."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def count_moments(work, folder):
    """Return how many calls `work` makes that may touch files, and the size of the largest file it leaves."""
    told = folder.parent / f"{folder.name}.calls"

    def counted():
        number = [0]
        _count_calls(lambda calls: number.__setitem__(0, calls))
        work()
        sys.setprofile(None)
        told.write_text(str(number[0]))

    assert in_child(counted) == 0
    return int(told.read_text()), max(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def moments(calls, size, points, chance):
    """Return how to kill: ``("call", n)`` before that call, ``("byte", n)`` at that size of a file, or by the clock.

    Half of them are calls from the first to the last; the clock starts with the first change in the folder.
    """
    number = max(points // 2, 1)
    step = calls / number
    found = [("call", 1 + int(step * place + chance.random() * step)) for place in range(number - 1)]
    found += [("call", calls)] + [("byte", chance.randrange(size)) for _ in range(points // 3)]
    return found + [("clock", chance.random() * 0.01) for _ in range(points - len(found))]


def killed(work, how, at, folder):
    """Run `work` in a process that is killed at a moment; return whether it was, or came to its end before."""

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def suicide():
        if how == "call":
            _count_calls(lambda calls: calls == at and die())
        if how == "byte":
            # the process ends inside of the write, whichever library does it
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (at, LIMIT[1]))
        work()

    if how != "clock":
        code = in_child(suicide)
        assert code in (0, -signal.SIGKILL, -signal.SIGXFSZ), code
        return code != 0
    before = _listing(folder)
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            work()
        os._exit(0)
    while _listing(folder) == before and not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0)
    time.sleep(at)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def _listing(folder):
    return [(entry.name, entry.stat().st_mtime_ns) for entry in os.scandir(folder)]


@contextlib.contextmanager
def longest_file(size):
    """Let every write beyond so many bytes fail, in C and Rust too: EFBIG, which is told as a full disk is."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, LIMIT[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, LIMIT)


@contextlib.contextmanager
def failing_call(number, code):
    """Let that call of fsync, rename, mkdir or open fail with an error of the system; yields the calls so far."""
    calls, stock = [], {name: getattr(os, name) for name in _CALLS}

    def instead(name):
        def call(*args, **kwargs):
            is_reading = name == "open" and len(args) > 1 and not args[1] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR)
            if not is_reading:
                calls.append(name)
                if len(calls) == number:
                    raise OSError(code, os.strerror(code))
            return stock[name](*args, **kwargs)

        return call

    for name in stock:
        setattr(os, name, instead(name))
    try:
        yield calls
    finally:
        for name, function in stock.items():
            setattr(os, name, function)


@contextlib.contextmanager
def recorded():
    """Yield the list of what is brought to disk, renamed and removed: ``("fsync", path)``, ``("rename", old, new)``."""
    events, stock = [], (os.fsync, os.replace, os.rename, os.rmdir)

    def fsync(descriptor):
        stock[0](descriptor)
        events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))

    def rename(old, new, **kwargs):
        stock[1](old, new, **kwargs)
        events.append(("rename", Path(old).absolute(), Path(new).absolute()))

    def rmdir(path, **kwargs):
        stock[3](path, **kwargs)
        events.append(("rmdir", Path(path)))

    os.fsync, os.replace, os.rename, os.rmdir = fsync, rename, rename, rmdir
    try:
        yield events
    finally:
        os.fsync, os.replace, os.rename, os.rmdir = stock


ERRORS = (errno.ENOSPC, errno.EIO)
