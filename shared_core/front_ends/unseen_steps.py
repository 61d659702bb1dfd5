"""Stop a script that trains without the recipe it was started with, before the whole training is wasted."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from shared_core.errors import CompatibilityError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shared_core.front_ends.finding import FrontEnd

_UPDATES = 2  # a single one may be a checkpoint loaded after a first backward pass
_WATCHED, _ELEMENTS = 16, 64  # parameters of a backward pass, and elements of each
_LEVELS = 6  # of containers between an optimizer and a parameter: Keras has a variable in a list


def unseen(script: str, why: str) -> CompatibilityError:
    """Return the error for a script that no front end has reached."""
    return CompatibilityError(
        "eff run",
        f"{script} must train with the Hugging Face Trainer, Lightning, or an Accelerate or Fabric loop that sets up "
        f"its model and optimizer in one call, but {why}",
        "no technique was applied; in your own loop use efftrain.training, in a callback of another library "
        "efftrain.Session.start",
    )


class UnseenSteps:
    """Stops a script that trains before any front end uses the recipe.

    Torch optimizers report their first step. Any other optimizer is detected by its effect: when a backward pass
    begins, parameters of an earlier one have changed. The second such change ends the script.
    """

    def __init__(
        self, installed: Callable[[], Sequence[FrontEnd]], script: str, taken: Callable[[], object] | None = None
    ) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._installed, self._script, self._taken = installed, script, taken
        self._is_seen, self._updates = False, 0
        self._marks: dict[int, tuple[weakref.ref[nn.Parameter], Tensor]] = {}
        self._handle = register_optimizer_step_pre_hook(self._before_step)
        self._stock = stock = torch.autograd.backward

        @functools.wraps(stock)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            self._before_backward([tensors] if isinstance(tensors, torch.Tensor) else tensors)
            stock(tensors, *args, **kwargs)

        self._backward = torch.autograd.backward = backward  # `Tensor.backward` calls it by this name

    def remove(self) -> None:
        """Stop watching."""
        self._handle.remove()
        self._let_backward_be()

    def _let_backward_be(self) -> None:
        import torch

        self._marks.clear()
        if torch.autograd.backward is self._backward:  # else another library wrapped it, and it just passes calls on
            torch.autograd.backward = self._stock

    def _has_taken(self) -> bool:
        if not self._is_seen:
            self._is_seen = any(front_end.used() for front_end in self._installed())
        return self._is_seen

    def _before_step(self, *_: Any) -> None:
        if self._is_seen and self._taken is None:
            return
        if not self._has_taken():
            raise unseen(self._script, "an optimizer stepped before any of them used the recipe")
        if self._taken is not None:
            self._taken()
            self._taken = None

    def _before_backward(self, roots: Iterable[Tensor]) -> None:
        if self._has_taken():
            self._let_backward_be()
            return
        changed = [one for held, mark in self._marks.values() if (one := held()) is not None and _differs(one, mark)]
        self._updates += bool(changed)
        if self._updates == _UPDATES:
            name = _name_of_stepper(changed[0]) or "an optimizer that is not one of torch.optim"
            raise unseen(self._script, f"{name} updated the weights before any of them used the recipe")
        parameters = list(_parameters_below(roots))
        for one in [*changed, *parameters[:: 1 + len(parameters) // _WATCHED]]:
            if (mark := _mark(one)) is not None:
                self._marks[id(one)] = weakref.ref(one), mark


def _parameters_below(roots: Iterable[Tensor]) -> Iterator[nn.Parameter]:
    """Yield the parameters that a backward pass from these tensors reaches."""
    from torch import nn

    nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if isinstance(parameter := getattr(node, "variable", None), nn.Parameter):
            yield parameter
        following = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= following
        nodes.extend(following)


def _mark(parameter: nn.Parameter) -> Tensor | None:
    """Return some of a parameter's values as bytes, None if it has none on this process."""
    import torch

    from shared_core.distributed.collectives import local_part

    values = local_part(parameter.detach())
    if type(values) is not torch.Tensor or values.is_meta or values.layout != torch.strided:
        return None
    return values.reshape(-1)[:_ELEMENTS].clone().view(torch.uint8)  # bytes: NaN equals itself


def _differs(parameter: nn.Parameter, mark: Tensor) -> bool:
    now = _mark(parameter)
    return now is not None and now.device == mark.device and not now.equal(mark)


def _name_of_stepper(parameter: nn.Parameter) -> str:
    """Return the class name of the nearest object that refers to a parameter and has a step method, or ""."""
    from torch import nn

    passed_by = (nn.Module, ModuleType, FrameType, FunctionType, type)
    level: list[Any] = [parameter]
    known = {id(parameter)}
    for _ in range(_LEVELS):
        holders = gc.get_referrers(*level)
        level = []
        for one in holders:
            # Skip a script's global variables, which refer to all its objects.
            if id(one) in known or isinstance(one, passed_by) or (type(one) is dict and "__builtins__" in one):
                continue
            known.add(id(one))
            # Look up names only in classes: reading an instance's attribute may run code.
            if any({"step", "apply_gradients"} & vars(base).keys() for base in type(one).__mro__):
                return type(one).__name__
            level.append(one)
        if not level:
            break
    return ""
