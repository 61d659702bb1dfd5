"""Metrics of predictions that the evaluators of soups report."""

from __future__ import annotations

import math

import torch
from torch import Tensor


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


def regression_score(task: str, predicted: Tensor, truth: Tensor) -> float:
    r"""Return ``mse`` or ``loss`` (mean squared error), ``mae``, ``pearson`` or ``spearman``, in float64.

    Correlations of predictions or truths that are all alike are NaN: there is nothing to order.

    Args:
        task: One of these names.
        predicted: Shape (examples).
        truth: Shape (examples).

    Example:
        >>> one, two = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 5.0])
        >>> regression_score("mae", one, two), regression_score("mse", one, two)
        (2.0, 5.0)
    """
    predicted, truth = predicted.double(), truth.double()
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
