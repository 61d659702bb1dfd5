"""Which of a model's parameters optimizers hold, and groups that follow what techniques add or replace, and return."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from shared_core.engine.checks.model_guards import optimizers_of
from shared_core.errors import CompatibilityError, TrainingError
from shared_core.modules.matching import plain_name

if TYPE_CHECKING:
    from shared_core.engine.session import Session
    from shared_core.engine.technique import Context

_TOLD = 6


def unheld(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], trained: Container[tuple[nn.Module, str]] = ()
) -> dict[nn.Parameter, str]:
    """Return the parameters that require gradients but are in no optimizer, with their plain names.

    Empty where the optimizers hold none of the model's parameters: they hold others in their place (parts of a sharded
    model, copies), or step elsewhere.

    Args:
        model: Techniques are attached.
        optimizers: Torch's own, unwrapped.
        trained: The owners and names of those that required gradients before techniques attached: of a layer whose
            additions no optimizer holds, what a technique has frozen is returned too.

    Example:
        >>> model = nn.ModuleDict({"net": nn.Linear(1, 1), "copy": nn.Linear(1, 1)})
        >>> list(unheld(model, [torch.optim.SGD(model["net"].parameters(), lr=0.1)]).values())
        ['copy.weight', 'copy.bias']
    """
    held = {parameter for one in optimizers for group in one.param_groups for parameter in group["params"]}
    named = {value: plain_name(name) for name, value in model.named_parameters()}
    trains = [value for value in named if value.requires_grad]
    found = {parameter: named[parameter] for parameter in trains if parameter not in held}
    if len(found) == len(trains):
        return {}
    inside = [one for module in untrained_modules(model, found).values() for one in own_parameters(module)]
    return found | {value: named[value] for owner, name, value in inside if (owner, name) in trained}


def own_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield every parameter with the module that holds it and its name there: FSDP2 puts others in their places."""
    for module in model.modules():
        for name, value in module.named_parameters(recurse=False):
            yield module, name, value


def untrained_modules(model: nn.Module, left: Mapping[nn.Parameter, str]) -> dict[str, nn.Module]:
    """Return by plain name the outermost modules that hold some of these parameters and train no others.

    Args:
        model: Searched through.
        left: Parameters that do not train, with their plain names.
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        place, parameters = plain_name(name), [*module.parameters()]
        if any(not outer or place.startswith(f"{outer}.") for outer in found):
            continue
        if any(one in left for one in parameters) and all(one in left or not one.requires_grad for one in parameters):
            found[place] = module
    return found


def named_parts(model: nn.Module, left: Mapping[nn.Parameter, str]) -> str:
    """Return the names of the modules that hold these parameters, or their own, for a message.

    Args:
        model: Searched through.
        left: Parameters that do not train, with their plain names.
    """
    modules = untrained_modules(model, left)
    inside = {parameter for module in modules.values() for parameter in module.parameters()}
    names = [*modules, *(name for parameter, name in left.items() if parameter not in inside)]
    return ", ".join(names[:_TOLD]) + (f" and {len(names) - _TOLD} more" if len(names) > _TOLD else "")


def shapes_of(module: nn.Module) -> list[torch.Size]:
    """Return the shapes of a module's parameters, in order."""
    return [value.shape for value in module.parameters()]


def copies(
    model: nn.Module, left: Mapping[nn.Parameter, str], shapes: Mapping[nn.Module, list[torch.Size]]
) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Return by name the copies of trained parts, such as a moving average that the user's code updates, and those.

    Such code goes through the parameters of both one by one. So a copy is told by parameters of the same shapes.

    Args:
        model: Searched through.
        left: From `unheld`.
        shapes: Of the parameters of modules, before techniques attached.
    """
    trained = [one for one in shapes if any(p.requires_grad and p not in left for p in one.parameters())]
    found: dict[str, tuple[nn.Module, nn.Module]] = {}
    for name, module in untrained_modules(model, left).items():
        original = next((one for one in trained if shapes[one] == shapes.get(module)), None)
        if original is not None:
            found[name] = module, original
    return found


def layers_of_copies(
    where: str, model: nn.Module, left: Mapping[nn.Parameter, str], shapes: Mapping[nn.Module, list[torch.Size]]
) -> set[nn.Module]:
    """Return the modules inside `copies`, which keep what a technique adds to them as to their originals.

    Args:
        where: The technique, for errors.
        model: As in `copies`.
        left: As in `copies`.
        shapes: As in `copies`.

    Raises:
        CompatibilityError: If the parameters of a copy are no longer those of its original one by one.
    """
    found = copies(model, left, shapes)
    for name, (copy, original) in found.items():
        if shapes_of(copy) != shapes_of(original):
            raise CompatibilityError(
                where,
                f"{name}, which no optimizer holds, must keep the parameters of the part that it copies one by one, "
                "got layers added to one of them",
                "let average keep the moving average, or make the copy outside of the model once training has begun",
            )
    return {inner for copy, _ in found.values() for inner in copy.modules()}


def unheld_note(model: nn.Module, left: Mapping[nn.Parameter, str]) -> str:
    """Return the line that tells which parameters no optimizer holds."""
    return f"no optimizer holds the parameters of {named_parts(model, left)}: for all techniques they count as frozen"


def joined_note(left: Mapping[nn.Parameter, str], optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Return the line that tells which of these parameters an optimizer holds by now; empty if none."""
    if not left:
        return ""
    held = {parameter for one in optimizers for group in one.param_groups for parameter in group["params"]}
    names = [name for parameter, name in left.items() if parameter in held]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{names[0]}{more} joined an optimizer after training had begun: techniques leave them as they are; give them "
        "to the optimizer at the start, frozen (requires_grad False) or with a learning rate of 0, until they train"
        if names
        else ""
    )


