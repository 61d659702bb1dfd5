"""Read texts and images with labels from local files, and prepare them for a model batch by batch."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import sys
from collections.abc import Iterator, Mapping
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoImageProcessor, AutoTokenizer

from shared_core.errors import CheckpointError, ConfigError, first_line
from shared_core.libraries import optional

READERS = {".json": "from_json", ".jsonl": "from_json", ".csv": "from_csv", ".parquet": "from_parquet"}


def open_table(file: Path) -> Any:
    """Return the examples in a file or a saved data set's folder as a `datasets.Dataset`."""
    datasets = optional("datasets", "examples", "eff soup --task")
    reader = READERS.get(file.suffix)
    if file.is_file() and reader is None:
        kinds = f"a file of {', '.join(READERS)} or the folder of a saved data set"
        raise CheckpointError("eff soup", f"--data must be {kinds}, got {file}")
    _check_some(not file.is_file() or file.stat().st_size, file)  # datasets fails on it without a message
    with _readable(file):
        data = datasets.load_from_disk(file) if file.is_dir() else getattr(datasets.Dataset, str(reader))(str(file))
    if isinstance(data, datasets.DatasetDict):
        raise refused("be one split", sorted(data), file, f"give {file}/{next(iter(data))}")
    _check_some(len(data), file)
    return data


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # datasets, pyarrow, pandas, NumPy and PIL each raise their own
        raise CheckpointError("eff soup", f"--data must be readable, got {file}: {first_line(error)}") from error


def load_from(stock: Any, folder: Path, what: str, instead: str) -> Any:
    """Return what a class of transformers loads from a folder."""
    try:
        loaded = stock.from_pretrained(folder, trust_remote_code=False)
        # without tokenizer files, transformers 5 invents a tokenizer that knows no word
        if what == "tokenizer" and len(loaded) <= len(loaded.all_special_tokens):
            raise ValueError("no word in its vocabulary")
        return loaded
    except Exception as error:  # transformers and tokenizers each raise their own
        rule = f"--task: no {what} loads from {folder} ({first_line(error):.200})"
        raise CheckpointError("eff soup", rule, f"save it there, or use {instead}") from error


def refused(rule: str, got: Any, file: Path, remedy: str = "") -> ConfigError:
    """Return the error for data that break a rule."""
    return ConfigError("eff soup", f"--data must {rule}, got {got} in {file}", remedy)


def _check_some(count: object, file: Path) -> None:
    if not count:
        raise refused("hold at least one example", "none", file, "use another file")


def label_column(columns: list[str], file: Path) -> str:
    """Return the name of the label column."""
    label = next((name for name in ("label", "labels") if name in columns), None)
    if label is None:
        raise refused("have a column label or labels", columns, file)
    return label


def goals(labels: list[Any], config: Any, regression: bool, file: Path) -> list[float]:
    """Return the targets: class indices (from numbers or names), or finite numbers for regression."""
    if regression:
        found, rule = labels, "have finite numbers as labels for a model of one output"
        fits = [type(label) in (int, float) and math.isfinite(label) for label in labels]
    else:
        found = [config.label2id.get(label, label) if isinstance(label, str) else label for label in labels]
        rule = f"have labels from 0 to {config.num_labels - 1}, or their names in config.json"
        fits = [type(known) is int and 0 <= known < config.num_labels for known in found]
    if not all(fits):
        raise refused(rule, repr(labels[fits.index(False)]), file)
    return [float(label) for label in found] if regression else found


IGNORED = -100
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_DEFAULT_LENGTH = 512


