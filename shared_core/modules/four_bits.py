"""Linear layers of four bits: bitsandbytes' codes and products, right on every processor."""

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
    """Return bitsandbytes' layer of a weight, (outputs, inputs), which stays as it is; a bias is on meta.

    Source: Dettmers et al., 2023, arXiv:2305.14314, section 3.
    """
    bnb: Any = importlib.import_module("bitsandbytes")
    outputs, inputs = weight.shape
    kind = _of_part_blocks() if inputs % _BLOCK else bnb.nn.Linear4bit
    # On meta: bitsandbytes' own layer would draw and allocate a weight only to lose it.
    layer = kind(inputs, outputs, bias=bias, compute_dtype=weight.dtype, device="meta")
    # .to() is what quantises: bitsandbytes (0.50) does it as the parameter reaches its device.
    layer.weight = bnb.nn.Params4bit(
        weight, requires_grad=False, compress_statistics=double_quant, quant_type=quant_type, module=layer
    ).to(weight.device)
    # In evaluation bitsandbytes (0.50) would repack the codes for AVX512-BF16 and not turn back for training, and it
    # fails there at sizes that are not full blocks.
    layer.support_avx512bf16_for_cpu = False
    return layer


def dequantized(weight: Any) -> Tensor:
    """Return what the 4-bit codes of a parameter of bitsandbytes stand for, in the dtype that they were made of."""
    bnb: Any = importlib.import_module("bitsandbytes")
    state = weight.quant_state
    if weight.device.type == "cpu" and state.shape[-1] % state.blocksize:
        # bitsandbytes' AVX-512 kernel (0.50) finds the scales by the rows' whole blocks: with 96 columns those of the
        # third block and all later ones are another's. Rows of one block each are read rightly.
        numel, state = state.shape.numel(), copy.copy(state)
        state.shape = torch.Size((1, numel) if numel % state.blocksize else (numel // state.blocksize, state.blocksize))
    found: Tensor = bnb.functional.dequantize_4bit(weight.data, state)
    return found.reshape(weight.quant_state.shape)


class _Product(torch.autograd.Function):
    """``x·Wᵀ`` of codes, which alone are kept for backward, as bitsandbytes has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        return nn.functional.linear(x, dequantized(layer.weight).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0] @ dequantized(ctx.layer.weight).to(grads[0].dtype), None


@cache
def _of_part_blocks() -> Any:
    """Return bitsandbytes' layer for rows that are not made of whole blocks, which multiplies by `dequantized`."""
    bnb: Any = importlib.import_module("bitsandbytes")

    class Linear4bit(bnb.nn.Linear4bit):  # type: ignore[name-defined,misc]
        def forward(self, x: Tensor) -> Tensor:
            if x.device.type != "cpu":
                return super().forward(x)  # type: ignore[no-any-return]
            product: Tensor = _Product.apply(x.to(self.compute_dtype), self)  # type: ignore[no-untyped-call]
            return (product if self.bias is None else product + self.bias.to(product.dtype)).to(x.dtype)

    return Linear4bit
