"""The best product of two thin matrices: for a weight, and for what it makes of given inputs.

What layers are given: the second moments of their inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared_core.distributed.collectives import all_reduce_
from shared_core.errors import TrainingError
from shared_core.low_rank.layers import input_rows

# Directions without any input keep this share of the mean second moment: they come last, in the order of the weight.
_FLOOR = 1e-12


@dataclass(frozen=True)
class Spectrum:
    """A weight's decomposition, ordered by what each direction of its output is worth.

    Args:
        weight: W, (rows, columns), float64.
        u: Orthonormal directions of the output, (rows, k).
        s: What each is worth: singular values of ``W S``, falling, (k,).
    """

    weight: Tensor
    u: Tensor
    s: Tensor

    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return ``(A, B)``, (rank, columns) and (rows, rank), of the best approximation ``B A = U Uᵀ W``.

        Row i of A and column i of B are of the same size, so that both learn at the same pace; without a moment each
        holds the root of a singular value.
        """
        # Eckart-Young: B A = U_r U_rᵀ W is the best rank-r approximation of W.
        u = self.u[:, :rank]
        rows = u.T @ self.weight
        # Split so that both factors have rows of equal size: products of very different factors train badly.
        root = rows.norm(dim=1).sqrt()
        root = root.where(root > 0, 1.0)
        return rows / root[:, None], u * root

    def energy(self) -> Tensor:
        """Return which share of the squared size ranks 1, 2, … keep, (k,); 1 for a zero matrix."""
        total = self.s.square().cumsum(0)
        return total / total[-1] if total[-1] > 0 else torch.ones_like(total)


def decompose(weight: Tensor, moment: Tensor | None = None) -> Spectrum:
    r"""Return the decomposition whose truncation minimises ``‖(W − BA) X‖_F`` over all pairs of that rank.

    With ``M = X Xᵀ = S Sᵀ`` the norm is ``‖(W − BA) S‖_F``, and ``W S = U Σ Vᵀ`` gives the best ``BA = U_r Σ_r V_rᵀ S⁻¹
    = U_r U_rᵀ W``: nothing is inverted. S comes from eigenvectors, as any root of M gives the same U, and Cholesky's
    fails where directions saw no input. The error is the root of the sum of the squared singular values left out.

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
        >>> (b @ a).square().round(decimals=3).tolist()
        [[1.0, 0.0], [0.0, 0.0]]
    """
    weight = weight.detach().double()
    # min ‖(W - BA) X‖_F: with X Xᵀ = M = V Λ Vᵀ, decompose W V Λ^½ and map back by U alone.
    scaled = weight
    if moment is not None and moment.dim() == 1:
        scaled = weight * _floored(moment.double()).sqrt()
    elif moment is not None:
        values, vectors = torch.linalg.eigh(moment.double())
        scaled = weight @ (vectors * _floored(values).sqrt())
    u, s, _ = torch.linalg.svd(scaled, full_matrices=False)
    return Spectrum(weight, u, s)


# Directions without input would be free, and eigh may give tiny negative eigenvalues.
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


class InputStatistics:
    """Sums ``x xᵀ`` over the inputs of layers, or its diagonal, in float64."""

    def __init__(self, layers: Mapping[str, tuple[Any, tuple[str, ...]]], *, diagonal: bool) -> None:
        self._layers, self._diagonal = layers, diagonal
        self._sums: dict[tuple[str, str], Tensor] = {}

    @torch.no_grad()
    def see(self, name: str, inputs: Tensor) -> None:
        """Take inputs of a layer into its sums."""
        layer, schemes = self._layers[name]
        wide = inputs if inputs.dtype == torch.float64 else inputs.float()
        for scheme in schemes:
            # rows.T @ rows sums over positions: (features, features), or its diagonal.
            rows = input_rows(layer, wide, scheme)
            with torch.autocast(rows.device.type, enabled=False):
                found = (rows.square().sum(0) if self._diagonal else rows.T @ rows).double()
            total = self._sums.get((name, scheme))
            self._sums[name, scheme] = found if total is None else total + found

    def hooks(self) -> list[Any]:
        """Return handles of hooks that show each layer's inputs to `see`."""

        def hook(name: str) -> Callable[..., None]:
            return lambda _, args, kwargs: self.see(name, args[0] if args else next(iter(kwargs.values())))

        return [
            layer.register_forward_pre_hook(hook(name), with_kwargs=True) for name, (layer, _) in self._layers.items()
        ]

    def read(self) -> dict[tuple[str, str], Tensor]:
        """Return the sums over all processes by (name, scheme); every process must call it."""
        moments = {}
        for name, (layer, schemes) in self._layers.items():
            for scheme in schemes:
                if (name, scheme) not in self._sums:
                    raise TrainingError(
                        "low_rank",
                        f"{name} must be reached by the calibration batches, got no input",
                        "leave it out with skip, or give other batches",
                    )
                total = all_reduce_(self._sums[name, scheme].to(layer.weight.device), "sum")
                # One NaN input makes all directions NaN: better to stop than to factorise noise.
                if not bool(total.isfinite().all()):
                    raise TrainingError("low_rank", f"{name} must see finite inputs, got NaN or infinity")
                moments[name, scheme] = total
        return moments
