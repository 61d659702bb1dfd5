"""The receipt of a run: what was asked, touched and run, what it cost. JSON for machines, a table for people."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shared_core.engine.protocols import TrainsPeers, offering
from shared_core.engine.registry import REGISTRY
from shared_core.files.atomic import atomic_write, make_folder
from shared_core.files.json_yaml import json_text, parse_json
from shared_core.hardware import matmul_environment
from shared_core.printing import counted, duration, is_quiet, printable, table, width_of_output

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from shared_core.engine.session import Session

RECEIPT_FILE = "eff_receipt.json"
RECEIPT_KEY = "eff_receipt"
"""Of a Lightning checkpoint where a run leaves no file: the text of one."""
VARIABLE = "EFF_RECEIPT"
"""Variable of the environment: a file that gets every receipt too."""
_WRITTEN: dict[Path, object] = {}
"""By file, the run of this process whose receipt it holds."""
# what evaluation took, which differs between runs that are otherwise equal
_TIMINGS = ("_runtime", "_per_second", "_time")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """Return versions, device and what it multiplies, as a receipt records them."""
    libraries = ("efftrain", "torch", "transformers", "accelerate", "pytorch-lightning", "lightning")
    return {
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
        "libraries": {name: found for name in libraries if (found := _version(name))},
        **matmul_environment(),
    }


class ReceiptPlace:
    """Where a run leaves its receipt: in its folder, or in its checkpoints where a file would be taken for one of them.

    Args:
        folder: Of the run, a path or a URL.
        listed: Folders of checkpoints that others list.
    """

    def __init__(self, folder: Path | str, listed: Iterable[str] = ()) -> None:
        # A URL (s3://...) is no path that a file could be written to.
        self.folder = None if "://" in str(folder) else Path(folder)
        """None where it is no path."""
        paths = {Path(one).resolve() for one in listed if "://" not in one}
        self.is_in_checkpoints = self.folder is None or self.folder.resolve() in paths

    @property
    def file(self) -> Path | None:
        """The receipt's own file."""
        return None if self.folder is None or self.is_in_checkpoints else self.folder / RECEIPT_FILE

    @property
    def told(self) -> str:
        """Where a user finds it."""
        if self.file is None:
            return "in each checkpoint, as of its step; as a page: eff report CHECKPOINT.ckpt"
        return f"{self.file}; as a page: eff report {self.folder}"


