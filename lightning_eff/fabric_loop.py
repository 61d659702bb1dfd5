"""Fabric loops: hooks on a Fabric and what it sets up drive a session."""

from __future__ import annotations

import atexit
import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff._checkpoints import load_checked, wrap_loading
from shared_core.checkpoint_formats.plain import LIGHTNING_META
from shared_core.config.training_time import StepsPerEpoch
from shared_core.distributed.collectives import is_main
from shared_core.engine.checks.model_guards import wrapped_by_user
from shared_core.engine.recipe import Recipe
from shared_core.engine.saving.session_state import loading
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError
from shared_core.front_ends.flags import as_recipe
from shared_core.front_ends.loop_driver import LoopDriver, LoopPlan
from shared_core.front_ends.wrapped_method import Wrapped

_KEY = "eff"
_STRATEGIES = {"DDPStrategy", "SingleDeviceStrategy", "ModelParallelStrategy"}
_PRECISIONS = {"Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision"}


def setup(
    fabric: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    recipe: Recipe | Mapping[str, Any] | str | Path,
    total_steps: int,
    steps_per_epoch: StepsPerEpoch | None = None,
    accumulate: int = 1,
    calibration: Iterable[Any] | None = None,
    **options: Any,
) -> Any:
    """Switch on techniques and return what ``fabric.setup(model, optimizer)`` returns. Call it instead of that.

    After the last planned step the model is final and plain. ``fabric.save`` of a state with the model
    saves the techniques' state under ``"eff"`` in the same file, and ``fabric.load`` restores it.

    Args:
        fabric: The script's Fabric, launched.
        model: The model, not set up yet.
        optimizer: The optimizer of its parameters. If the strategy shards them, it gets the sharded parts.
        recipe: A recipe, a dict, or a path to a YAML or JSON file. An empty recipe changes nothing.
        total_steps: Optimizer steps of the whole run.
        steps_per_epoch: Optimizer steps per epoch, for positions such as ``2ep``.
        accumulate: Micro-batches per step, at least 1. The loop divides the loss by it.
        calibration: Batches for techniques that calibrate: mappings are passed as keywords, of sequences the first
            element.
        options: Options of ``fabric.setup``.

    Raises:
        ConfigError: If an argument breaks its rule.
        CompatibilityError: If the techniques cannot run like this.
        MatchError: If a technique matches no module.

    Example:
        ``model, optimizer = setup(fabric, model, optimizer, recipe={"prune": {"sparsity": 0.8}}, total_steps=900)``
    """
    wanted = as_recipe(recipe)
    if not wanted:
        return fabric.setup(model, optimizer, **options)
    for name, value in (("total_steps", total_steps), ("accumulate", accumulate)):
        if not isinstance(value, int) or value < 1:
            raise ConfigError("fabric", f"{name} must be a whole number of at least 1, got {value!r}")
    plan = LoopPlan(total_steps=total_steps, steps_per_epoch=steps_per_epoch, accumulate=accumulate)
    FabricLoop.leave_earlier(fabric, [model])
    loop = FabricLoop(fabric, model, optimizer, wanted, plan, calibration)
    return loop.set_up(lambda: fabric.setup(model, optimizer, **options))


class _SavedState:
    """The session as Fabric saves and loads it: an object with a state dict."""

    def __init__(self, loop: FabricLoop) -> None:
        self.state_dict = loop.state
        self.load_state_dict = functools.partial(loop.read, source="checkpoint")


