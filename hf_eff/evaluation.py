"""Metrics of transformers models on a local file, for soups: classification, regression, next token.

In float64: torchmetrics computes F1 in float32 and adds an epsilon to rank correlations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig

from hf_eff._adapters.distillation import load_teacher
from hf_eff.evaluation_data import IGNORED, ImageExamples, TextExamples
from shared_core.checkpoint_formats import storage_key
from shared_core.errors import CheckpointError, ConfigError, EffError, first_line


def class_score(task: str, logits: Tensor, truth: Tensor) -> float:
    """Return ``accuracy``, ``f1`` or ``loss`` (mean cross-entropy) of logits (examples, classes); NaN if one is NaN.

    F1 = 2 TP / (2 TP + FP + FN) is that of class 1 of two, or the mean over more classes. A class that is neither true
    nor predicted does not count; without any class the score is 0.

    Example:
        >>> logits = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
        >>> [class_score(task, logits, torch.tensor([1, 0, 1, 0])) for task in ("f1", "accuracy")]
        [0.5, 0.5]
    """
    if not logits.isfinite().all():
        return math.nan  # argmax of NaN is a class too
    if task == "loss":
        return float(F.cross_entropy(logits, truth.long(), reduction="none").double().mean())
    guesses, classes = logits.argmax(-1), logits.shape[1]
    if task == "accuracy":
        return float((guesses == truth).double().mean())
    either = guesses.bincount(minlength=classes) + truth.long().bincount(minlength=classes)
    scores = 2 * guesses[guesses == truth].bincount(minlength=classes).double() / either
    kept = scores[1:] if classes == 2 else scores
    return float(kept[~kept.isnan()].mean().nan_to_num())


def regression_score(task: str, predicted: Tensor, truth: Tensor) -> float:
    """Return ``mse`` or ``loss`` (mean squared error), ``mae``, ``pearson`` or ``spearman``.

    Correlations are NaN if all predictions or all truths are equal.

    Example:
        >>> one, two = torch.tensor([[1.0], [2.0]]), torch.tensor([2.0, 5.0])
        >>> regression_score("mae", one, two), regression_score("mse", one, two)
        (2.0, 5.0)
    """
    if not predicted.isfinite().all():
        return math.nan
    predicted, truth = predicted[:, 0].double(), truth.double()
    if task in ("mse", "loss"):
        return float((predicted - truth).square().mean())
    if task == "mae":
        return float((predicted - truth).abs().mean())
    if task == "spearman":
        predicted, truth = _ranks(predicted), _ranks(truth)
    one, two = predicted - predicted.mean(), truth - truth.mean()
    size = float(one.norm() * two.norm())
    return float(one @ two) / size if size else math.nan


def _ranks(values: Tensor) -> Tensor:
    """Return the ranks of values; ties get their mean rank."""
    _, where, counts = torch.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    found: Tensor = (ends - (counts - 1).double() / 2)[where]
    return found


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


class FolderEvaluator:
    """Computes a metric of state dicts of one architecture on examples that are read and tokenized once.

    Classifiers of texts and images: ``accuracy``, ``f1`` (of class 1 of two, as in GLUE, else the mean over classes),
    ``loss`` (mean cross-entropy). Such models with one output: ``mse`` (or ``loss``), ``mae``, ``pearson``,
    ``spearman``. Causal language models: ``loss`` (mean negative log-likelihood per token in nats), ``perplexity`` (its
    exponential). Logits are in float32, sums in float64. Copies can be sent to other processes; each loads its own
    model.

    Args:
        task: The metric.
        folder: A folder with config and tokenizer or image processor, from the first ingredient.
        data: A ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file, or the folder of a saved data set, with text
        columns
            or ``input_ids``. Except for language models it needs ``label`` or ``labels``. For images see
            `ImageExamples`.
        text: One or two columns with the text; by default all text columns except the label.
        batch_size: Examples per batch.
        max_length: Tokens per example. Longer ones are cut for classification, and split into windows for language
            models, without predicting each window's first token. By default the tokenizer's and model's limit.
        device: Where the model runs.
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
            rule = f"--task: {folder} must hold a config of transformers, got {error}"
            raise CheckpointError("eff soup", rule) from error
        if not data.exists():
            raise CheckpointError("eff soup", f"--data {data} does not exist", "check the path")
        self._kind, is_image = self._kind_of_model()
        self._examples: ImageExamples | TextExamples
        regression = self._kind == _REGRESSOR
        if not is_image:
            causal = self._kind == _LANGUAGE_MODEL
            self._examples = TextExamples(
                data, folder, self._config, causal=causal, regression=regression, text=text, max_length=max_length
            )
        elif text or max_length is not None:
            raise ConfigError("eff soup", "--text and --max-length do not apply to images", "leave them out")
        else:
            self._examples = ImageExamples(data, folder, self._config, regression=regression)
        self._model: nn.Module | None = None

    @property
    def digest(self) -> str:
        """A hash of the examples: it changes with data, tokenizer or image processor, columns and length."""
        return self._examples.digest()

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
        except (ValueError, IndexError, RuntimeError) as error:  # models raise different errors for unsuitable inputs
            rule = f"--data must suit {type(self._model).__name__}, got {first_line(error):.200}"
            remedy = "check lengths (--max-length), sizes, and memory (--batch-size)"
            raise ConfigError("eff soup", rule, remedy) from error

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
            rule = f"--task {self.task} must have a {' or '.join(_TASKS[self.task])}, got {name} in {self._folder}"
            message = f"{rule} (num_labels {outputs}, problem_type {self._config.problem_type})"
            raise CheckpointError("eff soup", message, "choose another task, or give --eval")
        return kind, is_image

    def _load(self, model: nn.Module, state_dict: Mapping[str, Tensor]) -> nn.Module:
        own = model.state_dict()
        loaded = {storage_key(own[name]) for name in state_dict if name in own}
        lacking = [name for name, value in own.items() if name not in state_dict and storage_key(value) not in loaded]
        unexpected = [name for name in state_dict if name not in own]
        if not (lacking or unexpected):
            model.load_state_dict(state_dict, strict=False)
            return model
        # transformers saves some models under older names, and can map these
        stock: Any = type(model)
        with torch.random.fork_rng(devices=[]):
            other, info = stock.from_pretrained(
                None, config=self._config, state_dict=dict(state_dict), output_loading_info=True
            )
        if any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            rule = f"--task: ingredients must have the tensor names of {type(model).__name__}"
            got = f"missing {lacking[:3]} and unexpected {unexpected[:3]}"
            raise CheckpointError("eff soup", f"{rule}, got {got}", "save them with this transformers, or use --eval")
        return other.to(self._device).eval()  # type: ignore[no-any-return]

    def _of_labels(self, model: nn.Module) -> float:
        found = [
            (model(**self._on_device(inputs)).logits.float().cpu(), labels)
            for inputs, labels in self._examples.batches(self._batch_size)
        ]
        logits, truth = (torch.cat(parts) for parts in zip(*found, strict=True))
        return (regression_score if self._kind == _REGRESSOR else class_score)(self.task, logits, truth)

    def _of_tokens(self, model: nn.Module) -> float:
        total, count = 0.0, 0
        for inputs, tokens in self._examples.batches(self._batch_size):
            logits = model(**self._on_device(inputs), use_cache=False).logits
            labels = tokens.to(logits.device)[:, 1:]
            for row_logits, row_labels in zip(logits[:, :-1], labels, strict=True):  # one float32 row at a time
                losses = F.cross_entropy(row_logits.float(), row_labels, ignore_index=IGNORED, reduction="none")
                total += float(losses.double().sum())
            count += int((labels != IGNORED).sum())
        if not count:
            raise ConfigError("eff soup", "--data has no tokens to predict: every label is ignored")
        mean = total / count
        if self.task == "loss":
            return mean
        return math.exp(mean) if mean < 700 else math.inf  # the largest exponent of a float is 709

    def _on_device(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(self._device) for name, value in inputs.items()}
