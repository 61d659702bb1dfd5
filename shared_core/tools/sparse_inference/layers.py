"""Linear layers with sparse storage for inference. They save and load dense weights.

Also which weights and devices torch supports for 2:4 products.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

Backend = Literal["cusparselt", "cutlass"]
_MULTIPLES: dict[Backend, tuple[int, int]] = {"cusparselt": (16, 16), "cutlass": (32, 64)}
_TYPES = (torch.float16, torch.bfloat16)


def has_two_four_kernels(device: torch.device) -> bool:
    """Return True if torch multiplies 2:4 weights on a device: NVIDIA of compute capability 8.0 and newer."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def two_four_here(device: torch.device) -> str:
    """Return a description of 2:4 support on a device."""
    if has_two_four_kernels(device):
        return f"2:4 weights are multiplied by {compressor()[1]}"
    return "masks train everywhere; 2:4 products need a GPU of compute capability 8.0 or later"


@torch.no_grad()
def two_four_obstacle(weight: Tensor, backend: Backend) -> str:
    """Return why a weight cannot be compressed for a library of sparse products, or ``""`` if it can.

    Example:
        >>> two_four_obstacle(torch.ones(32, 64, dtype=torch.float16), "cusparselt")
        'it holds no 2:4 pattern: up to 4 of four neighbors are not zero'
    """
    if weight.dtype not in _TYPES:
        return f"2:4 products are of float16 and bfloat16, not {weight.dtype}; convert the model first"
    rows, columns = _MULTIPLES[backend]
    if weight.ndim != 2 or weight.shape[0] % rows or weight.shape[1] % columns or not weight.numel():
        return f"{backend} takes outputs in multiples of {rows} and inputs of {columns}, got {tuple(weight.shape)}"
    most = int(weight.ne(0).reshape(-1, 4).sum(1).max())
    return f"it holds no 2:4 pattern: up to {most} of four neighbors are not zero" if most > 2 else ""


def compressor() -> tuple[Callable[[Tensor], Tensor], Backend]:
    """Return the function that compresses 2:4 weights on this machine's GPU, and the library that multiplies them."""
    from torch.sparse import SparseSemiStructuredTensorCUSPARSELT, SparseSemiStructuredTensorCUTLASS

    if torch.backends.cusparselt.is_available():
        return SparseSemiStructuredTensorCUSPARSELT.from_dense, "cusparselt"
    return SparseSemiStructuredTensorCUTLASS.from_dense, "cutlass"


Layout = Literal["csr", "bsr"]
_LAYOUTS = {"csr": torch.sparse_csr, "bsr": torch.sparse_bsr}
_COMPUTED = (torch.float32, torch.float64)  # MKL has no sparse product of 16-bit floats (torch 2.13)


