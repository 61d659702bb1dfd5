"""A factorised layer, in the place of the user's own: two plain layers, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.low_rank.matrices import empty_factors, factor_weights, from_matrix, is_transposed, product
from shared_core.sharded import fill_


class LowRankLayer(nn.Module):
    """``y = B(A x) + b`` with `first` = A and `second` = B, plain layers that are trained and saved like any others.

    Args:
        dense: The user's layer; its bias goes over to `second`, the very same parameter.
        rank: Of the factors.
        scheme: How its weight becomes a matrix: ``linear``, ``channel`` or ``spatial``.

    Example:
        >>> layer = LowRankLayer(nn.Linear(6, 4), 2, "linear")
        >>> [(name, tuple(value.shape)) for name, value in layer.named_parameters()]
        [('first.weight', (2, 6)), ('second.weight', (4, 2)), ('second.bias', (4,))]
    """

    def __init__(self, dense: Any, rank: int, scheme: str) -> None:
        super().__init__()
        self.rank, self.scheme = rank, scheme
        self.first, self.second = (part.train(dense.training) for part in empty_factors(dense, scheme, rank))
        for part in (self.first, self.second):
            part.requires_grad_(dense.weight.requires_grad)
        self.second.bias = dense.bias
        self.training = dense.training
        self.observer: Callable[[LowRankLayer, Tensor], Tensor] | None = None
        """While inputs are looked at: what takes the place of the forward."""
        # in a tuple, so that its parameters are not this model's
        self._dense = (dense,)

    @property
    def dense(self) -> Any:
        """The user's layer; after `release` without a weight."""
        return self._dense[0]

    @property
    def transposed(self) -> bool:
        """Whether the user's layer holds its weight as (in, out)."""
        return is_transposed(self.dense)

    @property
    def weight(self) -> Tensor:
        """The product of the factors, as the user's layer would hold it: for code that looks at it."""
        return self.weight_of(self._part("first"), self._part("second"))

    @property
    def bias(self) -> Tensor | None:
        """The bias."""
        found: Tensor | None = self._modules["second"].bias  # type: ignore[union-attr, assignment]
        return found

    def _part(self, name: str) -> Tensor:
        weight: Tensor = self._modules[name].weight  # type: ignore[union-attr, assignment]
        return weight

    def weight_of(self, first: Tensor, second: Tensor) -> Tensor:
        """Return what the user's layer holds for two factors, in at least float32 and then in their dtype."""
        wide = torch.promote_types(first.dtype, torch.float32)
        matrix = product(first.to(wide), second.to(wide), self.scheme)
        return from_matrix(matrix, self.scheme, self.transposed, tuple(self.dense.weight.shape)).to(first.dtype)

    @torch.no_grad()
    def set_factors_(self, a: Tensor, b: Tensor) -> None:
        """Take over factors A (rank, columns) and B (rows, rank), whatever their dtype."""
        for name, value in zip(("first", "second"), factor_weights(a, b, self.scheme, self.dense), strict=True):
            fill_(self._part(name), value)

    def release(self) -> None:
        """Let go of the user's weight: its shape stays."""
        weight = self.dense.weight
        if not weight.is_meta:
            self.dense.weight = nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
            self.dense.bias = None  # a reference would keep an old one alive where a loader puts a new one

    @torch.no_grad()
    def merged(self) -> Any:
        """Return the user's layer with the product for its weight."""
        dense = self.dense
        dense.weight = nn.Parameter(self.weight, self._part("first").requires_grad)
        dense.bias = self.second.bias
        return dense.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``B(A x) + b``."""
        if self.observer is not None:
            return self.observer(self, x)
        out: Tensor = self.second(self.first(x))
        return out

    def extra_repr(self) -> str:
        """Return rank and scheme."""
        return f"rank={self.rank}, scheme={self.scheme}"


def factorised(model: nn.Module) -> dict[str, LowRankLayer]:
    """Return the factorised layers of a model by name, each once."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LowRankLayer)}


def replace_(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in the place of another, wherever the model holds it."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new


def put_in_(model: nn.Module, structure: Mapping[str, Mapping[str, Any]]) -> dict[str, LowRankLayer]:
    """Replace layers by factorised ones of zeros, into which weights are loaded.

    Args:
        model: The user's.
        structure: Rank and scheme of each layer by name.

    Returns:
        The new layers by name.
    """
    layers = {}
    for name, told in structure.items():
        dense = model.get_submodule(name)
        layers[name] = LowRankLayer(dense, int(told["rank"]), str(told["scheme"]))
        for part in ("first", "second"):
            nn.init.zeros_(layers[name]._part(part))  # other techniques look at weights before these are loaded
        replace_(model, dense, layers[name])
    return layers


def structure_of(layers: Mapping[str, LowRankLayer]) -> dict[str, dict[str, Any]]:
    """Return rank and scheme of layers by name, as plain values."""
    return {name: {"rank": layer.rank, "scheme": layer.scheme} for name, layer in layers.items()}


def merge(model: nn.Module) -> list[str]:
    """Put plain layers, whose weights are the products, in the place of factorised ones; return their names.

    Exact up to the rounding of the product to the weights' dtype. The model's own layers come back: same classes and
    keys as before it was factorised.

    Args:
        model: With factorised layers; changed in place.

    Example:
        >>> from shared_core.low_rank import LowRankConfig, factorize
        >>> net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
        >>> _ = factorize(net, LowRankConfig(rank=8))
        >>> merge(net), int(torch.linalg.matrix_rank(net[0].weight))
        (['0'], 8)
    """
    layers = factorised(model)
    for layer in layers.values():
        replace_(model, layer, layer.merged())
    return list(layers)
