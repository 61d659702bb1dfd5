"""Replace an optimizer's parameters by other tensors, in its groups and state, or a few at a time within its step."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from shared_core.distributed.collectives import local_part
from shared_core.errors import MatchError

HALF = (torch.float16, torch.bfloat16)


def replace_parameters_(optimizer: torch.optim.Optimizer, replacement: Mapping[Tensor, Tensor]) -> None:
    """Put other tensors into an optimizer's groups, in place, with the state of those that they replace.

    Torch's optimizers read their groups when they step, so they step the new tensors. Other parameters
    stay. The inverse mapping undoes it, also after groups were added in between.

    Args:
        optimizer: Changed in place. The order of its parameters, and so its state dict, stays.
        replacement: Old tensor → new tensor.

    Example:
        >>> weight, other = torch.zeros(2, dtype=torch.float16), torch.zeros(2)
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> replace_parameters_(optimizer, {weight: other})
        >>> other.grad = torch.ones(2)
        >>> optimizer.step()
        >>> weight.tolist(), other.tolist()
        ([0.0, 0.0], [-1.0, -1.0])
    """
    _replace_(optimizer, {id(old): new for old, new in replacement.items()}, optimizer.state)


def _replace_(optimizer: torch.optim.Optimizer, new: Mapping[int, Tensor], state: Any) -> None:
    # by identity, because a tensor's hash is a Python call
    for group in optimizer.param_groups:
        # In place, because schedulers and trainers may hold the list.
        group["params"][:] = [new.get(id(old), old) for old in group["params"]]
    # Collected before the clear, because `state` may be the optimizer's own dict.
    moved = [(new.get(id(key), key), value) for key, value in optimizer.state.items()]
    state.clear()
    state.update(moved)
    # Keep the object: a defaultdict(dict), with anything else that torch put into it.
    optimizer.state = state


class _Contents:
    """The groups and the state of an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.groups = [[*group["params"]] for group in optimizer.param_groups]
        self.state = optimizer.state
        self._keys, self._values = [*self.state], [*self.state.values()]

    def are_groups_of(self, optimizer: torch.optim.Optimizer) -> bool:
        groups = [group["params"] for group in optimizer.param_groups]
        return len(groups) == len(self.groups) and all(map(are_same, groups, self.groups))

    def are_state_of(self, optimizer: torch.optim.Optimizer) -> bool:
        state = self.state
        return optimizer.state is state and are_same(state, self._keys) and are_same(state.values(), self._values)


class Exchange:
    """Swap an optimizer's parameters with other tensors and back, in every step.

    Both contents of the optimizer are stored. While nobody changes them, whole lists and dictionaries are exchanged
    without looking up parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        self.optimizer = optimizer
        # Both directions by id, computed once, because an exchange happens twice per step.
        self._other = [{id(one): two for one, two in zip(*way, strict=True)} for way in ((old, new), (new, old))]
        self._contents: list[_Contents | None] = [_Contents(optimizer), None]
        self._side = 0

    @property
    def is_current(self) -> bool:
        """True if the groups hold the same tensors as at the last exchange."""
        contents = self._contents[0]
        return contents is not None and contents.are_groups_of(self.optimizer)

    def swap_(self) -> None:
        """Put the new tensors into the optimizer, or the old ones if the new ones are there."""
        optimizer, side = self.optimizer, self._side
        here, there = self._contents[side], self._contents[1 - side]
        # Exchange everything, unless a group was added or the first step created state.
        if here and there and here.are_groups_of(optimizer) and here.are_state_of(optimizer):
            for group, parameters in zip(optimizer.param_groups, there.groups, strict=True):
                group["params"][:] = parameters
            optimizer.state = there.state
        else:
            self._contents[side] = _Contents(optimizer)
            # copy.copy keeps the class (defaultdict). Its contents are replaced next.
            unused = there.state if there and there.state is not optimizer.state else copy.copy(optimizer.state)
            _replace_(optimizer, self._other[side], unused)
            self._contents[1 - side] = _Contents(optimizer)
        self._side = 1 - side


def are_same(one: Collection[object], other: Collection[object]) -> bool:
    """Return True if two collections hold the same objects in the same order."""
    return len(one) == len(other) and all(map(is_, one, other))


def parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """Return every parameter of the optimizers once, in their order."""
    groups = (group["params"] for optimizer in optimizers for group in optimizer.param_groups)
    return [*{id(parameter): parameter for parameters in groups for parameter in parameters}.values()]


def trained_in_16_bit(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """Return every trainable fp16 or bf16 parameter of the optimizers once, in their order."""
    return [*filter(is_trained_in_16_bit, parameters_of(optimizers))]


def is_trained_in_16_bit(parameter: Tensor) -> bool:
    """Return True if a parameter is trainable and fp16 or bf16."""
    return parameter.dtype in HALF and parameter.requires_grad


def moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return by name the floating-point state with the parameter's shape, which torch casts on loading."""
    return {
        name: value
        for name, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape
    }


