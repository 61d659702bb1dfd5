"""Keep what quantised layers learn out of state dicts, so that checkpoints are those of the plain model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

LEARNED = ("weight_magnitude", "input_magnitude", "input_offset", "input_clip")
"""Names of the parameters that a layer learns beside its own."""


class PlainState(nn.Module):
    """A layer whose learned scales are trained like any parameter, but that no state dict holds."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in LEARNED:
            destination.pop(prefix + name, None)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        missing: list[str] = args[2]
        super()._load_from_state_dict(state_dict, prefix, *args)
        # In place: torch goes on with this very list.
        missing[:] = [name for name in missing if name.removeprefix(prefix) not in LEARNED]


@contextlib.contextmanager
def own_parameters(model: nn.Module) -> Iterator[None]:
    """Let a model's layers list no learned parameters inside, for plain weights to be loaded by parameters' names."""
    layers = [module for module in model.modules() if isinstance(module, PlainState)]
    learned = [  # in their order, by which torch finds the state that optimizers keep of them
        {name: layer._parameters.pop(name) for name in [*layer._parameters] if name in LEARNED} for layer in layers
    ]
    for layer, beside in zip(layers, learned, strict=True):
        vars(layer).update(beside)  # FSDP2 (torch 2.13) looks each up as an attribute after a load
    try:
        yield
    finally:
        for layer, beside in zip(layers, learned, strict=True):
            for name, value in beside.items():
                del vars(layer)[name]
                layer._parameters[name] = value
