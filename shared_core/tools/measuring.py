"""Measure the savings of a smaller model: bytes, floating-point operations and time, before and after."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from shared_core.channel_graph.groups import decomposed, outputs_of
from shared_core.hardware import milliseconds
from shared_core.modules.calls import call, evaluated


def state_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and persistent buffers, tied tensors once.

    Example:
        >>> state_bytes(nn.Linear(3, 2))
        32
    """
    tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def forward_flops(model: nn.Module, example_inputs: Any) -> int:
    """Return the floating-point operations of one forward pass: matrix products and convolutions.

    Example:
        >>> forward_flops(nn.Linear(3, 2), torch.ones(5, 3))
        60
    """
    counter = _FlopCounter()
    with evaluated(model), decomposed(), counter:
        call(model, example_inputs)
    return counter.total


class _FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    # FlopCounterMode also hooks gradients, which fails for views of parameters made without them (torch 2.13)
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and count it."""
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.total += int(formula(*args, **(kwargs or {}), out_val=out))
        return out


def latency(first: nn.Module, second: nn.Module, example_inputs: Any, repeats: int) -> tuple[float, float]:
    """Return the median milliseconds of a forward pass of two models, measured as by `alternating`."""
    one, other = alternating(first, second, example_inputs, repeats)
    return statistics.median(one), statistics.median(other)


def alternating(
    first: nn.Module, second: nn.Module, example_inputs: Any, repeats: int
) -> tuple[list[float], list[float]]:
    """Return the milliseconds of each forward pass of two models, measured as by `hardware.milliseconds`."""
    device = next((tensor.device for tensor in first.parameters()), torch.device("cpu"))
    with evaluated(first), evaluated(second):
        one, other = milliseconds(
            [lambda: call(first, example_inputs), lambda: call(second, example_inputs)], device, repeats
        )
    return one, other


def outputs(model: nn.Module, example_inputs: Any) -> Any:
    """Return a model's outputs in eval mode."""
    with evaluated(model):
        return call(model, example_inputs)


def difference(expected: Any, found: Any) -> float:
    """Return the largest difference of the logits, or of all outputs of equal shape, relative to the largest value.

    Infinite if output shapes differ, or values are no longer finite.
    """
    pairs = list(zip(_compared(expected), _compared(found), strict=False))
    if not pairs or len(_compared(expected)) != len(_compared(found)):
        return float("inf")
    worst = 0.0
    for old, new in pairs:
        if old.shape != new.shape:
            return float("inf")
        if not old.numel():
            continue
        gap = (old.double() - new.double()).abs()
        gap = torch.where(old == new, torch.zeros_like(gap), gap)  # infinities
        if bool(gap.isnan().any() & ~old.isnan().any()):
            return float("inf")
        finite = old.double().abs()[old.isfinite()]
        scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
        worst = max(worst, float(gap.nan_to_num(0.0).max()) / scale)
    return worst


def _compared(output: Any) -> list[Tensor]:
    return [tensor for _, tensor in outputs_of(output) if tensor.is_floating_point()]
