"""Start runs as local processes, SLURM jobs (submitit) or Ray tasks, and wait for their end."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from shared_core.config.options import checked
from shared_core.errors import ConfigError, TrainingError, first_line, require
from shared_core.files.journal import read_object, write_object
from shared_core.libraries import optional

_GRACE_SECONDS, _SHOW_SECONDS = 5.0, 0.1
_TIME_LIMITS = {"timeout_min", "slurm_time"}
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class RemoteRun:
    """A training that runs elsewhere, with the interface of `subprocess.Popen`."""

    is_done: Callable[[], bool]
    result: Callable[[], int]
    """Waits for the end and returns the exit code."""
    kill: Callable[[], object]

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        return self.result() if self.is_done() else None

    def wait(self, timeout: float = math.inf) -> int:
        """Return the exit code once it has ended, or raise `subprocess.TimeoutExpired`."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= end:
                raise subprocess.TimeoutExpired("training", timeout)
            time.sleep(min(_POLL_SECONDS, timeout))
        return code


Run = subprocess.Popen[bytes] | RemoteRun


class Executor(Protocol):
    """Starts trainings."""

    def start(self, arguments: Sequence[str], variables: Mapping[str, str], log: Path) -> Run:
        """Start a training with a command, extra environment variables and a log file to append to."""


def executor_of(name: str, options: Sequence[str], folder: Path, where: str) -> Executor | None:
    """Return the executor for the runs of a search; None: local processes.

    Args:
        name: local, submitit or ray.
        options: ``NAME=VALUE``, as submitit's ``update_parameters`` or Ray's ``options`` take them.
        folder: The search's folder, on a file system that the other machines share.
        where: The calling command, for errors.

    Raises:
        ConfigError: If the name is unknown, or the executor does not accept an option.
        MissingExtraError: If its library is not installed.

    Example:
        >>> executor_of("local", [], Path("runs"), "eff chain") is None
        True
    """
    checked(name, Literal["local", "submitit", "ray"], where, "--executor")
    rule = f"--executor-set needs submitit or ray, got {' '.join(options)} with local"
    require(name != "local" or not options, where, rule)
    values: dict[str, Any] = {}
    for option in options:
        key, _, value = option.partition("=")
        require(key and value, where, f"--executor-set must be NAME=VALUE, got {option!r}")
        values[key] = int(value) if value.isdecimal() else value
    if name == "submitit":
        return SubmititExecutor(folder, values, where)
    return RayExecutor(values, where) if name == "ray" else None


class GroupedProcess(subprocess.Popen[bytes]):
    """A process that leads its own group, which ends as a whole, including workers and launched ranks."""

    def __init__(self, arguments: Sequence[str], **options: Any) -> None:
        group: dict[str, Any] = {"process_group": 0} if os.name == "posix" else {}
        super().__init__(arguments, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, **group, **options)

    def kill(self) -> None:
        """Terminate the group, and kill what is left some seconds later."""
        if os.name != "posix":
            super().kill()
            return
        try:
            self._signal_group(signal.SIGTERM)
            end = time.monotonic() + _GRACE_SECONDS
            while time.monotonic() < end and self._is_alive():
                time.sleep(_SHOW_SECONDS)
        finally:  # a second Ctrl-C skips the wait
            self._signal_group(signal.SIGKILL)
            self.wait()

    def _is_alive(self) -> bool:
        self.poll()  # otherwise an ended leader would stay in the group
        return self._signal_group(0)

    def _signal_group(self, number: int) -> bool:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
            return True
        return False


class LocalExecutor:
    """Starts each training as a process on this machine, which inherits descriptors."""

    def __init__(self, where: str, *descriptors: int) -> None:
        self._where, self._descriptors = where, descriptors if os.name == "posix" else ()

    def start(self, arguments: Sequence[str], variables: Mapping[str, str], log: Path) -> GroupedProcess:
        """Start the process."""
        try:
            with log.open("ab") as written:  # a file, not a pipe: it is complete even if this process is killed
                environment = {**os.environ, **variables}
                return GroupedProcess(arguments, env=environment, pass_fds=self._descriptors, stdout=written)
        except OSError as error:
            raise ConfigError(self._where, f"cannot start the command: {error}") from error


