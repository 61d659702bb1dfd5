"""A few hundred steps of a user's script, in a process that measures itself and then ends.

`TryOut` starts such processes in pairs that take turns. Each runs `shorten_script`. A front
end makes the trainer end after `ShortRunConfig.steps`, keeps its files in the run's folder, and calls
`ShortRun.conclude` after the last step. The rest of the script does not run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor

from shared_core.config.options import TechniqueConfig, option
from shared_core.engine.observers.history import numeric_metrics
from shared_core.engine.receipt import sentences
from shared_core.engine.recipe import Recipe
from shared_core.engine.registry import OURS, register
from shared_core.engine.session import Session
from shared_core.engine.technique import Context, Purpose, Technique
from shared_core.errors import CompatibilityError, EffError, require
from shared_core.files.atomic import atomic_write
from shared_core.files.json_yaml import json_text
from shared_core.runs.try_out import RESULT_FILE, VARIABLE

KEY = "short_run"
_WEIGHTS = (".safetensors", ".bin", ".ckpt")
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortRunConfig(TechniqueConfig):
    """Adds `ShortRun` to a recipe: a session's hooks are the same in every trainer and loop."""

    key = KEY
    switch = "steps"
    before: ClassVar = tuple(sorted(OURS))  # its loss is the task's only
    logs_nothing = "it writes a file"
    memory = "the loss of each step"

    steps: int = option(help="optimizer steps")
    block: int = option(help="steps of a turn")
    folder: str = option(help="folder for all that the run writes")
    eval_batches: int = option(help="maximum number of validation batches; 0: all")
    seed: int = option(help="added to the seed of the script's random numbers; 0 leaves them alone")
    turns: int = option(help="socket that a byte is written to at the end of a turn, and read from before the next")

    @property
    def output(self) -> str:
        """The folder that replaces the script's output folder."""
        return os.path.join(self.folder, "output")


