"""The selective policy: the outputs of matrix products are kept, the rest is computed again."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import create_selective_checkpoint_contexts

# Linear layers, convolutions and fused attention: the work of a block. Batched products of eager attention are left
# out: their T × T scores are the memory that selective recomputation is after (Korthikanti et al. 2022,
# arXiv:2205.05198).
_NAMES = (
    "mm", "addmm", "_scaled_mm", "_grouped_mm", "_int_mm", "convolution", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_attention_math",
)  # fmt: skip
SAVED_OPS = [getattr(torch.ops.aten, name).default for name in _NAMES if hasattr(torch.ops.aten, name)]


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return what a forward and its recomputation run in, for ``context_fn`` of `torch.utils.checkpoint.checkpoint`."""
    forward, recompute = create_selective_checkpoint_contexts(SAVED_OPS)  # type: ignore[no-untyped-call]
    return forward, recompute


class KeptBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that `selective_contexts` keeps of one forward, from outside of them."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        output = func(*args, **(kwargs or {}))
        if func in SAVED_OPS:
            self.num_bytes += sum(value.nbytes for value in tree_leaves(output) if isinstance(value, Tensor))
        return output
