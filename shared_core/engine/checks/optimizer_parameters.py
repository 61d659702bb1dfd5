"""Which parameters the optimizers hold, and parameter groups that follow what techniques add or replace."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from shared_core.engine.checks.model_guards import optimizers_of, with_wrapped
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

    Empty if the optimizers hold none of the model's parameters. They may hold shards or copies instead.

    Args:
        model: The model with techniques attached.
        optimizers: Unwrapped torch optimizers.
        trained: Owner and name of the parameters that required gradients before techniques attached. If a technique
            froze one of them in a layer that no optimizer holds, it is returned too.

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


def ids_of_held(optimizers: Iterable[Any]) -> set[int]:
    """Return the ids of the parameters that optimizers hold, or the optimizers that they wrap.

    Layerwise optimizers hold a dummy, and wrap an optimizer for each parameter.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> ids_of_held([torch.optim.SGD([weight])]) == {id(weight)}
        True
    """
    all_of_them = (one for optimizer in optimizers for one in with_wrapped(optimizer))
    return {id(held) for one in all_of_them for group in one.param_groups for held in group["params"]}


def own_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield every parameter with its module and its name there. FSDP2 replaces parameters, so names are the key."""
    for module in model.modules():
        for name, value in module.named_parameters(recurse=False):
            yield module, name, value


def untrained_modules(model: nn.Module, left: Mapping[nn.Parameter, str]) -> dict[str, nn.Module]:
    """Return the outermost modules that hold some of these parameters and train no others, by plain name.

    Args:
        model: The model to search.
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
    """Return the names of the modules that hold these parameters, or of the parameters, for a message.

    Args:
        model: The model to search.
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
    """Return copies of trained modules with their originals, such as a moving average that the user's code updates.

    Such code pairs the parameters of both one by one. So a copy is recognized by parameters of the same shapes.

    Args:
        model: The model to search.
        left: From `unheld`.
        shapes: Shapes of the parameters of each module, before techniques attached.
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
    """Return the modules inside `copies`. They keep what a technique adds, just like their originals.

    Args:
        where: Name of the technique in errors.
        model: As in `copies`.
        left: As in `copies`.
        shapes: As in `copies`.

    Raises:
        CompatibilityError: If the parameters of a copy no longer match its original one by one.
    """
    found = copies(model, left, shapes)
    for name, (copy, original) in found.items():
        if shapes_of(copy) != shapes_of(original):
            raise CompatibilityError(
                where,
                f"{name}, which no optimizer holds, is a copy of another module, but a technique changed the layers of "
                "only one of them",
                "use the technique average for a moving average, or make the copy outside the model after training "
                "begins",
            )
    return {inner for copy, _ in found.values() for inner in copy.modules()}


def unheld_note(model: nn.Module, left: Mapping[nn.Parameter, str]) -> str:
    """Return a note about the parameters that no optimizer holds."""
    return f"no optimizer holds the parameters of {named_parts(model, left)}: all techniques treat them as frozen"


def joined_note(idle: Mapping[nn.Parameter, str], optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Return a note about the parameters that did not train when training began but do now; empty if none."""
    if not idle:
        return ""
    held = {parameter for one in optimizers for group in one.param_groups for parameter in group["params"]}
    names = [name for parameter, name in idle.items() if parameter in held and parameter.requires_grad]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{names[0]}{more} train now but did not when training began, so techniques that leave out frozen parameters "
        "do not change them; add them to the optimizer at the start, with a learning rate of 0 until they train"
        if names
        else ""
    )


