"""FSDP2's sharded tensors: gather them for decisions and saving, cut whole tensors, and synchronize buffers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from shared_core.distributed.collectives import broadcast_, local_part, world_size


@torch.no_grad()
def join_buffers_(model: nn.Module) -> None:
    """Copy the main process's buffers of the module inside DDP to all processes; every process must call it.

    DDP does this only at the next forward, so after the last one they may differ (batch norm statistics).
    """
    if world_size() == 1:
        return
    own = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    for name, buffer in model.named_buffers():
        if name not in own and not (buffer.is_meta or is_sharded(buffer) or buffer.dtype == torch.bool):
            broadcast_(buffer)


def is_sharded(tensor: Tensor) -> bool:
    """Return True if a process may hold only part of a tensor."""
    return hasattr(tensor, "device_mesh")


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered if it is sharded. Then every process must call it."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else cast("Tensor", gather())


def whole_of(part: Tensor, like: Any) -> Tensor:
    """Return the whole tensor of which `part` is this process's shard, with `like`'s placement. Every process calls it.

    Returns `part` if `like` is not sharded.
    """
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    # run_check=False: a check would be a collective. Shape and stride do not follow from uneven parts.
    placed = DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return placed.full_tensor()


def cut(full: Tensor, like: Any) -> Tensor:
    """Return a whole tensor sharded as `like` is, without communication."""
    if not is_sharded(like):
        return full
    from torch.distributed.tensor import distribute_tensor

    # src_data_rank=None: every process has the whole tensor, so each cuts its own part.
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def apply_in_parts(function: Callable[[Tensor], Tensor], tensor: Any, whole_axes: Collection[int]) -> Tensor:
    """Apply a function of plain tensors to a sharded tensor. The result has the same shape and placement.

    Gradients flow back. If the tensor is cut along one of `whole_axes`, every process of its mesh must call this.
    """
    from torch.distributed.tensor import DTensor, Replicate

    mesh = tensor.device_mesh
    target: list[Any] = [Replicate() if one.is_partial() else one for one in tensor.placements]
    in_parts = all(one.is_replicate() or one.dim not in whole_axes for one in target)
    seen = tensor.redistribute(placements=target if in_parts else [Replicate()] * mesh.ndim)
    result = DTensor.from_local(
        function(seen.to_local()),
        mesh,
        seen.placements,
        run_check=False,
        shape=tensor.shape,
        stride=torch.empty(tensor.shape, device="meta").stride(),
    )
    return result.redistribute(placements=target)


def sum_parts(part: Tensor, like: Any) -> Tensor:
    """Return this process's shard, placed like `like`, of the sum of all `part`s; every process must call it."""
    from torch.distributed.tensor import DTensor, Partial

    # Partial: each process holds a summand. Redistributing to shards is a reduce-scatter instead of an all-reduce.
    mesh = like.device_mesh
    summed = DTensor.from_local(part, mesh, [Partial()] * mesh.ndim, run_check=False)
    return summed.redistribute(placements=like.placements).to_local()


def place_of(like: Any) -> tuple[slice, ...]:
    """Return the slices of this process's part in a sharded tensor; the full range for an unsharded one."""
    if not is_sharded(like):
        return tuple(slice(0, size) for size in like.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, starts = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    # The last processes may have an empty part that starts beyond the end.
    stops = (start + size for start, size in zip(starts, sizes, strict=True))
    return tuple(slice(*ends) for ends in zip(starts, stops, strict=True))


def part_of(full: Tensor, like: Any) -> Tensor:
    """Return this process's part of a whole tensor, without communication.

    Args:
        full: The whole tensor, equal on every process.
        like: A tensor that is placed as the result is to be: a sharded one, or a whole one for all of `full`.
    """
    return local_part(cut(full, like))


@torch.no_grad()
def fill_(tensor: Tensor, values: Tensor) -> None:
    """Overwrite a tensor, or this process's part of it, with whole values."""
    # Copies to a GPU are ordered on its stream. A copy to the CPU must be complete before it is read.
    values = values.to(tensor.device, non_blocking=not tensor.is_cpu)
    local_part(tensor).copy_(part_of(values, tensor))


def put_gradient(parameter: Tensor, part: Tensor) -> None:
    """Restore a parameter's gradient from the part that this process saved."""
    if is_sharded(parameter):  # its gradient must be sharded too
        parameter.grad = torch.zeros_like(parameter)
        local_part(parameter.grad).copy_(part)
    else:
        parameter.grad = part.to(parameter.device, copy=True)


def is_tensor_parallel(model: nn.Module) -> bool:
    """Return True if layers hold only parts of their weights even in the forward, with or without FSDP2."""
    cut: list[Any] = [parameter for parameter in model.parameters() if is_sharded(parameter)]
    # FSDP2 alone cuts along one mesh axis. Shards without FSDP2 come from tensor parallelism.
    return bool(cut) and (
        not shards(model)
        or any(sum(not placement.is_replicate() for placement in parameter.placements) > 1 for parameter in cut)
    )


def shards(model: nn.Module) -> bool:
    """Return True if FSDP2 shards a model, or a module in it."""
    return any(hasattr(module, "set_reshard_after_forward") for module in model.modules())


def place_gradients_(model: nn.Module) -> None:
    """Give gradients the placement of their parameters, after a step's last backward; every process must call it."""
    parameter: Any
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is not None and is_sharded(gradient) and gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def reshard_(model: nn.Module) -> None:
    """Reshard a model so that its parameters can be changed: FSDP2 keeps the outermost module gathered."""
    # Gathered parameters are separate tensors, which the next gathering overwrites.
    for module in model.modules():
        if hasattr(module, "set_reshard_after_forward"):
            cast(Any, module).reshard()


def fill_parameters_(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Overwrite weights of a model in place with whole ones, named as in its state dict."""
    for name, value in (model.state_dict() if weights else {}).items():
        if name in weights:
            fill_(value, weights[name])
