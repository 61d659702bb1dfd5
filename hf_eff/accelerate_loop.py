"""Loops written with accelerate: hooks on one Accelerator, its prepared model and optimizer drive a session."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, send_to_device
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from hf_eff._adapters.teacher import load_teacher
from hf_eff._checkpoints import factors_renamed, weights_of
from hf_eff._gradient_scale import GradientScale
from hf_eff._model_card import leave_section
from hf_eff._run_environment import accelerator_environment, inner_optimizer, is_peft
from shared_core.checkpoint_formats.plain import write_deployment
from shared_core.distributed.sharded_tensors import reshard_
from shared_core.engine import rank_states
from shared_core.engine.own_generators import OwnGenerators
from shared_core.engine.recipe import Recipe
from shared_core.engine.session import Session
from shared_core.engine.session_state import fits, loading
from shared_core.engine.state_file import load_state, rng_state, save_state, set_rng_state
from shared_core.engine.technique import BareServices
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, EffError, TrainingError
from shared_core.front_ends.flags import as_recipe
from shared_core.front_ends.script_loop import ScriptLoop
from shared_core.front_ends.wrapped_method import Wrapped
from shared_core.printing import printable

_LOOPS: weakref.WeakKeyDictionary[Accelerator, AcceleratedLoop] = weakref.WeakKeyDictionary()


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    recipe: Recipe | Mapping[str, Any] | str | Path,
    total_steps: int | None = None,
    **options: Any,
) -> Any:
    """Return what ``accelerator.prepare`` returns, with techniques on the model: call it in its place.

    Args:
        accelerator: The script's.
        objects: What the script prepares, in any order, with one model and the optimizer of its parameters among it.
        recipe: A recipe, a dict of one, or a path to a YAML or JSON file of one; an empty one touches nothing.
        total_steps: Optimizer steps of the whole run; left out where the prepared scheduler tells them.
        options: Of ``accelerator.prepare``.

    Raises:
        ConfigError: If there is no such model, or nothing tells the number of steps.
        CompatibilityError: If the techniques cannot run like this.
        MatchError: If a technique matches no module.

    Example:
        ``model, optimizer, loader = prepare(accelerator, model, optimizer, loader, recipe="r.yaml", total_steps=900)``
    """
    wanted = as_recipe(recipe)
    if not wanted:
        return accelerator.prepare(*objects, **options)
    earlier = _LOOPS.get(accelerator)
    if earlier is not None and not earlier.session.is_finished:
        raise ConfigError(
            "accelerate",
            "an accelerator must train one model with techniques at a time, got a second one",
            "call accelerator.end_training() of the first, or make another Accelerator",
        )
    if earlier is not None:
        earlier.release()
    loop = AcceleratedLoop(accelerator, objects, wanted, total_steps)
    try:
        loop.check_positions()
        with loop.session.sharding():
            prepared = accelerator.prepare(*objects, **options)
        prepared = loop.with_batches(prepared)
        loop.watch(prepared)
    except BaseException:
        loop.session.detach()
        raise
    _LOOPS[accelerator] = loop
    return prepared


def loop_of(accelerator: Accelerator) -> AcceleratedLoop:
    """Return the loop that `prepare` made for an accelerator, its latest."""
    return _LOOPS[accelerator]


def planned_steps(accelerator: Accelerator, objects: tuple[Any, ...]) -> int | None:
    """Return the optimizer steps that a scheduler among the objects was made for, None if none tells."""
    for scheduler in objects:
        if not isinstance(scheduler, LRScheduler):
            continue
        # transformers' schedules are partial functions of their length; OneCycleLR has it itself
        parts = [getattr(part, "keywords", {}) for part in getattr(scheduler, "lr_lambdas", ())]
        found = next((part["num_training_steps"] for part in parts if part.get("num_training_steps")), None)
        found = found or getattr(scheduler, "total_steps", None)
        if found:
            # accelerate steps the scheduler once for each process
            together = accelerator.step_scheduler_with_optimizer and not accelerator.split_batches
            return math.ceil(int(found) / (accelerator.num_processes if together else 1))
    return None


class LoopServices(BareServices):
    """Services of a loop of accelerate for a technique.

    Args:
        loop: The loop.
    """

    def __init__(self, loop: AcceleratedLoop) -> None:
        self._loop = loop

    def load_teacher(self, name: str, student: nn.Module, *, trust_remote_code: bool = False) -> nn.Module:
        """Return the teacher in a folder or on the Hub."""
        return load_teacher(name, student, trust_remote_code=trust_remote_code)

    def calibrate(self, num_batches: int) -> None:
        """Run batches of the first loader without gradients; random numbers and its order stay as they were."""
        loader, model = self._loop.loader, self._loop.inner
        if loader is None:
            super().calibrate(num_batches)
        random, own, was_training = rng_state(), OwnGenerators(loader), model.training
        drawn = own.states()
        model.train()
        try:
            with torch.no_grad(), self._loop.accelerator.autocast():
                for batch in itertools.islice(cast(Any, loader), num_batches):
                    batch = send_to_device(batch, self._loop.accelerator.device)
                    model(**batch) if isinstance(batch, Mapping) else model(batch[0])
        finally:
            model.train(was_training)
            own.restore(drawn)
            set_rng_state(random)
            reshard_(model)

    def wrapped_model(self) -> nn.Module | None:
        """Return what accelerate prepared."""
        model: nn.Module | None = self._loop.model
        return model

    def _needs_trainer(self, what: str) -> CompatibilityError:
        return CompatibilityError("accelerate", f"{what} needs a trainer", "use hf_eff with transformers' Trainer")

    def say(self, text: str) -> None:
        """Show a line above the progress bar, on the main process."""
        if self._loop.accelerator.is_main_process:
            tqdm.write(printable(text))


class SessionOptimizer(AcceleratedOptimizer):
    """accelerate's optimizer, whose steps a loop looks at: its class is put in place of accelerate's."""

    eff_loop: AcceleratedLoop

    def step(self, closure: Any = None) -> None:
        """Step, with the techniques' hooks before and after it."""
        self.eff_loop.step(functools.partial(AcceleratedOptimizer.step, self), closure)

    def zero_grad(self, set_to_none: Any = None) -> None:
        """Drop gradients; those of a step that was prepared and not made count as skipped."""
        self.eff_loop.drop_gradients()
        AcceleratedOptimizer.zero_grad(self, set_to_none)


