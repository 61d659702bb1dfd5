"""Another student of the same architecture: a copy of the model whose trained weights are drawn anew."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shared_core.errors import MatchError
from shared_core.wrappers import copied

# torch's own modules have one of the first two; transformers' models, and many users', the third
_INITIALISERS = ("reset_parameters", "_reset_parameters", "init_weights")


def redrawn(model: nn.Module, seed: int) -> nn.Module:
    """Return a copy whose trained weights the modules' own initialisers drew; global random numbers stay as they were.

    A module's children come before it, as in `torch.nn.Module.apply`. Frozen weights, and buffers beside them, are the
    model's own.

    Args:
        model: Stays as it is.
        seed: Of the draw.

    Raises:
        MatchError: If no initialiser reached a trained weight, which would be a copy of the model's.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> torch.equal(redrawn(layer, 1).weight, layer.weight), torch.equal(redrawn(layer, 1).bias, layer.bias)
        (False, False)
    """
    other = copied(model)
    devices = sorted({parameter.device.index or 0 for parameter in model.parameters() if parameter.is_cuda})
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(seed)
        for parameter in other.parameters():
            if parameter.requires_grad:
                parameter.fill_(torch.nan)  # what is still there afterwards, nothing drew
        for module in _children_first(other):
            vars(module).pop("_is_hf_initialized", None)  # transformers would leave it as it is
            draw = next((getattr(module, name) for name in _INITIALISERS if hasattr(module, name)), None)
            if draw is not None:
                draw()
        for name, tensor in _kept(model):
            _tensor(other, name).copy_(tensor)
    for name, parameter in other.named_parameters():
        if parameter.requires_grad and parameter.isnan().any():
            raise MatchError(
                f"distill: every trained weight of a peer must be drawn anew, but nothing drew {name}; give its module "
                "a method reset_parameters that does, or make the other students yourself and pass them as peers"
            )
    return other


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _kept(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        frozen = {name: parameter for name, parameter in own.items() if not parameter.requires_grad}
        for name, tensor in {**frozen, **(dict(module.named_buffers(recurse=False)) if frozen else {})}.items():
            yield f"{prefix}.{name}" if prefix else name, tensor


def _tensor(module: nn.Module, path: str) -> Tensor:
    prefix, _, name = path.rpartition(".")
    found: Tensor = getattr(module.get_submodule(prefix), name)
    return found
