"""Measure in a few steps how much each technique of a recipe lengthens a training step."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shared_core.channel_graph.groups import outputs_of
from shared_core.engine.recipe import Recipe
from shared_core.errors import ConfigError, first_line
from shared_core.front_ends.bare_loop import training
from shared_core.hardware import now
from shared_core.modules.calls import call

ALL = "all together"
_USUAL_TOTAL = 1000  # steps of a run whose length is unknown: its masks change as rarely as in a real one
_WARM_UP = 2

Make = Callable[[], tuple[nn.Module, Any]]


def step_shares(make: Make, recipe: Recipe, *, steps: int = 10, total_steps: int | None = None) -> list[dict[str, Any]]:
    """Return by how much each technique lengthens a training step, measured in turn with plain steps.

    Each entry has ``technique``, and either ``plain`` and ``seconds`` (of a step, medians), ``share`` (the median of
    ``t / t_plain - 1``) and ``error`` (its standard error by the quartiles), or ``reason`` why nothing was measured.

    Techniques act from the first step on. Rarer work, such as new masks, does not show in a median. The optimizer is
    AdamW. The loss is the model's own, or the mean square of its outputs. On a CPU, times are CPU time of one thread.

    Args:
        make: Returns a new model with values, and its inputs.
        recipe: The techniques.
        steps: Measured steps per technique, at least 2.
        total_steps: Optimizer steps of the planned run.

    Example:
        >>> private = Recipe.from_dict({"dp": {"noise_multiplier": 1.0}})
        >>> [sorted(entry) for entry in step_shares(lambda: (nn.Linear(8, 4), torch.ones(2, 8)), private)]
        [['reason', 'technique']]
    """
    total = max(total_steps or _USUAL_TOTAL, steps + _WARM_UP + 1)
    active = {key: _from_start(config) for key, config in recipe.items()}
    variants = {key: {key: config} for key, config in active.items()}
    if len(active) > 1:
        variants[ALL] = active
    entries = []
    for name, configs in variants.items():
        try:
            entries.append({"technique": name, **_measured(make, Recipe(configs, allow_partial=True), steps, total)})
        except Exception as error:  # techniques may need the user's loader, trainer or processes
            entries.append({"technique": name, "reason": first_line(error)})
    return entries


def _from_start(config: Any) -> Any:
    if getattr(config, "begin", None) is None:
        return config
    try:
        return dataclasses.replace(config, begin=0)
    except ConfigError:  # where its other options leave no choice
        return config


def _measured(make: Make, recipe: Recipe, steps: int, total: int) -> dict[str, float]:
    threads = torch.get_num_threads()
    times: list[tuple[float, float]] = []
    # An error ends the blocks before techniques finish the model, which takes longer than the steps.
    with contextlib.suppress(InterruptedError), contextlib.ExitStack() as stack:
        plain_precision = torch.get_float32_matmul_precision()
        run = [_started(stack, make, one, total) for one in (Recipe({}), recipe)]
        if torch.get_float32_matmul_precision() != plain_precision:
            # the plain steps would change, too
            raise ConfigError("matmul precision holds for the whole process", "measure it with eff try")
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)
        for _ in range(_WARM_UP + steps):
            plain, ours = (step() for step in run)
            times.append((plain, ours))
        raise InterruptedError
    plain, ours = (statistics.median(taken) for taken in zip(*times[_WARM_UP:], strict=True))
    ratios = [second / first for first, second in times[_WARM_UP:]]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    # Of a median of normal values; the distance of their quartiles is 1.35 standard deviations.
    error = 1.25 * (high - low) / 1.35 / math.sqrt(len(ratios))
    return {"plain": plain, "seconds": ours, "share": middle - 1, "error": error}


def _started(stack: contextlib.ExitStack, make: Make, recipe: Recipe, total: int) -> Callable[[], float]:
    """Begin a run of a new model; return its step, which returns the seconds it took."""
    model, inputs = make()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    device = next(model.parameters()).device
    loop = stack.enter_context(training(recipe, model, optimizer, total_steps=total))

    def step() -> float:
        start = now(device)
        with loop.forward():
            outputs = dict(outputs_of(call(model, inputs)))
            floats = [out.float().square().mean() for out in outputs.values() if out.is_floating_point()]
            loss = outputs["loss"] if "loss" in outputs else torch.stack(floats).sum()
        loop.backward(loss)
        loop.complete()
        loop.step()
        loop.zero_grad()
        return now(device) - start

    return step
