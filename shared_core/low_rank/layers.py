"""Layers as matrices, their best low-rank products, and the factorized layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shared_core.distributed.collectives import all_reduce_
from shared_core.distributed.sharded_tensors import fill_
from shared_core.errors import TrainingError
from shared_core.modules.matching import replaced
from shared_core.modules.own_forward import close_attention

LINEAR, CHANNEL, SPATIAL = "linear", "channel", "spatial"


def is_transposed(layer: nn.Module) -> bool:
    """Return True if a layer is transformers' Conv1D, a linear layer whose weight is (in, out)."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")


def schemes(layer: nn.Module) -> tuple[str, ...]:
    """Return the ways in which a layer can be factorized."""
    if not isinstance(layer, nn.Conv2d):
        return (LINEAR,)
    return (CHANNEL, SPATIAL) if max(layer.kernel_size) > 1 else (CHANNEL,)


def as_matrix(weight: Tensor, scheme: str, transposed: bool) -> Tensor:
    """Return a layer's weight as the matrix to factorize.

    ``linear``: (out, in). ``channel``: (out, in·kh·kw). ``spatial``: (out·kw, in·kh).
    """
    if scheme == LINEAR:
        return weight.T if transposed else weight
    if scheme == CHANNEL:
        return weight.flatten(1)
    # Spatial: a k x k kernel becomes k x 1 then 1 x k, so the matrix maps (in, height) to (out, width).
    out, into, height, width = weight.shape
    return weight.permute(0, 3, 1, 2).reshape(out * width, into * height)


def from_matrix(matrix: Tensor, scheme: str, transposed: bool, shape: tuple[int, ...]) -> Tensor:
    """Return the weight of a layer from its matrix: the inverse of `as_matrix`."""
    if scheme == LINEAR:
        return matrix.T.contiguous() if transposed else matrix
    if scheme == CHANNEL:
        return matrix.reshape(shape)
    out, into, height, width = shape
    return matrix.reshape(out, width, into, height).permute(0, 2, 3, 1).contiguous()


def empty_factors(layer: Any, scheme: str, rank: int) -> tuple[nn.Module, nn.Module]:
    """Return the two layers on the layer's device and in its dtype, uninitialized and without bias."""
    new: dict[str, Any] = {"bias": False, "device": layer.weight.device, "dtype": layer.weight.dtype}
    make: Any = torch.nn.utils.skip_init
    if scheme == LINEAR:
        into, out = layer.weight.shape if is_transposed(layer) else layer.weight.shape[::-1]
        return make(nn.Linear, into, rank, **new), make(nn.Linear, rank, out, **new)
    into, out = layer.in_channels, layer.out_channels
    if scheme == CHANNEL:
        geometry = {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "padding_mode")}
        first = make(nn.Conv2d, into, rank, layer.kernel_size, **geometry, **new)
        return first, make(nn.Conv2d, rank, out, 1, **new)
    parts = []
    # First along height, then along width. Strides are split the same way.
    for axis, (inner, outer) in enumerate(((into, rank), (rank, out))):
        kernel, stride, padding, dilation = (
            _along(getattr(layer, name), axis, rest)
            for name, rest in (("kernel_size", 1), ("stride", 1), ("padding", 0), ("dilation", 1))
        )
        parts.append(
            make(nn.Conv2d, inner, outer, kernel, stride=stride, padding=padding, dilation=dilation,
                 padding_mode=layer.padding_mode, **new)
        )  # fmt: skip
    return parts[0], parts[1]


def _along(value: Any, axis: int, rest: int) -> Any:
    """Return a pair with its value along one axis and `rest` along the other. ``"same"`` applies to both."""
    return value if isinstance(value, str) else tuple(value[i] if i == axis else rest for i in (0, 1))


def factor_weights(a: Tensor, b: Tensor, scheme: str, layer: Any) -> tuple[Tensor, Tensor]:
    """Return the weights of the two layers from the factors A (rank, columns) and B (rows, rank)."""
    rank = len(a)
    if scheme == LINEAR:
        return a, b
    height, width = layer.kernel_size
    if scheme == CHANNEL:
        return a.reshape(rank, -1, height, width), b.reshape(-1, rank, 1, 1)
    return (a.reshape(rank, -1, height, 1), b.reshape(-1, width, rank).permute(0, 2, 1).reshape(-1, rank, 1, width))


def product(first: Tensor, second: Tensor, scheme: str) -> Tensor:
    """Return the matrix ``B A`` from the two layers' weights."""
    if scheme == SPATIAL:
        # (out, rank, 1, width) to (out * width, rank): the inverse of `factor_weights`.
        second = second.squeeze(2).permute(0, 2, 1).flatten(0, 1)
    return second.flatten(1) @ first.flatten(1)


