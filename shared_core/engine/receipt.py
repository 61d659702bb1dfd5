"""The receipt of a run: its recipe, what each technique did, and the time it took. JSON, and a table for people."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared_core.engine.protocols import TrainsPeers, offering
from shared_core.engine.registry import REGISTRY
from shared_core.files.atomic import atomic_write, make_folder
from shared_core.files.json_yaml import json_text, parse_json
from shared_core.hardware import environment
from shared_core.printing import counted, duration, is_quiet, printable, table, width_of_output

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from shared_core.engine.session import Session

RECEIPT_FILE = "eff_receipt.json"
RECEIPT_KEY = "eff_receipt"
"""Key in a Lightning checkpoint that holds the receipt's text, if a run writes no file."""
VARIABLE = "EFF_RECEIPT"
"""Environment variable that names a file to which every receipt is also written."""
_WRITTEN: dict[Path, object] = {}
"""Run of this process whose receipt a file holds, by file."""


class ReceiptPlace:
    """Where a run writes its receipt: in its folder, or inside its checkpoints if the folder may hold only those.

    Args:
        folder: Folder of the run, a path or a URL.
        listed: Folders in which every file is taken for a checkpoint.
    """

    def __init__(self, folder: Path | str, listed: Iterable[str] = ()) -> None:
        # A URL (s3://...) is not a path that a file can be written to.
        self.folder = None if "://" in str(folder) else Path(folder)
        """None if it is not a path."""
        paths = {Path(one).resolve() for one in listed if "://" not in one}
        self.is_in_checkpoints = self.folder is None or self.folder.resolve() in paths

    @property
    def file(self) -> Path | None:
        """The receipt's file, None if it is inside the checkpoints."""
        return None if self.folder is None or self.is_in_checkpoints else self.folder / RECEIPT_FILE

    @property
    def description(self) -> str:
        """Where users find it."""
        if self.file is None:
            return "in each checkpoint, up to its step; as an HTML page: eff report CHECKPOINT.ckpt"
        return f"{self.file}; as an HTML page: eff report {self.folder}"


