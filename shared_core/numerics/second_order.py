"""Prune or round weights column by column, and adjust the others to compensate the error of the layer's output.

One solver for SparseGPT (Frantar & Alistarh 2023, arXiv:2301.00774) and GPTQ (Frantar et al. 2022, arXiv:2210.17323).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shared_core.errors import ConfigError, TrainingError

_COLUMNS = 128  # columns per lazy update, and per choice of weights to prune

Grid = Callable[[Tensor, int], Tensor]
"""(Values of a column, its index) → the values on that column's grid, which must contain 0."""
Regrid = Callable[[Tensor, int], None]
"""(Current values of a group of columns, its first index), before the first column of the group is rounded."""


@torch.no_grad()
def compensated(
    rows: Tensor,
    hessian: Tensor,
    *,
    sparsity: float = 0.0,
    n_m: tuple[int, int] | None = None,
    grid: Grid | None = None,
    regrid: tuple[int, Regrid] | None = None,
    actorder: bool = False,
    damping: float = 0.01,
) -> tuple[Tensor, Tensor]:
    """Return (new rows, bool mask of kept weights) with a small ``‖(W − W')X‖``.

    With ``U`` the upper Cholesky factor of ``(H + damping·mean(diag H)·I)⁻¹``, each column ``j`` is set to its final
    value ``q`` and every later column ``k`` loses ``(w_j − q)/U_jj · U_jk``. Within 128 columns the weights of least
    ``w²/U_jj²`` are pruned, or m − n of each m. With `grid` the kept ones are rounded too. Weights that are already 0
    stay 0. Inputs that were always 0 are not part of the compensation: their weights are pruned first, or rounded.

    Args:
        rows: A weight (outputs, inputs), finite.
        hessian: ``X Xᵀ`` of the inputs, (inputs, inputs), times any factor.
        sparsity: Share to prune.
        n_m: (kept, of how many neighbors), instead of `sparsity`. The second must divide the inputs.
        grid: Rounds values to the allowed ones; None: any value.
        regrid: (columns of a group, function that sets its grid from the values that compensation left so far). Not
            with `actorder` or pruning.
        actorder: Process columns by decreasing ``diag H``. Not with pruning.
        damping: As above. It is multiplied by ten if the matrix is not positive definite in float32.

    Raises:
        ConfigError: If `actorder` is used with pruning, or `regrid` with either.
        TrainingError: If the Hessian is not finite.

    Example:
        >>> hessian = torch.tensor([[1.0, 0.9], [0.9, 1.0]])
        >>> new, kept = compensated(torch.tensor([[1.0, 2.0]]), hessian, sparsity=0.5)
        >>> kept.tolist(), [round(value, 2) for value in new[0].tolist()]
        ([[False, True]], [0.0, 2.89])
    """
    if actorder and (sparsity or n_m):
        raise ConfigError("compensated", "actorder cannot be combined with pruning", "leave one out")
    if regrid and (actorder or sparsity or n_m):
        raise ConfigError("compensated", "regrid cannot be combined with actorder or pruning", "leave one out")
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    weight, curvature = rows.to(dtype, copy=True), hessian.to(rows.device, dtype)
    order = torch.arange(rows.shape[1], device=rows.device)
    if actorder:
        order = curvature.diagonal().argsort(descending=True, stable=True)
        weight, curvature = weight[:, order], curvature[order][:, order]
    factor = _inverse_factor(curvature, damping)
    columns = order.tolist()  # one read, because each read from a GPU would wait
    held = weight == 0
    unread = (curvature.diagonal() == 0) & bool(curvature.any())
    pruned = held.clone()
    together = n_m[1] if n_m else regrid[0] if regrid else 1
    step = max(_COLUMNS // together, 1) * together  # a group begins with all errors before it compensated
    for start in range(0, weight.shape[1], step):
        where = slice(start, start + step)
        part, inner = weight[:, where], factor[where, where]
        diagonal, errors = inner.diagonal(), torch.zeros_like(part)
        if sparsity:
            scores = _scores(part, diagonal, unread[where], held[:, where]).flatten()
            lowest = scores.argsort(stable=True)[: round(sparsity * scores.numel())]
            pruned[:, where] |= torch.zeros_like(scores, dtype=torch.bool).index_fill_(0, lowest, True).view_as(part)
        for j in range(part.shape[1]):
            if n_m is not None and j % n_m[1] == 0:
                near = slice(start + j, start + j + n_m[1])
                scores = _scores(weight[:, near], diagonal[j : j + n_m[1]], unread[near], held[:, near])
                lowest = scores.argsort(dim=1, stable=True)[:, : n_m[1] - n_m[0]]
                pruned[:, near] = held[:, near].scatter(1, lowest, True)
            if regrid is not None and j % regrid[0] == 0:
                regrid[1](part[:, j : j + regrid[0]], start + j)
            column = part[:, j].clone()
            value = column if grid is None else grid(column, columns[start + j])
            value = value.masked_fill(pruned[:, start + j], 0)
            errors[:, j] = (column - value) / diagonal[j]
            part[:, j:].addr_(errors[:, j], inner[j, j:], alpha=-1)
            part[:, j] = value
        weight[:, start + step :].addmm_(errors, factor[where, start + step :], alpha=-1)
    back = order.argsort()
    return weight[:, back].to(rows.dtype), ~pruned[:, back]


def _scores(weight: Tensor, diagonal: Tensor, unread: Tensor, held: Tensor) -> Tensor:
    return (weight / diagonal).square_().masked_fill_(unread, 0).masked_fill_(held, -1)


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """Return the upper Cholesky factor of the inverse of a damped Hessian."""
    diagonal = hessian.diagonal()
    mean = diagonal.mean()
    if not bool(torch.isfinite(hessian).all()):
        raise TrainingError("compensated", "hessian must be finite, got NaN or infinity", "check the batches")
    if not mean > 0:  # all inputs were zero: nothing to compensate
        return torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    for power in range(9):
        damped = hessian / mean
        damped.diagonal().add_(damping * 10**power)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and bool(torch.isfinite(upper).all()):
                return upper
    raise TrainingError("compensated", "hessian is not positive definite, even with damping")