class TextExamples:
    """Texts of a local file, the longest first: batches of similar length need less padding."""

    def __init__(
        self, file: Path, folder: Path, config: Any, *, causal: bool, regression: bool, text: tuple[str, ...],
        max_length: int | None,
    ) -> None:  # fmt: skip
        self._folder, self._config, self._causal = folder, config, causal
        self._rows = self._read(file, text, max_length, regression)
        _check_some(self._rows, file)
        self._rows.sort(key=lambda row: -len(row["input_ids"]))

    def digest(self) -> str:
        """Return a hash of tokens and labels."""
        return hashlib.sha256(json.dumps(self._rows, sort_keys=True).encode()).hexdigest()

    def batches(self, size: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield the model's inputs and the labels, per example or per token for a language model."""
        padding = getattr(self._config, "pad_token_id", None)
        # decoders find a text's last token by the padding after it: without padding, one text at a time
        size = 1 if padding is None and not self._causal else size
        for start in range(0, len(self._rows), size):
            rows = [{"attention_mask": [1] * len(row["input_ids"]), **row} for row in self._rows[start : start + size]]
            fill = {"input_ids": padding or 0}
            inputs = {name: _padded(rows, name, fill.get(name, 0)) for name in _INPUTS if name in rows[0]}
            yield inputs, _padded(rows, "labels", IGNORED) if self._causal else _labels(rows)

    def _read(
        self, file: Path, text: tuple[str, ...], max_length: int | None, regression: bool
    ) -> list[dict[str, Any]]:
        data, causal = open_table(file), self._causal
        label = next((name for name in ("label", "labels") if name in data.column_names), None)
        if not causal:
            label = label_column(data.column_names, file)
        if "input_ids" in data.column_names and not text:
            encoded = data.select_columns([name for name in _INPUTS if name in data.column_names]).to_dict()
            limit = max_length or self._longest(None, default=sys.maxsize)
        else:
            encoded, limit = self._tokenized(
                data, text_columns(data, text, label, file, most=1 if causal else 2), max_length
            )
        inputs = {name: rows for name, rows in encoded.items() if name in _INPUTS}
        labels = list(data[label]) if label is not None else []
        if causal and label == "labels" and any(isinstance(row, list) for row in labels):
            inputs["labels"] = labels
        check_tokens(inputs, getattr(self._config.get_text_config(), "vocab_size", None), causal, file)
        rows = [dict(zip(inputs, row, strict=True)) for row in zip(*inputs.values(), strict=True)]
        if causal:
            return [window for row in rows for window in _windows(row, limit)]
        wanted = goals(labels, self._config, regression, file)
        return [
            {**{name: values[:limit] for name, values in row.items()}, "label": goal}
            for row, goal in zip(rows, wanted, strict=True)
        ]

    def _tokenized(self, data: Any, columns: list[str], max_length: int | None) -> tuple[dict[str, Any], int]:
        tokenizer = load_from(AutoTokenizer, self._folder, "tokenizer", "data with input_ids")
        limit = max_length or self._longest(tokenizer)
        cut = {} if self._causal else {"truncation": True, "max_length": limit}
        return dict(tokenizer(*(list(data[name]) for name in columns), **cut)), limit

    def _longest(self, tokenizer: Any, default: int = _DEFAULT_LENGTH) -> int:
        limits = [getattr(tokenizer, "model_max_length", None)]
        limits += [getattr(self._config, name, None) for name in ("max_position_embeddings", "n_positions")]
        # tokenizers without a limit report 10**30
        return min((limit for limit in limits if limit and limit < 10**9), default=default)


def text_columns(data: Any, asked: tuple[str, ...], label: str | None, file: Path, most: int) -> list[str]:
    """Return the columns with text."""
    texts = [
        name
        for name, feature in data.features.items()
        if name != label and getattr(feature, "dtype", None) in ("string", "large_string")
    ]
    lost = [name for name in asked if name not in texts]
    columns = list(asked) or texts
    if lost or not 1 <= len(columns) <= most:
        number = "one or two columns of text" if most == 2 else "one column of text for a language model"
        got = f"{lost or columns} of {data.column_names} in {file}"
        raise ConfigError("eff soup", f"--text must name {number}, got {got}")
    return columns


def check_tokens(columns: Mapping[str, Any], vocabulary: int | None, may_be_empty: bool, file: Path) -> None:
    """Raise `ConfigError` unless each row has a list of tokens, and as many whole numbers in the other columns."""
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
                got = f"{values!r:.80} in row {number}"
                raise refused(f"have a list of {rule} as {name} in each row", got, file, "tokenize it for this model")


def _windows(row: Mapping[str, list[int]], limit: int) -> Iterator[dict[str, Any]]:
    """Yield parts of a text up to a length limit. A single token predicts nothing and is skipped."""
    mask = row.get("attention_mask", [1] * len(row["input_ids"]))  # masked tokens are padding
    ids, wanted = ([*compress(row[name], mask)] for name in ("input_ids", "labels" if "labels" in row else "input_ids"))
    for i in range(0, len(ids) - 1, limit):
        if len(ids[i : i + limit]) > 1:
            yield {"input_ids": ids[i : i + limit], "labels": wanted[i : i + limit]}


def _padded(rows: list[dict[str, Any]], name: str, value: int) -> Tensor:
    return pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True, padding_value=value)


def _labels(rows: list[dict[str, Any]]) -> Tensor:
    return torch.tensor([row["label"] for row in rows], dtype=torch.float64)


_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"})
_PIXELS = "pixel_values"


