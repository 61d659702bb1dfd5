"""A student whose trainer fuses its head into the loss (TRL): its forward returns log-probabilities of the labels.

No logits come out. The output of the backbone is kept, and the model's own forward, run with that output in place of
its backbone, makes the logits that it would have returned: with its scale, its cap and its head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from shared_core.distillation.forward_capture import FOR_THE_LOSS, Forward, named_inputs, trains

_LOG_PROBS = "log_probs"


class FusedHead:
    """Takes the log-probabilities that a student returns out of its graph, so that one pass can serve both terms.

    The trainer computes its loss from a leaf that holds the same numbers. `take` asks what the gradient by them is;
    whoever computes the soft term returns it through the head together with its own, or `Task.rejoined` lets it flow
    as it would have. A copied or pickled one is off.
    """

    def __init__(self, student: nn.Module) -> None:
        self.active = False
        self._student, self._model = student, _base(student)
        self._kept: Any = None
        self._cuts: list[tuple[Tensor, Tensor]] = []
        backbone = cast(nn.Module, self._model.base_model)
        self._handles = [
            backbone.register_forward_hook(self._keep, prepend=True),
            student.register_forward_hook(self._cut),
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {"active": False, "_kept": None, "_cuts": []}

    def _keep(self, backbone: nn.Module, args: Any, output: Any) -> None:
        if self.active and trains(backbone):
            self._kept = output

    def _cut(self, student: nn.Module, args: Any, output: Any) -> Any:
        log_probs = output.get(_LOG_PROBS) if isinstance(output, Mapping) else None
        if not (self.active and trains(student) and isinstance(log_probs, Tensor)):
            return None
        leaf = log_probs.detach().requires_grad_()
        self._cuts.append((leaf, log_probs))
        return type(output)(**{**output, _LOG_PROBS: leaf})  # type: ignore[call-arg]

    def take(self, task_loss: Tensor) -> Task:
        """Return the task loss with its gradients by the log-probabilities since the last call, and forget those."""
        cuts, self._cuts = self._cuts, []
        leaves = [leaf for leaf, _ in cuts]
        grads: Any = [None] * len(cuts)
        if cuts and task_loss.requires_grad:
            grads = torch.autograd.grad(task_loss, leaves, retain_graph=True, allow_unused=True)
        return Task(
            task_loss, [(whole, grad) for (_, whole), grad in zip(cuts, grads, strict=True) if grad is not None]
        )

    def with_logits(self, forward: Forward) -> Forward:
        """Return a forward of the student with the output that its own forward makes of the backbone's."""
        kept, self._kept = self._kept, None
        if _LOG_PROBS not in forward.output:
            return forward
        backbone, given = cast(nn.Module, self._model.base_model), named_inputs(self._student, forward)
        before = vars(backbone).get("forward")
        backbone.forward = lambda *args, **kwargs: kept  # type: ignore[method-assign]
        try:
            output = self._model.forward(**{name: value for name, value in given.items() if name not in FOR_THE_LOSS})
        finally:
            del backbone.forward
            if before is not None:
                backbone.forward = before
        self._kept = None
        return replace(forward, output=output)

    def forget(self) -> None:
        """Release the last batch."""
        self._kept, self._cuts = None, []

    def detach(self) -> None:
        """Take the hooks off."""
        self.active = False
        self.forget()
        for handle in self._handles:
            handle.remove()


@dataclass(frozen=True)
class Task:
    """A task loss that was computed from leaves, and the log-probabilities that belong there with its gradients."""

    loss: Tensor
    parts: list[tuple[Tensor, Tensor]]

    @property
    def weight(self) -> float:
        """The factor of every position's cross-entropy in the loss; 0 if factors differ or are not above 0."""
        if len(self.parts) != 1 or not self.parts[0][1].numel():
            return 0.0
        low, high = (float(end) for end in self.parts[0][1].aminmax())
        return -low if low == high < 0 else 0.0

    def rejoined(self) -> Tensor:
        """Return the loss with its gradient flowing to the log-probabilities."""
        loss = self.loss
        for log_probs, grad in self.parts:
            loss = routed(loss, log_probs, grad)
        return loss


def routed(value: Tensor, other: Tensor, weight: Tensor | float) -> Tensor:
    """Return a scalar whose gradient goes to itself and, times `weight`, to `other`.

    Example:
        >>> value, other = torch.tensor(3.0, requires_grad=True), torch.tensor([5.0, 7.0], requires_grad=True)
        >>> routed(value, other, torch.tensor([1.0, 2.0])).backward()
        >>> value.grad, other.grad
        (tensor(1.), tensor([1., 2.]))
    """
    result: Tensor = _Routed.apply(value, other, weight)  # type: ignore[no-untyped-call]
    return result


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, other: Tensor, weight: Tensor | float) -> Tensor:
        ctx.weight = weight
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], grads[0] * ctx.weight, None


def with_own_forward(copy: nn.Module) -> nn.Module:
    """Return a copied model with its class's forward: a fused one would run the model that it was copied from."""
    vars(_base(copy)).pop("forward", None)
    return copy


def _base(model: nn.Module) -> nn.Module:
    base: nn.Module = cast(Any, getattr(model, "get_base_model", lambda: model))()
    return base
