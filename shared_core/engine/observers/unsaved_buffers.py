"""Buffers that a model's state dict leaves out (``persistent=False``) but training changes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from shared_core.distributed.collectives import digest, local_part


class UnsavedBuffers:
    """Buffers that checkpoints lack but a resumed run needs, such as running statistics that a loss reads.

    Constant tables (rotary frequencies, causal masks) are left out.

    Args:
        model: The user's model, before techniques add their own buffers.

    Example:
        >>> import torch
        >>> model = nn.Module()
        >>> model.register_buffer("mean", torch.zeros(1), persistent=False)
        >>> found = UnsavedBuffers(model)
        >>> found.mark()
        >>> _ = model.mean.add_(1)
        >>> found.changed()
        {'mean': tensor([1.])}
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = {
            f"{path}.{name}".lstrip("."): (module, name)
            for path, module in model.named_modules()
            # Sorted: a set has no order, and processes must agree on places.
            for name in sorted(module._non_persistent_buffers_set)
        }
        self._before: dict[str, str] = {}

    def mark(self) -> None:
        """Record the values at the start of training. Buffers that `put_back` has filled count as changed."""
        # The marks of `put_back` override the present digest.
        self._before = {name: digest(value) for name, value in self._now().items()} | self._before

    def changed(self) -> dict[str, Tensor]:
        """Return the buffers that have changed since training began."""
        return {
            name: value.detach().clone()
            for name, value in self._now().items()
            # Digests instead of copies: most buffers (masks, position tables) never change.
            if value is not None and digest(value) != self._before.get(name)
        }

    def put_back(self, saved: Mapping[str, Tensor]) -> None:
        """Restore the values returned by `changed` into the same model. Unknown names are skipped."""
        for name, value in saved.items():
            if name not in self._places:
                continue
            module, own = self._places[name]
            present = self._now()[name]
            if present is not None and present.shape == value.shape:
                present.copy_(value)
            else:  # a table that has grown
                device = next((one.device for one in module.parameters()), value.device)
                module._buffers[own] = value.to(device, copy=True)
            self._before[name] = ""  # always saved again

    def _now(self) -> dict[str, Tensor | None]:
        found = {name: module._buffers.get(own) for name, (module, own) in self._places.items()}
        return {name: None if value is None else local_part(value) for name, value in found.items()}