class ImageExamples:
    """Images of a local file or folder, read batch by batch.

    Supported: a folder with one subfolder of images per class; a table or saved data set with a column of images, image
    paths or ``pixel_values``; or an ``.npz`` of ``images`` (uint8, ``(n, height, width[, channels])``) or
    ``pixel_values`` (floats as the model takes them) and ``labels``.
    """

    def __init__(self, file: Path, folder: Path, config: Any, *, regression: bool) -> None:
        optional("PIL", "examples", "eff soup --task")
        self._file, self._mode = file, "L" if getattr(config, "num_channels", 3) == 1 else "RGB"
        self._data, labels = _read(file)
        _check_some(len(self._data), file)
        self._labels = goals(labels, config, regression, file)
        self._processor: Any = None
        if _PIXELS in self._data.column_names:
            self._data = self._data.with_format("numpy")
        else:
            self._processor = load_from(AutoImageProcessor, folder, "image processor", f"data with {_PIXELS}")
        self._batch(0, 1)

    def digest(self) -> str:
        """Return a hash of the images and labels."""
        found = hashlib.sha256(repr((self._labels, self._processor and self._processor.to_dict())).encode())
        for number in range(len(self._labels)):
            array = np.ascontiguousarray(self._images(number, number + 1)[0])
            found.update(f"{array.shape} {array.dtype}".encode() + array.tobytes())
        return found.hexdigest()

    def batches(self, size: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield images as the model takes them, ``(n, channels, height, width)``, and their labels."""
        for start in range(0, len(self._labels), size):
            labels = torch.tensor(self._labels[start : start + size], dtype=torch.float64)
            yield {_PIXELS: self._batch(start, start + size)}, labels

    def _batch(self, begin: int, end: int) -> Tensor:
        images = self._images(begin, end)
        if self._processor is None:
            return torch.from_numpy(np.stack(images))
        pixels: Tensor = self._processor(images=images, return_tensors="pt")[_PIXELS]
        return pixels

    def _images(self, begin: int, end: int) -> list[Any]:
        if self._processor is None:
            return [np.asarray(image, dtype=np.float32) for image in self._data[begin:end][_PIXELS]]
        with _readable(self._file):
            return [_opened(image).convert(self._mode) for image in self._data[begin:end]["image"]]


def _read(file: Path) -> tuple[Any, list[Any]]:
    """Return a data set with a column ``image`` or ``pixel_values``, and the labels."""
    if file.suffix == ".npz":
        return _read_arrays(file)
    if file.is_dir() and not any((file / name).exists() for name in ("dataset_info.json", "dataset_dict.json")):
        return _read_folder(file)
    data = open_table(file)
    labels = list(data[label_column(data.column_names, file)])
    if _PIXELS in data.column_names:
        return data.select_columns([_PIXELS]), labels
    pictures = [name for name, feature in data.features.items() if type(feature).__name__ == "Image"]
    named = [name for name in ("image", "img", "file_name", "path") if name in data.column_names]
    if pictures:
        return data.select_columns(pictures[:1]).rename_columns({pictures[0]: "image"}), labels
    if named:
        return _pictures([str(file.parent / str(path)) for path in data[named[0]]]), labels
    rule = f"have a column of images, of paths to them (image, img, file_name, path), or {_PIXELS}"
    raise refused(rule, data.column_names, file)


def _opened(image: Any) -> Any:
    """Return an image as stored, ignoring orientation metadata."""
    from PIL import Image

    if not isinstance(image, dict):
        return image
    return Image.open(io.BytesIO(image["bytes"]) if image["bytes"] else image["path"])


def _pictures(images: Any) -> Any:
    """Return a data set of paths or arrays."""
    datasets = optional("datasets", "examples", "eff soup --task")
    return datasets.Dataset.from_dict({"image": images}, datasets.Features({"image": datasets.Image(decode=False)}))


def _read_folder(folder: Path) -> tuple[Any, list[Any]]:
    paths = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in _SUFFIXES)
    if not paths:
        raise refused("be a saved data set, or hold a folder of images for each class", "neither", folder)
    names = [path.parent.name for path in paths]
    return _pictures([str(path.absolute()) for path in paths]), [int(it) if it.isdigit() else it for it in names]


def _read_arrays(file: Path) -> tuple[Any, list[Any]]:
    with _readable(file), np.load(file, allow_pickle=False) as arrays:
        held = {name: arrays[name] for name in arrays.files}
    labels = held[label_column(sorted(held), file)]
    name = _PIXELS if _PIXELS in held else "images"
    values = held.get(name, np.empty(0))
    if name == _PIXELS:
        fits, rule = values.ndim == 4 and values.dtype.kind == "f", f"{_PIXELS} of floats, (n, channels, height, width)"
    else:
        fits = values.dtype == np.uint8 and (values.ndim == 3 or (values.ndim == 4 and values.shape[-1] in (3, 4)))
        rule = f"images of uint8, (n, height, width) or (n, height, width, 3), or {_PIXELS}"
    if not fits or labels.shape != values.shape[:1]:
        got = f"{values.dtype} {values.shape} and labels {labels.shape}"
        raise refused(f"hold {rule}, and one label each", got, file)
    datasets = optional("datasets", "examples", "eff soup --task")
    data = datasets.Dataset.from_dict({_PIXELS: values}) if name == _PIXELS else _pictures(list(values))
    return data, labels.tolist()
