"""Where runs are started: as processes of this machine, as jobs of SLURM by submitit, or as tasks of Ray."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from shared_core.errors import ConfigError, TrainingError
from shared_core.files.journal import read_object, write_object
from shared_core.libraries import optional

EXECUTORS = ("local", "submitit", "ray")
_TIME_LIMITS = ("timeout_min", "slurm_time")
_POLL_SECONDS = 0.5


class Run(Protocol):
    """A training that was started, as `subprocess.Popen` shows one."""

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once it has ended, or raise `subprocess.TimeoutExpired`."""

    def kill(self) -> None:
        """Stop it."""


class Executor(Protocol):
    """Starts trainings."""

    def start(self, arguments: Sequence[str], variables: Mapping[str, str], log: Path) -> Run:
        """Return a training that was started: its command, further variables, and the file its output is added to."""


def executor_of(name: str, options: Sequence[str], folder: Path, where: str) -> Executor | None:
    """Return what starts the runs of a search; None: processes of this machine.

    Args:
        name: Of `EXECUTORS`.
        options: ``NAME=VALUE``, as submitit's ``update_parameters`` or Ray's ``options`` take them.
        folder: Of the search, on a file system that the other machines have too.
        where: Who asks.

    Raises:
        ConfigError: If there is none of this name, or it does not take an option.
        MissingExtraError: If its library is not installed.

    Example:
        >>> executor_of("local", [], Path("runs"), "eff chain") is None
        True
    """
    if name not in EXECUTORS:
        raise ConfigError(where, f"--executor must be one of {', '.join(EXECUTORS)}, got {name!r}")
    values: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not (key and equals and value):
            raise ConfigError(where, f"--executor-set must be NAME=VALUE, got {option!r}")
        values[key] = int(value) if value.isdecimal() else value
    if name == "submitit":
        return SubmititExecutor(folder, values, where)
    if name == "ray":
        return RayExecutor(values, where)
    if values:
        raise ConfigError(where, f"--executor-set must come with submitit or ray, got {options[0]!r} with local")
    return None