def input_rows(layer: Any, inputs: Tensor, scheme: str) -> Tensor:
    """Return the inputs of a scheme's matrix, one per row, (n, columns).

    For ``spatial`` these are the pixel columns that its first layer sees. The second combines neighboring columns.
    """
    if scheme == LINEAR:
        return inputs.flatten(0, -2) if inputs.dim() > 1 else inputs[None]
    if inputs.dim() == 3:
        inputs = inputs[None]
    # Padding decides what the first factor sees, so pad as the layer does.
    if any(layer._reversed_padding_repeated_twice):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        sides = list(layer._reversed_padding_repeated_twice)
        # The first factor moves along height only, so width is not padded for it.
        if scheme == SPATIAL:
            sides[:2] = 0, 0
        inputs = F.pad(inputs, sides, mode=mode)
    kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    if scheme == SPATIAL:
        kernel, stride, dilation = ((pair[0], 1) for pair in (kernel, stride, dilation))
    patches = F.unfold(inputs, kernel, dilation=dilation, stride=stride)
    return patches.transpose(1, 2).flatten(0, 1)


class LowRankLayer(nn.Module):
    """``y = B(A x) + b`` with `first` = A and `second` = B, plain layers that train and save as usual.

    Args:
        dense: The user's layer. Its bias becomes the bias of `second`, as the same parameter.
        rank: Rank of the factors.
        scheme: How the weight becomes a matrix: ``linear``, ``channel`` or ``spatial``.

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
        """Replaces the forward during calibration."""
        # In a tuple, so that its parameters are not registered here.
        self._dense = (dense,)

    @property
    def dense(self) -> Any:
        """The user's layer, without a weight after `release`."""
        return self._dense[0]

    @property
    def transposed(self) -> bool:
        """True if the user's layer stores its weight as (in, out)."""
        return is_transposed(self.dense)

    @property
    def weight(self) -> Tensor:
        """The product of the factors in the layout of the user's layer, for code that reads it."""
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
        """Return the user's weight for two factors, computed in at least float32 and cast to their dtype."""
        wide = torch.promote_types(first.dtype, torch.float32)
        matrix = product(first.to(wide), second.to(wide), self.scheme)
        return from_matrix(matrix, self.scheme, self.transposed, tuple(self.dense.weight.shape)).to(first.dtype)

    @torch.no_grad()
    def set_factors_(self, a: Tensor, b: Tensor) -> None:
        """Copy factors A (rank, columns) and B (rows, rank) of any dtype."""
        for name, value in zip(("first", "second"), factor_weights(a, b, self.scheme, self.dense), strict=True):
            fill_(self._part(name), value)

    def release(self) -> None:
        """Release the user's weight, but keep its shape."""
        weight = self.dense.weight
        if not weight.is_meta:
            # A meta tensor keeps the shape for merging, without the memory.
            self.dense.weight = nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
            self.dense.bias = None  # a reference would keep the old bias alive when a loader replaces it

    @torch.no_grad()
    def merged(self) -> Any:
        """Return the user's layer with the product as its weight."""
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


def factorized(model: nn.Module) -> dict[str, LowRankLayer]:
    """Return the factorized layers of a model by name, each only once."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LowRankLayer)}


def put_in_(model: nn.Module, structure: Mapping[str, Mapping[str, Any]]) -> dict[str, LowRankLayer]:
    """Replace layers by factorized ones of zeros, into which weights are loaded later."""
    layers = {}
    for name, entry in structure.items():
        dense = model.get_submodule(name)
        layers[name] = LowRankLayer(dense, int(entry["rank"]), str(entry["scheme"]))
        for part in ("first", "second"):
            nn.init.zeros_(layers[name]._part(part))  # other techniques read weights before these are loaded
        replaced(model, {dense: layers[name]})
    return layers


def structure_of(layers: Mapping[str, LowRankLayer]) -> dict[str, dict[str, Any]]:
    """Return rank and scheme of layers by name, as plain values."""
    return {name: {"rank": layer.rank, "scheme": layer.scheme} for name, layer in layers.items()}


def merge(model: nn.Module) -> list[str]:
    """Replace factorized layers by plain ones whose weights are the products, and return their names.

    Exact except for rounding the product to the weights' dtype. The model's own layers are restored, with the original
    classes and keys.

    Args:
        model: A model with factorized layers, changed in place.

    Example:
        >>> from shared_core.low_rank import LowRankConfig, factorize
        >>> net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
        >>> _ = factorize(net, LowRankConfig(rank=8))
        >>> merge(net), int(torch.linalg.matrix_rank(net[0].weight))
        (['0'], 8)
    """
    layers = factorized(model)
    for layer in layers.values():
        replaced(model, {layer: layer.merged()})
    close_attention(model)
    return list(layers)


# Directions without input get this share of the mean second moment, so they come last, ordered by the weight.
_FLOOR = 1e-12


@dataclass(frozen=True)
class Spectrum:
    """A weight W, (rows, columns), orthonormal output directions `u`, (rows, k), and their values `s`, (k,).

    In float64. `s` are the singular values of ``W S``, in decreasing order.
    """

    weight: Tensor
    u: Tensor
    s: Tensor

    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return ``(A, B)``, (rank, columns) and (rows, rank), of the best approximation ``B A = U Uᵀ W``.

        Row i of A and column i of B have equal norm, so that both learn at the same rate. Without a moment each norm is
        the root of a singular value.
        """
        # Eckart-Young: B A = U_r U_rᵀ W is the best rank-r approximation of W.
        u = self.u[:, :rank]
        rows = u.T @ self.weight
        # Balance the factors: products of very different factors train badly.
        root = rows.norm(dim=1).sqrt()
        root = root.where(root > 0, 1.0)
        return rows / root[:, None], u * root

    def energy(self) -> Tensor:
        """Return the share of the squared norm that ranks 1, 2, … keep, (k,). For a zero matrix it is 1."""
        total = self.s.square().cumsum(0)
        return total / total[-1] if total[-1] > 0 else torch.ones_like(total)


