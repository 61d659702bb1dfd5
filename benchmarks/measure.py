"""Measure variants interleaved in one process: CPU time of one thread, paired ratios."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import gc
import json
import os
import platform
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
LIBRARIES = (
    "torch",
    "transformers",
    "accelerate",
    "pytorch-lightning",
    "torchao",
    "triton",
    "trl",
    "liger-kernel",
    "onnxruntime",
    "numpy",
    "safetensors",
)
MIB = float(1 << 20)
QUIET_HF: dict[str, Any] = {
    "use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True,
}  # fmt: skip
"""Options of Hugging Face's TrainingArguments and, below, of Lightning's Trainer that switch off all but the steps."""
QUIET_LIGHTNING: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def text(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


@dataclass(frozen=True)
class Row:
    """One line of the result table. `met` is None where nothing was promised."""

    what: str
    ours: str
    peer: str = ""
    ratio: str = ""
    memory: str = ""
    target: str = ""
    met: bool | None = None
    roofline: str = ""
    """Where memory bounds the operation: its share of the bandwidth that a copy reaches on the same device."""


Times = dict[str, list[float]]


class Runs:
    """The results of single runs, printed as they come, and kept in a file so that a stopped benchmark can go on.

    Args:
        file: One line of JSON for each finished run; None keeps nothing. A line that was cut off is not there.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        text = file.read_text() if file is not None and file.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if file is not None and whole != text:
            os.truncate(file, len(whole.encode()))
        self._done: dict[str, dict[str, Any]] = dict(json.loads(line) for line in whole.splitlines())

    def __contains__(self, name: str) -> bool:
        return name in self._done

    def seeds(self, count: int, run: Callable[[int], dict[str, Any]], title: str = "") -> list[dict[str, Any]]:
        """Return the results of a run with each seed from 0 on."""
        before = f"{title}, " if title else ""
        return [self.of(f"{before}seed {seed}", partial(run, seed)) for seed in range(count)]

    def of(self, name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of a run, from the file if it was finished earlier."""
        if name not in self._done:
            self._done[name] = run()
            if self._file is not None:
                with self._file.open("a") as lines:
                    lines.write(json.dumps([name, self._done[name]]) + "\n")
                    lines.flush()
                    os.fsync(lines.fileno())
            report = {key: value for key, value in self._done[name].items() if not isinstance(value, list | dict)}
            print(f"{name}: {json.dumps(report)}", flush=True)
        return self._done[name]

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Forget these results; by default all."""
        gone = list(self._done if names is None else names)
        self._done = {name: result for name, result in self._done.items() if name not in gone}
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            if self._done:
                self._file.write_text("".join(f"{json.dumps(item)}\n" for item in self._done.items()))

    @property
    def seconds(self) -> float:
        """Seconds that all runs took, of those that recorded it."""
        return sum(result.get("seconds", 0.0) for result in self._done.values())


SECONDS = 8.0  # of CPU time for one comparison: a slow machine makes fewer rounds, not a longer benchmark
FEWEST = 3


def in_turn(variants: Mapping[str, Callable[[], float]], *, rounds: int, seconds: float = SECONDS) -> Times:
    """Return the seconds that each variant reports, one entry a round.

    Every round has an order of its own: what a call leaves in caches and on the heap is not always the same one's to
    find. After three rounds no new one is begun once `seconds` of this process's time are spent.
    """
    names = list(variants)
    times: Times = {name: [] for name in names}
    shuffle = random.Random(0).shuffle
    gc.collect()
    gc.freeze()  # what lives on need not be searched again before every call
    begun = time.process_time()
    for i in range(rounds):
        if i >= FEWEST and time.process_time() - begun > seconds:
            break
        shuffle(names)
        for name in names:
            gc.collect()
            times[name].append(variants[name]())
    gc.unfreeze()
    return times


def interleaved(
    variants: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    calls: int = 1,
    warmup: int = 1,
    seconds: float = SECONDS,
) -> Times:
    """Return CPU seconds a call, one entry a round, after some calls that are not measured."""

    def timed(call: Callable[[], Any]) -> float:
        start = time.process_time()
        for _ in range(calls):
            call()
        return (time.process_time() - start) / calls

    for call in variants.values():
        for _ in range(warmup):
            call()
    return in_turn({name: partial(timed, call) for name, call in variants.items()}, rounds=rounds, seconds=seconds)


def ratio(times: Times, name: str, base: str) -> Spread:
    """Return how much longer `name` takes than `base`: the paired ratios of the rounds."""
    return Spread.of([a / b for a, b in zip(times[name], times[base], strict=True)])


def added(times: Times, name: str, base: str) -> Spread:
    """Return the seconds that `name` takes more than `base`: the paired differences of the rounds."""
    return Spread.of([a - b for a, b in zip(times[name], times[base], strict=True)])


@cache
def copy_bandwidth() -> float:
    """Return the bytes a second that a copy reads and writes, of tensors that fit no cache."""
    source = torch.ones(1 << 26)
    target = torch.empty_like(source)
    times = interleaved({"copy": lambda: target.copy_(source)}, rounds=9, seconds=1.0)
    return 2 * source.nbytes / statistics.median(times["copy"])


def share_of_copy(moved: int, seconds: Sequence[float]) -> str:
    """Return how near an operation that has to move so many bytes comes to a copy."""
    return f"{moved / statistics.median(seconds) / copy_bandwidth():.2f} of a copy"


def milliseconds(times: Times, name: str) -> str:
    return f"{1e3 * statistics.median(times[name]):.1f} ms"


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees; where the C library is not glibc nothing happens.

    glibc hands large pieces back to the system when they are freed, and the next use of such memory faults its pages
    in again. How often that happens depends on the order of all frees and takes 4-8 % of a training step, which is
    more than the differences between policies that free more and less.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    trim_threshold, top_pad, mmap_max = -1, -2, -4  # M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_MAX of <malloc.h>
    libc = ctypes.CDLL(None)
    for option, value in ((mmap_max, 0), (trim_threshold, 2**31 - 1), (top_pad, 256 << 20)):
        if libc.mallopt(option, value) != 1:
            raise OSError(f"mallopt({option}, {value}) failed")


def live_tensor_bytes() -> int:
    """Return the bytes of all tensors that Python can reach, shared storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        # not isinstance: it would ask lazy proxies of other libraries for their class, which loads them
        if issubclass(type(thing), torch.Tensor):
            with contextlib.suppress(RuntimeError):  # sparse and fake ones have none
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def peak_allocated(call: Callable[[], Any]) -> int:
    """Return the largest number of bytes that torch's CPU allocator held during a call, above what it held before."""
    return allocated(call)[1]


def allocated(call: Callable[[], Any]) -> tuple[int, int]:
    """Return the bytes of torch's CPU allocator that a call leaves, and the most that it held, above those before."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
        gc.collect()
    held = peak = 0
    events: Any = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return held, peak


def run_and_watch(command: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Run a program that prints one line of JSON; return that and its peak anonymous memory in bytes.

    RssAnon is sampled from outside every 2 ms. Pages of mapped files, which the system may drop at any time, are not
    in it, as they would be in ``ru_maxrss``.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        peak, status = 0, Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            found = re.search(r"RssAnon:\s+(\d+) kB", status.read_text())
            peak = max(peak, 1024 * int(found[1]) if found else 0)
            time.sleep(0.002)
        output = process.stdout.read() if process.stdout else ""
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with exit status {process.returncode}")
    return json.loads(output.splitlines()[-1]), peak


def cpu_seconds(command: Sequence[str]) -> float:
    """Return user and system seconds of a program, its start included."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # what a library warns of at its import is no part of a table
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def device() -> str:
    """Return the processor's name and the widest instructions that torch uses: one name stands for several."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    name = found[1].strip() if found else platform.processor() or platform.machine()
    return f"{name} {torch.backends.cpu.get_cpu_capability()}"


def versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def table(rows: Iterable[Row]) -> str:
    """Return the rows as a Markdown table."""
    verdict = {True: "yes", False: "**no**", None: ""}
    lines = [
        "| what | ours | peer | ratio to plain: median [quartiles] | memory | roofline | target | met |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (row.what, row.ours, row.peer, row.ratio, row.memory, row.roofline, row.target, verdict[row.met])
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def installed() -> str:
    """Return the versions of what is measured, as a page of results gives them."""
    return ", ".join(f"{name} {number}" for name, number in versions().items())


def measured_on(day: str = "") -> str:
    """Return the caption of a section: day, device and versions."""
    return f"{day or today()}, {device()}, CPU, one thread. {installed()}."


NOTES = "### Notes\n"
"""Begins what people write below a generated section."""


def write_sections(file: Path, head: str, sections: Mapping[str, str], order: Sequence[str]) -> Path:
    """Write the given sections of a page, keep its others, and keep the notes below each.

    Args:
        file: The page. It is created if it does not exist.
        head: Everything above the first section.
        sections: Heading → text of each section that was measured.
        order: All headings, in the order of the page.
    """
    from shared_core.files.atomic import atomic_write  # here: what is measured may be an import

    before = file.read_text(encoding="utf-8") if file.exists() else ""
    kept = dict(re.findall(r"^## ([^\n]+)\n\n(.*?)(?=^## |\Z)", before, flags=re.M | re.S))
    for name, text in sections.items():
        _, heading, notes = kept.get(name, "").partition(NOTES)
        kept[name] = "\n\n".join(part.strip() for part in (text, heading + notes) if part)
    parts = [head.strip(), *(f"## {name}\n\n{kept[name].strip()}" for name in order if name in kept)]
    file.parent.mkdir(exist_ok=True)
    with atomic_write(file) as aside:
        aside.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return file


def write_between(file: Path, command: str, text: str) -> None:
    """Write the text into a page, between ``<!-- command -->`` and ``<!-- end command -->``."""
    from shared_core.files.atomic import atomic_write  # here: what is measured may be an import

    begin, end = f"<!-- {command} -->\n", f"<!-- end {command} -->"
    before, _, rest = file.read_text(encoding="utf-8").partition(begin)
    with atomic_write(file) as aside:
        aside.write_text(f"{before}{begin}{text}{end}{rest.partition(end)[2]}", encoding="utf-8")


def arguments_of_cells(description: str | None) -> argparse.Namespace:
    """Parse the command line of a table of cells: ``words`` choose the cells to run again, ``keep`` keeps the runs."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("words", nargs="*", metavar="WORD", help="run the cells again whose names contain one")
    parser.add_argument("--keep", type=Path, help="a new folder for the runs, which stays")
    return parser.parse_args()


def main(measure: Callable[..., list[Row]], **options: int) -> None:
    """Run one benchmark as a program of `run.py`: ``--quick`` for a look, ``--json FILE``, and options of its own.

    ``--more 1``, where a benchmark has it, adds the rows that ``make bench`` has no time for.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="few rounds, small models: to see that it runs")
    parser.add_argument("--json", type=Path, help="write the rows here")
    for name, default in options.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(arguments.quick, **{name: getattr(arguments, name) for name in options})
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows]))


def rows_of_program(module: str, *arguments: str, kind: Callable[..., Any] = Row) -> list[Any]:
    """Run a module of this folder, as `speed.pruning`, in a process of its own with one thread; return its rows."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory(prefix="eff-bench-") as folder:
        file = Path(folder) / "rows.json"
        command = python("-P", "-m", module, "--json", str(file), *arguments)
        subprocess.run(command, check=True, env={**os.environ, **threads, "PYTHONPATH": str(RESULTS.parent)})
        return [kind(**row) for row in json.loads(file.read_text())]


def today() -> str:
    return datetime.date.today().isoformat()


def python(*arguments: str) -> list[str]:
    """Return a command line for this interpreter."""
    return [sys.executable, *arguments]