def check_match(parameters: Iterable[Tensor]) -> None:
    """Raise an error if no parameter is trained in 16 bit."""
    dtypes = {parameter.dtype for parameter in parameters if parameter.requires_grad}
    if dtypes.isdisjoint(HALF):
        raise MatchError(
            "primary_weights",
            "the model must have trainable float16 or bfloat16 parameters, got "
            f"{', '.join(sorted(map(dtype_name, dtypes))) or 'none that are trainable'}",
            "load it in 16 bit, or drop primary_weights: with autocast, parameters are float32 and need no copy",
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``float16``."""
    return str(dtype).removeprefix("torch.")


_ON_CPU, _ON_OTHERS = 1 << 18, 1 << 24
"""Elements that step together: few enough for a processor's cache, enough to keep a GPU busy."""
_ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD",
)  # fmt: skip
_TENSORWISE = ("Adafactor", "Muon")
# By name and not by import: none of them need be installed.
_TENSORWISE_OF_OTHERS = ("transformers.optimization.Adafactor", "bitsandbytes.optim.", "torchao.optim.adam.")


def updates_each_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer is known to update each parameter only from its own gradient and state."""
    kind = type(optimizer)
    if f"{kind.__module__}.{kind.__name__}".startswith(_TENSORWISE_OF_OTHERS):
        # bitsandbytes' overrides refer to the parameter's position or identity, which slices do not have.
        return not getattr(getattr(optimizer, "mng", None), "module_weight_config_triple", None)
    # `is`, because a subclass of the same name may couple parameters (by a global norm, say).
    return kind.__name__ in _ELEMENTWISE + _TENSORWISE and getattr(torch.optim, kind.__name__, None) is kind


class Part(NamedTuple):
    """Rows of a parameter, of its gradient, and of optimizer state with its shape."""

    parameter: Tensor
    rows: tuple[int, int] | None = None
    """First and end row in this process's shard; None: the whole tensor, possibly sharded."""
    is_last: bool = True
    """True for the last part of a parameter."""

    def of(self, tensor: Tensor) -> Tensor:
        """Return a view of these rows of a tensor with the parameter's shape."""
        return tensor if self.rows is None else local_part(tensor)[slice(*self.rows)]


