"""Whether tensors are for a Triton kernel called as an opaque operator."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from eff_kernels.triton_available import has_triton

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def on_eager_cuda(x: Tensor, *others: Tensor | None) -> bool:
    """Return whether `x`, of up to 32 bits and not empty, and the others are plain tensors on one GPU, and not traced.

    The compiler fuses torch's own operations and cannot look into an operator; ``torch.func`` cannot either.

    Args:
        x: Any tensor.
        others: Tensors that the operation takes as well, or None in their place.

    Example:
        >>> on_eager_cuda(torch.ones(2))
        False
    """
    return (
        x.is_cuda
        and not torch.compiler.is_compiling()
        and x.dtype in _DTYPES
        and x.numel() > 0
        and all(t is None or (is_plain(t) and t.device == x.device) for t in (x, *others))
        and not torch._C._are_functorch_transforms_active()
        and compiles_for(x.device)
    )


def is_plain(x: Tensor) -> bool:
    """Return whether a tensor is no subclass but a parameter; a subclass (a DTensor, say) has its data elsewhere.

    Args:
        x: Any tensor.

    Example:
        >>> is_plain(nn.Parameter(torch.ones(2)))
        True
    """
    return type(x) in (Tensor, nn.Parameter)


@functools.cache
def compiles_for(device: torch.device) -> bool:
    """Return whether Triton is there and knows bfloat16 on the GPU: from Ampere on."""
    return has_triton() and torch.cuda.get_device_capability(device) >= (8, 0)
