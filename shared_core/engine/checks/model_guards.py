"""Checks of the user's model and optimizers: one session per model, unchanged modules, supported wrappers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shared_core.distributed.sharded_tensors import reshard_
from shared_core.errors import CompatibilityError, TrainingError

if TYPE_CHECKING:
    from shared_core.engine.plan import Plan
    from shared_core.engine.session import Session
    from shared_core.engine.technique import Context

# Exact classes only: any other optimizer may mix the elements of a gradient, like Muon (singular values), Adafactor
# (sums of rows and columns), LAMB and LARS (norms) and 8-bit states (block scales).
_ELEMENT_WISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta",
        "ASGD",
    )
)  # fmt: skip
_Held = tuple[str, str, nn.Module | Tensor]
# A set of sessions instead of marks on models: a copied or pickled model has no session.
_ATTACHED: weakref.WeakSet[Session] = weakref.WeakSet()


def refuse_second_session(session: Session, model: nn.Module) -> None:
    """Register a session for a model, which may have only one.

    A trainer's session that has not begun is detached. It attaches again when its trainer trains.

    Raises:
        TrainingError: If another session is attached to the model, to a part of it, or to a model that contains it.
    """
    if not session.techniques:
        return
    if any(True for _ in _others(session, model)):
        gc.collect()  # sessions are in reference cycles: one that nobody uses may still exist
    for other in _others(session, model):
        if other.front_end == "bare" or other.has_begun:
            raise TrainingError(
                "session",
                f"{type(model).__name__} already has a {other.front_end} session with {', '.join(other.recipe)}, and a "
                "model can have only one",
                "put all techniques into one recipe, or call finish or detach on the other session first",
            )
        other.detach()
    _ATTACHED.add(session)


def has_session(model: nn.Module) -> bool:
    """Return True if techniques are attached to a model."""
    return any(one.context is not None and one.context.model is model for one in _ATTACHED if one.is_attached)


def _others(session: Session, model: nn.Module) -> Iterator[Session]:
    # A part of the model, or a model around it, shares modules too.
    parts = {*map(id, model.modules())}
    for other in list(_ATTACHED):
        if other is session or not other.is_attached or other.context is None:
            continue
        theirs = other.context.model
        if id(theirs) in parts or any(part is model for part in theirs.modules()):
            yield other


def refuse_changed(plans: Mapping[str, Plan], context: Context) -> None:
    """Refuse a model with replaced or unfrozen parts: a technique would work on objects that are no longer used.

    Args:
        plans: Plans of the techniques, by key.
        context: The context with the model.

    Raises:
        TrainingError: If a module or parameter that a technique uses was replaced, or unfrozen although it must not.
    """
    held = [(key, *one) for key, plan in plans.items() for one in plan.guards.items()]
    for key, name, value in held:
        if plans[key].keeps_frozen and isinstance(value, Tensor) and value.requires_grad:
            raise TrainingError(
                key,
                f"{name} must stay frozen until the end of training, but was unfrozen by step {context.step}",
                "remove what unfreezes whole modules, such as Lightning's BackboneFinetuning",
            )
    if held and _gone(held, context.model):
        reshard_(context.model)  # FSDP2's gathered parameters had replaced the sharded ones
        for key, name, _ in _gone(held, context.model):
            raise TrainingError(
                key,
                f"{name} must stay in the model until the end of training, but was replaced by step {context.step}",
                "change parameters in place (copy_, load_state_dict without assign=True), and replace modules before "
                "training",
            )


def _gone(held: Iterable[_Held], model: nn.Module) -> list[_Held]:
    # By identity: names may have changed by wrapping.
    there = {*map(id, model.modules()), *map(id, model.parameters())}
    return [one for one in held if id(one[-1]) not in there]


def wrapped_by_user(model: nn.Module) -> set[str]:
    """Return the keys of `shared_core.config.environments.RUN_ENVIRONMENTS` that apply to the user's wrappers.

    Args:
        model: The model as given to the trainer, before the trainer shards it.

    Example:
        >>> from torch import nn
        >>> wrapped_by_user(nn.DataParallel(nn.Linear(2, 2)))
        {'data_parallel'}
    """
    found = set()
    for module in model.modules():
        if isinstance(module, nn.DataParallel):
            found.add("data_parallel")
        if isinstance(module, FullyShardedDataParallel):
            found.add("fsdp1")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        found.add("sharded_by_user")
    return found


def trained_in_ddp(model: nn.Module) -> set[nn.Parameter]:
    """Return the trainable parameters inside DistributedDataParallel, in the model or around it."""
    wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    return {parameter for module in wrapped for parameter in module.parameters() if parameter.requires_grad}


def refuse_not_reduced(model: nn.Module, reduced: set[nn.Parameter]) -> None:
    """Refuse techniques that changed which parameters train inside DistributedDataParallel.

    Args:
        model: The model with techniques attached.
        reduced: The result of `trained_in_ddp` before.

    Raises:
        CompatibilityError: If other parameters train now. DDP reduces only the gradients it was built with.
    """
    if trained_in_ddp(model) != reduced:
        raise CompatibilityError(
            "session",
            "the model is already wrapped in DistributedDataParallel, but techniques add, replace or freeze parameters",
            "attach to model.module first, then wrap it",
        )


def refuse_scripted(model: nn.Module, where: str) -> None:
    """Refuse `torch.jit.script` modules for techniques that read parameters, copy the model or rerun a forward.

    Raises:
        CompatibilityError: Names the first such module.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CompatibilityError(
                where,
                f"torch.jit modules are not supported ({name or 'the model itself'})",
                "train the original module, then script the trained model",
            )


