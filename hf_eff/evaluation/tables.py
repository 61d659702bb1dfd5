"""The local files that evaluators of soups read, as tables; the labels in them, and errors that name the file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from shared_core.errors import CheckpointError, ConfigError
from shared_core.libraries import optional

READERS = {".json": "from_json", ".jsonl": "from_json", ".csv": "from_csv", ".parquet": "from_parquet"}


def open_table(file: Path) -> Any:
    """Return the examples in a file, or of a saved data set's folder, as a `datasets.Dataset`."""
    datasets = optional("datasets", "examples", "eff soup --task")
    reader = READERS.get(file.suffix)
    if file.is_file() and reader is None:
        raise CheckpointError(
            "eff soup", f"--data must be a file of {', '.join(READERS)} or the folder of a saved data set, got {file}"
        )
    if file.is_file() and not file.stat().st_size:  # on which datasets fails without a word
        raise empty(file)
    try:
        data = datasets.load_from_disk(file) if file.is_dir() else getattr(datasets.Dataset, str(reader))(str(file))
    except Exception as error:  # datasets, pyarrow and pandas each raise their own
        raise unreadable(file, error) from error
    if isinstance(data, datasets.DatasetDict):
        raise refused("be one split", sorted(data), file, f"give {file}/{next(iter(data))}")
    if not len(data):
        raise empty(file)
    return data


def unreadable(file: Path, error: Exception) -> CheckpointError:
    """Return the error of a file that cannot be read, with the first line of why."""
    return CheckpointError("eff soup", f"--data must be readable, got {file}: {first_line(error):.300}")


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, its class where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def load_from(stock: Any, folder: Path, what: str, instead: str) -> Any:
    """Return what a class of transformers loads from a folder."""
    try:
        loaded = stock.from_pretrained(folder, trust_remote_code=False)
        # in a folder without its files transformers 5 makes a tokenizer up, to which every word is unknown
        if what == "tokenizer" and len(loaded) <= len(loaded.all_special_tokens):
            raise ValueError("no word in its vocabulary")
        return loaded
    except Exception as error:  # transformers and tokenizers each raise their own
        raise CheckpointError(
            "eff soup",
            f"--task: {folder} must hold the {what}, got none that loads ({first_line(error):.200})",
            f"save it there, or give {instead}",
        ) from error


def refused(rule: str, got: Any, file: Path, remedy: str = "") -> ConfigError:
    """Return the error of data that break a rule."""
    return ConfigError("eff soup", f"--data must {rule}, got {got} in {file}", remedy)


def empty(file: Path) -> ConfigError:
    """Return the error of data without examples."""
    return refused("hold at least one example", "none", file, "give another file")


def label_column(columns: list[str], file: Path) -> str:
    """Return the name of the column with labels."""
    label = next((name for name in ("label", "labels") if name in columns), None)
    if label is None:
        raise refused("have a column label or labels", columns, file)
    return label


def goals(labels: list[Any], config: Any, regression: bool, file: Path) -> list[float]:
    """Return what a model is to predict: classes by number or by name, or for regression finite numbers."""
    if regression:
        odd = [label for label in labels if not _is_finite(label)]
        if odd:
            raise refused("have finite numbers as labels for a model of one output", repr(odd[0]), file)
        return [float(label) for label in labels]
    found = [config.label2id.get(label, label) if isinstance(label, str) else label for label in labels]
    fits = [type(known) is int and 0 <= known < config.num_labels for known in found]
    if not all(fits):
        rule = f"have labels from 0 to {config.num_labels - 1}, or their names in config.json"
        raise refused(rule, repr(labels[fits.index(False)]), file)
    return found


def _is_finite(label: Any) -> bool:
    return isinstance(label, int | float) and not isinstance(label, bool) and math.isfinite(label)
