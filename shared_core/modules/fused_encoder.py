"""Torch's fused evaluation of transformer layers reads weights itself: it is off while layers are swapped."""

from __future__ import annotations

from typing import Any

from torch import nn

Undo = list[tuple[nn.Module, str, Any]]


def fast_paths_off(model: nn.Module, layers: tuple[type[nn.Module], ...]) -> Undo:
    """Switch off the fused evaluation of `nn.TransformerEncoder` where it would bypass a swapped layer.

    In evaluation the fused path reads ``linear1.weight`` itself, so what is evaluated would be the float
    model.
    """
    undo: Undo = []
    for parent in model.modules():
        if not any(isinstance(child, layers) for child in parent.modules()):
            continue
        name = {
            nn.TransformerEncoderLayer: "activation_relu_or_gelu",
            nn.TransformerEncoder: "use_nested_tensor",
        }.get(type(parent))
        if name is not None and hasattr(parent, name):
            undo.append((parent, name, getattr(parent, name)))
            # 0: no activation that the fused kernel knows, and nested tensors off.
            setattr(parent, name, 0)
    return undo


def fast_paths_on(undo: Undo) -> None:
    """Set back what `fast_paths_off` changed."""
    for parent, name, value in undo:
        setattr(parent, name, value)
