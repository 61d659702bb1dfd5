"""Accelerate loops: hooks on an Accelerator and its prepared model and optimizer drive a session."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, send_to_device
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from hf_eff._checkpoints import factors_renamed, weights_of
from hf_eff._run_environment import accelerator_environment, is_peft, refuse_unsharded
from hf_eff._saving import leave_section, without_scaler
from hf_eff._services import HubServices
from hf_eff._watched_steps import GradientScale
from shared_core.checkpoint_formats.plain import write_deployment
from shared_core.distributed.collectives import is_main
from shared_core.distributed.sharded_tensors import is_sharded
from shared_core.engine.recipe import Recipe
from shared_core.engine.saving.session_state import loading
from shared_core.engine.saving.state_file import load_state, save_state
from shared_core.errors import CompatibilityError, ConfigError, TrainingError
from shared_core.front_ends.flags import as_recipe
from shared_core.front_ends.loop_driver import LoopDriver, LoopPlan
from shared_core.front_ends.services import LoopServices
from shared_core.front_ends.wrapped_method import Wrapped


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    recipe: Recipe | Mapping[str, Any] | str | Path,
    total_steps: int | None = None,
    **options: Any,
) -> Any:
    """Switch on techniques and return what ``accelerator.prepare`` returns. Call it instead of that.

    Args:
        accelerator: The script's accelerator.
        objects: What the script prepares, in any order, including one model and the optimizer of its parameters.
        recipe: A recipe, a dict, or a path to a YAML or JSON file. An empty recipe changes nothing.
        total_steps: Optimizer steps of the whole run. Not needed if the prepared scheduler knows them.
        options: Options of ``accelerator.prepare``.

    Raises:
        ConfigError: If there is no such model, or the number of steps is unknown.
        CompatibilityError: If the techniques cannot run like this.
        MatchError: If a technique matches no module.

    Example:
        ``model, optimizer, loader = prepare(accelerator, model, optimizer, loader, recipe="r.yaml", total_steps=900)``
    """
    wanted = as_recipe(recipe)
    if not wanted:
        return accelerator.prepare(*objects, **options)
    AcceleratedLoop.leave_earlier(accelerator, objects)
    loop = AcceleratedLoop(accelerator, objects, wanted, total_steps)
    return loop.set_up(lambda: accelerator.prepare(*objects, **options))


def planned_steps(accelerator: Accelerator, objects: tuple[Any, ...]) -> int | None:
    """Return the number of optimizer steps of a scheduler among the objects, None if unknown."""
    for scheduler in objects:
        if not isinstance(scheduler, LRScheduler):
            continue
        # transformers' schedules are partial functions of the length; OneCycleLR stores it
        parts = [getattr(part, "keywords", {}) for part in getattr(scheduler, "lr_lambdas", ())]
        found = next((part["num_training_steps"] for part in parts if part.get("num_training_steps")), None)
        found = found or getattr(scheduler, "total_steps", None)
        if found:
            # accelerate steps the scheduler once per process
            together = accelerator.step_scheduler_with_optimizer and not accelerator.split_batches
            return math.ceil(int(found) / (accelerator.num_processes if together else 1))
    return None


class AcceleratedServices(HubServices, LoopServices):
    """Services for techniques in an Accelerate loop."""


class AcceleratedLoop(LoopDriver):
    """An Accelerate loop.

    Args:
        accelerator: The script's accelerator. Its methods are replaced on the instance.
        objects: What it prepares next.
        recipe: The techniques to switch on.
        total_steps: Optimizer steps of the run, None if a scheduler knows them.
    """

    name = "accelerate"
    owner = "accelerator"
    accumulates = "accumulate with Accelerator(gradient_accumulation_steps=N) and accelerator.accumulate(model)"
    gives_batches = "prepare the training DataLoader together with model and optimizer"
    trainer = "use hf_eff with transformers' Trainer"
    ends_by = " without accelerator.end_training(), unwrap_model or save_model after the last one"

    def __init__(
        self, accelerator: Accelerator, objects: tuple[Any, ...], recipe: Recipe, total_steps: int | None
    ) -> None:
        self.library = self.accelerator = accelerator
        found, optimizer = _trained(accelerator, objects)
        _check_kind(accelerator)
        loaders = [one for one in objects if isinstance(one, DataLoader)]
        steps = _checked_steps(planned_steps(accelerator, objects) if total_steps is None else total_steps)
        plan = LoopPlan(total_steps=steps, steps_per_epoch=_steps_per_epoch(accelerator, loaders))
        inner = accelerator.unwrap_model(found, keep_torch_compile=False)
        super().__init__(recipe, inner, optimizer, plan, AcceleratedServices(self))
        self.batches: Any = loaders[0] if loaders else None
        self.autocast = accelerator.autocast
        self.to_device = functools.partial(send_to_device, device=accelerator.device)
        self.start = Path(self.accelerator.project_dir or self.start)
        environment = accelerator_environment(accelerator, inner, type(optimizer))
        _check_places(accelerator, environment)
        self.attach({"own_loop", *environment})
        if self.draws_batches and self.batches is None:
            raise ConfigError(
                "accelerate",
                "prepare must also get the training DataLoader if a technique draws batches, got none",
                "prepare it together with model and optimizer",
            )
        self._scale = GradientScale(self)
        # before the optimizer is prepared
        if (scaler := self.make_scaler(accelerator.device.type)) is not None:
            native = self.accelerator.native_amp or accelerator.mixed_precision == "fp16"
            self.restore_at_end(accelerator, scaler=scaler, native_amp=native)
        self._baked: Any = None

    @property
    def accumulate(self) -> int:
        """Micro-batches per step, which the script may change."""
        return int(self.accelerator.gradient_accumulation_steps)

    @property
    def is_last_micro_batch(self) -> bool:
        """True if Accelerate steps now."""
        return bool(self.accelerator.sync_gradients)

    def unscale(self) -> None:
        """Divide the gradients by the scale, if there is one, and reset the last step's outcome."""
        self.stepper._is_overflow = False  # Accelerate resets it only if it has a scaler
        self._scale.unscale()
        self._scale.before_step()

    def applied(self) -> bool:
        """Return True if Accelerate's scaler applied the step."""
        is_hidden = self._scale.hid_a_skip()
        return not (is_hidden or self.stepper.step_was_skipped)

    def hold_schedule(self) -> None:
        """Make Accelerate's scheduler treat the step as one that overflowed."""
        self.stepper._is_overflow = True

    def end_reached(self) -> None:
        """Synchronize buffers here, since later a single process may ask for the finished model."""
        self.session.join_buffers()

    # --- what is hooked

    def watch(self, prepared: tuple[Any, ...]) -> tuple[Any, ...]:
        """Install hooks on what Accelerate prepared and on the accelerator."""
        prepared, accelerator = self._with_batches(prepared), self.accelerator
        self.wrapped = next(one for one in prepared if isinstance(one, nn.Module) and self._is_ours(one))
        self.stepper: Any = next(one for one in prepared if isinstance(one, AcceleratedOptimizer))
        self.stepper.eff_loop = self
        self.watch_forward(self.wrapped)
        self.wrap(
            accelerator,
            backward=self._backward,
            clip_grad_norm_=self._clip,
            clip_grad_value_=self._clip,
            skip_first_batches=self._skip_batches,
            save_state=self._save_state,
            load_state=self._load_state,
            log=self.on_log,
            prepare=self.on_prepare,
        )
        self.until_end(self._scale.watch().undo)
        self.until_end(accelerator.register_save_state_pre_hook(self._save_own).remove)
        self.until_end(accelerator.register_load_state_pre_hook(self._read_own).remove)
        around: dict[str, Callable[..., Any]] = {
            "unwrap_model": self._unwrap_model,
            "get_state_dict": self._get_state_dict,
            "save_model": self._save_model,
            "end_training": self._end_training,
        }
        self._after_training = [Wrapped(accelerator, name, outer) for name, outer in around.items()]
        Wrapped(self.stepper, "step", lambda *given: self.on_step(*given))  # looked up late: `eff try` wraps it
        Wrapped(self.stepper, "zero_grad", self.on_zero_grad)
        if hasattr(self.inner, "save_pretrained"):
            Wrapped(self.inner, "save_pretrained", self._save_pretrained, keep_signature=True)
        return prepared

    def _with_batches(self, prepared: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return what Accelerate prepared. If a technique draws batches, the first loader yields those."""
        if not self.draws_batches:
            return prepared
        accelerator = self.accelerator
        place: int
        stock: Any
        place, stock = next((n, one) for n, one in enumerate(prepared) if isinstance(one, DataLoader))
        if type(stock) is not DataLoaderShard:
            raise CompatibilityError(
                "accelerate",
                f"every process must read its own batches if a technique draws them, got {type(stock).__name__}",
                "leave out dispatch_batches and use_stateful_dataloader",
            )
        together = accelerator.num_processes if accelerator.split_batches else 1
        size = self.batches.batch_size
        made = self.draw(stock, size and size // together, device=stock.device)
        accelerator._dataloaders[accelerator._dataloaders.index(stock)] = self.batches = made
        return (*prepared[:place], made, *prepared[place + 1 :])

    def _is_ours(self, model: Any) -> bool:
        stock: Any = Accelerator.unwrap_model
        return isinstance(model, nn.Module) and stock(self.accelerator, model, keep_torch_compile=False) is self.inner

    def _backward(self, method: Callable[..., Any], loss: Tensor, **kwargs: Any) -> Any:
        if not self.wrapped.training:
            raise TrainingError(
                "accelerate",
                f"{type(self.inner).__name__} was in eval mode during the backward pass",
                "call model.train() before each epoch",
            )
        return self.on_backward(method, loss, **kwargs)

    def _clip(self, method: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else [*parameters]
        if not self.trains(parameters):
            return method(parameters, *args, **kwargs)
        self.complete()
        result = method(parameters, *args, **kwargs)
        for peer in self.session.peers:  # each by its own norm
            method(peer.parameters(), *args, **kwargs)
        return result

    def _skip_batches(self, method: Callable[..., Any], dataloader: Any, num_batches: int = 0) -> Any:
        """Make drawn batches start with the epoch's first, since a resumed script skips those already trained."""
        if self.draws_batches and dataloader is self.batches:
            dataloader.batch_sampler.replayed = num_batches
        return method(dataloader, num_batches)

    # --- checkpoints

    def _save_state(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.saving(), without_scaler(self.stepper):
            return method(*args, **kwargs)

    def _load_state(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.filing(), loading(self.session), without_scaler(self.stepper):
            result = method(*args, **kwargs)
        self.loaded()
        return result

    def _save_own(self, models: Any, weights: Any, folder: str) -> None:
        state = self.state()
        if is_main():
            save_state(folder, state)
        self.folder = self.folder or Path(folder).parent

    def _read_own(self, models: Any, folder: str) -> None:
        self.loaded_state = None
        self.read(load_state(Path(folder)), folder)

    # --- the model as the user gets it

    def _finish_if_done(self) -> None:
        """Finish if the planned steps were made: saves from now on are after training."""
        if self.is_done and not self.is_filing:
            self.finish()

    def _unwrap_model(self, method: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_ours(model):
            self._finish_if_done()
        return method(model, *args, **kwargs)

    def _get_state_dict(self, method: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_filing or not self._is_ours(model):
            return method(model, *args, **kwargs)
        self._finish_if_done()
        with self.saving(baked=True):
            state = method(model, *args, **kwargs)
            if state and self.is_live:
                prefix = "" if next(iter(self.inner.state_dict())) in state else "module."
                baked = self.session.files.bake({name.removeprefix(prefix): value for name, value in state.items()})
                state = {f"{prefix}{name}": value for name, value in baked.items()}
        self._baked = state
        return state

    def _save_model(
        self, method: Callable[..., Any], model: Any, save_directory: Any, *args: Any, **kwargs: Any
    ) -> Any:
        result = method(model, save_directory, *args, **kwargs)
        if self._is_ours(model):
            self._saved(save_directory)
        return result

    def _save_pretrained(self, method: Callable[..., Any], save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        self._finish_if_done()
        with self.saving(baked=True):
            if self.is_live and not is_peft(self.inner):
                given = kwargs.get("state_dict")
                if given is None or given is not self._baked:
                    kwargs["state_dict"] = self.session.files.bake(given or self.inner.state_dict())
            result = method(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", self.accelerator.is_main_process):
            self._saved(save_directory)
        return result

    def _saved(self, folder: Any) -> None:
        self.folder = Path(folder)
        if not is_main() or not self.session.has_begun:
            return
        with factors_renamed(self.folder, self.inner):
            write_deployment(self.folder, self.session.files.deployment())
            if self.session.is_finished:
                if not is_peft(self.inner):
                    self.session.files.verify(weights_of(self.folder, self.inner), str(folder))
                self.session.receipt().write(self.folder)
                leave_section(self.folder, self.session.receipt())

    def leave(self) -> None:
        """End the run, write its receipt, and restore the accelerator's own methods."""
        self._finish_if_done()
        for wrapped in self._after_training:
            wrapped.undo()
        if self.session.is_finished:
            self.leave_receipt(self.start, gather=True)
        super().leave()

    def _end_training(self, method: Callable[..., Any]) -> Any:
        self.finish()
        self.leave()
        return method()


def _checked_steps(total_steps: int | None) -> int:
    if total_steps is not None and total_steps >= 1:
        return total_steps
    got = "none, and no prepared scheduler knows it" if total_steps is None else str(total_steps)
    raise ConfigError(
        "accelerate",
        f"total_steps must be the number of optimizer steps of the run, got {got}",
        "pass total_steps= to efftrain.hf.prepare, --eff_total_steps to eff run, or prepare the scheduler of "
        "get_scheduler(num_training_steps=...) in the same call",
    )


def _trained(accelerator: Accelerator, objects: tuple[Any, ...]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the one model that is trained, and its optimizer."""
    optimizers = [one for one in objects if isinstance(one, torch.optim.Optimizer)]
    held = {id(weight) for one in optimizers for group in one.param_groups for weight in group["params"]}
    models = [one for one in objects if isinstance(one, nn.Module) and any(id(p) in held for p in one.parameters())]
    if len(models) != 1 or len(optimizers) != 1:
        raise ConfigError(
            "accelerate",
            f"prepare needs one model and its optimizer in the same call, got {len(models)} models with an optimizer "
            f"and {len(optimizers)} optimizers",
            "pass other models and optimizers to accelerator.prepare",
        )
    # A model of an earlier run stays marked, but Accelerate leaves it as it is on one process.
    inner: Any = accelerator.unwrap_model(models[0], keep_torch_compile=False)
    is_wrapped = inner is not models[0] or any(map(is_sharded, inner.parameters()))
    if any(getattr(one, "_is_accelerate_prepared", False) for one in (optimizers[0], *models[: int(is_wrapped)])):
        raise ConfigError(
            "accelerate",
            "model and optimizer must not be prepared yet, got prepared ones",
            "pass accelerator.unwrap_model(model) and a new optimizer of its parameters",
        )
    return models[0], optimizers[0]


def _check_kind(accelerator: Accelerator) -> None:
    """Refuse engines with their own optimizer, FP8 that replaces layers, and requested but missing sharding."""
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise CompatibilityError(
            "accelerate", f"techniques do not support a loop with {kind.value}", "use DDP or FSDP2"
        )
    if kind != DistributedType.FSDP:
        refuse_unsharded("accelerate", accelerator)
    if accelerator.mixed_precision == "fp8":
        raise CompatibilityError(
            "accelerate", "mixed_precision must not be fp8, which replaces layers", "use bf16 and the technique fp8"
        )


def _check_places(accelerator: Accelerator, environment: set[str]) -> None:
    """Refuse a split model if accelerate does not know which processes share batches."""
    plan: Any = getattr(accelerator, "parallelism_config", None)  # since accelerate 1.10
    if "tensor_parallel" in environment and (plan is None or plan.total_size != accelerator.num_processes):
        sizes = "none" if plan is None else f"tp_size {plan.tp_size} and dp_shard_size {plan.dp_shard_size}"
        raise CompatibilityError(
            "accelerate",
            f"parallelism_config must place all {accelerator.num_processes} processes of a split model, got "
            f"{sizes}: accelerate would not know which of them take the same batches",
            "pass Accelerator(parallelism_config=ParallelismConfig(tp_size=..., dp_shard_size=...)) with the sizes of "
            "the model's distributed_config (tp_size, fsdp_size)",
        )


def _steps_per_epoch(accelerator: Accelerator, loaders: list[Any]) -> int | None:
    if len(loaders) != 1:
        return None
    try:
        batches: int = len(loaders[0])
    except TypeError:  # a stream
        return None
    processes = 1 if accelerator.split_batches else accelerator.num_processes
    return math.ceil(math.ceil(batches / processes) / int(accelerator.gradient_accumulation_steps))
