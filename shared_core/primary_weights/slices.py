"""A step of an optimizer on a few float32 values at a time, where it updates each parameter, or element, by itself."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shared_core.distributed.collectives import local_part

_ON_CPU, _ON_OTHERS = 1 << 18, 1 << 24
"""Elements that step together: what stays in a processor's cache, and what keeps a GPU's kernels long."""
_ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD",
)  # fmt: skip
_TENSORWISE = ("Adafactor", "Muon")
# By name and not by import: none of them need be installed.
_TENSORWISE_OF_OTHERS = ("transformers.optimization.Adafactor", "bitsandbytes.optim.", "torchao.optim.adam.")


def updates_each_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is known to update each parameter from its own gradient and state alone.

    Example:
        >>> updates_each_by_itself(torch.optim.AdamW([torch.zeros(2)]))
        True
        >>> updates_each_by_itself(torch.optim.LBFGS([torch.zeros(2)]))
        False
    """
    kind = type(optimizer)
    if f"{kind.__module__}.{kind.__name__}".startswith(_TENSORWISE_OF_OTHERS):
        # Overrides of bitsandbytes are by the parameter's place or identity, which slices do not have.
        return not getattr(getattr(optimizer, "mng", None), "module_weight_config_triple", None)
    # `is`: a subclass of the same name may couple parameters (a global norm, say).
    return kind.__name__ in _ELEMENTWISE + _TENSORWISE and getattr(torch.optim, kind.__name__, None) is kind


class Part(NamedTuple):
    """Rows of a parameter, of its gradient, and of what an optimizer keeps in its shape."""

    parameter: Tensor
    rows: tuple[int, int] | None = None
    """Of what this process holds, the second one excluded; None: the whole tensor, sharded if it is."""
    is_last: bool = True
    """True for the last part of a parameter."""

    def of(self, tensor: Tensor) -> Tensor:
        """Return these rows of a tensor that has the parameter's shape: a view."""
        return tensor if self.rows is None else local_part(tensor)[slice(*self.rows)]