class ShortRun(Technique):
    """Measures a short run in its own process through the technique hooks. It changes nothing."""

    config: ShortRunConfig

    def __init__(self, config: ShortRunConfig) -> None:
        super().__init__(config)
        self._seconds: list[float] = []
        self._losses: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._started = self._aside = 0.0
        self._done = 0

    def before_attach(self, context: Context) -> None:
        """Shift the script's random seeds, which changes the order of the data and dropout."""
        if self.config.seed:
            torch.manual_seed(torch.initial_seed() + self.config.seed)
            random.seed(self.config.seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(self.config.seed)

    def begin(self, context: Context, state: Mapping[str, Any] | None) -> None:
        """Wait for the first turn. Memory is measured from here."""
        if context.step or context.is_preview:
            return
        self._wait()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.reset_peak_memory_stats()
        elif _CLEAR.exists():
            with contextlib.suppress(OSError):  # some containers forbid it
                _CLEAR.write_text("5", encoding="ascii")
        self._start()

    def loss(self, task_loss: Tensor, context: Context) -> Tensor:
        """Record a micro-batch's loss, on its device."""
        self._losses.append(task_loss.detach())
        return task_loss

    def after_step(self, context: Context, applied: bool) -> None:
        """Count the step. At the end of a block give the other run its turn."""
        self._done += 1
        if self._losses:
            self._sums.append(torch.stack([loss.float().mean() for loss in self._losses]).mean())
            self._losses = []
        if self._done % self.config.block == 0:
            _synchronize()
            self._seconds.append(time.perf_counter() - self._started - self._aside)
            self._wait()
            self._start()

    @contextlib.contextmanager
    def swapped(self, context: Context, purpose: Purpose) -> Iterator[None]:
        """Exclude validation and saving from the step time."""
        started = time.perf_counter()
        try:
            yield
        finally:
            _synchronize()
            self._aside += time.perf_counter() - started

    def conclude(
        self, session: Session, metrics: Callable[[], Mapping[str, Any]], save: Callable[[Path], object]
    ) -> NoReturn:
        """Validate, save, write the result and end the process."""
        memory, model = _peak_memory(), Path(self.config.folder, "model")
        found = numeric_metrics(metrics())
        last = self._sums[-max(len(self._sums) // 4, 1) :]
        if last:
            found["train_loss"] = float(torch.stack([loss.to("cpu", torch.float64) for loss in last]).mean())
        save(model)
        written, packed = _sizes(model)
        reports = session.receipt().values["techniques"]
        plain = {key: report | {"note": ""} if "note" in report else report for key, report in reports.items()}
        write_result(self.config.folder, {
            "steps": self._done, "seconds": self._seconds, "memory": memory, "metrics": found,
            "bytes": written, "packed": packed, "learning": self._learning(),
            "techniques": {key: " ".join(sentences(key, report)) for key, report in plain.items() if key != KEY},
        })  # fmt: skip
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # skips the rest of the script and its exit handlers: both may write elsewhere

    def _learning(self) -> dict[str, float] | None:
        """Return the mean loss of the first and last quarter of the steps, and their difference's standard error."""
        count = len(self._sums) // 4
        if count < 2:
            return None
        losses = torch.stack([loss.to("cpu", torch.float64) for loss in self._sums])
        first, last = losses[:count], losses[-count:]
        error = ((first.var() + last.var()) / count).sqrt()
        return {"first": float(first.mean()), "last": float(last.mean()), "error": float(error)}

    def _start(self) -> None:
        self._aside, self._started = 0.0, time.perf_counter()

    def _wait(self) -> None:
        os.write(self.config.turns, b".")
        if not os.read(self.config.turns, 1):
            os._exit(1)  # the parent process has ended


def short_run_of(session: Session) -> ShortRun:
    """Return the `ShortRun` that measures a session's training."""
    return cast(ShortRun, session.techniques[KEY])


def write_result(folder: str, result: Mapping[str, Any]) -> None:
    """Write the result of a short run, or the reason why there is none."""
    with atomic_write(Path(folder, RESULT_FILE)) as temporary:
        temporary.write_text(json_text(dict(result)), encoding="utf-8")


def check_one_process(world_size: int) -> None:
    """Raise an error for a script that trains in several processes, which cannot take turns."""
    rule = f"the script must train in one process, got {world_size}"
    require(world_size < 2, "eff try", rule, "run it on one device", CompatibilityError)


def _synchronize() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def _peak_memory() -> int | None:
    """Return the peak bytes since `begin`: of tensors on the GPU, or of the process without mapped files."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.max_memory_allocated()
    if not _STATUS.exists():
        return None
    kilobytes = dict(re.findall(r"^(VmHWM|RssFile):\s+(\d+)", _STATUS.read_text(encoding="ascii"), flags=re.MULTILINE))
    return 1024 * (int(kilobytes["VmHWM"]) - int(kilobytes["RssFile"])) if len(kilobytes) == 2 else None


def _sizes(model: Path) -> tuple[int, int]:
    """Return the bytes of the saved weights, and their size compressed by zlib."""
    files = [model] if model.is_file() else [file for file in model.rglob("*") if file.suffix in _WEIGHTS]
    written = packed = 0
    for file in files:
        packer = zlib.compressobj(1)
        with file.open("rb") as stream:
            while piece := stream.read(1 << 20):
                written, packed = written + len(piece), packed + len(packer.compress(piece))
        packed += len(packer.flush())
    return written, packed


def shorten_script() -> None:
    """Run a script for a few steps and end: ``RECIPE SCRIPT|-m MODULE ARGUMENTS``, its options in the environment."""
    from shared_core.front_ends.finding import front_ends
    from shared_core.runs.command import run_script

    register(ShortRun, ShortRunConfig)
    config = ShortRunConfig(**json.loads(os.environ.pop(VARIABLE)))
    recipe, *arguments = sys.argv[1:]
    try:
        wanted = Recipe.from_yaml(Path(recipe)).merged(Recipe({KEY: config}))
        for front_end in front_ends():
            front_end.install(wanted)
            front_end.shorten(config)
        run_script(arguments)
    except BaseException as error:
        kind = "" if isinstance(error, EffError) else f"{type(error).__name__}: "
        write_result(config.folder, {"error": f"{kind}{error}".strip()})
        raise
    write_result(
        config.folder, {"error": "the script ended before a training with the techniques reached its last step"}
    )
