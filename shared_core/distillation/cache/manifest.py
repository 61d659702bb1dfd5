"""The manifest of a cache: what its arrays mean and what they were made with, as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shared_core.atomic import atomic_write
from shared_core.errors import CheckpointError
from shared_core.parsing import parse_json

MANIFEST_FILE = "eff_teacher_cache.json"
FORMAT = 1
DTYPES = {"float16": torch.float16, "float32": torch.float32}
FINGERPRINTS = ("teacher", "teacher_files", "tokenizer", "template", "data")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a cache holds.

    Attributes:
        temperature: ``T`` of the stored log-probabilities.
        top_k: Classes kept of each row.
        vocabulary: Classes that the softmax ran over.
        dtype: ``float16`` or ``float32``, of the log-probabilities.
        fields: The inputs that keys are made of.
        per_example: Whether the teacher has one output an example, ``(B, C)``, and not one a position.
        positions: The field whose positions the outputs follow; none: each example's outputs are taken as they are.
        labelled: Whether only positions that count for the loss were stored.
        fingerprints: Of the teacher, the files it came from, the tokenizer, the template and the data; none: not told.
        complete: Whether all examples are there.
        shards: Number of examples in each shard.
        rows: Number of stored rows.
        tail_mass_mean: Mean over rows of the probability outside the top k.
        tail_mass_max: The largest one.
    """

    temperature: float
    top_k: int
    vocabulary: int
    dtype: str
    fields: tuple[str, ...]
    per_example: bool
    positions: str | None
    labelled: bool
    fingerprints: Mapping[str, str | None]
    complete: bool = False
    shards: tuple[int, ...] = ()
    rows: int = 0
    tail_mass_mean: float = 0.0
    tail_mass_max: float = 0.0

    @property
    def examples(self) -> int:
        """Number of different examples."""
        return sum(self.shards)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the stored log-probabilities."""
        return DTYPES[self.dtype]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as they are written."""
        return {"format": FORMAT, **dataclasses.asdict(self), "examples": self.examples}

    def write(self, folder: Path) -> None:
        """Write it into the folder of a cache, whole or not at all."""
        with atomic_write(folder / MANIFEST_FILE) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Return the manifest in a folder.

        Raises:
            CheckpointError: If there is none, or it is damaged or of a newer format.
        """
        path = folder / MANIFEST_FILE
        if not path.is_file():
            raise CheckpointError(
                f"cached teacher: {folder} must be a folder that `eff cache-teacher` wrote, got no "
                f"{MANIFEST_FILE} in it"
            )
        try:
            content = parse_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise _damaged(path, str(error)) from error
        if not isinstance(content, dict):
            raise _damaged(path, type(content).__name__)
        version = content.pop("format", None)
        if not _is_int(version, 1):
            raise _damaged(path, f"format {version!r}")
        if version > FORMAT:
            raise CheckpointError(
                f"cached teacher: {path} was written by a newer efftrain; update it to read this cache"
            )
        examples = content.pop("examples", None)
        rules = _rules(content)
        for name, is_right in rules.items():
            if name not in content or not is_right(content[name]):
                raise _damaged(path, f"{name} {content.get(name)!r:.80}")
        if content.keys() - rules.keys():
            raise _damaged(path, f"the unknown {min(content.keys() - rules.keys())!r}")
        found = cls(**{**content, "fields": tuple(content["fields"]), "shards": tuple(content["shards"])})
        if found.examples != examples:
            raise _damaged(path, f"{examples!r} examples in shards of {found.examples}")
        return found


def _rules(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "vocabulary": lambda value: _is_int(value, 1) and value < 2**31,
        "temperature": lambda value: _is_number(value) and value > 0,
        "top_k": lambda value: _is_int(value, 1) and value <= content["vocabulary"],
        "dtype": lambda value: isinstance(value, str) and value in DTYPES,
        "fields": lambda value: isinstance(value, list) and value and all(isinstance(name, str) for name in value),
        "per_example": lambda value: isinstance(value, bool),
        "positions": lambda value: value is None or (isinstance(value, str) and value in content["fields"]),
        "labelled": lambda value: isinstance(value, bool),
        "fingerprints": _are_fingerprints,
        "complete": lambda value: isinstance(value, bool),
        "shards": lambda value: isinstance(value, list) and all(_is_int(count, 1) for count in value),
        "rows": lambda value: _is_int(value, 0),
        "tail_mass_mean": lambda value: _is_number(value) and value >= 0,
        "tail_mass_max": lambda value: _is_number(value) and value >= 0,
    }


def _is_int(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_fingerprints(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == set(FINGERPRINTS)
        and all(found is None or isinstance(found, str) for found in value.values())
    )


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"cached teacher: {path} must be a whole manifest, got {what}; write the cache again")
