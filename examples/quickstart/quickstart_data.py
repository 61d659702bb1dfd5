"""Where the quickstart's texts and labels come from: the standard library, a Hub data set, or local files."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from stdlib_fragments import load_fragments

from shared_core.errors import ConfigError, nearest

SPLITS = ("train", "validation", "test")
Splits = dict[str, list[dict[str, Any]]]


def load_texts(arguments: Any) -> tuple[Splits, list[str]]:
    """Return rows with ``text`` and ``label`` (an index) for each split, and the names of the labels."""
    files = {name: getattr(arguments, f"{name}_file") for name in SPLITS}
    given = [name for name, file in files.items() if file]
    if given and arguments.dataset_name:
        raise ConfigError(f"data: --dataset_name must come without --{given[0]}_file; drop one of them")
    if given and len(given) < len(SPLITS):
        raise ConfigError(
            "data: --train_file, --validation_file and --test_file must be given together, got only "
            f"{', '.join(given)}; the test file is used neither for training nor for choosing"
        )
    if given:
        tables = {name: read_rows(Path(file)) for name, file in files.items()}
        return label_rows(tables, arguments.text_column, arguments.label_column)
    if arguments.dataset_name:
        return label_rows(hub_rows(arguments.dataset_name), arguments.text_column, arguments.label_column)
    fragments = load_fragments()
    rows = {
        name: [{"text": fragment.text, "label": fragment.label} for fragment in split]
        for name, split in fragments.splits.items()
    }
    return rows, fragments.packages


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a CSV file with a header, of JSON lines, or of one JSON list of objects."""
    try:
        if file.suffix == ".csv":
            with file.open(encoding="utf-8", newline="") as lines:
                rows = list(csv.DictReader(lines))
        elif file.suffix in (".json", ".jsonl"):
            text = file.read_text(encoding="utf-8")
            rows = (
                json.loads(text) if text.lstrip().startswith("[") else [json.loads(x) for x in text.splitlines() if x]
            )
        else:
            raise ConfigError(f"data: file must be .csv, .json or .jsonl, got {file}")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, csv.Error) as error:
        raise ConfigError(f"data: {file} must be a readable table, got {error}") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"data: {file} must hold at least one row of named columns, got none")
    return rows


def hub_rows(name: str) -> Splits:
    """Return the rows of a Hub data set; without a validation split, a tenth of the training rows choose."""
    try:
        found = load_dataset(name)
    except Exception as error:  # the Hub client, the network and the builders each raise their own
        raise ConfigError(
            f"data: --dataset_name must name a data set that can be loaded, got {name!r}: {error}"
        ) from error
    if not {"train", "test"} <= set(found):
        raise ConfigError(f"data: {name} must have the splits train and test, got {', '.join(found)}")
    train = found["train"]
    if "validation" in found:
        parts = {"train": train, "validation": found["validation"]}
    else:
        cut = train.train_test_split(test_size=0.1, seed=0)
        parts = {"train": cut["train"], "validation": cut["test"]}
    return {name: list(part) for name, part in {**parts, "test": found["test"]}.items()}


def label_rows(tables: Splits, text_column: str, label_column: str) -> tuple[Splits, list[str]]:
    """Return the rows with labels as indices into the sorted labels of the training split, and those labels."""
    for name, rows in tables.items():
        for number, row in enumerate(rows, start=1):
            for flag, column in (("text_column", text_column), ("label_column", label_column)):
                if column not in row:
                    raise ConfigError(
                        f"data: --{flag} must be a column of the {name} split, got {column!r}{nearest(column, row)}"
                    )
                if row[column] is None:
                    raise ConfigError(f"data: every row must have a {column}, got none in row {number} of {name}")
    labels = sorted({row[label_column] for row in tables["train"]}, key=str)
    index = {label: position for position, label in enumerate(labels)}
    if len(labels) < 2:
        raise ConfigError(f"data: the train split must hold at least two labels, got {labels}")
    for name, rows in tables.items():
        if unknown := {str(row[label_column]) for row in rows} - {str(label) for label in labels}:
            raise ConfigError(f"data: labels of {name} must occur in train, got {sorted(unknown)[0]!r} as well")
    splits = {
        name: [{"text": str(row[text_column]), "label": index[row[label_column]]} for row in rows]
        for name, rows in tables.items()
    }
    return splits, [str(label) for label in labels]


def tokenize(splits: Splits, tokenizer: Any, max_length: int) -> dict[str, Dataset]:
    """Return data sets as a Trainer takes them."""
    encoded = {}
    for name, rows in splits.items():
        inputs = tokenizer([row["text"] for row in rows], truncation=True, max_length=max_length)
        encoded[name] = Dataset.from_dict({**inputs, "labels": [row["label"] for row in rows]})
    return encoded
