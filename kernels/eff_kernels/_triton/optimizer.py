"""`eff_kernels.optimizer` in Triton: every weight, gradient, moment and mask goes through the registers once."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from eff_kernels._triton.launch import tensor_tables
from eff_kernels._triton.pruning import vector_block

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    from eff_kernels._triton.launch import pointer, row_of_program
    from eff_kernels._triton.pruning import kept_of

_CHUNK, _WARPS = 1 << 14, 8


def _masked_adamw(
    table: tl.tensor,
    owners: tl.tensor,
    like: tl.tensor,
    mask_like: tl.tensor,
    corrections: tl.tensor,
    grad_scale: tl.tensor,
    found_inf: tl.tensor,
    lr: tl.tensor,
    decay: tl.tensor,
    beta1: tl.tensor,
    rest1: tl.tensor,
    beta2: tl.tensor,
    rest2: tl.tensor,
    eps: tl.tensor,
    maximize: tl.constexpr,
    scaled: tl.constexpr,
    skips: tl.constexpr,
    packed: tl.constexpr,
    aligned: tl.constexpr,
    chunk: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row, start, size, index = row_of_program(table, owners, 5, chunk, aligned)
    params = pointer(row, 0, like, aligned)
    grads = pointer(row, 1, like, aligned)
    exp_avgs = pointer(row, 2, like, aligned)
    exp_avg_sqs = pointer(row, 3, like, aligned)
    masks = pointer(row, 4, mask_like, aligned)
    step_size = tl.div_rn(lr, tl.load(corrections + 2 * index))
    root = tl.load(corrections + 2 * index + 1)
    scale = 1.0
    if scaled:
        scale = tl.load(grad_scale)
    takes_step = True
    if skips:
        takes_step = tl.load(found_inf) == 0.0
    for i in range(chunk // block):
        places = start + i * block + tl.arange(0, block)
        inside = places < size
        kept = kept_of(masks, places, inside, packed) != 0
        if takes_step:
            g = tl.load(grads + places, mask=inside, other=0.0).to(tl.float32)
            w = tl.load(params + places, mask=inside, other=0.0)
            m = tl.load(exp_avgs + places, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(exp_avg_sqs + places, mask=inside, other=0.0).to(tl.float32)
            if scaled:
                g = tl.div_rn(g, scale)
                tl.store(grads + places, g.to(w.dtype), mask=inside)
            if maximize:
                g = -g
            m = beta1 * m + rest1 * g
            v = beta2 * v + rest2 * g * g
            new = w.to(tl.float32)
            new = new - decay * new
            new = new - tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
            tl.store(exp_avgs + places, m.to(w.dtype), mask=inside)
            tl.store(exp_avg_sqs + places, v.to(w.dtype), mask=inside)
            tl.store(params + places, tl.where(kept, new, 0.0).to(w.dtype), mask=inside)
        else:
            tl.store(params + places, tl.zeros((block,), like.dtype.element_ty), mask=inside & (kept == 0))


if importlib.util.find_spec("triton") is not None:
    masked_adamw = triton.jit(_masked_adamw)


def masked_adamw_triton_(
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
    chunk: int = _CHUNK,
) -> None:
    """Do as `eff_kernels.optimizer.masked_adamw_`, given tensors that share dtype, shape and strides row by row.

    Args:
        params: As there.
        grads: As there.
        exp_avgs: As there.
        exp_avg_sqs: As there.
        steps: As there.
        masks: As there, all of one dtype.
        grad_scale: As there.
        found_inf: As there.
        lr: As there.
        beta1: As there.
        beta2: As there.
        weight_decay: As there.
        eps: As there.
        maximize: As there.
        chunk: Elements of a program, a power of two.
    """
    torch._foreach_add_(steps, 1)
    # in float64, as torch has them: 1 − β is a small difference of numbers near 1
    taken = torch.stack(steps).double()
    corrections = torch.stack((1 - beta1**taken, (1 - beta2**taken).sqrt()), 1).float()
    packed = masks[0].dtype == torch.uint8
    bytes_ = [mask.view(torch.uint8) for mask in masks]
    for part in tensor_tables(chunk, params, grads, exp_avgs, exp_avg_sqs, bytes_):
        masked_adamw[(len(part.owners),)](
            part.table,
            part.owners,
            part.like[0],
            part.like[4],
            corrections,
            corrections if grad_scale is None else grad_scale,
            corrections if found_inf is None else found_inf,
            lr,
            lr * weight_decay,
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            eps,
            maximize=maximize,
            scaled=grad_scale is not None,
            skips=found_inf is not None,
            packed=packed,
            aligned=part.is_aligned,
            chunk=chunk,
            block=vector_block(part.like[0].dtype, chunk, _WARPS),
            num_warps=_WARPS,
        )
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf] * len(steps))
