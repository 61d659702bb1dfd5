"""Tensors that FSDP2 has sharded, gathered whole to decide on and to save, and buffers that processes hold alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from shared_core.distributed.collectives import broadcast_, local_part, world_size


@torch.no_grad()
def join_buffers_(model: nn.Module) -> None:
    """Give every process the main one's buffers of the module inside DDP; each must call it.

    DDP does so as the next forward begins, so that those of the last one (statistics of batch norms) differ.
    """
    if world_size() == 1:
        return
    own = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    for name, buffer in model.named_buffers():
        if name not in own and not (buffer.is_meta or is_sharded(buffer) or buffer.dtype == torch.bool):
            broadcast_(buffer)


def is_sharded(tensor: Tensor) -> bool:
    """Return True if a process may hold only a part of a tensor."""
    return hasattr(tensor, "device_mesh")


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor as it is on one device: gathered if it is sharded; then every process must call it."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else cast("Tensor", gather())


def whole_of(part: Tensor, like: Any) -> Tensor:
    """Return the whole of which `part` is this process's, placed as `like` is; then every process must call it."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    # run_check=False: a check would be a collective. Uneven parts cannot tell shape and stride.
    placed = DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return placed.full_tensor()


def cut(full: Tensor, like: Any) -> Tensor:
    """Return a whole tensor sharded as `like` is, without communication."""
    if not is_sharded(like):
        return full
    from torch.distributed.tensor import distribute_tensor

    # src_data_rank=None: every process has the whole already, so each cuts its own part.
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def apply_in_parts(function: Callable[[Tensor], Tensor], tensor: Any, whole_axes: Collection[int]) -> Tensor:
    """Return what a function of plain tensors makes of a sharded one, in the same shape and placed alike.

    Gradients flow back; where the tensor is cut along one of `whole_axes`, every process of its mesh must call it.
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
    """Return the part that `like`'s placement gives of the sum of whole tensors; every process must call it."""
    from torch.distributed.tensor import DTensor, Partial

    # Partial: each process holds a summand. Redistributing it to shards is a reduce-scatter, not an all-reduce.
    mesh = like.device_mesh
    summed = DTensor.from_local(part, mesh, [Partial()] * mesh.ndim, run_check=False)
    return summed.redistribute(placements=like.placements).to_local()


def place_of(like: Any) -> tuple[slice, ...]:
    """Return where in the whole of a sharded tensor this process's part lies; of another one all of it."""
    if not is_sharded(like):
        return tuple(slice(0, size) for size in like.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, starts = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    # the last processes may have nothing, and begin behind the end
    stops = (start + size for start, size in zip(starts, sizes, strict=True))
    return tuple(slice(*ends) for ends in zip(starts, stops, strict=True))


def part_of(full: Tensor, like: Any) -> Tensor:
    """Return the part of a whole tensor that `like`'s placement gives this process, without communication."""
    return local_part(cut(full, like))


@torch.no_grad()
def fill_(tensor: Tensor, values: Tensor) -> None:
    """Overwrite a tensor, or the part of it that this process holds, by whole values."""
    # to a GPU nothing waits; from one a copy must be over when it is read
    values = values.to(tensor.device, non_blocking=not tensor.is_cpu)
    local_part(tensor).copy_(part_of(values, tensor))


def put_gradient(parameter: Tensor, part: Tensor) -> None:
    """Give a parameter the gradient of which this process saved its part."""
    if is_sharded(parameter):  # which takes no plain tensor for its gradient
        parameter.grad = torch.zeros_like(parameter)
        local_part(parameter.grad).copy_(part)
    else:
        parameter.grad = part.to(parameter.device, copy=True)


def is_tensor_parallel(model: nn.Module) -> bool:
    """Return True if layers hold parts of their weights in forward too, with or without FSDP2 around them."""
    cut: list[Any] = [parameter for parameter in model.parameters() if is_sharded(parameter)]
    # FSDP2 alone cuts along one axis of the mesh; without it there is nothing else that cuts
    return bool(cut) and (
        not shards(model)
        or any(sum(not placement.is_replicate() for placement in parameter.placements) > 1 for parameter in cut)
    )


def shards(model: nn.Module) -> bool:
    """Return True if FSDP2 shards a model, or a module in it."""
    return any(hasattr(module, "set_reshard_after_forward") for module in model.modules())


def place_gradients_(model: nn.Module) -> None:
    """Have gradients lie as their parameters do, after the last backward of a step; every process must call it."""
    parameter: Any
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is not None and is_sharded(gradient) and gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def reshard_(model: nn.Module) -> None:
    """Let a model hold its sharded parameters to write into: FSDP2 keeps the outermost module gathered."""
    # Gathered parameters after a forward are other tensors, and would be overwritten by the next gathering.
    for module in model.modules():
        if hasattr(module, "set_reshard_after_forward"):
            cast(Any, module).reshard()


def fill_parameters_(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Overwrite weights of a model, in place, by whole ones under the names of its state dict."""
    for name, value in (model.state_dict() if weights else {}).items():
        if name in weights:
            fill_(value, weights[name])