def decompose(weight: Tensor, moment: Tensor | None = None) -> Spectrum:
    r"""Return the decomposition whose truncation minimizes ``‖(W − BA) X‖_F`` for every rank.

    With ``M = X Xᵀ = S Sᵀ`` the norm is ``‖(W − BA) S‖_F``, and ``W S = U Σ Vᵀ`` gives the best ``BA = U_r Σ_r V_rᵀ S⁻¹
    = U_r U_rᵀ W`` without any inversion. S comes from eigenvectors, because every root of M gives the same U, and
    Cholesky fails if a direction had no input. The error is the root of the sum of the omitted squared singular values.

    Args:
        weight: W, (rows, columns), any float dtype.
        moment: M, (columns, columns), or its diagonal, (columns,), which ignores correlations. None: the identity.

    Returns:
        The decomposition in float64.

    Source: Eckart and Young, 1936; Wang et al., 2024 (SVD-LLM), arXiv:2403.07378; with a diagonal, after Yuan et al.,
        2023 (ASVD), arXiv:2312.05821.
    """
    weight = weight.detach().double()
    # min ‖(W - BA) X‖_F: with X Xᵀ = M = V Λ Vᵀ, decompose W V Λ^½ and map back using only U.
    scaled = weight
    if moment is not None and moment.dim() == 1:
        scaled = weight * _floored(moment.double()).sqrt()
    elif moment is not None:
        values, vectors = torch.linalg.eigh(moment.double())
        scaled = weight @ (vectors * _floored(values).sqrt())
    u, s, _ = torch.linalg.svd(scaled, full_matrices=False)
    return Spectrum(weight, u, s)


# Directions without input would be unconstrained, and eigh may return tiny negative eigenvalues.
def _floored(values: Tensor) -> Tensor:
    mean = values.mean()
    return values.clamp_min(float(mean) * _FLOOR) if mean > 0 else torch.ones_like(values)


def relative_error(weight: Tensor, product: Tensor, moment: Tensor | None = None) -> float:
    """Return ``‖(W − P) S‖ / ‖W S‖``, or 0 if ``W S`` is 0. Without a moment, S is the identity."""
    change, weight = (weight - product).double(), weight.double()
    if moment is not None and moment.dim() == 2:
        squared = [((each @ moment) * each).sum() for each in (change, weight)]
    else:
        scale = 1.0 if moment is None else moment
        squared = [(each.square() * scale).sum() for each in (change, weight)]
    return float((squared[0].clamp_min(0) / squared[1]).sqrt()) if squared[1] > 0 else 0.0


class InputStatistics:
    """Sums ``x xᵀ``, or its diagonal, over the inputs of layers, in float64."""

    def __init__(self, layers: Mapping[str, tuple[Any, tuple[str, ...]]], *, diagonal: bool) -> None:
        self._layers, self._diagonal = layers, diagonal
        self._sums: dict[tuple[str, str], Tensor] = {}

    @torch.no_grad()
    def see(self, name: str, inputs: Tensor) -> None:
        """Add inputs of a layer to its sums."""
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
        """Register hooks that pass each layer's inputs to `see`, and return their handles."""

        def hook(name: str) -> Callable[..., None]:
            return lambda _, args, kwargs: self.see(name, args[0] if args else next(iter(kwargs.values())))

        return [
            layer.register_forward_pre_hook(hook(name), with_kwargs=True) for name, (layer, _) in self._layers.items()
        ]

    def read(self) -> dict[tuple[str, str], Tensor]:
        """Return the sums over all processes by (name, scheme). Every process must call it."""
        moments = {}
        for name, (layer, schemes) in self._layers.items():
            for scheme in schemes:
                found = self._sums.get((name, scheme))
                total = None if found is None else all_reduce_(found.to(layer.weight.device), "sum")
                # One NaN input makes all directions NaN. Stop instead of factorizing noise.
                if total is None or not bool(total.isfinite().all()):
                    got = "no input" if total is None else "NaN or infinity"
                    rule = f"{name} must get finite inputs from the calibration batches, got {got}"
                    raise TrainingError("low_rank", rule, "leave it out with skip, or use other batches")
                moments[name, scheme] = total
        return moments