class DenseStateDict(nn.Module, abc.ABC):
    """A layer that stores its weight in another form, but saves and loads it as a dense ``weight``."""

    in_features: int
    out_features: int

    @abc.abstractmethod
    def dense_weight(self) -> Tensor:
        """Return the weight as a dense tensor."""

    @abc.abstractmethod
    def set_weight(self, weight: Tensor) -> None:
        """Set the weight from a dense one."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        weight = self.dense_weight()
        destination[f"{prefix}weight"] = weight  # before the bias, as in a dense layer
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = weight

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        key = f"{prefix}weight"
        others = {name: tensor for name, tensor in state_dict.items() if name != key}
        weight = state_dict.get(key)
        # Without the weight, which torch would look for among the parameters.
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        missing_keys[:] = [name for name in missing_keys if name != key]
        shape = (self.out_features, self.in_features)
        if weight is None:
            missing_keys.extend([key] if strict else [])
        elif weight.shape != shape:
            error_msgs.append(f"size mismatch for {key}: got {tuple(weight.shape)}, the layer has {shape}")
        else:
            self.set_weight(weight.detach())


class SparseLinear(DenseStateDict):
    """A linear layer whose weight is a CSR or BSR matrix, for inference on CPU.

    Weights in 16-bit floats are multiplied in float32, and the output is rounded to the input's dtype, since torch has
    no such sparse product on CPU. Unlike in a dense layer, NaN in the input reaches only outputs with a weight for it.

    Args:
        weight: Dense, ``(outputs, inputs)``, floating point, on CPU.
        bias: ``(outputs,)``, or None.
        layout: ``csr``, or ``bsr`` for blocks.
        block: Side of a ``bsr`` block, which divides the shape. MKL supports only square blocks.

    Example:
        >>> weight = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
        >>> SparseLinear(weight, None, "csr")(torch.tensor([[1.0, 3.0]]))
        tensor([[6., 0.]])
    """

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, layout: Layout, block: int | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.layout, self.block = layout, block
        self.crow_indices: Tensor
        self.col_indices: Tensor
        self.values: Tensor
        # Buffers that follow the model to a device; not persistent, since the state dict holds the dense weight.
        for name in ("crow_indices", "col_indices", "values"):
            self.register_buffer(name, torch.empty(0), persistent=False)
        # has the dense weight's dtype, and follows model.half() and the like
        self.register_buffer("_like", weight.new_empty(0), persistent=False)
        self.bias = bias
        self.set_weight(weight.detach())

    @property
    def weight(self) -> Tensor:
        """The dense weight, rebuilt on each access."""
        return self.dense_weight()

    @property
    def dtype(self) -> torch.dtype:
        """The dense weight's dtype."""
        like: Tensor = self._buffers["_like"]  # type: ignore[assignment]
        return like.dtype

    @torch.no_grad()
    def set_weight(self, weight: Tensor) -> None:
        """Set the weight from a dense one. Only nonzero values are stored."""
        weight = weight.to(self.dtype)
        # MKL has no 16-bit product: values are held in float32, and outputs rounded to the layer's dtype.
        if self.dtype not in _COMPUTED:
            weight = weight.float()
        sparse = weight.to_sparse_bsr((self.block, self.block)) if self.block else weight.to_sparse_csr()
        # MKL's own index type: int64 would be converted at every product
        self.crow_indices = sparse.crow_indices().to(torch.int32)
        self.col_indices = sparse.col_indices().to(torch.int32)
        self.values = sparse.values().contiguous()

    @torch.no_grad()
    def dense_weight(self) -> Tensor:
        """Return the weight as a dense tensor."""
        return self.matrix().to_dense().to(self.dtype)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the sparse weight: values and indices."""
        return sum(tensor.nbytes for tensor in (self.crow_indices, self.col_indices, self.values))

    def matrix(self) -> Tensor:
        """Return the weight as a CSR or BSR tensor, without a copy."""
        shape = (self.out_features, self.in_features)
        return torch.sparse_compressed_tensor(
            self.crow_indices, self.col_indices, self.values, shape, layout=_LAYOUTS[self.layout],
            # Checked when the weight was set: a check per product costs as much as the product.
            check_invariants=False,
        )  # fmt: skip

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output, in the dtype of a dense layer's."""
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            # The product must not run under autocast: it would cast the values. A dense layer would take the input in
            # this dtype.
            with torch.autocast(kind, enabled=False):
                return self._output(input.to(torch.get_autocast_dtype(kind)))
        return self._output(input)

    def _output(self, input: Tensor) -> Tensor:
        x = input.reshape(-1, self.in_features).to(self.values.dtype)
        y: Tensor = _product(self, x)
        if self.bias is not None:
            y = y + self.bias
        return y.to(input.dtype).view(*input.shape[:-1], self.out_features)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # model.half() also converts the buffers: convert values back to MKL's dtype.
        if self.values.is_floating_point() and self.values.dtype not in _COMPUTED:
            self.values = self.values.float()
        return self

    def extra_repr(self) -> str:
        """Return shape, layout and the number of stored weights."""
        block = f", block={self.block}" if self.block else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"layout={self.layout}{block}, stored={self.values.numel()}"
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]  # dynamo cannot trace compressed tensors (torch 2.13)
def _product(layer: SparseLinear, x: Tensor) -> Tensor:
    """Return rows times the transposed weight, contiguous: later code views outputs."""
    matrix = layer.matrix()
    if len(x) == 1:
        return (matrix @ x[0]).unsqueeze(0)  # with a vector MKL is several times faster than with one column
    return (matrix @ x.t()).t().contiguous()


class SemiStructuredLinear(DenseStateDict):
    """A linear layer whose weight holds a 2:4 pattern, on the sparse tensor cores of an NVIDIA GPU, for inference."""

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, compress: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._compress = compress
        self.bias = bias
        self.set_weight(weight.detach())

    def set_weight(self, weight: Tensor) -> None:
        """Set the weight from a dense one with a 2:4 pattern."""
        # The loaded weight takes the current parameter's device and dtype.
        held = self._parameters.get("weight")
        if held is not None:
            weight = weight.to(device=held.device, dtype=held.dtype)
        self.weight = nn.Parameter(self._compress(weight.contiguous()), requires_grad=False)

    @torch.no_grad()
    def dense_weight(self) -> Tensor:
        """Return the weight as a dense tensor."""
        weight: Tensor = self.weight.detach()
        return weight if type(weight) is Tensor else weight.to_dense()

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output."""
        return nn.functional.linear(input, self.weight, self.bias)
