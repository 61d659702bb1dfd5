"""One evaluated batch before the first step: what evaluation will not report is found before it is trained for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shared_core.distributed.collectives import from_main
from shared_core.distributed.sharded_tensors import reshard_
from shared_core.engine.saving.own_generators import OwnGenerators
from shared_core.engine.saving.state_file import rng_state, set_rng_state
from shared_core.errors import ConfigError, EffError, nearest
from shared_core.modules.calls import modes_restored


def check_reported(option: str, metric: str, reported: Collection[str]) -> None:
    """Refuse a metric that evaluation does not report.

    Args:
        option: Who asks for it, as ``"soup: metric"``.
        metric: Its name, as the trainer reports it.
        reported: Names of what evaluation reported.

    Raises:
        ConfigError: With the nearest name that was reported.

    Example:
        >>> check_reported("soup: metric", "eval_acc", ["eval_loss", "eval_accuracy"])
        Traceback (most recent call last):
        shared_core.errors.ConfigError: soup: metric must be one that evaluation reports, got 'eval_acc'; did you \
mean 'eval_accuracy'? One that has no value yet can be reported as NaN
    """
    if metric not in reported:
        hint = nearest(metric, reported) or "; this one reports none"
        raise ConfigError(
            f"{option} must be one that evaluation reports, got {metric!r}{hint}{'' if hint.endswith('?') else '.'} "
            "One that has no value yet can be reported as NaN"
        )


def reported_names(evaluate: Callable[[], Iterable[str]]) -> tuple[list[str] | None, str]:
    """Return the names of metrics that the main process found; None, and why, where the user's code failed.

    Args:
        evaluate: Evaluates one batch on every process; an `EffError` of it is raised, as it would be in training.
    """
    try:
        told = "\n".join(evaluate())
    except EffError:
        raise
    except Exception as error:  # the user's own evaluation, of fewer examples than it was written for
        first_line = (str(error).splitlines() or [""])[0]
        # A NUL marks a failure: names of metrics have none, and one text is all that is broadcast.
        told = f"\0{type(error).__name__}: {first_line[:200]}"
    # The main process's answer for all: others would go on and wait.
    told = from_main(told)
    return (None, told[1:]) if told.startswith("\0") else (told.split("\n") if told else [], "")


@contextlib.contextmanager
def without_trace(model: nn.Module, *owners: Any, data: Iterable[Any] = ()) -> Iterator[None]:
    """Put back what an evaluation changes: random generators, modes, buffers, and the owners' attributes.

    Args:
        model: What is evaluated.
        owners: Objects whose attributes are put back, and whose lists and dicts are replaced by copies until then.
        data: Where else generators may be: data sets, loaders, collators.

    Example:
        >>> model = nn.BatchNorm1d(2)
        >>> with without_trace(model):
        ...     _ = model(torch.ones(4, 2)), model.eval()
        >>> model.training, int(model.num_batches_tracked)
        (True, 0)
    """
    random, own = rng_state(), OwnGenerators(*data)
    drawn = own.states()
    # The dicts too: a forward may register or replace buffers.
    held = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    before = [(owner, dict(vars(owner))) for owner in owners]
    for owner, attributes in before:
        # Lists and dicts of a trainer are copied for the evaluation to write into.
        vars(owner).update({name: _copied(value) for name, value in attributes.items() if type(value) in (list, dict)})
    try:
        with modes_restored(model):
            yield
    finally:
        for owner, attributes in before:
            for name in vars(owner).keys() - attributes.keys():
                del vars(owner)[name]
            vars(owner).update(attributes)
        # FSDP2 gathers in the forward.
        reshard_(model)
        with torch.no_grad():
            for module, buffers in held:
                module._buffers.clear()
                module._buffers.update(buffers)
            for buffer, value in values:
                buffer.copy_(value)
        # Data sets' generators, then the global ones: making the former may draw.
        own.restore(drawn)
        set_rng_state(random)


def _copied(value: Any) -> Any:
    """Return a copy of a list or dict, and of those that lie in it."""
    if type(value) is dict:
        return {key: _copied(part) for key, part in value.items()}
    return [_copied(part) for part in value] if type(value) is list else value


def check_all(wanted: Mapping[str, str], reported: Collection[str]) -> None:
    """Check each metric of ``{option: metric}`` as `check_reported` does."""
    for option, metric in wanted.items():
        check_reported(option, metric, reported)
