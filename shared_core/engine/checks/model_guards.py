"""Checks of the user's model and optimizers: one session for a model, what techniques hold, what they can work with."""

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

# Exact classes: a subclass may do anything, and what is not known may mix the elements of a gradient, as Muon (its
# singular values), Adafactor (sums of rows and columns), LAMB and LARS (norms) and 8-bit states (scales of blocks) do.
_ELEMENT_WISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta",
        "ASGD",
    )
)  # fmt: skip
_Held = tuple[str, str, nn.Module | Tensor]
# of sessions, not of models: a copy of a model, or one that was pickled, has none
_ATTACHED: weakref.WeakSet[Session] = weakref.WeakSet()


def refuse_second_session(session: Session, model: nn.Module) -> None:
    """Note that a session attaches to a model, which no other may do then.

    A trainer's session that has not begun gives way: it attaches again when its trainer trains.

    Raises:
        TrainingError: If the model, one of its parts, or one that it is a part of, is another session's.
    """
    if not session.techniques:
        return
    if any(True for _ in _others(session, model)):
        gc.collect()  # sessions are in cycles with what they drive, so that one nobody holds may still be there
    for other in _others(session, model):
        if other.front_end == "bare" or other.has_begun:
            raise TrainingError(
                "session",
                f"a model must have one session, got {type(model).__name__}, which a {other.front_end} session with "
                f"{', '.join(other.recipe)} is attached to",
                "put all techniques into one recipe, or call finish or detach of the other one first",
            )
        other.detach()
    _ATTACHED.add(session)


def _others(session: Session, model: nn.Module) -> Iterator[Session]:
    # Also a part of a model, or a model around it: they share modules.
    parts = {*map(id, model.modules())}
    for other in list(_ATTACHED):
        if other is session or not other.is_attached or other.context is None:
            continue
        theirs = other.context.model
        if id(theirs) in parts or any(part is model for part in theirs.modules()):
            yield other


def refuse_changed(plans: Mapping[str, Plan], context: Context) -> None:
    """Refuse a model of which something was replaced or unfrozen: a technique would work on what is left over.

    Args:
        plans: Of the techniques, by their keys.
        context: With the model.

    Raises:
        TrainingError: If something that a technique holds is no longer in the model, or trains and must not.
    """
    held = [(key, *one) for key, plan in plans.items() for one in plan.guards.items()]
    for key, name, value in held:
        if plans[key].keeps_frozen and isinstance(value, Tensor) and value.requires_grad:
            raise TrainingError(
                key,
                f"{name} must stay frozen until the end of training, got it trainable by step {context.step}",
                "leave out what unfreezes whole modules, such as Lightning's BackboneFinetuning",
            )
    if held and _gone(held, context.model):
        reshard_(context.model)  # FSDP2's gathered parameters were in the places of its parts
        for key, name, _ in _gone(held, context.model):
            raise TrainingError(
                key,
                f"{name} must stay in the model until the end of training, got another object in its place by step "
                f"{context.step}",
                "write into parameters (copy_, load_state_dict without assign=True), and replace modules before "
                "training",
            )


def _gone(held: Iterable[_Held], model: nn.Module) -> list[_Held]:
    # By identity: names may have changed by wrapping.
    there = {*map(id, model.modules()), *map(id, model.parameters())}
    return [one for one in held if id(one[-1]) not in there]


def wrapped_by_user(model: nn.Module) -> set[str]:
    """Return the keys of `shared_core.config.conflicts.RUN_ENVIRONMENTS` that modules and weights of a model show.

    Args:
        model: As the trainer was given it. Under a trainer that shards, weights are in parts anyway.

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
    """Return the parameters that train inside DistributedDataParallel, where a model is or holds one."""
    wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    return {parameter for module in wrapped for parameter in module.parameters() if parameter.requires_grad}


def refuse_not_reduced(model: nn.Module, reduced: set[nn.Parameter]) -> None:
    """Refuse techniques that changed which parameters train inside DistributedDataParallel.

    Args:
        model: With techniques attached.
        reduced: What `trained_in_ddp` returned before.

    Raises:
        CompatibilityError: If others train now: it reduces the gradients of those that it was made with.
    """
    if trained_in_ddp(model) != reduced:
        raise CompatibilityError(
            "session",
            "model must be the one inside DistributedDataParallel where techniques add, replace or freeze parameters, "
            "got one that is wrapped already",
            "attach to model.module first, and wrap it then",
        )


def refuse_scripted(model: nn.Module, where: str) -> None:
    """Refuse modules of `torch.jit.script` where a technique reads parameters, copies or runs a forward again.

    Raises:
        CompatibilityError: Names the first one.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CompatibilityError(
                where,
                f"model must consist of Python modules, got a torch.jit module ({name or 'the model itself'})",
                "train the module that it was made of, and script the trained model",
            )


def optimizers_of(given: Any, where: str) -> tuple[torch.optim.Optimizer, ...]:
    """Return a list of optimizers as it was given: techniques read their groups and their state.

    Raises:
        TrainingError: If it is no list, or one is no optimizer of torch and does not look like one.
    """
    if isinstance(given, torch.optim.Optimizer) or not isinstance(given, Iterable):
        raise TrainingError(where, "optimizers must be a list, got one", "pass [optimizer]")
    found = tuple(given)
    for optimizer in found:
        if not all(hasattr(optimizer, name) for name in ("param_groups", "state")):
            inner = getattr(optimizer, "optimizer", None) or getattr(optimizer, "opt", None)
            raise TrainingError(
                where,
                "optimizer must be a torch.optim.Optimizer, or have its param_groups and state, got "
                f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
                f"pass the {type(inner).__name__} that it wraps"
                if isinstance(inner, torch.optim.Optimizer)
                else "make one of torch.optim, or of a library whose optimizers are subclasses of it",
            )
    return found


def refuse_lbfgs(optimizers: Iterable[Any], where: str, why: str) -> None:
    """Refuse an optimizer that is LBFGS, beneath a wrapper too: it moves weights many times within one step.

    Raises:
        CompatibilityError: If one is.
    """
    for optimizer in optimizers:
        if isinstance(getattr(optimizer, "optimizer", optimizer), torch.optim.LBFGS):
            raise CompatibilityError(where, f"optimizer must not be LBFGS, {why}", "use SGD or AdamW")


def is_element_wise(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer is known to move each element by its own gradient alone.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 2))
        >>> is_element_wise(torch.optim.AdamW([weight])), is_element_wise(torch.optim.Adafactor([weight]))
        (True, False)
    """
    return type(optimizer) in _ELEMENT_WISE
