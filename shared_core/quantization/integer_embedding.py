"""An embedding whose vectors are stored as int8 codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from eff_kernels import quantization as kernels
from torch import Tensor, nn

from shared_core.errors import CompatibilityError
from shared_core.quantization.integer_modules import CodeModule
from shared_core.quantization.schemes import LayerScheme


class IntEmbedding(CodeModule):
    """Looks up int8 codes and returns ``s·q``, one scale a vector; bit for bit the baked embedding.

    Args:
        stock: The embedding, in float.
        scheme: How it is quantised: per channel, which is a vector.
        learned: A saved entry; its ``weight_scale`` is used if there is one.

    Raises:
        CompatibilityError: If a weight is not finite.

    Example:
        >>> layer = IntEmbedding(nn.Embedding(9, 4), LayerScheme(input="none"), {})
        >>> layer.weight_codes.dtype, layer(torch.tensor([[2, 3]])).shape
        (torch.int8, torch.Size([1, 2, 4]))
    """

    def __init__(self, stock: nn.Embedding, scheme: LayerScheme, learned: Mapping[str, Any]) -> None:
        super().__init__()
        weight = stock.weight.detach()
        scale = kernels.symmetric_scale(weight, 0, scheme.weight_qmax)
        if "weight_scale" in learned:
            scale = torch.tensor(learned["weight_scale"], dtype=scale.dtype, device=scale.device)
        if not bool(torch.isfinite(scale).all()):
            raise CompatibilityError("convert: weights must be finite, got NaN or infinity; look for the diverged step")
        self.num_embeddings, self.embedding_dim, self.dtype = stock.num_embeddings, stock.embedding_dim, weight.dtype
        self.register_buffer("weight_codes", (weight.to(scale.dtype) / scale[:, None]).round().to(torch.int8))
        self.register_buffer("weight_scale", scale)

    @property
    def weight(self) -> Tensor:
        """The weight that the codes stand for, for code that asks an embedding for it."""
        return super().weight.to(self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Return the vectors of the indices, in the type that the embedding had."""
        scale = self.weight_scale[input].unsqueeze(-1)
        return (self.weight_codes[input].to(scale.dtype) * scale).to(self.dtype)

    def extra_repr(self) -> str:
        """Return the shape."""
        return f"{self.num_embeddings}, {self.embedding_dim}"
