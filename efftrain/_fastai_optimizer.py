"""fastai's own optimizer as one of torch's, and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from fastai.optimizer import Optimizer, OptimWrapper
from fastcore.foundation import L

from shared_core.errors import CompatibilityError


class NativeOptimizer(torch.optim.Optimizer):
    """Steps as fastai's optimizer does, with torch's parameter groups, state and hooks.

    Args:
        own: The optimizer that `Learner.create_opt` made. It is out of date until `give_back`.
    """

    def __init__(self, own: Any) -> None:
        groups = zip(own.param_lists, own.hypers, strict=True)
        super().__init__([{"params": [*parameters], **hyper} for parameters, hyper in groups], {})
        self._own = own
        self._take(own.state)

    def _take(self, state: Mapping[Any, Mapping[str, Any]]) -> None:
        """Keep fastai's flags apart, so that a parameter that has not stepped has no state."""
        flags = self._own._keep_on_clear
        self._flags = {one: {name: held[name] for name in flags if name in held} for one, held in state.items()}
        own = {one: {name: held[name] for name in held if name not in flags} for one, held in state.items()}
        self.state = defaultdict(dict, {one: held for one, held in own.items() if held})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Call the functions of fastai's optimizer on each parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                fixed = {**_hyper(group), **self._flags.get(parameter, {})}
                for update in self._own.cbs:
                    new = update(parameter, **fixed, **self.state[parameter])
                    if isinstance(new, dict):
                        self.state[parameter].update(new)

    def give_back(self) -> Any:
        """Return fastai's optimizer with the present groups and state."""
        self._own.param_lists = L(L(group["params"]) for group in self.param_groups)
        self._own.hypers = L(_hyper(group) for group in self.param_groups)
        held = (one for group in self.param_groups for one in group["params"])
        self._own.state = defaultdict(dict, {one: {**self._flags.get(one, {}), **self.state[one]} for one in held})
        return self._own

    def take(self, state: Mapping[str, Any]) -> None:
        """Load a state in fastai's form."""
        self.give_back().load_state_dict(state)
        self._take(self._own.state)
        for group, hyper in zip(self.param_groups, self._own.hypers, strict=True):
            group.update(hyper)


class _Wrapper(OptimWrapper):
    """Saves and loads the state in fastai's form, so that files fit any Learner."""

    def state_dict(self) -> dict[str, Any]:
        return dict(self.opt.give_back().state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.opt.take(state)


def _hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def wrapped(opt: Any) -> Any:
    """Return the Learner's optimizer as an `OptimWrapper` of one of torch's.

    Raises:
        CompatibilityError: If it is a subclass of fastai's, such as `Lookahead`, which steps in its own way.
    """
    if isinstance(opt, OptimWrapper):
        return opt
    if type(opt) is not Optimizer:
        raise CompatibilityError(
            "fastai",
            f"the optimizer {type(opt).__name__} is not supported",
            "pass opt_func=partial(OptimWrapper, opt=torch.optim.AdamW), or fastai's Adam, to Learner",
        )
    made = _Wrapper(opt=NativeOptimizer(opt), hp_map={})
    made.state, made.frozen_idx = opt.state, opt.frozen_idx
    return made