def slices(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> Iterator[list[Part]]:
    """Yield what steps together: a large parameter alone, by rows if elements step by themselves; small ones together.

    Example:
        >>> parameters = [torch.zeros(9), torch.zeros(1 << 19), torch.zeros(2), torch.zeros(3)]
        >>> [[part.rows for part in parts] for parts in slices(torch.optim.SGD(parameters), parameters)]
        [[(0, 9)], [(0, 262144)], [(262144, 524288)], [(0, 2), (0, 3)]]
    """
    by_rows = type(optimizer).__name__ in _ELEMENTWISE and type(optimizer).__module__.startswith("torch.optim")
    together: list[Part] = []
    filled = 0
    for parameter in parameters:
        room = _ON_CPU if parameter.device.type == "cpu" else _ON_OTHERS
        for part in _rows(parameter, room) if by_rows else [Part(parameter)]:
            size = part.of(parameter).numel()
            if together and filled + size > room:
                yield together
                together, filled = [], 0
            together.append(part)
            filled += size
    if together:
        yield together


def _rows(parameter: Tensor, room: int) -> Iterator[Part]:
    local = local_part(parameter)
    if not local.dim() or (parameter.grad is not None and parameter.grad.is_sparse):
        yield Part(parameter)
        return
    row = max(math.prod(local.shape[1:]), 1)
    # Whole vectors: kernels may round the elements of an unfinished one otherwise.
    unit = 64 // math.gcd(row, 64)
    step = max(room // row // unit * unit, unit)
    count = local.shape[0]
    for start in range(0, max(count, 1), step):
        end = min(start + step, count)
        yield Part(parameter, (start, end), end == count)


class SlicedStep:
    """Takes the place of an optimizer's step for some of its parameters; `torch.optim` steps the others.

    It is within the step, after the closure, so that whoever calls the step, and in which way, needs to know nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.ready: tuple[Sequence[Tensor], Callable[[], None]] | None = None
        """The parameters of the next step, and what steps them by `step_`; None once it has."""
        self._groups: list[dict[str, Any]] | None = None
        self._group_of: dict[int, int] = {}
        """Index of the group that holds a parameter, by the parameter's id."""
        self._new: set[int] = set()
        """Ids of parameters in whose first step some parts have state already."""
        after = optimizer.register_step_post_hook(self._restore)
        self._handles = (optimizer.register_step_pre_hook(self._within), after)
        # those of others are to see the whole optimizer again
        optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Leave the optimizer's step to itself."""
        self._restore()
        self.ready = None
        for handle in self._handles:
            handle.remove()

    def _within(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        # A step that raised has left its groups replaced.
        self._restore()
        # args[0] is the optimizer: torch's hooks get the step's own arguments.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")

        # The step is made from the closure: torch calls it first thing in `step`, after gradients are there. What is
        # then left of `param_groups` is stepped by torch as ever.
        def run() -> Any:
            loss = None if closure is None else closure()
            if self.ready is not None:
                # Once: a scheduler or a scaler may call step again.
                (parameters, update), self.ready = self.ready, None
                groups = optimizer.param_groups
                self._group_of = {id(p): place for place, group in enumerate(groups) for p in group["params"]}
                with torch.no_grad():
                    update()
                ours = {*map(id, parameters)}
                others = [[p for p in group["params"] if id(p) not in ours] for group in groups]
                self._groups, optimizer.param_groups = groups, _with_parameters(groups, others)
            return loss

        return (args[0], run), {}

    def _restore(self, *_: Any) -> None:
        if self._groups is not None:
            self.optimizer.param_groups, self._groups = self._groups, None

    def step_(
        self,
        values: Mapping[Part, Tensor],
        narrow: torch.dtype | None = None,
        round_: Callable[[Part, str, Tensor, Tensor], object] | None = None,
    ) -> None:
        """Step on float32 values in the places of parameters or parts of them, with their options and state.

        Args:
            values: With gradients.
            narrow: Format in which float32 state of the parameter's shape is kept between steps; None: its own.
            round_: Writes new state into the old, in that format: part, name, target and float32 source.
        """
        optimizer = self.optimizer
        groups, state = optimizer.param_groups, optimizer.state
        # State by the float32 stand-ins, for those that have some; missing entries are made by the optimizer as in
        # its first step.
        self._new |= {id(part.parameter) for part in values if part.parameter not in state}
        known = [(part, new) for part, new in values.items() if id(part.parameter) not in self._new]
        optimizer.state = defaultdict(dict, {new: _state_of(part, state[part.parameter]) for part, new in known})
        self._new -= {id(part.parameter) for part in values if part.is_last}
        members: list[list[Tensor]] = [[] for _ in groups]
        for part, new in values.items():
            members[self._group_of[id(part.parameter)]].append(new)
        optimizer.param_groups = _with_parameters(groups, members)
        try:
            type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]  # past the hooks of whole steps
            for part, new in values.items():
                # The first step has made state for the stand-in: it belongs to the parameter.
                if new in optimizer.state:
                    _keep(part, state[part.parameter], optimizer.state[new], new, narrow, round_)
        finally:
            optimizer.param_groups, optimizer.state = groups, state


def narrow_moments_(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
    """Round an optimizer's float32 state of the parameters' shape to bfloat16, in which it is kept between steps."""
    for parameter in parameters:
        # `get`: of a defaultdict
        for key, value in optimizer.state.get(parameter, {}).items():
            if _is_elementwise(value, parameter) and value.dtype == torch.float32:
                optimizer.state[parameter][key] = value.bfloat16()


def _with_parameters(groups: list[dict[str, Any]], members: list[list[Tensor]]) -> list[dict[str, Any]]:
    # A group without parameters is one that some optimizers stumble over.
    return [{**group, "params": kept} for group, kept in zip(groups, members, strict=True) if kept]


def _is_elementwise(value: object, like: Tensor) -> bool:
    # A scalar's count of steps has the scalar's shape; 8-bit states of torchao are subclasses, and stay as they are.
    return isinstance(value, Tensor) and value.shape == like.shape and value.dim() > 0 and _is_plain(value)


def _is_plain(value: Tensor) -> bool:
    return type(local_part(value)) in (Tensor, nn.Parameter)


def _state_of(part: Part, state: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in state.items():
        if _is_elementwise(value, part.parameter):
            view = part.of(value)
            found[key] = view.float() if _is_16_bit(view) else view
        elif isinstance(value, Tensor) and not part.is_last:
            # Each part steps from the same count; the last one's is kept.
            found[key] = value.clone()
        else:
            found[key] = value
    return found


def _is_16_bit(value: Tensor) -> bool:
    return value.dtype in (torch.bfloat16, torch.float16)


def _keep(
    part: Part,
    state: dict[str, Any],
    found: Mapping[str, Any],
    like: Tensor,
    narrow: torch.dtype | None,
    round_: Callable[[Part, str, Tensor, Tensor], object] | None,
) -> None:
    for key, value in found.items():
        if not _is_elementwise(value, like) or (part.rows is None and narrow is None):
            if part.is_last:
                state[key] = value
            continue
        plain = local_part(value)
        dtype = narrow if narrow is not None and plain.dtype == torch.float32 else plain.dtype
        if key not in state:
            state[key] = torch.zeros_like(part.parameter, dtype=dtype)
        target = local_part(part.of(state[key]))
        if target.dtype != plain.dtype and round_ is not None:
            round_(part, key, target, plain)
        elif target.data_ptr() != plain.data_ptr():
            target.copy_(plain)