def optimizers_of(given: Any, where: str) -> tuple[torch.optim.Optimizer, ...]:
    """Return the given optimizers as a tuple. Techniques read their groups and state.

    Raises:
        TrainingError: If it is not a list, or an item has no `param_groups` and `state` like torch's optimizers.
    """
    if isinstance(given, torch.optim.Optimizer) or not isinstance(given, Iterable):
        raise TrainingError(where, "optimizers must be a list, got a single object", "pass [optimizer]")
    found = tuple(given)
    for optimizer in found:
        if not all(hasattr(optimizer, name) for name in ("param_groups", "state")):
            inner = getattr(optimizer, "optimizer", None) or getattr(optimizer, "opt", None)
            raise TrainingError(
                where,
                "optimizer must be a torch.optim.Optimizer, or have its param_groups and state, got "
                f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
                f"pass the {type(inner).__name__} inside it"
                if isinstance(inner, torch.optim.Optimizer)
                else "use an optimizer from torch.optim, or a subclass of torch.optim.Optimizer",
            )
    return found


def kinds_of(optimizers: Iterable[Any]) -> set[str]:
    """Return the keys of `config.environments.RUN_ENVIRONMENTS` that apply to optimizers or those that they wrap.

    Example:
        >>> kinds_of([torch.optim.LBFGS([torch.ones(2)])])
        {'lbfgs'}
    """
    lbfgs = torch.optim.LBFGS
    return {"lbfgs"} if any(isinstance(getattr(one, "optimizer", one), lbfgs) for one in optimizers) else set()


def with_wrapped(optimizer: Any, depth: int = 3) -> Iterator[Any]:
    """Yield an optimizer and the optimizers that it wraps.

    Example:
        >>> class Lookahead(torch.optim.Optimizer):
        ...     def __init__(self, inner):
        ...         self.inner = inner
        >>> inner = torch.optim.SGD([torch.ones(2)])
        >>> [type(one).__name__ for one in with_wrapped(Lookahead(inner))]
        ['Lookahead', 'SGD']
    """
    yield optimizer
    if depth and hasattr(optimizer, "__dict__"):
        for value in vars(optimizer).values():
            held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            for one in held:
                if isinstance(one, torch.optim.Optimizer):
                    yield from with_wrapped(one, depth - 1)


def is_element_wise(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer is known to update each element from its own gradient only.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 2))
        >>> is_element_wise(torch.optim.AdamW([weight])), is_element_wise(torch.optim.Adafactor([weight]))
        (True, False)
    """
    return type(optimizer) in _ELEMENT_WISE
