"""4-bit linear layers: bitsandbytes' codes and products, correct on every processor."""

from __future__ import annotations

import copy
import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

_BLOCK = 64
"""Weights under one scale, bitsandbytes' default."""


def linear_of_four_bits(weight: Tensor, *, bias: bool, quant_type: str = "nf4", double_quant: bool = True) -> Any:
    """Return a bitsandbytes layer for a weight, (outputs, inputs), which is not changed. A bias is on meta.

    Source: Dettmers et al., 2023, arXiv:2305.14314, section 3.
    """
    bnb: Any = importlib.import_module("bitsandbytes")
    outputs, inputs = weight.shape
    kind = _of_part_blocks() if inputs % _BLOCK else bnb.nn.Linear4bit
    # On meta, because bitsandbytes' layer would otherwise allocate and initialize a weight that is not used.
    layer = kind(inputs, outputs, bias=bias, compute_dtype=weight.dtype, device="meta")
    # .to() quantizes: bitsandbytes (0.50) does it when the parameter reaches its device.
    layer.weight = bnb.nn.Params4bit(
        weight, requires_grad=False, compress_statistics=double_quant, quant_type=quant_type, module=layer
    ).to(weight.device)
    # In evaluation bitsandbytes (0.50) would repack the codes for AVX512-BF16 and not restore them for training. It
    # fails there at sizes that are not full blocks.
    layer.support_avx512bf16_for_cpu = False
    return layer


def dequantized(weight: Any) -> Tensor:
    """Return the values of a bitsandbytes parameter's 4-bit codes, in the dtype before quantization."""
    bnb: Any = importlib.import_module("bitsandbytes")
    state = weight.quant_state
    if weight.device.type == "cpu" and state.shape[-1] % state.blocksize:
        # bitsandbytes' AVX-512 kernel (0.50) assumes rows of whole blocks to find scales: with 96 columns, from the
        # third block on it uses wrong ones. Rows of one block each are read correctly.
        numel, state = state.shape.numel(), copy.copy(state)
        state.shape = torch.Size((1, numel) if numel % state.blocksize else (numel // state.blocksize, state.blocksize))
    found: Tensor = bnb.functional.dequantize_4bit(weight.data, state)
    return found.reshape(weight.quant_state.shape)


class _Product(torch.autograd.Function):
    """``x·Wᵀ`` of codes. As in bitsandbytes, only the codes are kept for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        return nn.functional.linear(x, dequantized(layer.weight).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0] @ dequantized(ctx.layer.weight).to(grads[0].dtype), None


@cache
def _of_part_blocks() -> Any:
    """Return bitsandbytes' layer for rows that do not consist of whole blocks. It multiplies by `dequantized`."""
    bnb: Any = importlib.import_module("bitsandbytes")

    class Linear4bit(bnb.nn.Linear4bit):  # type: ignore[name-defined,misc]
        def forward(self, x: Tensor) -> Tensor:
            if x.device.type != "cpu":
                return super().forward(x)  # type: ignore[no-any-return]
            product: Tensor = _Product.apply(x.to(self.compute_dtype), self)  # type: ignore[no-untyped-call]
            return (product if self.bias is None else product + self.bias.to(product.dtype)).to(x.dtype)

    return Linear4bit
