"""Metrics of transformers models on a local file, for soups: of classes, of numbers, of the next token."""

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
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoTokenizer

from hf_eff._adapters.teacher import load_teacher
from hf_eff.evaluation.data import (
    IGNORED,
    ImageExamples,
    check_tokens,
    empty,
    first_line,
    goals,
    label_column,
    load_from,
    open_table,
    text_columns,
)
from hf_eff.evaluation.metrics import class_score, regression_score
from shared_core.checkpoint_formats import storage_key
from shared_core.errors import CheckpointError, ConfigError, EffError

_LANGUAGE_MODEL, _CLASSIFIER, _REGRESSOR = (
    "language model", "classifier of texts or images (single labels)",
    "regression model (such a class with one output)",
)  # fmt: skip
_PROBLEMS = {_CLASSIFIER: "single_label_classification", _REGRESSOR: "regression"}
_TASKS = {
    **dict.fromkeys(("accuracy", "f1"), (_CLASSIFIER,)), "perplexity": (_LANGUAGE_MODEL,),
    **dict.fromkeys(("mse", "mae", "pearson", "spearman"), (_REGRESSOR,)),
    "loss": (_LANGUAGE_MODEL, _CLASSIFIER, _REGRESSOR),
}  # fmt: skip
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_DEFAULT_LENGTH = 512