class LocalExecutor:
    """A process of this machine for each training.

    Args:
        where: Who asks.
        descriptors: Those that a process inherits.
        options: Further ones of `subprocess.Popen`.
    """

    def __init__(self, where: str, *descriptors: int, **options: Any) -> None:
        self._where, self._descriptors = where, descriptors if os.name == "posix" else ()
        self._options = {"stdin": subprocess.DEVNULL, **options}

    def start(self, arguments: Sequence[str], variables: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Return the process.

        Raises:
            ConfigError: If the command cannot be started.
        """
        try:
            with log.open("ab") as written:  # a file and no pipe: it is whole if this process is killed
                return subprocess.Popen(
                    arguments, env={**os.environ, **variables}, pass_fds=self._descriptors, stdout=written,
                    stderr=subprocess.STDOUT, **self._options,
                )  # fmt: skip
        except OSError as error:
            raise ConfigError(self._where, f"command must be one that can be started, got {error}") from error


class RemoteRun:
    """A training that runs elsewhere.

    Args:
        is_done: Returns whether it has ended.
        result: Returns its exit code then.
        cancel: Stops it.
    """

    def __init__(self, is_done: Callable[[], bool], result: Callable[[], int], cancel: Callable[[], object]) -> None:
        self._is_done, self._result, self._cancel = is_done, result, cancel

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        return self._result() if self._is_done() else None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once it has ended."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired("training", timeout or 0)
            time.sleep(min(_POLL_SECONDS, timeout or _POLL_SECONDS))
        return code

    def kill(self) -> None:
        """Stop it."""
        self._cancel()


class SubmititExecutor:
    """One job of SLURM for each training; without SLURM, or with ``cluster=local``, a process as submitit starts it.

    Args:
        folder: Of the search; submitit's files lie in ``.submitit`` in it.
        parameters: Of submitit's ``update_parameters``, and ``cluster``.
        where: Who asks.
    """

    def __init__(self, folder: Path, parameters: Mapping[str, Any], where: str) -> None:
        submitit = optional("submitit", "slurm", f"{where}: --executor submitit")
        if not any(name in parameters for name in _TIME_LIMITS):
            raise ConfigError(
                where,
                "--executor-set must name a time limit, as submitit stops a job after 5 minutes without, got none",
                "add --executor-set timeout_min=600",
            )
        given = dict(parameters)
        self._where, self._folder, cluster = where, folder.resolve() / ".submitit", given.pop("cluster", None)
        try:
            self._executor = submitit.AutoExecutor(self._folder, cluster=cluster)
            self._executor.update_parameters(**given)
        except (NameError, TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(where, f"--executor-set must be what submitit takes, got {error}") from error

    def start(self, arguments: Sequence[str], variables: Mapping[str, str], log: Path) -> RemoteRun:
        """Return a training that was submitted.

        Raises:
            TrainingError: If the job of a search that was killed still waits or runs.
        """
        note = log.with_suffix(".job.json")
        self._check_free(note)
        with _interruptible_children():
            job = self._executor.submit(run_training, [*arguments], dict(variables), os.getcwd(), str(log.resolve()))
        write_object(note, {"cluster": self._executor.cluster, "job": job.job_id})

        def result() -> int:
            if (failed := job.exception()) is not None:
                last = str(failed).strip().splitlines()[-1:] or [""]
                raise TrainingError(
                    self._where,
                    f"job {job.job_id} must come to its end, got {type(failed).__name__}: {last[0]}",
                    f"see {job.paths.stderr} and {log}",
                )
            return int(job.result())

        return RemoteRun(job.done, result, lambda: job.cancel(check=False))

    def _check_free(self, note: Path) -> None:
        if not note.exists() or (known := read_object(note)).get("cluster") != "slurm":
            return
        submitit = importlib.import_module("submitit")
        if not submitit.SlurmJob(self._folder, str(known.get("job"))).done(force_check=True):
            raise TrainingError(
                self._where,
                f"job {known.get('job')} of a search that was stopped must have ended, but it waits or runs",
                f"wait for it, or scancel {known.get('job')}",
            )


class RayExecutor:
    """One task of Ray for each training, in the cluster of ``RAY_ADDRESS``, or one that is started here.

    Args:
        options: Of Ray's ``options``, as num_gpus and num_cpus, and ``address``.
        where: Who asks.
    """

    def __init__(self, options: Mapping[str, Any], where: str) -> None:
        self._ray, self._where, given = optional("ray", "ray", f"{where}: --executor ray"), where, dict(options)
        try:
            self._ray.init(address=given.pop("address", None), ignore_reinit_error=True, log_to_driver=False)
            self._task = self._ray.remote(run_training).options(max_retries=0, **given)
        except (TypeError, ValueError, ConnectionError) as error:
            raise ConfigError(where, f"--executor-set must be what Ray takes, got {error}") from error

    def start(self, arguments: Sequence[str], variables: Mapping[str, str], log: Path) -> RemoteRun:
        """Return a training that was submitted; it ends with this process, as Ray ends a driver's tasks."""
        reference = self._task.remote([*arguments], dict(variables), os.getcwd(), str(log.resolve()))

        def result() -> int:
            try:
                return int(self._ray.get(reference))
            except self._ray.exceptions.RayError as error:
                first = (str(error).splitlines() or [""])[0]
                raise TrainingError(
                    self._where, f"Ray's task must come to its end, got {first}", f"see {log}"
                ) from error

        return RemoteRun(
            lambda: bool(self._ray.wait([reference], timeout=0)[0]), result, lambda: self._ray.cancel(reference)
        )


def run_training(arguments: list[str], variables: dict[str, str], folder: str, log: str) -> int:
    """Train once, on the machine that this is called on, and return the exit code.

    Args:
        arguments: The command.
        variables: Further variables of its environment.
        folder: Where it starts.
        log: The file that its output is added to.
    """
    try:
        process = LocalExecutor("run", cwd=folder).start(arguments, variables, Path(log))
    except ConfigError as error:
        with open(log, "a", encoding="utf-8") as written:
            written.write(f"{error}\n")
        return 127
    try:
        return process.wait()
    except BaseException:  # a job that is cancelled
        process.kill()
        raise


@contextlib.contextmanager
def _interruptible_children() -> Iterator[None]:
    """Start processes that heed SIGINT, by which submitit cancels those of this machine.

    A shell starts background jobs with SIGINT ignored, and so would their children.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
