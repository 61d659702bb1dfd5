"""What chunked distillation is given, checked before any work: heads, vocabularies, labels, limits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from eff_kernels.distillation import DIVERGENCES
from torch import Tensor, nn

from shared_core.distillation.chunked_autograd import Head, Terms, rows_in_budget
from shared_core.distillation.softened_pair import check_fraction, check_mask, check_temperature
from shared_core.errors import ConfigError

HeadLike = nn.Module | Tensor | tuple[Tensor, Tensor | None]
"""A linear layer, its weight ``(classes, features)``, or weight and bias."""
_WHERE = "chunked_kd_loss"


def checked_terms(
    temperature: float,
    alpha: float,
    labels: Tensor | None,
    *,
    divergence: Any,
    beta: Any,
    scale_by_temperature: Any,
) -> Terms:
    """Return what is computed of each row; β at its ends is one of the other divergences."""
    check_temperature(_WHERE, temperature)
    check_fraction(_WHERE, "alpha", alpha)
    check_fraction(_WHERE, "beta", beta)
    if divergence not in DIVERGENCES:
        raise ConfigError(f"{_WHERE}: divergence must be one of {', '.join(DIVERGENCES)}, got {divergence!r}")
    if alpha > 0 and labels is None:
        raise ConfigError(f"{_WHERE}: labels must be given with alpha above 0, got alpha {alpha} and no labels")
    if divergence == "jsd" and beta in (0, 1):
        divergence = "reverse_kl" if beta else "forward_kl"
    factor = temperature**2 if scale_by_temperature else 1.0
    return Terms(float(temperature), factor, 1.0 - alpha, float(alpha), divergence, float(beta))


def checked_head(whose: str, hidden: Tensor, head: HeadLike, softcap: float | None) -> Head:
    """Return a head's weight, bias and type of product, checked against the hidden states that go into it."""
    name = f"{whose}_head"
    if isinstance(head, nn.Module):
        if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
            raise ConfigError(
                f"{_WHERE}: {name} must be an nn.Linear with its own forward, got {type(head).__name__}; "
                "give the weight and bias that its forward multiplies with and adds"
            )
        head = head.weight, head.bias
    weight, bias = head if isinstance(head, tuple) else (head, None)
    if hasattr(weight, "full_tensor"):
        raise ConfigError(f"{_WHERE}: {name} must be whole, got a sharded weight; call inside unshard() and reshard()")
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.dim() != 2:
        got = f"{weight.dtype} {tuple(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
        raise ConfigError(f"{_WHERE}: {name} must have a floating point weight (classes, features), got {got}")
    if not hidden.is_floating_point() or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ConfigError(
            f"{_WHERE}: {whose}_hidden must be floating point of shape (..., {weight.shape[1]}), the features of its "
            f"head, got {hidden.dtype} {tuple(hidden.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ConfigError(f"{_WHERE}: {name} must have a bias ({weight.shape[0]},), got {tuple(bias.shape)}")
    if hidden.device != weight.device:
        raise ConfigError(f"{_WHERE}: {name} must be on the device of its input, {hidden.device}, got {weight.device}")
    if softcap is not None and not (0 < softcap < math.inf):
        raise ConfigError(f"{_WHERE}: softcap must be finite and above 0, got {softcap}")
    kind, dtype = hidden.device.type, weight.dtype
    # as autocast itself, which leaves float64 alone
    if torch.is_autocast_enabled(kind) and torch.float64 not in (dtype, hidden.dtype):
        dtype = torch.get_autocast_dtype(kind)
    return Head(weight, bias, dtype, weight.shape[0], softcap or 0.0)


def with_same_classes(student: Head, teacher: Head, vocab_size: int | None) -> tuple[Head, Head]:
    """Return both heads with the number of classes that count."""
    sizes = student.classes, teacher.classes
    if vocab_size is None and sizes[0] != sizes[1]:
        raise ConfigError(
            f"{_WHERE}: teacher_head must have the student's {sizes[0]} classes, got {sizes[1]}; with one tokenizer "
            "and padded vocabularies give the tokenizer's size as vocab_size"
        )
    if vocab_size is not None and not 0 < vocab_size <= min(sizes):
        raise ConfigError(
            f"{_WHERE}: vocab_size must be in 1 to {min(sizes)}, the smaller of the heads' {sizes[0]} and {sizes[1]} "
            f"classes, got {vocab_size}"
        )
    if min(sizes) == 0:
        raise ConfigError(f"{_WHERE}: student_head must have classes, got none")
    classes = vocab_size or sizes[0]
    return replace(student, classes=classes), replace(teacher, classes=classes)


def checked_rows(
    labels: Tensor | None,
    ignore_index: int,
    mask: Tensor | None,
    shape: tuple[int, ...],
    device: torch.device,
    classes: int,
) -> tuple[Tensor | None, Tensor | None]:
    """Return flat labels with -1 where a row has none, and the indices of rows that count, None for all."""
    check_mask(_WHERE, mask, shape)
    if labels is not None:
        if labels.is_floating_point() or labels.dtype == torch.bool or tuple(labels.shape) != shape:
            raise ConfigError(
                f"{_WHERE}: labels must be integers of shape {shape}, one for each row of student_hidden, "
                f"got {labels.dtype} of shape {tuple(labels.shape)}"
            )
        labels = labels.to(device).reshape(-1).long()
        ignored = labels == ignore_index
        if bool(((labels < 0) | (labels >= classes)).logical_and_(~ignored).any()):
            wrong = labels[~ignored]
            raise ConfigError(
                f"{_WHERE}: labels must be in 0 to {classes - 1} or {ignore_index}, "
                f"got {int(wrong.min())} to {int(wrong.max())}"
            )
        labels = labels.masked_fill(ignored, -1)
        mask = ~ignored if mask is None else mask
    if mask is None:
        return labels, None
    mask = mask.to(device).reshape(-1)
    return labels, None if bool(mask.all()) else mask.nonzero().squeeze(-1)


def checked_chunk_rows(
    chunk_rows: int | None, budget_mib: float | None, student: Head, teacher: Head, device: torch.device
) -> int:
    """Return the rows of a chunk: as given, or what the budget holds."""
    if chunk_rows is not None and (isinstance(chunk_rows, bool) or chunk_rows < 1):
        raise ConfigError(f"{_WHERE}: chunk_rows must be at least 1, got {chunk_rows}")
    if budget_mib is not None and not 0 < budget_mib < math.inf:
        raise ConfigError(f"{_WHERE}: budget_mib must be finite and above 0, got {budget_mib}")
    budget = None if budget_mib is None else int(budget_mib * 2**20)
    wider = max(student.dtype, teacher.dtype, key=lambda dtype: dtype.itemsize)
    return chunk_rows or rows_in_budget(student.classes, wider, device, budget)
