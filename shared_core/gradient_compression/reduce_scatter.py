"""FSDP2's one communication of gradients, which each process hands on in 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shared_core.distributed.sharded_tensors import is_sharded
from shared_core.errors import CompatibilityError

# torch 2.13 gave it this name, and warns of the one before
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class RoundedReduceScatter:
    """Communication that FSDP2 calls to sum gradients and to give every process its part; it has torch's methods.

    Gradients are divided by the number of processes in 16 bits, as DDP's hooks do it, so that both give the same sums.
    """

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None
        """The dtype to send in; None sends gradients as they are."""
        self.step = {"gradients": 0, "sent": 0}
        """Bytes since the last optimizer step, that gradients have and that this process sent of them."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Overwrite `output_tensor` with this process's part of what all inputs add up to, or their mean, by `op`."""
        # 16-bit gradients (param_dtype bf16 with reduce_dtype bf16) travel as they are: a cast between fp16 and bf16
        # would only lose.
        narrow = self.dtype if self.dtype is not None and input_tensor.dtype.itemsize > 2 else input_tensor.dtype
        self.step["gradients"] += input_tensor.nbytes
        self.step["sent"] += input_tensor.numel() * narrow.itemsize
        if narrow == input_tensor.dtype:
            return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)  # type: ignore[no-any-return]
        sent = input_tensor.to(narrow)
        # Divided before the sum: n fp16 gradients may add up to more than 65504 where their mean does not.
        if op == dist.ReduceOp.AVG:
            sent, op = sent.div_(dist.get_world_size(group)), dist.ReduceOp.SUM
        received = torch.empty_like(output_tensor, dtype=narrow)
        _reduce_scatter(received, sent, op=op, group=group)
        # None tells FSDP2 that there is nothing to wait for: the copy back runs on the stream that received.
        output_tensor.copy_(received)
        return None


def put_into(model: nn.Module) -> RoundedReduceScatter | None:
    """Return what the sharded modules of a model reduce gradients by from now on; None if none is sharded."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        return None
    # HSDP all-reduces the parts after this, in a call that has no hook: it would send them in full.
    kept: Any = next((p for p in model.parameters() if is_sharded(p) and p.device_mesh.ndim > 1), None)  # type: ignore[attr-defined]
    if kept is not None:
        raise CompatibilityError(
            "comm",
            f"weights must be sharded over all processes, got {tuple(kept.placements)}: sums over copies are made by "
            "another collective, which nothing rounds",
            "shard without copies (no HSDP), or leave comm out",
        )
    scatter = RoundedReduceScatter()
    for module in modules:
        try:
            module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
        except ValueError as error:
            raise CompatibilityError("comm", f"FSDP2 must take a reduce-scatter of ours, got {error}") from error
    return scatter