class Receipt:
    """Record of what happened in a run, as plain values under `values`.

    Args:
        values: See `of`.
        writers: What techniques write into the same folder, such as the other students of a distillation.
        run: Stands for the run: receipts of another one of this process are kept.
    """

    def __init__(
        self, values: Mapping[str, Any], writers: Iterable[Callable[[Path], None]] = (), run: object = None
    ) -> None:
        self.values, self._writers, self._run = dict(values), tuple(writers), run
        self._told = ""

    @classmethod
    def of(cls, session: Session) -> Receipt:
        """Return what was asked of a session, what it has touched and run so far, and what that cost."""
        context = session.context
        applied, skipped = context.furthest if context else (0, 0)
        values = {
            "recipe": session.recipe.to_dict(),
            "front_end": session.front_end,
            "finished": session.is_finished,
            "environment": environment(),
            "steps": {"applied": applied, "skipped": skipped, "planned": context and context.total_steps},
            "wall_seconds": round(time.perf_counter() - session.started, 3),
            "seconds": {key: round(spent, 4) for key, spent in session.hooks.seconds.items()},
            "techniques": session.reports(),
            "unreached": session.ending.unreached(),
            "final_evaluation": session.validation.finals(),
            "coverage": {key: reach.to_dict() for key, reach in session.coverage.items()},
            "experts_without_tokens": session.experts.without_tokens(),
            **session.history.told(),
            "notes": list(session.notes),
        }
        writers: list[Callable[[Path], None]] = []
        if session.has_begun:
            writers += [one.write for _, one in offering(session.techniques, TrainsPeers)]
        # Where the trainer saves the whole model, its trained part lies beside the receipt.
        if session.is_finished and context and not context.part_alone and (part := session.part()) is not None:
            writers.append(part.write_beside)
        return cls(values, writers, session.run)

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def write(self, folder: Path | str) -> Path:
        """Write ``eff_receipt.json`` into `folder`, made if need be, and what belongs beside it; return its path.

        Where another run of this process left its receipt there, that one is kept as ``eff_receipt-1.json`` (-2, ...).
        The file that the environment variable ``EFF_RECEIPT`` names gets the same: whoever runs a script that nobody
        edits need not know where it writes.
        """
        self.leave(ReceiptPlace(folder))
        return Path(folder) / RECEIPT_FILE

    def leave(self, place: ReceiptPlace) -> None:
        """Do what `write` does where a trainer says that it may be done."""
        if place.folder is not None:
            make_folder(place.folder)
        # The variable names one file for scripts that start runs; the run's own place beside it.
        kept: list[str] = []
        for file in (os.environ.get(VARIABLE), place.file):
            if file:
                kept += self._keep_other(Path(file).resolve())
                with atomic_write(file) as temporary:
                    temporary.write_text(self.json() + "\n", encoding="utf-8")
        for write in self._writers:
            if place.folder is not None:
                write(place.folder)
        before = f"; of the run before in this process: {', '.join(kept)}" if kept else ""
        self._told = place.told + before

    def _keep_other(self, file: Path) -> list[str]:
        """Rename a receipt that another run of this process left under the same name; return its new name, if any."""
        other, _WRITTEN[file] = _WRITTEN.get(file, self._run), self._run
        if other is self._run or not file.is_file():
            return []
        numbered = (file.with_stem(f"{file.stem}-{number}") for number in itertools.count(1))
        kept = next(name for name in numbered if not name.exists())
        file.replace(kept)
        return [kept.name]

    def json(self) -> str:
        """Return all of it as a text."""
        return json_text(self.values)

    @classmethod
    def read(cls, folder: Path | str) -> Receipt:
        """Return the receipt that `write` left in `folder`."""
        return cls(parse_json((Path(folder) / RECEIPT_FILE).read_text(encoding="utf-8")))

    def table(self) -> Table:
        """Return one row a technique: what it did, and the time that its own code took."""
        from rich.markup import escape

        rows = [
            (escape(key), escape(" ".join(sentences(key, report))), duration(self.values["seconds"].get(key, 0.0)))
            for key, report in self.values["techniques"].items()
        ]
        headings = ("technique", "what happened", "own time")
        title = f"efftrain receipt: {_steps(self.values['steps'], ' applied')}"
        return table(title, headings[:2], headings, rows)

    def text(self, width: int | None = None) -> str:
        """Return the table, the notes under it, and where it was written, as plain text.

        Args:
            width: Columns. None: those of the terminal, 100 at most.
        """
        return printable(self._printed(width or min(width_of_output(), _WIDTH)).export_text()).rstrip()

    def line(self) -> str:
        """Return what happened in a line: steps, the first sentence of each technique, the number of notes.

        Example:
            >>> values = {"steps": {"applied": 9, "skipped": 0}, "notes": ["one"]}
            >>> values["techniques"] = {"my_technique": {"layers": 64, "share": 0.5}}
            >>> Receipt(values).line()
            'efftrain: 9 steps; my_technique: layers 64, share 0.5; 1 note'
        """
        parts = [f"{key}: {sentences(key, report)[0].rstrip('.')}" for key, report in self.values["techniques"].items()]
        if notes := len(self.values["notes"]):
            parts.append(counted(notes, "note"))
        parts += [f"all of it: {self._told}"] if self._told else []
        return printable(f"efftrain: {'; '.join([_steps(self.values['steps']), *parts])}")

    def told(self) -> str:
        """Return what a run prints at its end: `text`, or `line` where ``EFF_QUIET`` is set."""
        return self.line() if is_quiet() else self.text()

    def _repr_html_(self) -> str:
        # notebooks show the value of a cell by it
        return printable(self._printed(_WIDTH).export_html(inline_styles=True, code_format="<pre>{code}</pre>"))

    def _printed(self, width: int) -> Console:
        from rich.console import Console

        console = Console(width=width, record=True, file=io.StringIO())
        console.print(self.table())
        for note in self.values["notes"]:
            console.print(f"note: {note}", markup=False, highlight=False)
        if self._told:
            console.print(f"all of it: {self._told}", markup=False, highlight=False, soft_wrap=True)
        return console


_WIDTH = 100


def _steps(steps: Mapping[str, Any], verb: str = "") -> str:
    skipped = f", {steps['skipped']:,} skipped" if steps["skipped"] else ""
    return f"{counted(steps['applied'], 'step')}{verb}{skipped}"


def figures(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among metrics, but not how long the validation took.

    Example:
        >>> figures({"eval_loss": 0.5, "eval_runtime": 3.0, "note": "x"})
        {'eval_loss': 0.5}
    """
    return {name: float(value) for name, value in metrics.items() if _is_figure(name, value)}


def device_memory() -> dict[str, float]:
    """Return the bytes that tensors take on the CUDA device now, and the most so far; nothing without one."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    found = torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]  # the flat form costs much more
    return {"memory/allocated": float(found["current"]), "memory/largest": float(found["peak"])}


def _is_figure(name: str, value: Any) -> bool:
    is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    of_a_technique = name.partition("/")[0] in REGISTRY  # Lightning hands back what was logged for us
    return is_number and not isinstance(value, bool) and not name.endswith(_TIMINGS) and not of_a_technique


def sentences(key: str, report: Mapping[str, Any]) -> list[str]:
    """Return what a technique's report says in sentences, or its names and figures where it has none.

    Example:
        >>> sentences("my_technique", {"layers": 2, "left_out": {"head": "too small"}})
        ['layers 2, left out 1']
    """
    told: list[str] = []
    if key in REGISTRY:
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):  # a report of another version
            told = REGISTRY[key].technique_class.summary(report)
    return told or [_names_and_figures(report) or "Nothing was reported."]


def _names_and_figures(report: Mapping[str, Any]) -> str:
    parts = []
    for key, value in report.items():
        name = key.replace("_", " ")
        if value is None or isinstance(value, bool):
            parts.append(f"{name} {({None: 'none', True: 'yes', False: 'no'})[value]}")
        elif isinstance(value, str):
            parts.append(f"{name} {value}")
        elif isinstance(value, float):
            parts.append(f"{name} {value:.4g}")
        elif isinstance(value, int):
            parts.append(f"{name} {value:,}")
        elif isinstance(value, list | tuple | dict) and value and key != "notes" and not key.startswith("per_"):
            parts.append(f"{name} {len(value)}")
    return ", ".join(parts)
