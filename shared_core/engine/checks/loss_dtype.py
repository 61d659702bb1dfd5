"""Check that the loss and its softmax are computed in 32 bits: 16 are too few to add up many classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shared_core.engine.technique import Context

_NARROW = (torch.float16, torch.bfloat16)
_MAX_NODES = 64
# What may lie between a loss and its logits; at anything else the model begins.
_PASSED = (
    *("ToCopy", "View", "UnsafeView", "ReshapeAlias", "Slice", "Select", "Transpose", "T", "Permute", "Clone"),
    *("Squeeze", "Unsqueeze", "Expand", "Index", "Gather", "Where", "MaskedFill"),
    *("Mul", "Div", "Add", "Sub", "Rsub", "Neg", "Log", "Exp", "Pow", "Sum", "Mean"),
    *("NllLoss", "NllLoss2D", "MseLoss", "SmoothL1Loss", "KlDiv"),
)


class LossDtype:
    """Looks once at how a training loss came about: the dtypes that autograd noted for its last operations.

    A trainer may hand out a float32 loss that the model had computed in 16 bits and that was cast afterwards, so the
    dtype of the tensor alone tells nothing.

    Example:
        >>> probe = LossDtype()
        >>> logits = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
        >>> probe.see(torch.nn.functional.cross_entropy(logits, torch.tensor([0, 2])).float()), probe.report()
        (True, {'loss_dtype': 'bfloat16', 'softmax_dtype': 'bfloat16'})
        >>> _ = probe.warning()
    """

    def __init__(self) -> None:
        self.loss: torch.dtype | None = None
        """The narrowest dtype of the operations that gave one number; None before the first loss."""
        self.softmax: torch.dtype | None = None
        """The narrowest dtype of a softmax between the loss and the last matrix product; None without one."""

    def see(self, loss: Tensor) -> bool:
        """Note the dtypes behind the first loss, and return whether one has 16 bits; later ones are passed over."""
        if self.loss is not None:
            return False
        self.loss = loss.dtype
        # Breadth first from the loss through what may lie between it and the logits; bounded, since a graph is large.
        nodes: list[Any] = [loss.grad_fn]
        for node in nodes:  # grows while it is walked
            # autograd's notes of a node's outputs: shape and dtype, without the tensors.
            outputs = getattr(node, "_input_metadata", ())
            if not outputs:
                continue
            operation, shape, dtype = node.name().partition("Backward")[0], tuple(outputs[0].shape), outputs[0].dtype
            if operation in ("LogSoftmax", "Softmax"):
                self.softmax = _narrower(self.softmax, dtype)
                # Behind the softmax are logits, whose dtype does not matter any more.
                continue
            # A node that gives one number is part of the loss itself.
            if not shape:
                self.loss = _narrower(self.loss, dtype)
            if not shape or operation in _PASSED:
                found = [child for child, _ in node.next_functions if child is not None and child not in nodes]
                nodes += found[: max(_MAX_NODES - len(nodes), 0)]
        return self.is_narrow

    def tell(self, loss: Tensor, context: Context, hook: Callable[..., Any]) -> None:
        """Note the dtypes behind the first loss, warn of 16 bits, and have `hook` called no more."""
        if self.see(loss):
            context.services.say(self.warning())
        context.drop(hook)

    @property
    def is_narrow(self) -> bool:
        """True if loss or softmax were computed in 16 bits."""
        return self.loss in _NARROW or self.softmax in _NARROW

    def warning(self) -> str:
        """Return one line for the user."""
        what = "loss" if self.loss in _NARROW else "softmax"
        dtype = str(self.loss if what == "loss" else self.softmax).removeprefix("torch.")
        return (
            f"efftrain: the {what} is computed in {dtype}, which has too few bits to add up many classes or positions; "
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
