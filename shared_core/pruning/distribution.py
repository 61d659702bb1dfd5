"""How sparse each tensor becomes when all together are to reach one sparsity."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shared_core.errors import ConfigError


def erdos_renyi_sparsities(
    shapes: Sequence[Sequence[int]], sparsity: float, *, kernel: bool = False, most: float = 1.0
) -> list[float]:
    """Return a sparsity for each tensor, so that large ones are sparser and all together reach `sparsity`.

    Density is ``ε·(n_in + n_out)/(n_in·n_out)``, with `kernel` ``ε·(n_in + n_out + k_h + k_w)/numel``, and 1 where that
    is more, ``1 - most`` where it is less; ε is solved again for the others until it holds (Mocanu et al. 2018,
    arXiv:1707.04780; Evci et al. 2020, arXiv:1911.11134).

    Args:
        shapes: Of two or more dimensions, ``(n_out, n_in, *kernel)``.
        sparsity: Share of all elements to prune, in [0, 1].
        kernel: Whether kernel sizes count (Erdős–Rényi kernel), or a convolution's kernel is part of its size only.
        most: The largest sparsity of one tensor, at least `sparsity`.

    Raises:
        ConfigError: If `sparsity` is not in [0, 1], or a shape has fewer than two dimensions or no elements.

    Example:
        >>> [round(share, 4) for share in erdos_renyi_sparsities([(4, 4), (64, 64)], 0.9)]
        [0.0, 0.9035]
    """
    if not 0 <= sparsity <= 1:
        raise ConfigError(f"erdos_renyi_sparsities: sparsity must be in [0, 1], got {sparsity!r}")
    numels, shares = [], []
    for shape in shapes:
        if len(shape) < 2:
            raise ConfigError(f"erdos_renyi_sparsities: shapes must have two dimensions or more, got {tuple(shape)}")
        numel = math.prod(shape)
        if not numel:
            raise ConfigError(f"erdos_renyi_sparsities: shapes must not be empty, got {tuple(shape)}, no weights")
        numels.append(numel)
        # without the kernel's sizes a convolution is a matrix n_out x n_in of kernels
        shares.append(sum(shape) / numel if kernel else sum(shape[:2]) / (shape[0] * shape[1]))
    fixed: dict[int, float] = {}  # densities
    kept = (1 - sparsity) * sum(numels)
    while True:
        open_ = [i for i in range(len(numels)) if i not in fixed]
        weight = sum(shares[i] * numels[i] for i in open_)
        epsilon = (kept - sum(density * numels[i] for i, density in fixed.items())) / weight if weight else 0.0
        over = {i: 1.0 for i in open_ if epsilon * shares[i] > 1}
        under = {i: 1 - most for i in open_ if epsilon * shares[i] < 1 - most}
        if not over and not under:
            return [1 - fixed.get(i, max(0.0, epsilon) * shares[i]) for i in range(len(numels))]
        # what those over may not keep raises ε for the others, what those under must keep lowers it: where more is to
        # be handed out than taken back those over stay over, whatever becomes of the others
        surplus = sum((epsilon * shares[i] - density) * numels[i] for i, density in (over | under).items())
        fixed |= (over if surplus >= 0 else {}) | (under if surplus <= 0 else {})
