"""Saved models load in the user's own model without this library: same keys, same shapes, plain tensors."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from shared_core.errors import CheckpointError


class PlainKeys:
    """The keys and shapes that the user's model had before anything was attached to it.

    Args:
        model: The user's model, still untouched.
    """

    def __init__(self, model: nn.Module) -> None:
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if _sized(tensor)}
        self._names = set(model.state_dict())

    def check(self, state_dict: Mapping[str, Tensor]) -> None:
        """Refuse a state dict that the untouched model could not load strictly.

        Raises:
            CheckpointError: Naming what is missing, unexpected or of another shape.
        """
        missing, unexpected = self._names - set(state_dict), set(state_dict) - self._names
        reshaped = {
            name: (shape, tuple(state_dict[name].shape))
            for name, shape in self._shapes.items()
            if name in state_dict and tuple(state_dict[name].shape) != shape
        }
        if missing or unexpected or reshaped:
            raise CheckpointError(
                f"checkpoint: keys must be those of the plain model, got missing {sorted(missing)}, "
                f"unexpected {sorted(unexpected)}, other shapes {reshaped}; nothing was written"
            )


def _sized(tensor: object) -> bool:
    # Extra state (`get_extra_state`) may be any object; only tensors have a shape to hold.
    return isinstance(tensor, Tensor)
