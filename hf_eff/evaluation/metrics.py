"""Metrics of predictions, in float64. torchmetrics computes F1 in float32 and adds an epsilon to rank correlations."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def class_score(task: str, logits: Tensor, truth: Tensor) -> float:
    """Return ``accuracy``, ``f1`` or ``loss`` (mean cross-entropy); NaN if a logit is not finite.

    F1 = 2 TP / (2 TP + FP + FN) is that of class 1 of two, or the mean over more classes. A class that is neither there
    nor guessed does not count; without any the score is 0.

    Args:
        task: One of these names.
        logits: Shape (examples, classes).
        truth: Shape (examples).

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

    Correlations of predictions or truths that are all alike are NaN: there is nothing to order.

    Args:
        task: One of these names.
        predicted: Shape (examples, 1).
        truth: Shape (examples).

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
    """Return the ranks of values; equal ones share the mean of theirs."""
    _, where, counts = torch.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    found: Tensor = (ends - (counts - 1).double() / 2)[where]
    return found