class Receipt:
    """Record of what happened in a run, as plain values under `values`.

    Args:
        values: See `of`.
        writers: Functions that write a technique's files into the same folder, such as other students.
        run: Identity of the run in this process. None replaces whatever receipt there is.
        is_resumed: True if the run may have written a receipt in another process.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        writers: Iterable[Callable[[Path], None]] = (),
        run: object = None,
        *,
        is_resumed: bool = False,
    ) -> None:
        self.values, self._writers, self._run, self._is_resumed = dict(values), tuple(writers), run, is_resumed
        self._location = ""

    @classmethod
    def of(cls, session: Session) -> Receipt:
        """Return the receipt of a session so far."""
        context = session.context
        applied, skipped = context.furthest if context else (0, 0)
        values = {
            "recipe": session.recipe.to_dict(),
            "front_end": session.front_end,
            "finished": session.is_complete,
            "environment": environment(),
            "steps": {"applied": applied, "skipped": skipped, "planned": context and context.total_steps},
            "wall_seconds": round(time.perf_counter() - session.started, 3),
            "seconds": {key: round(spent, 4) for key, spent in session.hooks.seconds.items()},
            "techniques": session.reports(),
            "unreached": session.progress.unreached(),
            "final_evaluation": session.validation.finals(),
            "coverage": {key: reach.to_dict() for key, reach in session.coverage.items()},
            "experts_without_tokens": session.experts.without_tokens(),
            **session.history.to_dict(),
            "notes": [*session.notes, *([_CUT_SHORT] if session.is_finished and not session.is_complete else [])],
        }
        writers: list[Callable[[Path], None]] = []
        if session.has_begun:
            writers += [one.write for _, one in offering(session.techniques, TrainsPeers)]
        # If the trainer saves the whole model, its trained part is written next to the receipt.
        if session.is_finished and context and not context.part_alone and (part := session.files.part()) is not None:
            writers.append(lambda folder: part.write(folder / part.name))
        # Each run has a new history.
        return cls(values, writers, session.history, is_resumed=session.is_resumed)

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def write(self, folder: Path | str) -> Path:
        """Write ``eff_receipt.json`` and related files into `folder`, which is created if needed. Return its path.

        The receipt of another run there is kept as ``eff_receipt-1.json`` (-2, ...). A resumed run replaces its own,
        which has the same recipe. The receipt is also written to the file named by the environment variable
        ``EFF_RECEIPT``, for scripts whose folder is unknown.
        """
        self.leave(ReceiptPlace(folder))
        return Path(folder) / RECEIPT_FILE

    def leave(self, place: ReceiptPlace) -> None:
        """Write the receipt as `write` does, to a trainer's place."""
        if place.folder is not None:
            make_folder(place.folder)
        # Write to the file that the environment variable names, and to the run's own place.
        kept: list[str] = []
        for file in (os.environ.get(VARIABLE), place.file):
            if file:
                kept += self._keep_other(Path(file).resolve())
                with atomic_write(file) as temporary:
                    temporary.write_text(self.json() + "\n", encoding="utf-8")
        for write in self._writers:
            if place.folder is not None:
                write(place.folder)
        before = f"; of the previous run in this folder: {', '.join(kept)}" if kept else ""
        self._location = place.description + before

    def _keep_other(self, file: Path) -> list[str]:
        """Rename the receipt of another run with the same name. Return its new name, if any."""
        is_own = self._run is None or (self._is_own(file) if file not in _WRITTEN else _WRITTEN[file] is self._run)
        _WRITTEN[file] = self._run
        if is_own or not file.is_file():
            return []
        numbered = (file.with_stem(f"{file.stem}-{number}") for number in itertools.count(1))
        kept = next(name for name in numbered if not name.exists())
        file.replace(kept)
        return [kept.name]

    def _is_own(self, file: Path) -> bool:
        """Return True if this run may have written a receipt before it was resumed in this process."""
        if not self._is_resumed:
            return False
        try:
            written = parse_json(file.read_bytes())["recipe"]
        except (OSError, ValueError, LookupError, TypeError):  # no file, or not a receipt
            return False
        return json_text(written) == json_text(self.values["recipe"])

    def json(self) -> str:
        """Return the receipt as JSON text."""
        return json_text(self.values)

    @classmethod
    def read(cls, folder: Path | str) -> Receipt:
        """Return the receipt that `write` has written into `folder`."""
        return cls(parse_json((Path(folder) / RECEIPT_FILE).read_text(encoding="utf-8")))

    def table(self) -> Table:
        """Return a table with one row per technique: what it did, and the time spent in its own code."""
        from rich.markup import escape

        rows = [
            (escape(key), escape(" ".join(sentences(key, report))), duration(self.values["seconds"].get(key, 0.0)))
            for key, report in self.values["techniques"].items()
        ]
        headings = ("technique", "what happened", "own time")
        title = f"efftrain receipt: {_steps(self.values['steps'], ' applied')}"
        return table(title, headings[:2], headings, rows)

    def text(self, width: int | None = None) -> str:
        """Return the table, the notes and the location of the receipt as plain text.

        Args:
            width: Number of columns. None for the terminal's width, at most 100.
        """
        return printable(self._printed(width or min(width_of_output(), _WIDTH)).export_text()).rstrip()

    def line(self) -> str:
        """Return a one-line summary: steps, the first sentence of each technique, the number of notes.

        Example:
            >>> values = {"steps": {"applied": 9, "skipped": 0}, "notes": ["one"]}
            >>> values["techniques"] = {"my_technique": {"layers": 64, "share": 0.5}}
            >>> Receipt(values).line()
            'efftrain: 9 steps; my_technique: layers 64, share 0.5; 1 note'
        """
        parts = [f"{key}: {sentences(key, report)[0].rstrip('.')}" for key, report in self.values["techniques"].items()]
        if notes := len(self.values["notes"]):
            parts.append(counted(notes, "note"))
        parts += [f"full receipt: {self._location}"] if self._location else []
        return printable(f"efftrain: {'; '.join([_steps(self.values['steps']), *parts])}")

    def final_text(self) -> str:
        """Return what a run prints at its end: `text`, or `line` if ``EFF_QUIET`` is set."""
        return self.line() if is_quiet() else self.text()

    def _repr_html_(self) -> str:
        # Notebooks use this to show the value of a cell.
        return printable(self._printed(_WIDTH).export_html(inline_styles=True, code_format="<pre>{code}</pre>"))

    def _printed(self, width: int) -> Console:
        from rich.console import Console

        console = Console(width=width, record=True, file=io.StringIO())
        console.print(self.table())
        for note in self.values["notes"]:
            console.print(f"note: {note}", markup=False, highlight=False)
        if self._location:
            console.print(f"full receipt: {self._location}", markup=False, highlight=False, soft_wrap=True)
        return console


_WIDTH = 100
_CUT_SHORT = "The run was cut short, so the model is not the result of the techniques."


def _steps(steps: Mapping[str, Any], verb: str = "") -> str:
    skipped = f", {steps['skipped']:,} skipped" if steps["skipped"] else ""
    return f"{counted(steps['applied'], 'step')}{verb}{skipped}"


def sentences(key: str, report: Mapping[str, Any]) -> list[str]:
    """Return a technique's report in sentences, or as names and figures if it has none.

    Example:
        >>> sentences("my_technique", {"layers": 2, "left_out": {"head": "too small"}})
        ['layers 2, left out 1']
    """
    lines: list[str] = []
    if key in REGISTRY:
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):  # a report of another version
            lines = REGISTRY[key].technique_class.summary(report)
    return lines or [_names_and_figures(report) or "Nothing was reported."]


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