class FolderEvaluator:
    """Returns a metric of a state dict of one architecture, on examples that are read and tokenised once.

    Classifiers of texts and images: ``accuracy``, ``f1`` (of class 1 where there are two, as in GLUE, else the mean
    over classes), ``loss`` (mean cross-entropy). Such models of one output: ``mse`` (or ``loss``), ``mae``,
    ``pearson``, ``spearman``. Causal language models: ``loss`` (mean negative log-likelihood of a token in nats),
    ``perplexity`` (its exponential). Logits are taken in float32, sums in float64. Copies of it can be sent to other
    processes; each loads its own model.

    Args:
        task: The metric.
        folder: A folder with config and tokenizer, or image processor, of the first ingredient.
        data: A ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file, or a folder of a saved data set; text columns, or
            ``input_ids``; but for language models ``label`` or ``labels``. For images see `ImageExamples`.
        text: Columns with the text, one or a pair; by default all that hold texts, but for the label.
        batch_size: Examples at a time.
        max_length: Tokens of an example: longer ones are cut for classification, and split into windows for language
            models, the first token of each being given. By default what tokenizer and model allow.
        device: Where the model runs.

    Raises:
        CheckpointError: If the folder holds no model or tokenizer that can do the task, or the data cannot be read.
        ConfigError: If columns or labels are not there or do not fit.
        MissingExtraError: If datasets is not installed.
    """

    def __init__(
        self,
        task: str,
        folder: Path,
        data: Path,
        *,
        text: tuple[str, ...] = (),
        batch_size: int = 32,
        max_length: int | None = None,
        device: str = "cpu",
    ) -> None:
        self.task, self._folder, self._batch_size, self._device = task, folder, batch_size, device
        try:
            self._config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                "eff soup", f"--task: {folder} must hold a config of transformers, got {error}"
            ) from error
        if not data.exists():
            raise CheckpointError("eff soup", f"--data must exist, got no {data}", "check the path")
        self._kind, is_image = self._kind_of_model()
        self._images: ImageExamples | None = None
        self._examples: list[dict[str, Any]] = []
        if is_image:
            if text or max_length is not None:
                raise ConfigError("eff soup", "--text and --max-length must stand without images", "leave them out")
            self._images = ImageExamples(data, folder, self._config, regression=self._kind == _REGRESSOR)
        else:
            self._examples = self._read(data, text, max_length)
            if not self._examples:
                raise empty(data)
            # similar lengths together: less padding
            self._examples.sort(key=lambda example: -len(example["input_ids"]))
        self._model: nn.Module | None = None

    @property
    def digest(self) -> str:
        """A hash of the examples: it changes with data, tokenizer or image processor, columns and length."""
        if self._images is not None:
            return self._images.digest()
        return hashlib.sha256(json.dumps(self._examples, sort_keys=True).encode()).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None}

    def __call__(self, state_dict: Mapping[str, Tensor]) -> float:
        """Return the metric of the model with these weights."""
        if self._model is None:
            self._model = load_teacher(str(self._folder), nn.Module()).to(self._device).eval()
        self._model = self._load(self._model, state_dict)
        try:
            with torch.inference_mode():
                return (self._of_tokens if self._kind == _LANGUAGE_MODEL else self._of_labels)(self._model)
        except EffError:
            raise
        except (ValueError, IndexError, RuntimeError) as error:  # each model says otherwise what it does not take
            raise ConfigError(
                "eff soup",
                f"--data must be what {type(self._model).__name__} takes, got {first_line(error):.200}",
                "check lengths (--max-length), sizes, and memory (--batch-size)",
            ) from error

    def _kind_of_model(self) -> tuple[str, bool]:
        name = next(iter(self._config.architectures or ()), "no class")
        kind, outputs = "", self._config.num_labels
        is_image = name.endswith("ForImageClassification")
        if name.endswith(("ForCausalLM", "LMHeadModel")):
            kind = _LANGUAGE_MODEL
        elif is_image or name.endswith("ForSequenceClassification"):
            kind = _CLASSIFIER if outputs > 1 else _REGRESSOR
            if self._config.problem_type not in (None, _PROBLEMS[kind]):
                kind = ""
        if kind not in _TASKS[self.task]:
            raise CheckpointError(
                "eff soup",
                f"--task {self.task} must have a {' or '.join(_TASKS[self.task])}, got {name} in {self._folder} "
                f"(num_labels {outputs}, problem_type {self._config.problem_type})",
                "choose another task, or give --eval",
            )
        return kind, is_image

    def _load(self, model: nn.Module, state_dict: Mapping[str, Tensor]) -> nn.Module:
        own = model.state_dict()
        loaded = {storage_key(own[name]) for name in state_dict if name in own}
        lacking = [name for name, value in own.items() if name not in state_dict and storage_key(value) not in loaded]
        unexpected = [name for name in state_dict if name not in own]
        if not (lacking or unexpected):
            model.load_state_dict(state_dict, strict=False)
            return model
        # transformers saves some models under older names than they have, and knows how to read these
        stock: Any = type(model)
        with torch.random.fork_rng(devices=[]):
            other, info = stock.from_pretrained(
                None, config=self._config, state_dict=dict(state_dict), output_loading_info=True
            )
        if any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            raise CheckpointError(
                "eff soup",
                f"--task: ingredients must have the tensor names of {type(model).__name__}, got missing {lacking[:3]} "
                f"and unexpected {unexpected[:3]}",
                "save them by this transformers, or give --eval",
            )
        return other.to(self._device).eval()  # type: ignore[no-any-return]

    # -- examples

    def _read(self, file: Path, text: tuple[str, ...], max_length: int | None) -> list[dict[str, Any]]:
        data, causal = open_table(file), self._kind == _LANGUAGE_MODEL
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
        wanted = goals(labels, self._config, self._kind == _REGRESSOR, file)
        return [
            {**{name: values[:limit] for name, values in row.items()}, "label": goal}
            for row, goal in zip(rows, wanted, strict=True)
        ]

    def _tokenised(self, data: Any, columns: list[str], max_length: int | None) -> tuple[dict[str, Any], int]:
        causal = self._kind == _LANGUAGE_MODEL
        if causal and len(columns) > 1:
            raise ConfigError("eff soup", f"--text must be one column for a language model, got {columns}", "name one")
        tokenizer = load_from(AutoTokenizer, self._folder, "tokenizer", "data with input_ids")
        limit = max_length or self._longest(tokenizer)
        cut = {} if causal else {"truncation": True, "max_length": limit}
        return dict(tokenizer(*(list(data[name]) for name in columns), **cut)), limit

    def _longest(self, tokenizer: Any, default: int = _DEFAULT_LENGTH) -> int:
        limits = [getattr(tokenizer, "model_max_length", None)]
        limits += [getattr(self._config, name, None) for name in ("max_position_embeddings", "n_positions")]
        # a tokenizer without a limit says 10**30
        return min((limit for limit in limits if limit and limit < 10**9), default=default)

    # -- metrics

    def _batches(self) -> Iterator[tuple[dict[str, Tensor], list[dict[str, Any]]]]:
        padding = getattr(self._config, "pad_token_id", None)
        # decoders find the last token of a text by the padding after it: without padding, one text at a time
        size = 1 if padding is None and self._kind != _LANGUAGE_MODEL else self._batch_size
        for start in range(0, len(self._examples), size):
            rows = [
                {"attention_mask": [1] * len(row["input_ids"]), **row} for row in self._examples[start : start + size]
            ]
            yield (
                {
                    name: _padded(rows, name, (padding or 0) if name == "input_ids" else 0).to(self._device)
                    for name in _INPUTS
                    if name in rows[0]
                },
                rows,
            )

    def _of_labels(self, model: nn.Module) -> float:
        outputs, wanted = [], []
        for inputs, labels in self._labelled():
            outputs.append(model(**inputs).logits.float().cpu())
            wanted += labels
        logits, truth = torch.cat(outputs), torch.tensor(wanted, dtype=torch.float64)
        if self._kind == _REGRESSOR:
            return regression_score(self.task, logits[:, 0], truth) if logits.isfinite().all() else math.nan
        return class_score(self.task, logits, truth)

    def _labelled(self) -> Iterator[tuple[dict[str, Tensor], list[float]]]:
        if self._images is None:
            for inputs, rows in self._batches():
                yield inputs, [row["label"] for row in rows]
            return
        for start in range(0, len(self._images), self._batch_size):
            end = start + self._batch_size
            yield {"pixel_values": self._images.batch(start, end).to(self._device)}, self._images.labels[start:end]

    def _of_tokens(self, model: nn.Module) -> float:
        total, count = 0.0, 0
        for inputs, rows in self._batches():
            logits = model(**inputs, use_cache=False).logits
            labels = _padded(rows, "labels", IGNORED).to(logits.device)[:, 1:]
            for row_logits, row_labels in zip(logits[:, :-1], labels, strict=True):  # one float32 row at a time
                losses = F.cross_entropy(row_logits.float(), row_labels, ignore_index=IGNORED, reduction="none")
                total += float(losses.double().sum())
            count += int((labels != IGNORED).sum())
        if not count:
            raise ConfigError("eff soup", "--data must have tokens to predict, got none that a label asks for")
        mean = total / count
        if self.task == "loss":
            return mean
        return math.exp(mean) if mean < 700 else math.inf  # the largest exponent of a float is 709


def _windows(row: Mapping[str, list[int]], limit: int) -> Iterator[dict[str, Any]]:
    """Yield the parts of a text that are no longer than a limit; one token alone predicts nothing."""
    mask = row.get("attention_mask", [1] * len(row["input_ids"]))  # what it leaves out is padding
    ids, wanted = ([*compress(row[name], mask)] for name in ("input_ids", "labels" if "labels" in row else "input_ids"))
    for i in range(0, len(ids) - 1, limit):
        if len(ids[i : i + limit]) > 1:
            yield {"input_ids": ids[i : i + limit], "labels": wanted[i : i + limit]}


def _padded(rows: list[dict[str, Any]], name: str, value: int) -> Tensor:
    return pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True, padding_value=value)
