"""The local files that evaluators of soups read: tables of texts, images and labels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared_core.errors import CheckpointError, ConfigError, MissingExtraError

IGNORED = -100
READERS = {".json": "from_json", ".jsonl": "from_json", ".csv": "from_csv", ".parquet": "from_parquet"}


def open_table(file: Path) -> Any:
    """Return the examples in a file, or of a saved data set's folder, as a `datasets.Dataset`.

    Raises:
        CheckpointError: If it does not exist, or is not readable as such.
        ConfigError: If it holds several splits, or no example.
        MissingExtraError: If datasets is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("eff soup --task", "datasets", "examples") from error
    reader = READERS.get(file.suffix)
    if file.is_file() and reader is None:
        raise CheckpointError(
            f"eff soup: --data must be a file of {', '.join(READERS)} or the folder of a saved data set, got {file}"
        )
    if file.is_file() and not file.stat().st_size:  # on which datasets fails without a word
        raise empty(file)
    try:
        data = datasets.load_from_disk(file) if file.is_dir() else getattr(datasets.Dataset, str(reader))(str(file))
    except Exception as error:  # datasets, pyarrow and pandas each raise their own
        raise unreadable(file, error) from error
    if isinstance(data, datasets.DatasetDict):
        raise ConfigError(
            f"eff soup: --data must be one split, got {sorted(data)} in {file}; give {file}/{next(iter(data))}"
        )
    if not len(data):
        raise empty(file)
    return data


def unreadable(file: Path, error: Exception) -> CheckpointError:
    """Return the error of a file that cannot be read, with the first line of why."""
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    return CheckpointError(f"eff soup: --data must be readable, got {file}: {first_line:.300}")


def empty(file: Path) -> ConfigError:
    """Return the error of data without examples."""
    return ConfigError(f"eff soup: --data must hold at least one example, got none in {file}; give another file")


def label_column(columns: list[str], file: Path) -> str:
    """Return the name of the column with labels.

    Raises:
        ConfigError: If there is none.
    """
    label = next((name for name in ("label", "labels") if name in columns), None)
    if label is None:
        raise ConfigError(f"eff soup: --data must have a column label or labels, got {columns} in {file}")
    return label


def goals(labels: list[Any], config: Any, regression: bool, file: Path) -> list[float]:
    """Return what a model is to predict: classes by number or by name, or for regression finite numbers.

    Raises:
        ConfigError: With the first label that is no such thing.
    """
    if regression:
        odd = next((label for label in labels if not _is_finite(label)), None)
        if odd is not None or None in labels:
            raise ConfigError(
                f"eff soup: --data must have finite numbers as labels for a model of one output, got {odd!r} in {file}"
            )
        return [float(label) for label in labels]
    found = [config.label2id.get(label, label) if isinstance(label, str) else label for label in labels]
    for known, label in zip(found, labels, strict=True):
        if isinstance(known, bool) or not isinstance(known, int) or not 0 <= known < config.num_labels:
            raise ConfigError(
                f"eff soup: --data must have labels from 0 to {config.num_labels - 1}, or their names in config.json, "
                f"got {label!r} in {file}"
            )
    return found


def _is_finite(label: Any) -> bool:
    return not isinstance(label, bool) and isinstance(label, int | float) and math.isfinite(label)


def text_columns(data: Any, asked: tuple[str, ...], label: str | None, file: Path) -> list[str]:
    """Return the one or two columns with text.

    Raises:
        ConfigError: If there are none or more, or not those asked for.
    """
    texts = [
        name
        for name, feature in data.features.items()
        if name != label and getattr(feature, "dtype", None) in ("string", "large_string")
    ]
    lost = [name for name in asked if name not in texts]
    columns = list(asked) or texts
    if lost or not 1 <= len(columns) <= 2:
        raise ConfigError(
            f"eff soup: --text must name one or two columns of text, got {lost or columns} of {data.column_names} in "
            f"{file}"
        )
    return columns


def check_tokens(columns: Mapping[str, Any], vocabulary: int | None, may_be_empty: bool, file: Path) -> None:
    """Raise `ConfigError` unless each row has a list of tokens, and in the other columns as many whole numbers.

    Args:
        columns: ``input_ids``, other inputs of the model, and perhaps ``labels``, tokens or -100.
        vocabulary: How many tokens the model knows, None if its config does not tell.
        may_be_empty: Whether a row may be without tokens.
        file: Where they come from.
    """
    known = math.inf if vocabulary is None else vocabulary
    for number, ids in enumerate(columns["input_ids"]):
        for name, rows in columns.items():
            values = rows[number]
            fits = isinstance(values, list) and set(map(type, values)) <= {int} and len(values) == len(ids)
            if fits and name in ("input_ids", "labels"):
                tokens = [value for value in values if name == "input_ids" or value != IGNORED]
                fits = (bool(ids) or may_be_empty) and all(0 <= token < known for token in tokens)
            if not fits:
                rule = f"tokens below {known}" if name == "input_ids" else "as many numbers as tokens"
                raise ConfigError(
                    f"eff soup: --data must have a list of {rule} as {name} in each row, got {values!r:.80} in row "
                    f"{number} of {file}; tokenise it for this model"
                )
