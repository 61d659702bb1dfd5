"""A few hundred steps of somebody's script, in a process of its own that measures itself and then ends.

`shared_core.tools.try_out` starts such processes two by two and lets them take turns; `shorten_script` is what each of
them runs. A front end makes the trainer end after `ShortRun.steps`, keeps its files in `ShortRun.folder`, and calls
`ShortRun.conclude` behind the last step: nothing of the script that comes after is run.
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
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from shared_core.config.options import TechniqueConfig, option
from shared_core.engine.receipt import figures, headline
from shared_core.engine.recipe import Recipe
from shared_core.engine.registry import OURS, register
from shared_core.engine.session import Session
from shared_core.engine.technique import Context, Purpose, Technique
from shared_core.errors import CompatibilityError, EffError
from shared_core.files.atomic import atomic_write
from shared_core.files.json_yaml import json_text

VARIABLE = "EFF_SHORT_RUN"
"""The plan of a short run, as JSON, for the process that runs it."""
KEY = "short_run"
RESULT_FILE = "result.json"
_WEIGHTS = (".safetensors", ".bin", ".ckpt")
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclasses.dataclass(frozen=True)
class ShortPlan:
    """The plan of a short run.

    Args:
        steps: Optimizer steps.
        block: Steps of a turn.
        folder: All that the run writes.
        eval_batches: Batches of a validation at most; 0: all.
        seed: Added to the seed of the script's random numbers; 0 leaves them alone.
        tell: File descriptor that a byte is written to at the end of a turn. The next turn begins with a byte from
            the standard input.
    """

    steps: int
    block: int
    folder: str
    eval_batches: int
    seed: int
    tell: int


class ShortRun:
    """Measures a short run in its own process; a front end drives it.

    Args:
        plan: What was asked.
        turns: File descriptor that turns are read from.
    """

    def __init__(self, plan: ShortPlan, turns: int) -> None:
        self.plan, self.steps, self.folder = plan, plan.steps, Path(plan.folder)
        self._turns = turns
        self._seconds: list[float] = []
        self._losses: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._started = self._aside = 0.0
        self._done = 0

    def seed(self) -> None:
        """Move the seeds of the script's random numbers: the order of the data and dropout become others."""
        if self.plan.seed:
            torch.manual_seed(torch.initial_seed() + self.plan.seed)
            random.seed(self.plan.seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(self.plan.seed)

    def begin(self) -> None:
        """Wait for the first turn; memory counts from here."""
        self._wait()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.reset_peak_memory_stats()
        elif _CLEAR.exists():
            with contextlib.suppress(OSError):  # not every container lets a process do so
                _CLEAR.write_text("5", encoding="ascii")
        self._start()

    def saw(self, loss: Tensor) -> None:
        """Note the task's loss of a micro-batch; it stays on its device."""
        self._losses.append(loss.detach())

    def stepped(self) -> None:
        """Count an optimizer step, applied or skipped; at the end of a block let the other run have its turn."""
        self._done += 1
        if self._losses:
            self._sums.append(torch.stack([loss.float().mean() for loss in self._losses]).mean())
            self._losses = []
        if self._done % self.plan.block == 0:
            _synchronize()
            self._seconds.append(time.perf_counter() - self._started - self._aside)
            self._wait()
            self._start()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Surround what is no part of a step: validation and saving."""
        started = time.perf_counter()
        try:
            yield
        finally:
            _synchronize()
            self._aside += time.perf_counter() - started

    def conclude(
        self, session: Session, metrics: Callable[[], Mapping[str, Any]], save: Callable[[Path], object]
    ) -> NoReturn:
        """Validate, save, write the result and end the process.

        Args:
            session: Finished.
            metrics: Returns those of the validation.
            save: Saves the model as the trainer does, into a folder or file of this name.
        """
        memory = _peak_memory()
        found = figures(metrics())
        last = self._sums[-max(len(self._sums) // 4, 1) :]
        if last:
            found["train_loss"] = float(torch.stack([loss.to("cpu", torch.float64) for loss in last]).mean())
        save(self.folder / "model")
        written, packed = _sizes(self.folder / "model")
        told = {key: {**report, "note": []} for key, report in session.receipt().values["techniques"].items()}
        self.write({
            "steps": self._done, "seconds": self._seconds, "memory": memory, "metrics": found,
            "bytes": written, "packed": packed,
            "techniques": {key: headline(report) for key, report in told.items() if key != KEY},
        })  # fmt: skip
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # neither the rest of the script nor what it registered for its end: both may write elsewhere

    def write(self, result: Mapping[str, Any]) -> None:
        """Write the result."""
        with atomic_write(self.folder / RESULT_FILE) as temporary:
            temporary.write_text(json_text(dict(result)), encoding="utf-8")

    def _start(self) -> None:
        self._aside, self._started = 0.0, time.perf_counter()

    def _wait(self) -> None:
        os.write(self.plan.tell, b".")
        if not os.read(self._turns, 1):
            os._exit(1)  # whoever tries is gone


def check_one_process(world_size: int) -> None:
    """Refuse a script that trains in several processes, which cannot take turns."""
    if world_size > 1:
        raise CompatibilityError(
            "eff try", f"the script must train in one process, got {world_size}", "ask it for one device"
        )


def _synchronize() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def _peak_memory() -> int | None:
    """Return the most bytes since `begin`: of tensors on the GPU, or of the process without mapped files."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.max_memory_allocated()
    if not _STATUS.exists():
        return None
    status = _STATUS.read_text(encoding="ascii")
    kilobytes = {name: re.search(rf"{name}:\s+(\d+)", status) for name in ("VmHWM", "RssFile")}
    peak, mapped = kilobytes["VmHWM"], kilobytes["RssFile"]
    return None if peak is None or mapped is None else 1024 * (int(peak[1]) - int(mapped[1]))


def _sizes(model: Path) -> tuple[int, int]:
    """Return the bytes of the saved weights, and those that zlib leaves of them."""
    files = [model] if model.is_file() else [file for file in model.rglob("*") if file.suffix in _WEIGHTS]
    written = packed = 0
    for file in files:
        packer = zlib.compressobj(1)
        with file.open("rb") as stream:
            while piece := stream.read(1 << 20):
                written, packed = written + len(piece), packed + len(packer.compress(piece))
        packed += len(packer.flush())
    return written, packed


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortRunConfig(TechniqueConfig):
    """Has the technique below in a recipe: the hooks of a session are alike in every trainer and loop."""

    key = KEY
    switch = "on"
    before: ClassVar = tuple(sorted(OURS))  # its loss is the task's alone
    logs_nothing = "it writes a file"
    memory = "the loss of each step"

    on: bool = option(True, help="measure")


class MeasuredRun(Technique):
    """Tells a short run what a session tells every technique; it changes nothing."""

    key = KEY
    run: ClassVar[ShortRun]

    def before_attach(self, context: Context) -> None:
        """Random numbers are drawn from here on."""
        self.run.seed()

    def begin(self, context: Context) -> None:
        """The next step is the first one."""
        if not context.step and not context.is_preview:
            self.run.begin()

    def loss(self, task_loss: Tensor, context: Context) -> Tensor:
        """Note the loss."""
        self.run.saw(task_loss)
        return task_loss

    def after_step(self, context: Context, applied: bool) -> None:
        """Count the step."""
        self.run.stepped()

    def swapped(self, context: Context, purpose: Purpose) -> contextlib.AbstractContextManager[None]:
        """Neither a validation nor saving is part of a step."""
        return self.run.aside()


def shorten_script() -> None:
    """Run a script for a few steps and end: ``RECIPE SCRIPT|-m MODULE ARGUMENTS``, the plan in the environment."""
    from shared_core.front_ends.finding import front_ends
    from shared_core.front_ends.training_command import run_script

    turns = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    run = MeasuredRun.run = ShortRun(ShortPlan(**json.loads(os.environ.pop(VARIABLE))), turns)
    register(MeasuredRun, ShortRunConfig)
    recipe, *arguments = sys.argv[1:]
    try:
        wanted = Recipe.from_yaml(Path(recipe)).merged(Recipe.from_dict({KEY: {"on": True}}))
        for front_end in front_ends():
            front_end.install(wanted)
            front_end.shorten(run)
        run_script(arguments)
    except BaseException as error:
        kind = "" if isinstance(error, EffError) else f"{type(error).__name__}: "
        run.write({"error": f"{kind}{error}".strip(), "is_input": isinstance(error, EffError)})
        raise
    run.write({"error": "the script ended before a training with the techniques reached its last step"})
