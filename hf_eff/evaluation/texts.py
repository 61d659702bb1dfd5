"""Texts or tokens of a local file, tokenised once and made ready for a model a batch at a time."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from hf_eff.evaluation.tables import empty, goals, label_column, load_from, open_table, refused
from shared_core.errors import ConfigError

IGNORED = -100
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_DEFAULT_LENGTH = 512


class TextExamples:
    """Texts of a local file, the longest first: similar lengths together need less padding.

    Args:
        file: A table or saved data set with columns of text, or ``input_ids``, and of labels.
        folder: Holds the tokenizer; not needed for ``input_ids``.
        config: The model's.
        causal: Whether the next token is predicted: then labels are tokens, and long texts are split into windows.
        regression: Whether labels are numbers to predict.
        text: Columns with the text; by default all that hold texts, but for the label.
        max_length: Tokens of an example; by default what tokenizer and model allow.
    """

    def __init__(
        self, file: Path, folder: Path, config: Any, *, causal: bool, regression: bool, text: tuple[str, ...],
        max_length: int | None,
    ) -> None:  # fmt: skip
        self._folder, self._config, self._causal = folder, config, causal
        self._rows = self._read(file, text, max_length, regression)
        if not self._rows:
            raise empty(file)
        self._rows.sort(key=lambda row: -len(row["input_ids"]))

    def digest(self) -> str:
        """Return a hash of tokens and labels."""
        return hashlib.sha256(json.dumps(self._rows, sort_keys=True).encode()).hexdigest()

    def batches(self, size: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield the model's inputs and the labels: of examples, or of tokens for a language model."""
        padding = getattr(self._config, "pad_token_id", None)
        # decoders find the last token of a text by the padding after it: without padding, one text at a time
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
            encoded, limit = self._tokenised(data, text_columns(data, text, label, file), max_length)
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

    def _tokenised(self, data: Any, columns: list[str], max_length: int | None) -> tuple[dict[str, Any], int]:
        if self._causal and len(columns) > 1:
            raise ConfigError("eff soup", f"--text must be one column for a language model, got {columns}", "name one")
        tokenizer = load_from(AutoTokenizer, self._folder, "tokenizer", "data with input_ids")
        limit = max_length or self._longest(tokenizer)
        cut = {} if self._causal else {"truncation": True, "max_length": limit}
        return dict(tokenizer(*(list(data[name]) for name in columns), **cut)), limit

    def _longest(self, tokenizer: Any, default: int = _DEFAULT_LENGTH) -> int:
        limits = [getattr(tokenizer, "model_max_length", None)]
        limits += [getattr(self._config, name, None) for name in ("max_position_embeddings", "n_positions")]
        # a tokenizer without a limit says 10**30
        return min((limit for limit in limits if limit and limit < 10**9), default=default)


def text_columns(data: Any, asked: tuple[str, ...], label: str | None, file: Path) -> list[str]:
    """Return the one or two columns with text."""
    texts = [
        name
        for name, feature in data.features.items()
        if name != label and getattr(feature, "dtype", None) in ("string", "large_string")
    ]
    lost = [name for name in asked if name not in texts]
    columns = list(asked) or texts
    if lost or not 1 <= len(columns) <= 2:
        raise ConfigError(
            "eff soup",
            f"--text must name one or two columns of text, got {lost or columns} of {data.column_names} in {file}",
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
                got = f"{values!r:.80} in row {number}"
                raise refused(f"have a list of {rule} as {name} in each row", got, file, "tokenise it for this model")


def _windows(row: Mapping[str, list[int]], limit: int) -> Iterator[dict[str, Any]]:
    """Yield the parts of a text that are no longer than a limit; one token alone predicts nothing."""
    mask = row.get("attention_mask", [1] * len(row["input_ids"]))  # what it leaves out is padding
    ids, wanted = ([*compress(row[name], mask)] for name in ("input_ids", "labels" if "labels" in row else "input_ids"))
    for i in range(0, len(ids) - 1, limit):
        if len(ids[i : i + limit]) > 1:
            yield {"input_ids": ids[i : i + limit], "labels": wanted[i : i + limit]}


def _padded(rows: list[dict[str, Any]], name: str, value: int) -> Tensor:
    return pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True, padding_value=value)


def _labels(rows: list[dict[str, Any]]) -> Tensor:
    return torch.tensor([row["label"] for row in rows], dtype=torch.float64)
