"""The gradients of an optimizer as loss scaling takes them: by device and dtype, in plain numbers."""

from __future__ import annotations

import inspect
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor


def has_scaled_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the step unscales in its own kernel, in fp32: only then may parameters be fp16."""
    # kernels that want the whole scaler as an argument would skip inside; they take unscaled gradients too
    return getattr(optimizer, "_step_supports_amp_scaling", False) and (
        "grad_scaler" not in inspect.signature(optimizer.step).parameters
    )


def _coalesced(parameter: Tensor) -> Tensor | None:
    grad = parameter.grad
    if grad is not None and grad.is_sparse and grad.dtype is torch.float16:
        # scaled fp16 values of one index can overflow when they are added up: check the sums
        parameter.grad = grad = grad.coalesce()
    return grad._values() if grad is not None and grad.is_sparse else grad


def grouped_gradients(optimizer: torch.optim.Optimizer) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Return the numbers to be unscaled by device and dtype; of sparse gradients, those that they store."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    grads = [grad for parameter in parameters if (grad := parameter.grad) is not None]
    if not grads:
        return {}
    if any(map(attrgetter("is_sparse"), grads)):
        grads = [grad for parameter in parameters if (grad := _coalesced(parameter)) is not None]
    # what torch's optimizers group by; no None comes out where none went in
    groups: Any = torch._C._group_tensors_by_device_and_dtype([grads], False)
    return {
        # torch's kernel is of real numbers
        (device, dtype): [*map(torch.view_as_real, same)] if dtype.is_complex else same
        for (device, dtype), ((same,), _) in groups.items()
    }
