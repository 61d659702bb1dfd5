"""AdamW on weights of which some are pruned: step, unscaling, skipping and masking in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eff_kernels._triton.launch import runs_in_one_launch
from eff_kernels.pruning import apply_mask_, fit_masks

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@torch.no_grad()
def masked_adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    masks: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    r"""Take the step of ``torch.optim.AdamW(fused=True)`` and set every pruned weight to +0.0, in place.

    :math:`m ← β_1 m + (1 − β_1) g`, :math:`v ← β_2 v + (1 − β_2) g^2`,
    :math:`w ← mask · ((1 − lr · λ) w − lr · \hat m / (\sqrt{\hat v} + ε))`. Moments go on under the masks, as they do
    where the mask is applied after the optimizer. One launch reads and writes everything once, 29 bytes a float32
    weight instead of 37 in two.

    For loops that step by themselves: ``prune`` leaves the user's optimizer, whatever it is, and masks after it.

    Args:
        params: float32, bfloat16 or float16, all of one device.
        grads: Of the same shapes, strides and dtypes; divided by `grad_scale` in place, where it is given.
        exp_avgs: m, likewise.
        exp_avg_sqs: v, likewise.
        steps: float32 scalars on the same device, steps taken so far; counted up.
        masks: bool of the same shapes and strides, True = keep; or uint8, what `pack_bits` makes of one.
        lr: Learning rate.
        beta1: In [0, 1).
        beta2: In [0, 1).
        weight_decay: λ, decoupled.
        eps: ε, > 0.
        maximize: Climb instead.
        grad_scale: float32 scalar; the gradients are that many times too large.
        found_inf: float32 scalar; where it is 1 nothing is done but the masks applied.

    Source: Loshchilov and Hutter, 2019, arXiv:1711.05101, algorithm 2.

    Example:
        >>> weight, mask = torch.ones(2), torch.tensor([True, False])
        >>> m, v, step = torch.zeros(2), torch.zeros(2), torch.zeros(())
        >>> masked_adamw_([weight], [torch.ones(2)], [m], [v], [step], [mask],
        ...               lr=0.1, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8)
        >>> weight, step.item()
        (tensor([0.9000, 0.0000]), 1.0)
    """
    columns = _detached(params), _detached(grads), _detached(exp_avgs), _detached(exp_avg_sqs)
    numbers = (lr, beta1, beta2, weight_decay, eps)
    if runs_in_one_launch(*columns, masks, steps) and _are_alike(columns) and fit_masks(params, masks):
        masked_adamw_of(*columns, list(steps), list(masks), grad_scale, found_inf, *numbers, maximize)
    else:
        _masked_adamw(*columns, list(steps), list(masks), grad_scale, found_inf, *numbers, maximize)


def _detached(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach() for tensor in tensors]


def _are_alike(columns: Sequence[Sequence[Tensor]]) -> bool:
    for param, *others in zip(*columns, strict=True):
        alike = all(t.dtype == param.dtype and t.shape == param.shape and t.stride() == param.stride() for t in others)
        if param.dtype not in _DTYPES or not alike:
            return False
    return True


@torch.library.custom_op(
    "eff_kernels::masked_adamw_", mutates_args={"params", "grads", "exp_avgs", "exp_avg_sqs", "steps"}
)
def masked_adamw_of(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    masks: list[Tensor],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
) -> None:
    """Do as `masked_adamw_` as one operator."""
    columns = (params, grads, exp_avgs, exp_avg_sqs)
    numbers = (lr, beta1, beta2, weight_decay, eps)
    if not params[0].is_cuda:
        _masked_adamw(*columns, steps, masks, grad_scale, found_inf, *numbers, maximize)
        return
    from eff_kernels._triton.optimizer import masked_adamw_triton_

    with torch.cuda.device(params[0].device):
        masked_adamw_triton_(*columns, steps, masks, grad_scale, found_inf, *numbers, maximize)


@masked_adamw_of.register_fake
def _(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    masks: list[Tensor],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
) -> None:
    pass


def _masked_adamw(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    masks: list[Tensor],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
) -> None:
    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(
        params, grads, exp_avgs, exp_avg_sqs, [], steps,
        lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=maximize,
        grad_scale=grad_scale, found_inf=found_inf,
    )  # fmt: skip
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf] * len(steps))
    apply_mask_(params, masks)
