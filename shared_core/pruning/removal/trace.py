"""What is known of every tensor of a forward: the ids of its positions, and values that no input changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from shared_core.pruning.removal.positions import Positions, compact, core, varying_dims


@dataclass
class Tracked:
    """What is known of a tensor.

    `labels` are int64 tensors of its shape (see `positions.varying_dims`), one for each set of dims that can be
    narrowed; `value` its values where they do not depend on the input; `is_parameter`: it comes from the model's
    state alone.
    """

    labels: list[Tensor] = field(default_factory=list)
    value: Tensor | None = None
    is_parameter: bool = False


@dataclass(frozen=True)
class Normalised:
    """A norm over labelled positions: narrowing `label` along `dims` changes what it divides by."""

    kind: str
    module: str
    label: Tensor
    dims: tuple[int, ...]


Rule = Callable[["Tracer", Any, tuple[Any, ...], dict[str, Any], Any], Any]
RULES: dict[str, Rule] = {}
"""By the name of an aten operator: functions that return a `Tracked` or None for every tensor of its output."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of operators; returns a decorator."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows ids and constants through every operator that runs.

    Args:
        model: Its parameters and buffers are what can be narrowed.
        constants: Also follow the values that do not depend on the input.
    """

    def __init__(self, model: nn.Module, *, constants: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.constants = constants
        self.names: dict[str, Tensor] = {}
        seen: set[Tensor] = set()
        persistent = set(model.state_dict(keep_vars=True))
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in persistent and tensor not in seen:
                seen.add(tensor)
                self.names[name] = tensor
        self.positions = Positions({name: tuple(tensor.shape) for name, tensor in self.names.items()})
        self.constant_of: NDArray[np.float64] = np.zeros(self.positions.count)
        """What is known to arrive at the positions that are summed over: NaN where it is not known."""
        self.is_summed = np.zeros(self.positions.count, dtype=bool)
        self.norms: list[Normalised] = []
        self.module_names: list[str] = [""]
        self._viewed: set[int] = set()
        self.inputs: set[int] = set()
        """Where the storages of the example's tensors are."""
        self._tracked: Any = WeakTensorKeyDictionary()
        for name, tensor in self.names.items():
            labels = [self.positions.label(name, axis, tensor) for axis in range(tensor.ndim)]
            for label in labels:
                if not varying_dims(label):
                    self.positions.pin(label, "it is the only one")
            tracked = Tracked([label for label in labels if varying_dims(label)], is_parameter=True)
            tracked.value = tensor.detach() if constants and tensor.is_floating_point() else None
            self.set(tensor, tracked)

    def get(self, tensor: Any) -> Tracked | None:
        """Return what is known of a tensor, without constants if it was written to under another name since."""
        found = self._tracked.get(tensor) if isinstance(tensor, Tensor) else None
        if found is None:
            return None
        tracked, version = found
        return tracked if version == tensor._version else Tracked(tracked.labels, None, False)

    def set(self, tensor: Tensor, tracked: Tracked, version: int | None = None) -> None:
        """Note what is known of a tensor, which will have `version` once the operator has returned."""
        if tracked.labels or tracked.value is not None or tracked.is_parameter:
            self._tracked[tensor] = (tracked, tensor._version if version is None else version)
        else:
            self._tracked.pop(tensor, None)

    def pin(self, tensors: Any, reason: str) -> None:
        """Pin all positions of the tensors among `tensors`."""
        for tensor in tree_leaves(tensors):
            tracked = self.get(tensor)
            for label in tracked.labels if tracked else ():
                self.positions.pin(label, reason)

    def is_aliased(self, tensor: Tensor) -> bool:
        """Return whether a tensor without labels may have another name: what is written to it cannot be followed."""
        tracked = self.get(tensor)
        return not (tracked and tracked.labels) and tensor.untyped_storage().data_ptr() in self._viewed

    def here(self) -> str:
        """Return where the forward is, for a reason."""
        return self.module_names[-1] or "the model"

    def sum_over(self, label: Tensor, value: Tensor | None) -> None:
        """Note that positions are summed over, and what arrives there.

        Args:
            label: Compact or not.
            value: Constants of the same shape as `core(label)`, NaN where unknown; None: nowhere known.
        """
        ids = core(label).reshape(-1).cpu().numpy()
        found = np.full(ids.shape, np.nan) if value is None else value.reshape(-1).double().cpu().numpy()
        order = np.argsort(ids, kind="stable")
        ids, found = ids[order], found[order]
        starts = np.flatnonzero(np.r_[True, ids[1:] != ids[:-1]])
        low, high = np.minimum.reduceat(found, starts), np.maximum.reduceat(found, starts)
        found, ids = np.where(low == high, low, np.nan), ids[starts]
        old = self.constant_of[ids]
        self.constant_of[ids] = np.where(self.is_summed[ids] & (old != found), np.nan, found)
        self.is_summed[ids] = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, then its rule."""
        kwargs = kwargs or {}
        before = [tracked for leaf in tree_leaves((args, kwargs)) if (tracked := self.get(leaf))]
        name = func._schema.name.removeprefix("aten::")
        mutates = func._schema.is_mutable and args and isinstance(args[0], Tensor) and name.endswith("_")
        is_view = not func._schema.is_mutable and any(item.alias_info is not None for item in func._schema.returns)
        if is_view and isinstance(args[0], Tensor):
            self._viewed.add(args[0].untyped_storage().data_ptr())
        if not before:
            out = func(*args, **kwargs)
            if isinstance(out, Tensor) and not is_view and not func._schema.is_mutable:
                self._viewed.discard(out.untyped_storage().data_ptr())  # the memory of a view that is gone
            return out
        known = RULES.get(name.removesuffix("_") if mutates else name)
        if known is None and torch.Tag.pointwise in func.tags:
            known = RULES["pointwise"]
        if known is None or (func._schema.is_mutable and not mutates and "batch_norm" not in name):
            out = func(*args, **kwargs)
            self.pin((args, kwargs), f"the operator {name} in {self.here()} is not followed")
            return out
        if not mutates:
            out = func(*args, **kwargs)
            found = self._follow(known, func, args, kwargs, out)
            self._note(out, found, args[0]._version if is_view and isinstance(args[0], Tensor) else None)
            return out
        found = self._follow(known, func, args, kwargs, args[0])  # before the tensor is written to
        out = func(*args, **kwargs)
        self._note(args[0], found, args[0]._version + 1)
        return out

    def _follow(self, known: Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        try:
            return known(self, func, args, kwargs, out)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:  # an overload that the rule does not know
            name = func._schema.name.removeprefix("aten::")
            self.pin((args, kwargs), f"the operator {name} in {self.here()} is not followed: {error}")
            return Tracked()

    def _note(self, out: Any, found: Any, version: int | None = None) -> None:
        # versions are counted up, and views given that of their base, only when this returns
        outs = out if isinstance(out, tuple | list) else [out]
        tracked = found if isinstance(found, list) else [found]
        for tensor, item in zip(outs, tracked, strict=False):
            if isinstance(tensor, Tensor) and item is not None and tensor.numel():
                item.labels = [label for label in map(compact, item.labels) if self._varies(label)]
                self.set(tensor, item, version)

    def _varies(self, label: Tensor) -> bool:
        if not varying_dims(label):
            self.positions.pin(label, "it is the only one")
            return False
        return True
