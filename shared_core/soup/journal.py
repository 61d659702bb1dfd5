"""The scores of a soup search on disk, so that a killed search goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared_core.atomic import atomic_write
from shared_core.errors import CheckpointError
from shared_core.soup.sources import Ingredient, read_json

_FORMAT = 2


class Journal:
    """Scores of ingredients and averages, each under a key that names its members, written whole after each evaluation.

    Args:
        path: The JSON file, None to keep nothing.
        ingredients: All candidates, in the order given.
        search: What else tells this search from another, as JSON has it: its options, the evaluator, the data.

    Raises:
        CheckpointError: If the file is damaged, cannot be written, or belongs to another search.
    """

    def __init__(self, path: str | Path | None, ingredients: Sequence[Ingredient], search: Mapping[str, Any]) -> None:
        self._path = None if path is None else Path(path)
        self._scores: dict[str, float] = {}
        if self._path is None:
            return
        self._search = {
            "format": _FORMAT,
            **search,
            "ingredients": [[item.name, item.digest()] for item in ingredients],
        }
        if self._path.exists():
            self._read(self._path)
        else:
            self._write()

    def _read(self, path: Path) -> None:
        content = read_json(path)
        search, scores = content.get("search"), content.get("scores")
        if not isinstance(search, dict) or not isinstance(scores, dict):
            raise CheckpointError(f"{path}: journal must be one that a soup search wrote; give another file")
        if search.get("format") != _FORMAT:
            raise CheckpointError(
                f"{path}: journal must have format {_FORMAT}, got {search.get('format')!r} of another version of "
                "efftrain; remove the file to start again, or give another"
            )
        for name in self._search | search:
            mine, theirs = self._search.get(name), search.get(name)
            if theirs != mine:
                got = "others" if name == "ingredients" else f"{theirs!r}, now {mine!r}"
                raise CheckpointError(
                    f"{path}: journal must be of this search, got one of another: its {name} were {got}; remove the "
                    "file to start again, or give another"
                )
        try:
            self._scores = {str(members): float(score) for members, score in scores.items()}
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: journal must hold numbers, got {error}; remove it") from error

    def _write(self) -> None:
        if self._path is not None:
            # repr reads back to the same bits, and names NaN and infinity, which JSON cannot
            scores = {members: repr(score) for members, score in self._scores.items()}
            with atomic_write(self._path) as temporary:
                temporary.write_text(json.dumps({"search": self._search, "scores": scores}, indent=1), encoding="utf-8")

    def score(self, key: str) -> float | None:
        """Return the score kept under a key, None if there is none yet."""
        return self._scores.get(key)

    def record(self, key: str, score: float) -> None:
        """Keep a score, on disk before this returns."""
        self._scores[key] = score
        self._write()
