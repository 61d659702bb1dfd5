"""What holds in this run of a Lightning Trainer: facts that decide a refusal, and the length of the run."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from lightning_eff._averages import averaging
from lightning_eff._namespaces import callback_kinds
from shared_core.positions import StepsPerEpoch, steps_until
from shared_core.wrappers import wrapped_by_user

_STRATEGIES = {
    "DeepSpeedStrategy": "deepspeed",
    "FSDPStrategy": "fsdp1",
    "ModelParallelStrategy": "fsdp2",
    "XLAStrategy": "tpu",
    "SingleDeviceXLAStrategy": "tpu",
    "XLAFSDPStrategy": "tpu",
}


def surroundings(trainer: Any, model: Any) -> set[str]:
    """Return the keys of `shared_core.compatibility.SURROUNDINGS` that hold; optimizers count once they exist."""
    kinds = {kind.__name__ for kind in type(trainer.strategy).__mro__}
    found = {key for name, key in _STRATEGIES.items() if name in kinds}
    if "fsdp2" in found and trainer.strategy.device_mesh["tensor_parallel"].size() > 1:
        found.add("tensor_parallel")
    if "deepspeed" in found and trainer.strategy.zero_stage_3:
        found.add("zero3")
    if "fsdp2" not in found:
        found |= wrapped_by_user(model)
    precision = str(trainer.precision_plugin.precision)
    found |= {kind for kind, start in (("bf16", "bf16"), ("fp16", "16")) if precision.startswith(start)}
    if averaging(trainer):
        found.add("averaging_callback")
    if "ModelPruning" in callback_kinds(trainer):
        found.add("pruning_callback")
    peft = sys.modules.get("peft")  # without it there is no such model
    if peft is not None and any(isinstance(module, peft.PeftModel) for module in model.modules()):
        found.add("peft")
    if not model.automatic_optimization:
        found.add("manual_optimization")
    optimizers = trainer.optimizers
    if len(optimizers) > 1:
        found.add("several_optimizers")
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        found.add("lbfgs")
    return found


def total_steps(trainer: Any, model: Any) -> int | None:
    """Return how many optimizer steps the run has, None if that is unknown.

    With manual optimisation every optimizer is taken to step once a batch, unless ``max_steps`` ends the run before.
    """
    limit = trainer.max_steps if trainer.max_steps >= 0 else None
    steps = steps_per_epoch(trainer, model)
    if steps is None or trainer.max_epochs in (None, -1):
        return limit
    by_epochs = int(steps_until(max(trainer.max_epochs, 1), steps))
    return by_epochs if limit is None else min(by_epochs, limit)


def steps_per_epoch(trainer: Any, model: Any) -> StepsPerEpoch | None:
    """Return how many optimizer steps an epoch has, None if unknown, of each epoch where accumulation changes."""
    batches = float(trainer.num_training_batches)
    if not math.isfinite(batches):
        return None
    if not model.automatic_optimization:
        return batches * max(len(trainer.optimizers), 1)
    for callback in trainer.callbacks:
        if hasattr(callback, "get_accumulate_grad_batches"):
            epochs = range(max(trainer.max_epochs or 1, *callback.scheduling, 1) + 1)
            return tuple(math.ceil(batches / callback.get_accumulate_grad_batches(epoch)) for epoch in epochs)
    return float(math.ceil(batches / trainer.accumulate_grad_batches))


def share_done(trainer: Any, model: Any, batch_index: int) -> float | None:
    """Return which share of the run's epochs is over after a batch, weighted by planned steps; None without an end."""
    steps = steps_per_epoch(trainer, model)
    if steps is None or trainer.max_epochs in (None, -1) or not trainer.num_training_batches:
        return None
    epochs = trainer.current_epoch + (batch_index + 1) / trainer.num_training_batches
    return steps_until(epochs, steps) / steps_until(max(trainer.max_epochs, 1), steps)


def clips_by_norm(trainer: Any, model: Any) -> bool:
    """Return whether gradients may be clipped by norm: certain not to be only if Lightning would do it and does not."""
    own = type(model).configure_gradient_clipping is not _stock(model).configure_gradient_clipping
    if own or not model.automatic_optimization:
        return True
    return bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value"


def _stock(model: Any) -> Any:
    return next(kind for kind in type(model).__mro__ if kind.__name__ == "LightningModule")
