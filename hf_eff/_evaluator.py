"""Metrics of transformers models on a local file, for soups: accuracy, F1, loss, perplexity."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer

from hf_eff._teacher import load_teacher
from shared_core.errors import CheckpointError, ConfigError, MissingExtraError
from shared_core.soup.sources import storage_key

_READERS = {".json": "from_json", ".jsonl": "from_json", ".csv": "from_csv", ".parquet": "from_parquet"}
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_IGNORED = -100
_DEFAULT_LENGTH = 512


class FolderEvaluator:
    """Returns a metric of a state dict of one architecture, on examples that are read and tokenised once.

    Text classification: ``accuracy``, ``f1`` (of class 1 where there are two, as in GLUE, else the mean over classes),
    ``loss`` (mean cross-entropy). Causal language models: ``loss`` (mean negative log-likelihood of a token in nats),
    ``perplexity`` (its exponential). Logits are taken in float32, sums in float64. Copies of it can be sent to other
    processes; each loads its own model.

    Args:
        task: The metric.
        folder: A folder with config and tokenizer, of the first ingredient.
        data: A ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file, or a folder of a saved data set; text columns, or
            ``input_ids``; for classification ``label`` or ``labels``.
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
            self._config = AutoConfig.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"eff soup: --task: {folder} must hold a config of transformers, got {error}"
            ) from error
        self._causal = self._is_causal()
        self._examples = self._read(data, text, max_length)
        if not self._examples:
            raise _empty(data)
        # similar lengths together: less padding
        self._examples.sort(key=lambda example: -len(example["input_ids"]))
        self._model: nn.Module | None = None

    @property
    def digest(self) -> str:
        """A hash of the tokenised examples: it changes with data, tokenizer, columns and length."""
        return hashlib.sha256(json.dumps(self._examples, sort_keys=True).encode()).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None}

    def __call__(self, state_dict: Mapping[str, Tensor]) -> float:
        """Return the metric of the model with these weights."""
        if self._model is None:
            self._model = load_teacher(str(self._folder), nn.Module()).to(self._device).eval()
        self._load(self._model, state_dict)
        with torch.inference_mode():
            if self._causal:
                return self._of_tokens(self._model)
            return self._of_classes(self._model)

    def _is_causal(self) -> bool:
        name = next(iter(self._config.architectures or ()), "no class")
        causal = name.endswith(("ForCausalLM", "LMHeadModel"))
        classifies = name.endswith("ForSequenceClassification") and self._config.num_labels > 1
        if self._config.problem_type not in (None, "single_label_classification"):
            classifies = False
        fits = {"accuracy": classifies, "f1": classifies, "perplexity": causal, "loss": causal or classifies}[self.task]
        if not fits:
            needed = "language model" if self.task == "perplexity" else "text classifier of single labels"
            raise CheckpointError(
                f"eff soup: --task {self.task} must have a {needed}, got {name} in {self._folder}; choose another "
                "task, or give --eval"
            )
        return causal

    def _load(self, model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
        missing, unexpected = model.load_state_dict(state_dict, strict=False)
        own = model.state_dict()
        loaded = {storage_key(value) for name, value in own.items() if name in state_dict}
        lacking = [name for name in missing if storage_key(own[name]) not in loaded]
        if lacking or unexpected:
            raise CheckpointError(
                f"eff soup: --task: ingredients must have the tensor names of {type(model).__name__}, got missing "
                f"{lacking[:3]} and unexpected {unexpected[:3]}; save them by this transformers, or give --eval"
            )

    # -- examples

    def _read(self, file: Path, text: tuple[str, ...], max_length: int | None) -> list[dict[str, Any]]:
        data = _open(file)
        label = next((name for name in ("label", "labels") if name in data.column_names), None)
        if not self._causal and label is None:
            raise ConfigError(f"eff soup: --data must have a column label or labels, got {data.column_names} in {file}")
        if "input_ids" in data.column_names and not text:
            encoded = data.select_columns([name for name in _INPUTS if name in data.column_names]).to_dict()
            limit = max_length
        else:
            tokenizer = self._tokenizer()
            columns = _text_columns(data, text, label, file)
            if self._causal and len(columns) > 1:
                raise ConfigError(f"eff soup: --text must be one column for a language model, got {columns}; name one")
            limit = max_length or self._longest(tokenizer)
            cut = {} if self._causal else {"truncation": True, "max_length": limit}
            encoded = dict(tokenizer(*(list(data[name]) for name in columns), **cut))
        labels = list(data[label]) if label is not None else []
        examples = []
        for number, ids in enumerate(encoded["input_ids"]):
            example = {name: list(values[number]) for name, values in encoded.items() if name in _INPUTS}
            if not self._causal:
                examples.append({**example, "label": self._class(labels[number], file)})
                continue
            goals = labels[number] if label == "labels" and isinstance(labels[number], list) else ids
            step = limit or len(ids) or 1
            examples += [
                {"input_ids": list(ids[i : i + step]), "labels": list(goals[i : i + step])}
                for i in range(0, len(ids), step)
                if len(ids[i : i + step]) > 1  # one token alone predicts nothing
            ]
        return examples

    def _tokenizer(self) -> Any:
        try:
            return AutoTokenizer.from_pretrained(self._folder)
        except Exception as error:  # transformers and tokenizers each raise their own
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(
                f"eff soup: --task: {self._folder} must hold the tokenizer, got none that loads ({first_line:.200}); "
                "save it there, or give data with input_ids"
            ) from error

    def _longest(self, tokenizer: Any) -> int:
        limits = [tokenizer.model_max_length]
        limits += [getattr(self._config, name, None) for name in ("max_position_embeddings", "n_positions")]
        # a tokenizer without a limit says 10**30
        return min((limit for limit in limits if limit and limit < 10**9), default=_DEFAULT_LENGTH)

    def _class(self, label: Any, file: Path) -> int:
        known = self._config.label2id.get(label, label) if isinstance(label, str) else label
        if isinstance(known, bool) or not isinstance(known, int) or not 0 <= known < self._config.num_labels:
            raise ConfigError(
                f"eff soup: --data must have labels from 0 to {self._config.num_labels - 1}, or their names in "
                f"config.json, got {label!r} in {file}"
            )
        return known

    # -- metrics

    def _batches(self) -> Iterator[tuple[dict[str, Tensor], list[dict[str, Any]]]]:
        padding = getattr(self._config, "pad_token_id", None)
        # decoders find the last token of a text by the padding after it: without padding, one text at a time
        size = 1 if padding is None and not self._causal else self._batch_size
        for start in range(0, len(self._examples), size):
            rows = self._examples[start : start + size]
            longest = len(rows[0]["input_ids"])
            ones = [{"attention_mask": [1] * len(row["input_ids"]), **row} for row in rows]
            fill = {"input_ids": padding or 0}
            inputs = {
                name: torch.tensor([row[name] + [fill.get(name, 0)] * (longest - len(row[name])) for row in ones])
                for name in _INPUTS
                if name in ones[0]
            }
            yield {name: value.to(self._device) for name, value in inputs.items()}, rows

    def _of_classes(self, model: nn.Module) -> float:
        predicted, right, total = [], [], 0.0
        for inputs, rows in self._batches():
            logits = model(**inputs).logits.float()
            labels = torch.tensor([row["label"] for row in rows], device=logits.device)
            total += float(F.cross_entropy(logits, labels, reduction="none").double().sum())
            if not logits.isfinite().all():
                return math.nan  # argmax of NaN is a class too
            predicted.append(logits.argmax(-1).cpu())
            right.append(labels.cpu())
        if self.task == "loss":
            return total / len(self._examples)
        guesses, truth = torch.cat(predicted), torch.cat(right)
        if self.task == "f1":
            return f1(guesses, truth, self._config.num_labels)
        return float((guesses == truth).double().mean())

    def _of_tokens(self, model: nn.Module) -> float:
        total, count = 0.0, 0
        for inputs, rows in self._batches():
            logits = model(**inputs, use_cache=False).logits
            width = inputs["input_ids"].shape[1]
            padded = [row["labels"] + [_IGNORED] * (width - len(row["labels"])) for row in rows]
            labels = torch.tensor(padded, device=logits.device)[:, 1:]
            for row_logits, row_labels in zip(logits[:, :-1], labels, strict=True):  # one float32 row at a time
                losses = F.cross_entropy(row_logits.float(), row_labels, ignore_index=_IGNORED, reduction="none")
                total += float(losses.double().sum())
            count += int((labels != _IGNORED).sum())
        if not count:
            raise ConfigError("eff soup: --data must have tokens to predict, got none that a label asks for")
        mean = total / count
        if self.task == "loss":
            return mean
        return math.exp(mean) if mean < 700 else math.inf  # the largest exponent of a float is 709


def f1(guesses: Tensor, truth: Tensor, classes: int) -> float:
    """Return F1 = 2 TP / (2 TP + FP + FN), of class 1 of two, or the mean over more classes.

    A class that is neither there nor guessed does not count; without any the score is 0.

    Example:
        >>> f1(torch.tensor([1, 1, 0, 0]), torch.tensor([1, 0, 1, 0]), classes=2)
        0.5
    """
    scores = []
    for number in [1] if classes == 2 else range(classes):
        both = int(((guesses == number) & (truth == number)).sum())
        either = int((guesses == number).sum() + (truth == number).sum())
        if either:
            scores.append(2 * both / either)
    return sum(scores) / len(scores) if scores else 0.0


def _open(file: Path) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("eff soup --task", "datasets", "examples") from error
    if not file.exists():
        raise CheckpointError(f"eff soup: --data must exist, got no {file}; check the path")
    reader = _READERS.get(file.suffix)
    if file.is_file() and reader is None:
        raise CheckpointError(
            f"eff soup: --data must be a file of {', '.join(_READERS)} or the folder of a saved data set, got {file}"
        )
    try:
        data = datasets.load_from_disk(file) if file.is_dir() else getattr(datasets.Dataset, str(reader))(str(file))
    except Exception as error:  # datasets, pyarrow and pandas each raise their own
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"eff soup: --data must be readable, got {file}: {first_line:.300}") from error
    if isinstance(data, datasets.DatasetDict):
        raise ConfigError(
            f"eff soup: --data must be one split, got {sorted(data)} in {file}; give {file}/{next(iter(data))}"
        )
    if not len(data):
        raise _empty(file)
    return data


def _empty(file: Path) -> ConfigError:
    return ConfigError(f"eff soup: --data must hold at least one example, got none in {file}; give another file")


def _text_columns(data: Any, asked: tuple[str, ...], label: str | None, file: Path) -> list[str]:
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
