"""Parameters that techniques add or replace after the optimizer was made: its groups follow the model, and return."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from shared_core.errors import TrainingError


class OptimizerParameters:
    """Which of a model's parameters each group of existing optimizers holds, by name.

    Groups stay as many and keep their options: schedulers and saved states count them. A new parameter joins the group
    that holds its layer's other ones, or those of the nearest module around it.

    Args:
        model: The user's, before techniques are attached.
        optimizers: Torch's own, unwrapped.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> parameters = OptimizerParameters(model, [optimizer])
        >>> model[0].scale = nn.Parameter(torch.ones(()))
        >>> parameters.follow()
        >>> any(held is model[0].scale for held in optimizer.param_groups[0]["params"])
        True
    """

    def __init__(self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._model, self._optimizers = model, list(optimizers)
        self._before = {parameter: (name, parameter.requires_grad) for name, parameter in model.named_parameters()}
        self._held = {held: index for index, group in enumerate(self._groups()) for held in group["params"]}
        self._group_of = {self._before[held][0]: index for held, index in self._held.items() if held in self._before}

    @property
    def is_empty(self) -> bool:
        """Whether the optimizers hold none of the model's parameters."""
        return not self._group_of

    def follow(self) -> None:
        """Put into the groups what trains in the model as it is now; nothing changes where its parameters are the same.

        Raises:
            TrainingError: If an optimizer has state of a parameter that no longer trains: it stepped before.
        """
        now = dict(self._model.named_parameters())
        if {*now.values()} == self._before.keys():
            return
        joins: dict[nn.Parameter, int] = {}
        for name, parameter in now.items():
            if parameter not in self._before and parameter.requires_grad:
                joins[parameter] = self._nearest(name)
            # what a technique froze leaves, what the user froze stays
            elif parameter in self._held and (parameter.requires_grad or not self._before[parameter][1]):
                joins[parameter] = self._held[parameter]
        if any(
            parameter not in joins and parameter in self._before for one in self._optimizers for parameter in one.state
        ):
            raise TrainingError(
                "session",
                "optimizer must not have stepped before techniques add or replace parameters, got one with state",
                "make a new one; in a resumed run load its state once training has begun",
            )
        self._fill(joins)

    @contextlib.contextmanager
    def sharding(self) -> Iterator[None]:
        """Surround what may shard the model: groups hold what then stands in the places of its parameters.

        Raises:
            TrainingError: If an optimizer has state of a parameter that another one has taken the place of.

        Example:
            >>> model = nn.Linear(2, 2)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> with OptimizerParameters(model, [optimizer]).sharding():
            ...     model.weight = nn.Parameter(model.weight[:1])
            >>> [list(held.shape) for held in optimizer.param_groups[0]["params"]]
            [[1, 2], [2]]
        """
        places = {
            parameter: (module, name)
            for module in self._model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        yield
        now: dict[Any, Any] = {parameter: module._parameters[name] for parameter, (module, name) in places.items()}
        replaced = {before: after for before, after in now.items() if after is not before}
        if not replaced:
            return
        if any(parameter in replaced for optimizer in self._optimizers for parameter in optimizer.state):
            raise TrainingError(
                "session",
                "optimizer must not have stepped before its model is sharded, got one with state",
                "make it anew",
            )
        for group in self._groups():
            group["params"][:] = [replaced.get(held, held) for held in group["params"]]
        # whole parameters would stay in memory for as long as anything here is known by them
        others = {held: index for held, index in self._held.items() if held not in self._before}
        self._before = {now[held]: told for held, told in self._before.items() if held in now}
        self._held = others | {now[held]: index for held, index in self._held.items() if held in now}

    def restore(self) -> None:
        """Have the groups hold the user's parameters again, by name."""
        now = dict(self._model.named_parameters())
        joins = {now[name]: index for name, index in self._group_of.items() if name in now}
        self._fill(joins)
        for optimizer in self._optimizers:
            held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            for parameter in [one for one in optimizer.state if one not in held]:
                del optimizer.state[parameter]

    def _nearest(self, name: str) -> int:
        around = name
        while around:
            around = around.rpartition(".")[0]
            inside = f"{around}." if around else ""
            found = [index for held, index in self._group_of.items() if held.startswith(inside)]
            if found:
                return found[0]
        return 0

    def _groups(self) -> list[dict[str, Any]]:
        # Asked each time: loading a state makes new ones.
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _fill(self, joins: dict[nn.Parameter, int]) -> None:
        for index, group in enumerate(self._groups()):
            others = [held for held, its in self._held.items() if its == index and held not in self._before]
            # in place: some optimizers keep the list itself
            group["params"][:] = [*others, *(held for held, its in joins.items() if its == index)]
