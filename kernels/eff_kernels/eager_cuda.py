"""Whether a tensor is one for a Triton kernel called as an opaque operator."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eff_kernels.triton_available import has_triton

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CLASSES = (Tensor, nn.Parameter)


def on_eager_cuda(*tensors: Tensor) -> bool:
    """Return whether plain tensors of up to 32 bits lie on a CUDA device, outside graphs and functorch transforms.

    The compiler fuses plain torch better than it calls an operator; subclasses (DTensor) dispatch on their own.

    Example:
        >>> on_eager_cuda(torch.ones(2))
        False
    """
    return (
        all(x.is_cuda and x.dtype in _DTYPES and type(x) in _CLASSES for x in tensors)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and has_triton()
    )