class FabricLoop(LoopDriver):
    """A Fabric loop."""

    name = owner = "fabric"
    accumulates = "pass accumulate= to setup"
    gives_batches = "pass calibration= to setup"
    trainer = "use lightning_eff with Lightning's Trainer"
    divides_loss = True

    def __init__(
        self, fabric: Any, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe, plan: LoopPlan,
        calibration: Iterable[Any] | None,
    ) -> None:  # fmt: skip
        inner = getattr(model, "_orig_mod", model)  # inside torch.compile's wrapper
        super().__init__(recipe, inner, optimizer, plan)
        self.library, self.batches = fabric, calibration
        self.fabric, self._precision = fabric, fabric.strategy.precision
        self.autocast, self.to_device = fabric.autocast, fabric.to_device
        environment = _environment(fabric, inner)
        self._shards = "fsdp2" in environment
        self._precision.convert_module(inner)  # now: techniques must see the dtype that is trained
        self._scaler: Any = self.make_scaler(fabric.device.type)
        self.attach(environment)
        self._stock_unscale = self._precision.unscale_gradients
        self._drawn: Any = None  # batches of a technique that draws them

    def unscale(self) -> None:
        """Divide the gradients by the loss scale, if any."""
        (self._stock_unscale if self._scaler is None else self._scaler.unscale_)(self.optimizer)

    def end_reached(self) -> None:
        """Finish the model, and write the receipt to the folder of saved files or logs."""
        self.finish()
        logged = next((getattr(logger, "log_dir", None) for logger in self.fabric.loggers), None)
        self.folder = self.folder or (Path(logged) if logged else None)
        self.leave_receipt(None, gather=True)  # without a folder: beside what is saved next

    # --- what is hooked

    def watch(self, prepared: Any) -> Any:
        """Install hooks on what Fabric set up, and on Fabric."""
        self.model, wrapper = prepared[:2]
        self.wrapped, self.wrappers = next(self.model.children()), [wrapper]
        self.watch_forward(self.model)
        self.watch_steps()
        self.wrap(self.fabric, setup=self.on_prepare, log_dict=self.on_log)
        self.wrap(self.fabric, backward=self.on_backward, clip_gradients=self._clip)
        self.wrap(self._precision, unscale_gradients=self._unscale)
        self.wrap(wrapper, zero_grad=self.on_zero_grad)
        Wrapped(wrapper, "step", self.on_step)  # also after the end, when it raises
        if self.draws_batches:
            self.wrap(self.fabric, setup_dataloaders=self._set_up_loaders)
        if self._scaler is not None:
            self.wrap(self._precision, backward=self._scaled, optimizer_step=self._step_scaled)
            if getattr(self._precision, "scaler", None) is not None:
                self.restore_at_end(self._precision, scaler=None)
        Wrapped(self.fabric, "save", self._save)
        Wrapped(self.fabric, "load", self._load)
        return prepared

    def _set_up_loaders(self, method: Callable[..., Any], *loaders: Any, **options: Any) -> Any:
        """Set up loaders. If a technique draws batches, the first loader yields those."""
        if self._drawn is not None:
            return method(*loaders, **options)
        made = self.draw(loaders[0])
        self._drawn = made.batch_sampler
        self._drawn.begin_epoch_again()
        drawn = method(made, **{**options, "use_distributed_sampler": False})
        return [drawn, *(method(one, **options) for one in loaders[1:])] if len(loaders) > 1 else drawn

    def _scaled(self, method: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        return method(self._scaler.scale(loss), *args, **kwargs)

    def _unscale(self, method: Callable[..., Any], optimizer: Any) -> None:
        self.complete() if optimizer is self.optimizer else method(optimizer)  # a GradScaler rejects a second call

    def _step_scaled(self, method: Callable[..., Any], optimizer: Any, **kwargs: Any) -> Any:
        result = self._scaler.step(optimizer, **kwargs)
        self._scaler.update()
        return result

    def _clip(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        names = ("module", "optimizer", "clip_val", "max_norm", "norm_type", "error_if_nonfinite")
        # an overflow is not an error with a scaler, which skips the step
        usual = {"norm_type": 2.0, "error_if_nonfinite": self._scaler is None}
        asked = {**usual, **dict(zip(names, args, strict=False)), **kwargs}
        if not self.trains(asked["module"].parameters()):
            return method(*args, **kwargs)
        self.complete()
        if not self.session.peers:
            return method(**asked)
        # Each by its own norm: Fabric clips all parameters of the optimizer together.
        norms = []
        for one in (self.inner, *self.session.peers):
            if asked.get("max_norm") is None:
                nn.utils.clip_grad_value_(one.parameters(), asked["clip_val"])
            else:
                norm = asked["norm_type"], asked["error_if_nonfinite"]
                norms.append(nn.utils.clip_grad_norm_(one.parameters(), asked["max_norm"], *norm))
        return norms[0] if norms else None

    # --- checkpoints

    def _of_ours(self, state: Any) -> str | None:
        """Return the key under which a state holds this loop's model, None if it does not."""
        items = state.items() if isinstance(state, Mapping) else ()
        return next((key for key, value in items if getattr(value, "_orig_mod", value) is self.model), None)

    def _save(self, method: Callable[..., Any], path: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        key = self._of_ours(state)
        if key is None:
            return method(path, state, *args, **kwargs)
        if self.session.is_finished:
            result = method(path, state, *args, **kwargs)
            self._check_saved(Path(path), key)
            return result
        self.folder = self.folder or Path(path).absolute().parent
        if _KEY in state:
            raise ConfigError(
                "fabric", f"state must not have a key {_KEY!r}, which is reserved for techniques", "rename it"
            )
        with self.saving():
            return method(path, {_KEY: _SavedState(self), **state}, *args, **kwargs)

    def _check_saved(self, path: Path, key: str) -> None:
        """Check the saved file against the receipt, and write the receipt beside it."""
        self.folder = path.absolute().parent
        atexit.unregister(self.at_exit)
        if not is_main():
            return
        try:
            weights = torch.load(path, "cpu", weights_only=True, mmap=True)[key]
        except Exception:  # a folder of shards, or objects of the script's own: check the model's weights instead
            weights = None
        try:
            if weights is not None or not self._shards:  # one process cannot check parts of a model
                self.session.files.verify(weights, str(path))
        finally:
            self.session.receipt().write(self.folder)

    def _load(self, method: Callable[..., Any], path: Any, state: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self._of_ours(state) is None or self.session.is_finished:
            return method(path, state, *args, **kwargs)
        self.loaded_state = None
        load = self._load_sharded if self._shards else self._load_whole
        result = load(method, path, state, *args, **kwargs)
        if self.loaded_state is None:
            self._refuse_foreign(path, None)
        self.loaded()
        if self._drawn is not None:
            self._drawn.begin_epoch_again()  # a resumed loop skips batches that it has trained on
        return result

    def _load_whole(self, method: Callable[..., Any], path: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        asked = {_KEY: _SavedState(self), **state}
        with self.filing(), loading(self.session):
            try:
                result = method(path, asked, *args, **kwargs)
            except KeyError as error:
                if f"'{_KEY}'" not in str(error):
                    raise
                self._refuse_foreign(path, error)
        state.update({name: asked[name] for name in state})
        return result

    def _load_sharded(self, method: Callable[..., Any], path: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        """Load with a sharding strategy, which reads the technique state last and otherwise only parts."""
        path = Path(self.fabric.broadcast(str(path)))
        own = path / LIGHTNING_META if path.is_dir() else path
        saved = load_checked(torch.load, own, "cpu", mmap=True, weights_only=kwargs.get("weights_only"))
        if not isinstance(saved, Mapping) or _KEY not in saved:
            self._refuse_foreign(path, None)
        self.read(saved[_KEY], "checkpoint")
        with self.filing(), contextlib.ExitStack() as within:
            for wrapped in wrap_loading(self.fabric.strategy, self.session):
                within.callback(wrapped.undo)
            result = method(path, state, *args, **kwargs)
        result.pop(_KEY, None)
        return result

    def _refuse_foreign(self, path: Any, error: BaseException | None) -> None:
        raise CheckpointError(
            "fabric",
            f"{path} must hold the techniques' state under {_KEY!r}, got a file without it",
            "load its weights before setup, to start from them",
        ) from error


def _environment(fabric: Any, model: nn.Module) -> set[str]:
    """Return the run environment of a Fabric."""
    strategy, precision = type(fabric.strategy).__name__, type(fabric.strategy.precision).__name__
    if strategy not in _STRATEGIES:
        raise CompatibilityError(
            "fabric",
            f"strategy must be one of {', '.join(sorted(_STRATEGIES))}, got {strategy}",
            "use ddp, or ModelParallelStrategy, whose parallelize_fn calls fully_shard",
        )
    if precision not in _PRECISIONS:
        raise CompatibilityError(
            "fabric",
            f"precision must not replace layers, got {precision}",
            "use bf16-mixed, and a technique such as fp8 for fewer bits",
        )
    kind = {"16-mixed": {"fp16"}, "bf16-mixed": {"bf16"}}.get(str(fabric.strategy.precision.precision), set())
    if strategy != "ModelParallelStrategy":
        kind |= wrapped_by_user(model)
    elif any(weight.is_meta for weight in model.parameters()):
        raise CompatibilityError(
            "fabric",
            "model must hold its weights before it is sharded, got some on the meta device",
            "make it without empty_init",
        )
    else:
        kind |= {"fsdp2", *(["tensor_parallel"] if fabric.strategy.device_mesh["tensor_parallel"].size() > 1 else ())}
    return {"own_loop", *kind}
