"""What a tensor that autograd is about to save is: a weight, an operation's own result, a region's input."""

from __future__ import annotations

import sys
from typing import Any

import torch.utils.checkpoint
from torch import Tensor, nn

# what may lie between a parameter and the form of it that a product saves: autocast's copy, a transposed view
_STILL_A_WEIGHT = ("ToCopyBackward", "TBackward", "TransposeBackward", "ViewBackward", "PermuteBackward")
_MAX_FRAMES = 8


def is_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter, a view of one, or its copy in another type.

    Example:
        >>> import torch
        >>> layer, x = nn.Linear(2, 2), torch.ones(1, 2)
        >>> is_weight(layer.weight.t()), is_weight(layer.weight.to(torch.bfloat16)), is_weight(layer(x))
        (True, True, False)
    """
    if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
        return True
    node: Any = tensor.grad_fn
    while node is not None and node.name().startswith(_STILL_A_WEIGHT):
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), nn.Parameter)


def is_own_result(tensor: Tensor, operation: str) -> bool:
    """Return whether `operation` is just saving its own result, rather than another one its input.

    Autograd notes who made a tensor before it saves the result there, so the place is still empty. Asking for it
    unpacks nothing (`SavedTensor.data` of torch 2.13; without it no result counts as its own).
    """
    node: Any = tensor.grad_fn
    return node is not None and node.name() == operation and getattr(node._raw_saved_result, "data", node) is None


def is_region_input() -> bool:
    """Return whether activation checkpointing is saving the input of a region that it will compute again."""
    frame: Any = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False
