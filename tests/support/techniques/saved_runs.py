"""One forward and backward of a net whose saved tensors are packed, or are not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shared_core.activation_compression import ActivationsConfig
from shared_core.activation_compression.saved_tensors import Counts, HeldMemory, Ledger


def packed(call: Any, *, weights: nn.Module | None = None, mover: Any = None, seed: int = 0, **options: Any) -> Any:
    """Return what `call` returns, with what it saved for backward packed, and the counts."""
    config = ActivationsConfig(**({"pack": "exact", "min_size": 1} | options))
    counts, generator = Counts(), torch.Generator().manual_seed(seed)
    ledger = Ledger(
        config,
        counts,
        held=None if weights is None else HeldMemory(weights),
        mover=mover,
        generator=lambda device: generator,
    )
    with saved_tensors_hooks(ledger.pack, ledger.unpack):
        result = call()
    ledger.close()
    return result, counts


def gradients(net: nn.Module, x: Tensor, *, pack: str | None = "exact", **options: Any) -> tuple[list[Tensor], Counts]:
    """Return the gradients of input and parameters of a loss that weighs every output differently."""
    torch.manual_seed(3)  # dropout
    for buffer in net.buffers():
        buffer.zero_()
    x = x.clone(memory_format=torch.preserve_format)
    leaves = [x.requires_grad_()] if x.is_floating_point() else []
    leaves += [p for p in net.parameters() if p.requires_grad]

    def loss() -> Tensor:
        output = net(x)
        weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
        return (output * weight).sum() + output.square().mean()

    value, counts = (loss(), Counts()) if pack is None else packed(loss, weights=net, pack=pack, **options)
    return list(torch.autograd.grad(value, leaves)), counts
