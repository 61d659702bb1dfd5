"""Whether a tensor is one for a Triton kernel called as an opaque operator."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eff_kernels.triton_available import has_triton

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def on_eager_cuda(x: Tensor) -> bool:
    """Return whether a plain tensor of up to 32 bits lies on a CUDA device, outside graphs and functorch transforms.

    The compiler fuses plain torch better than it calls an operator; subclasses (DTensor) dispatch on their own.

    Example:
        >>> on_eager_cuda(torch.ones(2))
        False
    """
    return (
        x.is_cuda
        and not torch.compiler.is_compiling()
        and x.dtype in _DTYPES
        and is_plain(x)
        and not torch._C._are_functorch_transforms_active()
        and has_triton()
    )


def is_plain(x: Tensor) -> bool:
    """Return whether a tensor is no subclass but a parameter.

    Example:
        >>> is_plain(nn.Parameter(torch.ones(2)))
        True
    """
    return type(x) in (Tensor, nn.Parameter)
