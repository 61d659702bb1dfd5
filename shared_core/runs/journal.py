"""The folder of a search that goes on where it was stopped: what is searched, what is known so far, who works on it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shared_core.errors import CheckpointError
from shared_core.files.atomic import clean_strays, make_folder
from shared_core.files.journal import check_same, locked, read_object, write_object


class Journal:
    """A JSON file of the folder, which its owner alone can read: it holds the plan, and what is noted beside it."""

    def __init__(self, file: Path, where: str, what: str, plan: Mapping[str, Any], own: str) -> None:
        self.file, self._where, self._what, self._own = file, where, what, own
        # Through JSON and back: a tuple compares unequal to the list that the file holds.
        self._plan = json.loads(json.dumps({"format": 1, **plan}))

    def read(self, *noted: str) -> dict[str, Any]:
        """Return what was noted under these names, nothing in a new folder."""
        folder = self.file.parent
        if self.file.exists():
            known = read_object(self.file)
            found = {name: known.pop(name, None) for name in noted}
            check_same(self.file, known, self._plan, self._what)
            return found
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(self._where, f"out must be a folder, got the file {folder}")
        if odd := sorted(path.name for path in folder.glob(self._own)):
            raise CheckpointError(
                self._where,
                f"out must be new or hold a {self._what}, got {folder} with {odd[0]!r} and no {self.file.name}",
                "give another folder",
            )
        return {}

    def write(self, **noted: Any) -> None:
        """Write the plan, and what is noted beside it."""
        write_object(self.file, {**self._plan, **noted}, private=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Make the folder, keep others out, and yield the descriptor that does: runs that inherit it do so too."""
        clean_strays(make_folder(self.file.parent))
        with locked(self.file.with_name(f".{self.file.stem}.lock"), self._where, self._what) as descriptor:
            yield descriptor