class SubmititExecutor:
    """Starts each training as a SLURM job; without SLURM, or with ``cluster=local``, as submitit's local process."""

    def __init__(self, folder: Path, parameters: Mapping[str, Any], where: str) -> None:
        submitit = optional("submitit", "slurm", f"{where}: --executor submitit")
        rule = "--executor-set must name a time limit: submitit stops a job after 5 minutes by default, got none"
        require(parameters.keys() & _TIME_LIMITS, where, rule, "add --executor-set timeout_min=600")
        given = dict(parameters)
        self._where, self._folder, cluster = where, folder.resolve() / ".submitit", given.pop("cluster", None)
        try:
            self._executor = submitit.AutoExecutor(self._folder, cluster=cluster)
            self._executor.update_parameters(**given)
        except (NameError, TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(where, f"--executor-set must have options of submitit, got {error}") from error

    def start(self, arguments: Sequence[str], variables: Mapping[str, str], log: Path) -> RemoteRun:
        """Submit a training."""
        note = log.with_suffix(".job.json")
        self._check_free(note)
        with _interruptible_children():
            job = self._executor.submit(run_training, [*arguments], dict(variables), os.getcwd(), str(log.resolve()))
        write_object(note, {"cluster": self._executor.cluster, "job": job.job_id})

        def result() -> int:
            if (failed := job.exception()) is not None:
                last = str(failed).strip().splitlines()[-1:] or [""]
                rule = f"job {job.job_id} failed with {type(failed).__name__}: {last[0]}"
                raise TrainingError(self._where, rule, f"see {job.paths.stderr} and {log}")
            return int(job.result())

        return RemoteRun(job.done, result, lambda: job.cancel(check=False))

    def _check_free(self, note: Path) -> None:
        if not note.exists() or (known := read_object(note)).get("cluster") != "slurm":
            return
        submitit = importlib.import_module("submitit")
        job = str(known.get("job"))
        rule = f"job {job} of a stopped search is still waiting or running"
        is_done = submitit.SlurmJob(self._folder, job).done(force_check=True)
        require(is_done, self._where, rule, f"wait for it, or scancel {job}", TrainingError)


class RayExecutor:
    """Starts each training as a Ray task, in the cluster of ``address`` or ``RAY_ADDRESS``, or in a new local one."""

    def __init__(self, options: Mapping[str, Any], where: str) -> None:
        self._ray, self._where, given = optional("ray", "ray", f"{where}: --executor ray"), where, dict(options)
        try:
            self._ray.init(address=given.pop("address", None), ignore_reinit_error=True, log_to_driver=False)
            self._task = self._ray.remote(run_training).options(max_retries=0, **given)
        except (TypeError, ValueError, ConnectionError) as error:
            raise ConfigError(where, f"--executor-set must have options of Ray, got {error}") from error

    def start(self, arguments: Sequence[str], variables: Mapping[str, str], log: Path) -> RemoteRun:
        """Submit a training. It ends with this process, because Ray ends a driver's tasks."""
        reference = self._task.remote([*arguments], dict(variables), os.getcwd(), str(log.resolve()))

        def result() -> int:
            try:
                return int(self._ray.get(reference))
            except self._ray.exceptions.RayError as error:
                raise TrainingError(self._where, f"the Ray task failed: {first_line(error)}", f"see {log}") from error

        return RemoteRun(
            lambda: bool(self._ray.wait([reference], timeout=0)[0]), result, lambda: self._ray.cancel(reference)
        )


def run_training(arguments: list[str], variables: dict[str, str], folder: str, log: str) -> int:
    """Train once on the current machine, in a folder, and return the exit code."""
    with open(log, "ab") as written:
        try:
            process = GroupedProcess(arguments, env={**os.environ, **variables}, cwd=folder, stdout=written)
        except OSError as error:
            written.write(f"{error}\n".encode())
            return 127
        try:
            return process.wait()
        except BaseException:
            process.kill()
            raise


@contextlib.contextmanager
def _interruptible_children() -> Iterator[None]:
    """Start processes that handle SIGINT, which submitit cancels them with. A shell's background jobs ignore it."""
    is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    if is_ignored and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    else:
        yield


_LAST_LINES = 15


class RunError(TrainingError):
    """A run's training failed.

    Args:
        message: What happened, with the last lines of the run's log.
        exit_code: The training's exit code, as a shell reports it.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.args = (message, exit_code)  # for unpickling
        self.exit_code = exit_code


@dataclass
class StartedRun:
    """A started run."""

    name: str
    """Name of the command and the run, for errors."""
    command: str
    """The training command, for errors."""
    run: Run
    log: Path
    """The file that its output is appended to."""
    shown: int
    """Bytes of the log that were shown, or are from an earlier attempt."""

    def finish(self, output: BinaryIO | None = None, is_hopeless: Callable[[], bool] = lambda: False) -> bool:
        """Wait for its end, and show its log meanwhile. Return False if it was stopped because it is hopeless."""
        try:
            while (code := self.run.poll()) is None:
                self._show(output)
                if is_hopeless():
                    self.run.kill()
                    return False
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.run.wait(_SHOW_SECONDS)
            self._show(output)
        except BaseException:
            self.run.kill()
            raise
        if code:
            text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
            lines = [line for line in text.replace("\r", "\n").splitlines() if line.strip()]
            raise RunError(
                f"{self.name} failed: `{self.command}` ended with exit code {code}; see {self.log}. "
                "The same command resumes here. The last lines:\n"
                + "\n".join(f"  {line}" for line in lines[-_LAST_LINES:]),
                code if code > 0 else 128 - code,
            )
        return True

    def _show(self, output: BinaryIO | None) -> None:
        if output is not None and self.log.exists():
            with self.log.open("rb") as log:
                log.seek(self.shown)
                output.write(log.read())
                output.flush()
                self.shown = log.tell()
