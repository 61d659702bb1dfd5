"""Warn if the loss or its softmax is computed in 16 bits, which are too few to sum over many classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shared_core.engine.technique import Context

_NARROW = (torch.float16, torch.bfloat16)
_MAX_NODES = 64
# Operations that may lie between a loss and its logits. Any other belongs to the model.
_PASSED = (
    *("ToCopy", "View", "UnsafeView", "ReshapeAlias", "Slice", "Select", "Transpose", "T", "Permute", "Clone"),
    *("Squeeze", "Unsqueeze", "Expand", "Index", "Gather", "Where", "MaskedFill"),
    *("Mul", "Div", "Add", "Sub", "Rsub", "Neg", "Log", "Exp", "Pow", "Sum", "Mean"),
    *("NllLoss", "NllLoss2D", "MseLoss", "SmoothL1Loss", "KlDiv"),
)


class LossDtype:
    """Read the dtypes of the last operations of a training loss from its autograd graph, once per run.

    The dtype of the loss tensor is not enough: a trainer may cast a loss to float32 that was computed in 16 bits.

    Example:
        >>> probe = LossDtype()
        >>> logits = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
        >>> probe.see(torch.nn.functional.cross_entropy(logits, torch.tensor([0, 2])).float()), probe.report()
        (True, {'loss_dtype': 'bfloat16', 'softmax_dtype': 'bfloat16'})
        >>> _ = probe.warning()
    """

    def __init__(self) -> None:
        self.loss: torch.dtype | None = None
        """Narrowest dtype of the operations with a scalar result; None before the first loss."""
        self.softmax: torch.dtype | None = None
        """Narrowest dtype of a softmax between the loss and the last matrix product; None without one."""

    def see(self, loss: Tensor) -> bool:
        """Record the dtypes of the first loss and return True if one has 16 bits. Later losses are ignored."""
        if self.loss is not None:
            return False
        self.loss = loss.dtype
        # Breadth first from the loss to the logits. Bounded, since a graph is large.
        nodes: list[Any] = [loss.grad_fn]
        for node in nodes:  # grows while it is walked
            # autograd records the shape and dtype of a node's outputs, without the tensors.
            outputs = getattr(node, "_input_metadata", ())
            if not outputs:
                continue
            operation, shape, dtype = node.name().partition("Backward")[0], tuple(outputs[0].shape), outputs[0].dtype
            if operation in ("LogSoftmax", "Softmax"):
                self.softmax = _narrower(self.softmax, dtype)
                # Beyond the softmax are the logits, whose dtype does not matter.
                continue
            # A node with a scalar result is part of the loss itself.
            if not shape:
                self.loss = _narrower(self.loss, dtype)
            if not shape or operation in _PASSED:
                found = [child for child, _ in node.next_functions if child is not None and child not in nodes]
                nodes += found[: max(_MAX_NODES - len(nodes), 0)]
        return self.is_narrow

    def warn(self, loss: Tensor, context: Context, hook: Callable[..., Any]) -> None:
        """Check the first loss, warn about 16 bits, and remove `hook`."""
        if self.see(loss):
            context.services.say(self.warning())
        context.drop(hook)

    @property
    def is_narrow(self) -> bool:
        """True if the loss or softmax was computed in 16 bits."""
        return self.loss in _NARROW or self.softmax in _NARROW

    def warning(self) -> str:
        """Return one line for the user."""
        what = "loss" if self.loss in _NARROW else "softmax"
        dtype = str(self.loss if what == "loss" else self.softmax).removeprefix("torch.")
        return (
            f"efftrain: the {what} is computed in {dtype}, which is too imprecise to sum over many classes or tokens; "
            "call .float() on the logits before the loss"
        )

    def report(self) -> dict[str, str | None]:
        """Return both dtypes; nothing before the first loss."""
        if self.loss is None:
            return {}
        softmax = None if self.softmax is None else str(self.softmax).removeprefix("torch.")
        return {"loss_dtype": str(self.loss).removeprefix("torch."), "softmax_dtype": softmax}

    def state_dict(self) -> dict[str, str | None]:
        """Return both dtypes."""
        return self.report()

    def load_state_dict(self, state: Mapping[str, str | None]) -> None:
        """Restore the state returned by `state_dict`; an empty state changes nothing."""
        if state:
            loss, softmax = state["loss_dtype"], state["softmax_dtype"]
            self.loss = getattr(torch, loss) if loss else None
            self.softmax = getattr(torch, softmax) if softmax else None


def _narrower(first: torch.dtype | None, second: torch.dtype) -> torch.dtype:
    if first is None or not second.is_floating_point or first in _NARROW:
        return second if first is None else first
    return second if second.itemsize < first.itemsize else first
