"""Inspect a trainer before anything is attached: precision, processes, output folder, callbacks."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.optimizer import AcceleratedOptimizer
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils.import_utils import is_peft_available, is_torch_xla_available

from shared_core.engine.checks.model_guards import wrapped_by_user
from shared_core.engine.recipe import Recipe
from shared_core.errors import CheckpointError, CompatibilityError, TrainingError

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback, TrainingArguments


def forget_optimizer(trainer: Trainer) -> None:
    """Drop the trainer's optimizer if the model's parameters have changed since it was made."""
    if trainer.optimizer is None:
        return
    # An optimizer made for another model of this run (model_init, added techniques): its groups lack parameters.
    held = {id(weight) for group in trainer.optimizer.param_groups for weight in group["params"]}
    if any(weight.requires_grad and id(weight) not in held for weight in cast(Any, trainer.model).parameters()):
        trainer.optimizer = None


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer inside accelerate's wrappers."""
    # accelerate may wrap more than once.
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return cast(torch.optim.Optimizer, optimizer)


def is_peft(model: Any) -> bool:
    """Return True if the model has PEFT adapters, whose checkpoints hold only the adapters."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def run_environment(trainer: Trainer) -> set[str]:
    """Return the keys of `shared_core.config.environments.RUN_ENVIRONMENTS` that hold for this trainer."""
    args = trainer.args
    optimizer_class = (trainer.optimizer_cls_and_kwargs or (None,))[0]
    if trainer.optimizer is not None:
        optimizer_class = type(inner_optimizer(trainer.optimizer))
    holds = {
        "deepspeed": trainer.is_deepspeed_enabled,
        "zero3": trainer.is_deepspeed_enabled and is_deepspeed_zero3_enabled(),  # type: ignore[no-untyped-call]
        "data_parallel": args.n_gpu > 1,
        "unequal_ranks": args.world_size > 1 and not args.average_tokens_across_devices,
        "vllm_rollouts": bool(getattr(args, "use_vllm", False)),
        "trainer_checkpointing": bool(args.gradient_checkpointing or getattr(args, "activation_checkpointing", False)),
    }
    found = {key for key, value in holds.items() if value}
    return found | accelerator_environment(trainer.accelerator, trainer.model, optimizer_class)


def accelerator_environment(accelerator: Any, model: Any, optimizer_class: Any) -> set[str]:
    """Return the keys that hold for an accelerator, its model and its optimizer."""
    state = accelerator.state
    plugin = getattr(state, "fsdp_plugin", None)
    holds = {
        "bf16": accelerator.mixed_precision == "bf16",
        "fp16": accelerator.mixed_precision == "fp16",
        "deepspeed": (engine := getattr(state, "deepspeed_plugin", None)) is not None,
        "deepspeed_fp16": engine is not None and accelerator.mixed_precision == "fp16",
        "lbfgs": isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.LBFGS),
        "peft": is_peft(model) or bool(getattr(model, "_hf_peft_config_loaded", False)),
        "tpu": is_torch_xla_available(),
        "tensor_parallel": bool(getattr(model, "is_distributed_loading_by_transformers", False)),
    }
    if plugin is not None:
        holds["fsdp2" if getattr(plugin, "fsdp_version", 1) == 2 else "fsdp1"] = True
        holds["efficient_loading"] = bool(getattr(plugin, "cpu_ram_efficient_loading", False))
    found = {key for key, value in holds.items() if value}
    if model is None or plugin is not None:
        return found
    # transformers split the model over devices on loading
    return found | wrapped_by_user(model) - ({"sharded_by_user"} if holds["tensor_parallel"] else set())


def check_sharding(trainer: Trainer) -> None:
    """Raise an error if FSDP or DeepSpeed was requested but accelerate would silently train in plain DDP."""
    if getattr(trainer.args, "deepspeed_plugin", None) is not None and not trainer.is_deepspeed_enabled:
        raise CompatibilityError(
            "hf",
            "DeepSpeed was requested, but accelerate does not use it here (distributed type "
            f"{trainer.accelerator.distributed_type.value}): every process would hold the whole model, as in DDP",
            "leave out use_cpu, or drop deepspeed and ACCELERATE_USE_DEEPSPEED",
        )
    if not trainer.is_fsdp_enabled and not trainer.is_fsdp_xla_enabled:
        refuse_unsharded("hf", trainer.accelerator, bool(trainer.args.fsdp))


def refuse_unsharded(where: str, accelerator: Any, by_flags: bool = False) -> None:
    """Raise an error if FSDP was requested, by flags or accelerate's environment, but accelerate does not shard."""
    if by_flags or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise CompatibilityError(
            where,
            "FSDP was requested, but accelerate does not shard here (distributed type "
            f"{accelerator.distributed_type.value}): every process would hold the whole model, as in DDP",
            "start several processes on devices that support FSDP, or drop fsdp and ACCELERATE_USE_FSDP",
        )


def check_output_folder(args: TrainingArguments) -> None:
    """Raise an error at start if the output folder is not writable."""
    if not args.should_save:
        return
    try:
        # Write a real file: permissions do not show a full or read-only file system.
        os.makedirs(str(args.output_dir), exist_ok=True)
        with tempfile.TemporaryFile(dir=args.output_dir):
            pass
    except OSError as error:
        raise CheckpointError(
            "hf", f"output_dir must be a writable folder, got {args.output_dir!r}: {error}"
        ) from error


class GivenCallbacks:
    """Checks that the callbacks given to a trainer stay while it trains."""

    def __init__(self, trainer: Trainer, driver: TrainerCallback) -> None:
        self._trainer, self._driver = trainer, driver
        self.callbacks: list[Any] = []

    def gone(self) -> list[Any]:
        """Return the callbacks that the user removed, including the driver."""
        # By identity: users' callbacks may define __eq__.
        there = {id(callback) for callback in self._trainer.callback_handler.callbacks}
        return [callback for callback in (self._driver, *self.callbacks) if id(callback) not in there]

    def others(self) -> list[str]:
        """Return the classes of callbacks from other sources, which might change weights."""
        kinds = [type(callback) for callback in self._trainer.callback_handler.callbacks]
        own = [type(self._driver), *map(type, self.callbacks)]
        return [kind.__name__ for kind in kinds if kind not in own and not kind.__module__.startswith("transformers.")]

    def check(self, step: int) -> None:
        """Raise an error if a callback was removed during training."""
        if gone := self.gone():
            raise TrainingError(
                "hf",
                f"{type(gone[0]).__name__} must stay until training ends, but was removed by step {step}",
                "remove it before or after training",
            )

    def left_of(self, recipe: Recipe) -> Recipe:
        """Return the recipe without the techniques of removed callbacks."""
        gone = self.gone()
        out = {key for callback in gone if callback is not self._driver for key in callback.recipe}
        # The driver itself was removed: nothing drives the session.
        left = {key: config for key, config in recipe.items() if key not in out and self._driver not in gone}
        for callback in gone if left else self.callbacks:
            callback.session = None
        self.callbacks = [callback for callback in self.callbacks if callback not in gone]
        return Recipe(left, allow_partial=recipe.allow_partial)