class OptimizerParameters:
    """Keeps the parameter groups of existing optimizers up to date while techniques change the model.

    The number of groups and their options stay the same, since schedulers and saved states rely on them. A new
    parameter joins the group of its layer's other parameters, or of the nearest enclosing module. Muon takes only
    matrices, so other parameters join the nearest group of another optimizer.

    Args:
        model: The user's model, before techniques are attached.
        optimizers: Unwrapped torch optimizers.

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
        self._joined: set[nn.Parameter] = set()
        self.adds = False
        """True once a parameter has joined that was created after the optimizers."""

    @property
    def is_empty(self) -> bool:
        """True if the optimizers hold none of the model's parameters."""
        return not self._group_of

    def follow(self) -> None:
        """Fill the groups with the model's present trainable parameters. A no-op if its parameters did not change.

        Raises:
            TrainingError: If an optimizer has already stepped a parameter that no longer trains, or if no optimizer
                can take a new one.
        """
        now = dict(self._model.named_parameters())
        if {*now.values()} == self._before.keys():
            return
        joins: dict[nn.Parameter, int] = {}
        for name, parameter in now.items():
            if parameter not in self._before and parameter.requires_grad:
                # Additions to a layer that no optimizer holds don't train either.
                if not self._is_unheld(name):
                    joins[parameter] = self._nearest(name, parameter)
                    self.adds = True
            # Parameters that a technique froze leave; those that the user froze stay.
            elif parameter in self._held and (parameter.requires_grad or not self._before[parameter][1]):
                joins[parameter] = self._held[parameter]
        if any(
            parameter not in joins and parameter in self._before for one in self._optimizers for parameter in one.state
        ):
            raise TrainingError(
                "session",
                "the optimizer has stepped already, but techniques add or replace parameters",
                "create a new optimizer; in a resumed run, load its state after training begins",
            )
        self._fill(joins)

    @contextlib.contextmanager
    def sharding(self) -> Iterator[None]:
        """Return a context manager for code that may shard the model: the groups get the sharded parameters.

        Raises:
            TrainingError: If an optimizer has state for a parameter that was replaced.

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
                "the optimizer stepped before its model was sharded",
                "create a new optimizer",
            )
        for group in self._groups():
            group["params"][:] = [replaced.get(held, held) for held in group["params"]]
        # Drop all references to the whole parameters, which would stay in memory.
        self._before = {now[held]: value for held, value in self._before.items() if held in now}
        self._held = {now[held]: index for held, index in self._held.items() if held in now}
        self._joined = {now[held] for held in self._joined if held in now}

    def restore(self) -> None:
        """Fill the groups with the user's parameters again, by name."""
        now = dict(self._model.named_parameters())
        joins = {now[name]: index for name, index in self._group_of.items() if name in now}
        self._fill(joins)
        for optimizer in self._optimizers:
            held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            for parameter in [one for one in optimizer.state if one not in held]:
                del optimizer.state[parameter]

    def _is_unheld(self, name: str) -> bool:
        """Return True if the nearest parameters around a new one could train but are in no group."""
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
            f"a technique adds {name} of shape {tuple(parameter.shape)}, but {names} takes only matrices",
            "also pass an optimizer such as AdamW (attach_with and Session.begin take several), or exclude the layer",
        )

    def _takes(self, index: int, parameter: nn.Parameter) -> bool:
        """Return True if the optimizer of a group accepts parameters with this number of dimensions."""
        groups = [(optimizer, group) for optimizer in self._optimizers for group in optimizer.param_groups]
        optimizer, group = groups[index]
        if "muon" not in type(optimizer).__name__.lower() or not group.get("use_muon", True):
            return True
        # Some Muon versions other than torch's flatten convolutions.
        return parameter.ndim == 2 or any(held.ndim == parameter.ndim for held in group["params"])

    def _groups(self) -> list[dict[str, Any]]:
        # Not cached: loading a state makes new groups.
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _fill(self, joins: dict[nn.Parameter, int]) -> None:
        for index, group in enumerate(self._groups()):
            # Parameters outside the model, and those that the script has added since.
            others = [held for held in group["params"] if held not in self._before and held not in self._joined]
            # In place: some optimizers keep a reference to the list.
            group["params"][:] = [*others, *(held for held, its in joins.items() if its == index)]
        self._joined |= joins.keys()


def attach_with(
    session: Session,
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    run_environment: Iterable[str] = (),
) -> OptimizerParameters:
    """Attach a session to a model whose optimizers already exist. The groups are restored when the session ends.

    Args:
        session: A session that is not attached yet.
        model: As in `Session.attach`.
        optimizers: Unwrapped torch optimizers that have not stepped yet.
        run_environment: As in `Session.attach`.

    Returns:
        The object that keeps the parameter groups up to date.

    Raises:
        TrainingError: If no optimizer holds a parameter of the model, or one is not torch's. Also the errors of
            `Session.attach`.
    """
    optimizers = optimizers_of(optimizers, session.front_end)
    parameters = OptimizerParameters(model, optimizers)
    if parameters.is_empty:
        raise TrainingError(
            session.front_end,
            f"the optimizer holds no parameters of the {type(model).__name__} to train",
            "create it from model.parameters()",
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