class AcceleratedLoop(ScriptLoop):
    """Drives one session through one script's loop.

    Args:
        accelerator: The script's; its methods are replaced on the instance.
        objects: What it prepares next.
        recipe: What to switch on.
        total_steps: Optimizer steps of the run, None if a scheduler tells them.
    """

    def __init__(
        self, accelerator: Accelerator, objects: tuple[Any, ...], recipe: Recipe, total_steps: int | None
    ) -> None:
        self.accelerator: Any = accelerator
        self.optimizer: Any = None
        self.model: Any = None
        found, torch_optimizer = _trained(objects)
        _check_kind(accelerator)
        total_steps = planned_steps(accelerator, objects) if total_steps is None else total_steps
        if total_steps is None or total_steps < 1:
            raise ConfigError(
                "accelerate",
                "total_steps must be the number of optimizer steps of the run, got "
                + (
                    "none, and no scheduler among the prepared objects tells it"
                    if total_steps is None
                    else str(total_steps)
                ),
                "pass total_steps= to hf_eff.prepare, --eff_total_steps to eff run, or prepare the scheduler of "
                "get_scheduler(num_training_steps=...) in the same call",
            )
        loaders = [one for one in objects if isinstance(one, DataLoader)]
        self.loader: Any = loaders[0] if loaders else None
        inner = accelerator.unwrap_model(found, keep_torch_compile=False)
        super().__init__(inner, total_steps, _steps_per_epoch(accelerator, loaders))
        self.session = Session(recipe, front_end="accelerate", services=LoopServices(self))
        environment = {"own_loop", *accelerator_environment(accelerator, self.inner, type(torch_optimizer))}
        _check_places(accelerator, environment)
        self.session.attach_with(self.inner, [torch_optimizer], environment)
        if self.session.draws_batches and self.loader is None:
            raise ConfigError(
                "accelerate",
                "prepare must get the training DataLoader too with a technique that draws batches, got none",
                "prepare it together with model and optimizer",
            )
        self._scale = GradientScale(self)
        self._own_scaler = accelerator.scaler, accelerator.native_amp
        self._place_scaler()
        self._is_discarded = self._is_checkpointing = False  # of the last step; of files
        self._loaded: Mapping[str, Any] = {}
        self._baked: Any = None
        self._folder: Path | None = None

    def _place_scaler(self) -> None:
        """Give accelerate the scaler of a technique that has one, before it prepares the optimizer."""
        if (scaler := self.session.make_scaler(self.accelerator.device.type)) is not None:
            self.accelerator.scaler = scaler
            self.accelerator.native_amp |= self.accelerator.mixed_precision == "fp16"

    def with_batches(self, prepared: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return what accelerate prepared, the first loader with batches of a technique that draws them.

        Raises:
            CompatibilityError: If accelerate would hand out one process's batches to all.
        """
        if not self.session.draws_batches:
            return prepared
        accelerator = self.accelerator
        place: int
        stock: Any
        place, stock = next((n, one) for n, one in enumerate(prepared) if isinstance(one, DataLoader))
        if type(stock) is not DataLoaderShard:
            raise CompatibilityError(
                "accelerate",
                f"every process must read its own batches where a technique draws them, got {type(stock).__name__}",
                "leave dispatch_batches and use_stateful_dataloader out",
            )
        together = accelerator.num_processes if accelerator.split_batches else 1
        size = self.loader.batch_size
        size, accumulate = size and size // together, accelerator.gradient_accumulation_steps
        made = self.session.draw(stock, accumulate, size, device=stock.device)
        accelerator._dataloaders[accelerator._dataloaders.index(stock)] = self.loader = made
        return (*prepared[:place], made, *prepared[place + 1 :])

    def watch(self, prepared: tuple[Any, ...]) -> None:
        """Put the hooks on what accelerate prepared, and on the accelerator."""
        accelerator = self.accelerator
        self.model = next(one for one in prepared if isinstance(one, nn.Module) and self._unwrapped(one) is self.inner)
        self.optimizer = next(one for one in prepared if isinstance(one, AcceleratedOptimizer))
        self.optimizer.__class__ = SessionOptimizer
        self.optimizer.eff_loop = self
        in_training: dict[str, Callable[..., Any]] = {
            "backward": self._backward,
            "clip_grad_norm_": self._clip,
            "clip_grad_value_": self._clip,
            "skip_first_batches": self._skip_batches,
            "save_state": self._save_state,
            "load_state": self._load_state,
            "log": self.log_figures,
        }
        around: dict[str, Callable[..., Any]] = {
            "unwrap_model": self._unwrap_model,
            "get_state_dict": self._get_state_dict,
            "save_model": self._save_model,
            "end_training": self._end_training,
        }
        self._wrapped = [Wrapped(accelerator, name, outer) for name, outer in around.items()]
        self._wrapped_in_training = [Wrapped(accelerator, name, outer) for name, outer in in_training.items()]
        self._wrapped_in_training += [self._scale.watch(), Wrapped(self.model, "train", self.set_mode)]
        self._in_training: list[Any] = [
            self.model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True),
            self.model.register_forward_hook(self.leave, always_call=True),
            accelerator.register_save_state_pre_hook(self._save_own),
            accelerator.register_load_state_pre_hook(self._read_own),
        ]
        if hasattr(self.inner, "save_pretrained"):
            Wrapped(self.inner, "save_pretrained", self._save_pretrained, keep_signature=True)
        atexit.register(self._at_exit)

    def _unwrapped(self, model: nn.Module) -> nn.Module:
        return cast(nn.Module, Accelerator.unwrap_model(self.accelerator, model, keep_torch_compile=False))

    def _is_ours(self, model: Any) -> bool:
        return isinstance(model, nn.Module) and self._unwrapped(model) is self.inner

    # --- a step

    def _begin(self) -> None:
        """Begin at the first micro-batch: whatever the script loads is loaded by then."""
        if self.session.has_begun:
            return
        self.session.begin(
            [inner_optimizer(self.optimizer)], total_steps=self.total_steps, steps_per_epoch=self.steps_per_epoch
        )
        self.restore_window()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        trains = module.training and torch.is_grad_enabled() and not self.session.is_finished
        if trains and not self.session.has_begun:
            known = {*module._forward_pre_hooks}
            self._begin()
            # torch has listed this call's hooks already: those that techniques begin with would miss the first batch
            for number, hook in [*module._forward_pre_hooks.items()]:
                if number not in known:
                    named = (kwargs,) if number in module._forward_pre_hooks_with_kwargs else ()
                    hook(module, args, *named)
        planned = self.accelerator.gradient_accumulation_steps
        if trains and self.session.draws_batches and self.micro_batches >= planned:
            raise TrainingError(
                "accelerate",
                f"a step must be of one drawn batch in {planned} parts, got a forward behind {self.micro_batches}",
                "accumulate with Accelerator(gradient_accumulation_steps=N) and accelerator.accumulate(model)",
            )
        self.surround(trains)

    def _backward(self, method: Callable[..., Any], loss: Tensor, **kwargs: Any) -> Any:
        session = self.session
        if not self.model.training:
            raise TrainingError(
                "accelerate",
                f"{type(self.inner).__name__} must be in training mode in backward, got eval",
                "call model.train() before each epoch",
            )
        self._begin()
        if self.is_complete:
            raise TrainingError(
                "accelerate",
                "gradients must be clipped once a step, after its last backward, got a backward behind the clipping",
                "accumulate with accelerator.accumulate(model), or clip where the optimizer steps",
            )
        self.micro_batches += 1
        self._check_accumulation()
        # The forward ran under autocast, and other models of a loss belong there too.
        with self.accelerator.autocast():
            loss = session.loss(loss)
        return method(loss, **kwargs)

    def _check_accumulation(self) -> None:
        planned = self.accelerator.gradient_accumulation_steps
        weighs = [key for key, technique in self.session.techniques.items() if technique.weighs_loss]
        if weighs and self.micro_batches > planned:
            raise TrainingError(
                "accelerate",
                f"a step must have at most {planned} backward with {', '.join(weighs)}, got {self.micro_batches}: "
                "what is added to the loss would not be divided by their number as the script divides its own",
                "accumulate with Accelerator(gradient_accumulation_steps=N) and accelerator.accumulate(model)",
            )

    def _complete(self) -> None:
        """Gradients are there, and not clipped: unscale them and show them to the techniques, once a step."""
        if self.is_live and self.accelerator.sync_gradients and not self.is_complete:
            self.is_complete = True
            self._scale.unscale()
            self.session.before_step()

    def _clip(self, method: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        self._complete()
        result = method(parameters, *args, **kwargs)
        for peer in self.peers:  # each by its own norm
            method(peer.parameters(), *args, **kwargs)
        return result

    def step(self, method: Callable[..., Any], closure: Any) -> None:
        """Step the optimizer where gradients are complete, and tell the session whether the step was applied."""
        if self._is_checkpointing or not self.accelerator.sync_gradients:
            method(closure)
            return
        if self.session.is_finished:
            raise TrainingError(
                "accelerate",
                f"training must end with its {self.total_steps} steps, got a step after the model was finished",
                "pass the true total_steps, and call unwrap_model, save_model and end_training behind the last step",
            )
        if closure is not None or not self.micro_batches:
            raise TrainingError(
                "accelerate",
                "optimizer.step must follow accelerator.backward(loss), got "
                + ("a closure" if closure is not None else "a step without one"),
                "call accelerator.backward in place of loss.backward",
            )
        self._complete()
        if self._is_discarded:
            self.optimizer._is_overflow = self._is_discarded = False  # accelerate sets it where it has a scaler alone
        self._scale.before_step()
        method()
        self.is_complete, self.micro_batches = False, 0
        is_hidden = self._scale.hid_a_skip()
        if is_hidden or self.optimizer.step_was_skipped:
            self.session.after_step(applied=False)
        elif not self.session.after_step():
            self.optimizer._is_overflow = self._is_discarded = True  # the scheduler must not move
        if self._is_done:
            self.session.join_buffers()  # here, as one process alone may ask for the finished model

    def drop_gradients(self) -> None:
        """The script drops gradients: a step that was prepared for and not made is a skipped one."""
        if self.accelerator.sync_gradients and not self._is_checkpointing:
            if self.is_complete and self.is_live:
                self._scale.hid_a_skip()
                self.session.after_step(applied=False)
            self.is_complete, self.micro_batches = False, 0

    # --- the state beside accelerate's own

    def _skip_batches(self, method: Callable[..., Any], dataloader: Any, num_batches: int = 0) -> Any:
        """Have drawn batches begin with those of the epoch that a resumed script skips."""
        if self.session.draws_batches and dataloader is self.loader:
            dataloader.batch_sampler.replayed = num_batches
        return method(dataloader, num_batches)

    def _save_state(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.session.is_attached:
            return method(*args, **kwargs)
        self._begin()
        with self._checkpointing(), self.training_weights(), self.session.swapped("checkpoint"):
            return method(*args, **kwargs)

    @contextlib.contextmanager
    def _checkpointing(self) -> Iterator[None]:
        """Surround accelerate's own files; with shards torch makes the optimizer's state by a step that is none."""
        self._is_checkpointing = True
        scaler, self.optimizer.scaler = self.optimizer.scaler, None  # which fails before the first loss
        try:
            yield
        finally:
            self._is_checkpointing, self.optimizer.scaler = False, scaler

    def _save_own(self, models: Any, weights: Any, folder: str) -> None:
        if not self.is_live:
            return
        state = rank_states.gathered(self.session, self.model, window=self.open_window())
        if self.accelerator.is_main_process:
            save_state(folder, state)
        self._folder = self._folder or Path(folder).parent

    def _read_own(self, models: Any, folder: str) -> None:
        self._loaded = {}
        if not self.session.is_attached:
            return
        self._loaded = load_state(Path(folder))
        if not fits(self.session, self._loaded):
            raise CheckpointError(
                "accelerate",
                f"{folder} must hold layers as the recipe makes them, got others, and the optimizer exists already",
                "start from the weights and the recipe that it was saved with",
            )
        if not self.session.has_begun:
            self.session.prepare_optimizers([inner_optimizer(self.optimizer)])

    def _load_state(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._checkpointing(), self.training_weights(), loading(self.session):
            result = method(*args, **kwargs)
        if self._loaded:
            own = rank_states.load(self.session, self._loaded)
            self.window = own.get("window", {})
            if self.session.has_begun:
                self.session.begin_again()
                self.restore_window()
        return result

    # --- the model as the user gets it

    def _finish_if_done(self) -> None:
        """Finish where the planned steps were made: what is saved now is the end of training."""
        if self.session.is_attached and self._is_done:
            self.finish()

    @property
    def _is_done(self) -> bool:
        return self.session.step + self.session.skipped >= self.total_steps

    def _unwrap_model(self, method: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_checkpointing and self._is_ours(model):
            self._finish_if_done()
        return method(model, *args, **kwargs)

    def _get_state_dict(self, method: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_checkpointing or not self._is_ours(model):
            return method(model, *args, **kwargs)
        self._finish_if_done()
        with self._saving_baked():
            state = method(model, *args, **kwargs)
            if state and self.is_live:
                prefix = "" if next(iter(self.inner.state_dict())) in state else "module."
                baked = self.session.bake({name.removeprefix(prefix): value for name, value in state.items()})
                state = {f"{prefix}{name}": value for name, value in baked.items()}
        self._baked = state
        return state

    @contextlib.contextmanager
    def _saving_baked(self) -> Iterator[None]:
        with self.training_weights(), self.session.swapped("export") if self.is_live else contextlib.nullcontext():
            yield

    def _save_model(
        self, method: Callable[..., Any], model: Any, save_directory: Any, *args: Any, **kwargs: Any
    ) -> Any:
        result = method(model, save_directory, *args, **kwargs)
        if self._is_ours(model):
            self._saved(save_directory)
        return result

    def _save_pretrained(self, method: Callable[..., Any], save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        self._finish_if_done()
        with self._saving_baked():
            if self.is_live and not is_peft(self.inner):
                given = kwargs.get("state_dict")
                if given is None or given is not self._baked:
                    kwargs["state_dict"] = self.session.bake(given or self.inner.state_dict())
            result = method(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", self.accelerator.is_main_process):
            self._saved(save_directory)
        return result

    def _saved(self, folder: Any) -> None:
        self._folder = Path(folder)
        if not self.accelerator.is_main_process or not self.session.has_begun:
            return
        with factors_renamed(self._folder, self.inner):
            write_deployment(self._folder, self.session.deployment())
            if self.session.is_finished:
                if not is_peft(self.inner):
                    self.session.verify(weights_of(self._folder, self.inner), str(folder))
                self.session.receipt().write(self._folder)
                leave_section(self._folder, self.session.receipt())

    # --- the end

    def finish(self) -> None:
        """Finish the model: it is the user's plain one from now on."""
        if self.session.is_finished:
            return
        if self._loaded:
            self._begin()  # a run that was resumed behind its last step
        self.session.finish()
        self.evaluates = False
        for wrapped in self._wrapped_in_training:
            wrapped.undo()
        for handle in self._in_training:
            handle.remove()
        self.accelerator.scaler, self.accelerator.native_amp = self._own_scaler

    def release(self) -> None:
        """Finish the model, leave the receipt, and give the accelerator its own methods back."""
        self.finish()
        for wrapped in self._wrapped:
            wrapped.undo()
        atexit.unregister(self._at_exit)
        self._leave_receipt(gather=True)

    def _end_training(self, method: Callable[..., Any]) -> Any:
        self.release()
        return method()

    def _leave_receipt(self, *, gather: bool) -> None:
        try:
            if self.session.is_finished:
                # Every process: sharded weights are gathered.
                self.session.verify(None, "the trained model", gather=gather)
        finally:
            if self.accelerator.is_main_process:
                receipt = self.session.receipt()
                receipt.write(self._folder or self.accelerator.project_dir or Path.cwd())
                self.session._services.say(receipt.told())

    def _at_exit(self) -> None:
        if not self.session.has_begun:
            self.session.finish()  # says that training never began
            return
        if not self.session.is_finished:
            self.session.note(
                f"THE MODEL WAS NOT FINISHED: the script ended after {self.session.step} of {self.total_steps} steps "
                "without accelerator.end_training(), unwrap_model or save_model behind the last one; a state_dict that "
                "it saved itself holds the weights of training"
            )
        with contextlib.suppress(EffError):  # told, and in the receipt
            self._leave_receipt(gather=False)


def _trained(objects: tuple[Any, ...]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the one model that is trained, and its optimizer."""
    optimizers = [one for one in objects if isinstance(one, torch.optim.Optimizer)]
    held = {id(weight) for one in optimizers for group in one.param_groups for weight in group["params"]}
    models = [one for one in objects if isinstance(one, nn.Module) and any(id(p) in held for p in one.parameters())]
    if len(models) != 1 or len(optimizers) != 1:
        raise ConfigError(
            "accelerate",
            f"prepare must get one model and the optimizer of its parameters in one call, got {len(models)} such "
            f"models and {len(optimizers)} optimizers",
            "prepare them together, and others in a call of accelerator.prepare",
        )
    if any(getattr(one, "_is_accelerate_prepared", False) for one in (models[0], optimizers[0])):
        raise ConfigError(
            "accelerate",
            "model and optimizer must not be prepared yet, got prepared ones",
            "pass them to hf_eff.prepare as they were made",
        )
    return models[0], optimizers[0]


def _check_kind(accelerator: Accelerator) -> None:
    """Refuse what has an optimizer of its own, changes layers by itself, or would not shard as it was asked to."""
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise CompatibilityError("accelerate", f"techniques do not run in a loop with {kind.value}", "use DDP or FSDP2")
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if asked and kind != DistributedType.FSDP:
        raise CompatibilityError(
            "accelerate",
            f"FSDP was asked for, but accelerate does not shard here (distributed type {kind.value})",
            "start several processes on devices that it shards on, or drop ACCELERATE_USE_FSDP",
        )
    if accelerator.mixed_precision == "fp8":
        raise CompatibilityError(
            "accelerate", "mixed_precision must not be fp8, which replaces layers", "use bf16 and the technique fp8"
        )


def _check_places(accelerator: Accelerator, environment: set[str]) -> None:
    """Refuse a model in parts whose processes accelerate would give other batches than their places ask for."""
    plan: Any = getattr(accelerator, "parallelism_config", None)  # since accelerate 1.10
    if "tensor_parallel" in environment and (plan is None or plan.total_size != accelerator.num_processes):
        sizes = "none" if plan is None else f"tp_size {plan.tp_size} and dp_shard_size {plan.dp_shard_size}"
        raise CompatibilityError(
            "accelerate",
            f"parallelism_config must place all {accelerator.num_processes} processes of a model that is cut, got "
            f"{sizes}: nothing would tell accelerate which of them take the same batches",
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
