"""The best product of two thin matrices: for a weight, and for what it makes of given inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Eigenvalues of a second moment below this share of their mean are raised to it: fewer inputs than dimensions leave
# directions without any, whose inverse would be infinite.
_FLOOR = 1e-6


@dataclass(frozen=True)
class Spectrum:
    """A weight's singular value decomposition, in coordinates where the inputs are white.

    Args:
        u: Left vectors, (rows, k).
        s: Singular values, falling, (k,).
        vh: Right vectors in the weight's own coordinates, ``Vᵀ S⁻¹``, (k, columns).
    """

    u: Tensor
    s: Tensor
    vh: Tensor

    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return ``(A, B)``, (rank, columns) and (rows, rank), of the best approximation ``B A``.

        Each takes the root of the singular values, so that both start at the same size.
        """
        root = self.s[:rank].sqrt()
        return root[:, None] * self.vh[:rank], self.u[:, :rank] * root

    def energy(self) -> Tensor:
        """Return which share of the squared size ranks 1, 2, … keep, (k,); 1 for a zero matrix."""
        total = self.s.square().cumsum(0)
        return total / total[-1] if total[-1] > 0 else torch.ones_like(total)


def decompose(weight: Tensor, moment: Tensor | None = None) -> Spectrum:
    r"""Return the decomposition whose truncation minimises ``‖(W − BA) X‖_F`` over all pairs of that rank.

    With ``M = X Xᵀ = S Sᵀ`` the norm is ``‖(W − BA) S‖_F``, so the best ``BA`` is the truncated SVD of ``W S`` times
    ``S⁻¹``, and the error is the root of the sum of the squared singular values that are left out. S comes from
    eigenvectors: any root of M gives the same optimum, and Cholesky's fails where directions saw no input.

    Args:
        weight: W, (rows, columns), any float dtype.
        moment: M, (columns, columns), or its diagonal, (columns,), which leaves correlations out; None: the identity.

    Returns:
        In float64.

    Source: Eckart and Young, 1936; Wang et al., 2024 (SVD-LLM), arXiv:2403.07378; with a diagonal, after Yuan et al.,
        2023 (ASVD), arXiv:2312.05821.

    Example:
        >>> inputs = torch.tensor([[3.0, 0.0], [0.0, 0.1]])
        >>> a, b = decompose(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), inputs @ inputs.T).factors(1)
        >>> (b @ a).round(decimals=3).tolist()
        [[1.0, 0.0], [0.0, 0.0]]
    """
    weight = weight.detach().double()
    if moment is None:
        u, s, vh = torch.linalg.svd(weight, full_matrices=False)
        return Spectrum(u, s, vh)
    moment = moment.double()
    if moment.dim() == 1:
        root = _floored(moment).sqrt()
        u, s, vh = torch.linalg.svd(weight * root, full_matrices=False)
        return Spectrum(u, s, vh / root)
    values, vectors = torch.linalg.eigh(moment)
    root = _floored(values).sqrt()
    u, s, vh = torch.linalg.svd(weight @ (vectors * root), full_matrices=False)
    return Spectrum(u, s, (vh / root) @ vectors.T)


def _floored(values: Tensor) -> Tensor:
    mean = values.mean()
    return values.clamp_min(float(mean) * _FLOOR) if mean > 0 else torch.ones_like(values)


def relative_error(weight: Tensor, product: Tensor, moment: Tensor | None = None) -> float:
    """Return ``‖(W − P) S‖ / ‖W S‖``, 0 where W does nothing; without a moment that of the weights alone."""
    change, weight = (weight - product).double(), weight.double()
    if moment is not None and moment.dim() == 2:
        squared = [((each @ moment) * each).sum() for each in (change, weight)]
    else:
        scale = 1.0 if moment is None else moment
        squared = [(each.square() * scale).sum() for each in (change, weight)]
    return float((squared[0].clamp_min(0) / squared[1]).sqrt()) if squared[1] > 0 else 0.0