class OptimizerParameters:
    """Which of a model's parameters each group of existing optimizers holds, by name.

    Groups stay as many and keep their options: schedulers and saved states count them. A new parameter joins the group
    that holds its layer's other ones, or those of the nearest module around it. Muon takes matrices alone: any other
    parameter joins the nearest group of another optimizer.

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
        self.adds = False
        """True once parameters have joined that were made after the optimizers."""

    @property
    def is_empty(self) -> bool:
        """True if the optimizers hold none of the model's parameters."""
        return not self._group_of

    def follow(self) -> None:
        """Put into the groups what trains in the model as it is now; nothing changes where its parameters are the same.

        Raises:
            TrainingError: If an optimizer has state of a parameter that no longer trains: it stepped before; or if none
                can take a new one.
        """
        now = dict(self._model.named_parameters())
        if {*now.values()} == self._before.keys():
            return
        joins: dict[nn.Parameter, int] = {}
        for name, parameter in now.items():
            if parameter not in self._before and parameter.requires_grad:
                # what is added to a layer that no optimizer holds does not train either
                if not self._is_unheld(name):
                    joins[parameter] = self._nearest(name, parameter)
                    self.adds = True
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

    def _is_unheld(self, name: str) -> bool:
        """Return True if parameters stood nearest to a new one that could train, and no group holds any of them."""
        around = name
        while around:
            around = around.rpartition(".")[0]
            inside = f"{around}." if around else ""
            beside = [parameter for parameter, (held, _) in self._before.items() if held.startswith(inside)]
            if beside:
                return not any(parameter in self._held or not self._before[parameter][1] for parameter in beside)
        return False

    def _nearest(self, name: str, parameter: nn.Parameter) -> int:
        around = name
        while around:
            around = around.rpartition(".")[0]
            inside = f"{around}." if around else ""
            for held, index in self._group_of.items():
                if held.startswith(inside) and self._takes(index, parameter):
                    return index
        names = " and ".join(type(optimizer).__name__ for optimizer in self._optimizers)
        raise TrainingError(
            "session",
            f"an optimizer must take {name} of shape {tuple(parameter.shape)}, which a technique adds, got {names}, "
            "which takes matrices alone",
            "pass one such as AdamW as well (attach_with and Session.begin take several), or exclude the layer",
        )

    def _takes(self, index: int, parameter: nn.Parameter) -> bool:
        """Return True if the optimizer of a group steps parameters of as many dimensions."""
        groups = [(optimizer, group) for optimizer in self._optimizers for group in optimizer.param_groups]
        optimizer, group = groups[index]
        if "muon" not in type(optimizer).__name__.lower() or not group.get("use_muon", True):
            return True
        # Some other than torch's own flatten convolutions.
        return parameter.ndim == 2 or any(held.ndim == parameter.ndim for held in group["params"])

    def _groups(self) -> list[dict[str, Any]]:
        # Asked each time: loading a state makes new ones.
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _fill(self, joins: dict[nn.Parameter, int]) -> None:
        for index, group in enumerate(self._groups()):
            others = [held for held, its in self._held.items() if its == index and held not in self._before]
            # in place: some optimizers keep the list itself
            group["params"][:] = [*others, *(held for held, its in joins.items() if its == index)]


def attach_with(
    session: Session,
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    run_environment: Iterable[str] = (),
) -> OptimizerParameters:
    """Attach a session to a model whose optimizers exist; return what fills their groups, until the run is over.

    Args:
        session: Not attached yet.
        model: As in `Session.attach`.
        optimizers: Torch's own, unwrapped, which have not stepped yet.
        run_environment: As in `Session.attach`.

    Raises:
        TrainingError: If no optimizer holds a parameter of the model, or one is not torch's; else as `Session.attach`.
    """
    optimizers = optimizers_of(optimizers, session.front_end)
    parameters = OptimizerParameters(model, optimizers)
    if parameters.is_empty:
        raise TrainingError(
            session.front_end,
            f"optimizer must hold parameters of the {type(model).__name__} that trains, got none",
            "make it from model.parameters()",
        )
    session.attach(model, run_environment)
    context = cast("Context", session.context)
    context.undo.close_with(parameters.restore)
    try:
        parameters.follow()
    except BaseException:
        session.detach()
        raise
    context.adds_parameters = parameters.adds
    return parameters