def slices(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> Iterator[list[Part]]:
    """Yield parts that step together: large parameters alone (by rows if elementwise), small ones joined."""
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
    # Whole vectors, because kernels may round the elements of an unfinished one differently.
    unit = 64 // math.gcd(row, 64)
    step = max(room // row // unit * unit, unit)
    count = local.shape[0]
    for start in range(0, max(count, 1), step):
        end = min(start + step, count)
        yield Part(parameter, (start, end), end == count)


class SlicedStep:
    """Replaces an optimizer's step for some of its parameters. `torch.optim` steps the others.

    It runs inside the step, after the closure, so that callers of the step need no changes.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.ready: tuple[Sequence[Tensor], Callable[[], None]] | None = None
        """The parameters of the next step, and the function that steps them with `step_`; None after the step."""
        self._groups: list[dict[str, Any]] | None = None
        self._group_of: dict[int, int] = {}
        """Index of the group that holds a parameter, by the parameter's id."""
        self._new: set[int] = set()
        """Ids of parameters in their first step of which some parts already have state."""
        after = optimizer.register_step_post_hook(self._restore)
        self._handles = (optimizer.register_step_pre_hook(self._within), after)
        # hooks of others must see the whole optimizer again
        optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Restore the optimizer's own step."""
        self._restore()
        self.ready = None
        for handle in self._handles:
            handle.remove()

    def _within(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        # A step that raised an error left its groups replaced.
        self._restore()
        # args[0] is the optimizer, because torch's hooks get the step's arguments.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")

        # torch first calls the closure in `step`, then steps what is left in `param_groups`.
        def run() -> Any:
            loss = None if closure is None else closure()
            if self.ready is not None:
                # Only once: a scheduler or a scaler may call step again.
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
        """Step float32 values in place of parameters or parts of them, with their options and state.

        Float32 state with the parameter's shape is stored in the format `narrow` between steps. `round_` writes new
        state into the old one in that format. Its arguments are part, name, target and float32 source.
        """
        optimizer = self.optimizer
        groups, state = optimizer.param_groups, optimizer.state
        # State by float32 stand-in. The optimizer creates missing entries as in its first step.
        self._new |= {id(part.parameter) for part in values if part.parameter not in state}
        known = [(part, new) for part, new in values.items() if id(part.parameter) not in self._new]
        optimizer.state = defaultdict(dict, {new: _state_of(part, state[part.parameter]) for part, new in known})
        self._new -= {id(part.parameter) for part in values if part.is_last}
        members: list[list[Tensor]] = [[] for _ in groups]
        for part, new in values.items():
            members[self._group_of[id(part.parameter)]].append(new)
        optimizer.param_groups = _with_parameters(groups, members)
        try:
            type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]  # without the hooks of whole steps
            for part, new in values.items():
                # The first step created state for the stand-in, which belongs to the parameter.
                if new in optimizer.state:
                    _keep(part, state[part.parameter], optimizer.state[new], new, narrow, round_)
        finally:
            optimizer.param_groups, optimizer.state = groups, state


def narrow_moments_(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
    """Round an optimizer's float32 state with the parameters' shape to bfloat16, its format between steps."""
    for parameter in parameters:
        # `get`, because it is a defaultdict
        for key, value in optimizer.state.get(parameter, {}).items():
            if _is_elementwise(value, parameter) and value.dtype == torch.float32:
                optimizer.state[parameter][key] = value.bfloat16()


def _with_parameters(groups: list[dict[str, Any]], members: list[list[Tensor]]) -> list[dict[str, Any]]:
    # Some optimizers fail on a group without parameters.
    return [{**group, "params": kept} for group, kept in zip(groups, members, strict=True) if kept]


def _is_elementwise(value: object, like: Tensor) -> bool:
    # A scalar's step count has the scalar's shape. torchao's 8-bit states are subclasses and stay as they are.
    is_alike = isinstance(value, Tensor) and value.shape == like.shape and value.dim() > 0
    return is_alike and type(local_part(cast("Tensor", value))) in (Tensor, nn.Parameter)


def _state_of(part: Part, state: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in state.items():
        if _is_elementwise(value, part.parameter):
            view = part.of(value)
            found[key] = view.float() if view.dtype in HALF else view
        elif isinstance(value, Tensor) and not part.is_last:
            # Each part steps from the same count, and the last part's is kept.
            found[key] = value.clone()
        else:
            found[key] = value
    return found


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
