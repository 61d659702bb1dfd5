"""Evaluate one batch before the first step, to find a metric that evaluation does not report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shared_core.distributed.collectives import from_main
from shared_core.distributed.sharded_tensors import reshard_
from shared_core.engine.saving.own_generators import OwnGenerators
from shared_core.engine.saving.state_file import rng_restored
from shared_core.errors import ConfigError, EffError, in_short, nearest
from shared_core.front_ends.session import Session
from shared_core.modules.calls import modes_restored


def check_metrics(
    session: Session, evaluate: Callable[[], Iterable[str]], also: Mapping[str, str] | None = None
) -> None:
    """Evaluate one batch at the start of a run to check that evaluation reports the metrics the recipe needs.

    If the user's evaluation fails on so little data, a note says so. Nothing is evaluated in a resumed run, or if no
    metric is needed.

    Args:
        session: The session, which has begun.
        evaluate: Evaluates one batch without side effects and returns the metric names, on every process.
        also: Metrics that the trainer itself needs, by option.

    Raises:
        ConfigError: If a metric is not reported.
    """
    wanted = {**session.recipe.needed_metrics(), **(also or {})}
    if not wanted or session.step:
        return
    names, reason = reported_names(evaluate)
    if names is not None:
        check_all(wanted, names)
        return
    session.note(
        f"could not check that evaluation reports {', '.join(sorted(set(wanted.values())))}: evaluating one batch "
        f"at the start failed ({reason})"
    )


def check_reported(option: str, metric: str, reported: Collection[str]) -> None:
    """Refuse a metric that evaluation does not report.

    Args:
        option: The option that names it, such as ``"soup: metric"``.
        metric: Name of the metric, as the trainer reports it.
        reported: Names of the reported metrics.

    Raises:
        ConfigError: Suggests the nearest reported name.

    Example:
        >>> check_reported("soup: metric", "eval_acc", ["eval_loss", "eval_accuracy"])
        Traceback (most recent call last):
        shared_core.errors.ConfigError: soup: metric must be an evaluation metric, got 'eval_acc'; did you \
mean 'eval_accuracy'? If a metric has no value yet, report NaN
    """
    if metric not in reported:
        hint = nearest(metric, reported) or "; evaluation reports no metrics"
        raise ConfigError(
            f"{option} must be an evaluation metric, got {metric!r}{hint}{'' if hint.endswith('?') else '.'} "
            "If a metric has no value yet, report NaN"
        )


def reported_names(evaluate: Callable[[], Iterable[str]]) -> tuple[list[str] | None, str]:
    """Return the metric names of the main process, or None and the reason if the user's code failed.

    Args:
        evaluate: Evaluates one batch on every process. Its `EffError`s are raised, as in training.
    """
    try:
        answer = "\n".join(evaluate())
    except EffError:
        raise
    except Exception as error:  # the user's evaluation may not expect so few examples
        # A NUL marks a failure, since one text is broadcast. Metric names contain none.
        answer = f"\0{in_short(error)}"
    # All processes use the main one's answer. Otherwise some would continue and wait for the rest.
    answer = from_main(answer)
    return (None, answer[1:]) if answer.startswith("\0") else (answer.split("\n") if answer else [], "")


@contextlib.contextmanager
def without_trace(model: nn.Module, *owners: Any, data: Iterable[Any] = ()) -> Iterator[None]:
    """Restore what an evaluation changes: random generators, modes, buffers, and the owners' attributes.

    Args:
        model: The evaluated model.
        owners: Objects whose attributes are restored. Their lists and dicts are copied meanwhile.
        data: Data sets, loaders and collators, which may hold generators.

    Example:
        >>> model = nn.BatchNorm1d(2)
        >>> with without_trace(model):
        ...     _ = model(torch.ones(4, 2)), model.eval()
        >>> model.training, int(model.num_batches_tracked)
        (True, 0)
    """
    own = OwnGenerators(*data)
    drawn = own.states()
    # Keep the dicts too: a forward may register or replace buffers.
    held = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    before = [(owner, dict(vars(owner))) for owner in owners]
    for owner, attributes in before:
        # The evaluation writes into copies of the trainer's lists and dicts.
        vars(owner).update({name: _copied(value) for name, value in attributes.items() if type(value) in (list, dict)})
    with rng_restored():  # last, because making data sets' generators may draw from the global ones
        try:
            with modes_restored(model):
                yield
        finally:
            for owner, attributes in before:
                for name in vars(owner).keys() - attributes.keys():
                    del vars(owner)[name]
                vars(owner).update(attributes)
            reshard_(model)  # FSDP2 gathers weights in the forward
            with torch.no_grad():
                for module, buffers in held:
                    module._buffers.clear()
                    module._buffers.update(buffers)
                for buffer, value in values:
                    buffer.copy_(value)
            own.restore(drawn)


def _copied(value: Any) -> Any:
    """Return a copy of a list or dict, including nested ones."""
    if type(value) is dict:
        return {key: _copied(part) for key, part in value.items()}
    return [_copied(part) for part in value] if type(value) is list else value


def check_all(wanted: Mapping[str, str], reported: Collection[str]) -> None:
    """Call `check_reported` for each entry of ``{option: metric}``."""
    for option, metric in wanted.items():
        check_reported(option, metric, reported)
