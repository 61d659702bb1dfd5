"""Loops written with Fabric: hooks on one Fabric and on what it sets up drive a session."""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_eff._checkpoints import load_checked, wrap_loading
from lightning_eff._services import say
from shared_core.checkpoint_formats.plain import LIGHTNING_META
from shared_core.config.training_time import StepsPerEpoch
from shared_core.distributed.sharded_tensors import reshard_
from shared_core.engine import rank_states
from shared_core.engine.model_guards import wrapped_by_user
from shared_core.engine.recipe import Recipe
from shared_core.engine.session import Session
from shared_core.engine.session_state import fits, loading
from shared_core.engine.state_file import rng_state, set_rng_state
from shared_core.engine.technique import BareServices
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, TrainingError
from shared_core.front_ends.flags import as_recipe
from shared_core.front_ends.script_loop import ScriptLoop
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
    """Return what ``fabric.setup(model, optimizer)`` returns, with techniques on the model: call it in its place.

    The model is finished, and plain, behind the last of the planned steps. ``fabric.save`` of a state with the model
    saves the techniques' state under ``"eff"`` in the same file, and ``fabric.load`` restores it.

    Args:
        fabric: The script's, launched.
        model: The model, not set up yet.
        optimizer: That of its parameters; where the strategy shards them, it gets their parts.
        recipe: A recipe, a dict of one, or a path to a YAML or JSON file of one; an empty one touches nothing.
        total_steps: Optimizer steps of the whole run.
        steps_per_epoch: Those of an epoch, for positions such as ``2ep``.
        accumulate: Micro-batches of a step, by whose number the loop divides the loss; at least 1.
        calibration: Batches that the model is called with where a technique looks at some: mappings as keywords, of
            sequences the first element.
        options: Of ``fabric.setup``.

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
    plan = (total_steps, steps_per_epoch, accumulate)
    loop = FabricLoop(fabric, model, optimizer, wanted, plan, calibration)
    try:
        loop.check_positions()
        with loop.session.sharding():
            prepared = fabric.setup(model, optimizer, **options)
        loop.watch(prepared[0], prepared[1])
    except BaseException:
        loop.session.detach()
        raise
    return prepared


class FabricServices(BareServices):
    """Services of a loop of Fabric for a technique.

    Args:
        loop: The loop.
    """

    def __init__(self, loop: FabricLoop) -> None:
        self._loop = loop

    @property
    def lacks_batches(self) -> str:
        """What the user must do so that `calibrate` has training batches; empty if it has some."""
        return "pass calibration= to setup" if self._loop.calibration is None else ""

    def calibrate(self, num_batches: int) -> None:
        """Run the batches that were given, without gradients; random numbers stay as they were."""
        loop = self._loop
        if loop.calibration is None:
            raise ConfigError("fabric", "calibration must be batches, got none", "pass calibration= to setup")
        random, was_training = rng_state(), loop.inner.training
        loop.inner.train()
        try:
            with torch.no_grad(), loop.fabric.autocast():
                for batch in itertools.islice(loop.calibration, num_batches):
                    batch = loop.fabric.to_device(batch)
                    loop.inner(**batch) if isinstance(batch, Mapping) else loop.inner(batch[0])
        finally:
            loop.inner.train(was_training)
            set_rng_state(random)
            reshard_(loop.inner)

    def wrapped_model(self) -> nn.Module | None:
        """Return what Fabric's strategy has made of the model."""
        return cast("nn.Module | None", getattr(self._loop.model, "_forward_module", None))

    def _needs_trainer(self, what: str) -> CompatibilityError:
        return CompatibilityError("fabric", f"{what} needs a trainer", "use lightning_eff with Lightning's Trainer")

    def say(self, text: str) -> None:
        """Print one line on the main process."""
        say(text)


class _SavedState:
    """The session as Fabric saves and loads it: an object with a state dict."""

    def __init__(self, loop: FabricLoop) -> None:
        self._loop = loop

    def state_dict(self) -> dict[str, Any]:
        return self._loop.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loop.read_state(state)


class FabricLoop(ScriptLoop):
    """Drives one session through one script's loop.

    Args:
        fabric: The script's; its methods are replaced on the instance.
        model: What it sets up next.
        optimizer: The model's, of torch.
        recipe: What to switch on.
        plan: Optimizer steps of the run, those of an epoch if they are known, micro-batches of a step.
        calibration: Batches for the techniques that look at some.
    """

    def __init__(
        self, fabric: Any, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe,
        plan: tuple[int, StepsPerEpoch | None, int], calibration: Iterable[Any] | None,
    ) -> None:  # fmt: skip
        total_steps, steps_per_epoch, self._accumulate = plan
        inner = getattr(model, "_orig_mod", model)  # without torch.compile's
        super().__init__(inner, total_steps, steps_per_epoch)
        self.fabric, self.calibration, self._optimizer = fabric, calibration, optimizer
        self.model: Any = None
        environment = _environment(fabric, inner, optimizer)
        self._shards = "fsdp2" in environment
        self._precision = fabric.strategy.precision
        self._precision.convert_module(self.inner)  # now: techniques must see the type that is trained
        self.session = Session(recipe, front_end="fabric", services=FabricServices(self))
        self._scaler = self.session.make_scaler(fabric.device.type)
        """That of a technique, in the place of the one that Fabric's precision may have."""
        self._own_scaler = getattr(self._precision, "scaler", None)
        self.session.attach_with(self.inner, [optimizer], environment)
        self._is_unscaled = self._has_stepped = False
        self._batches: Any = None  # of a technique that draws them
        self._loaded: Mapping[str, Any] | None = None
        self._folder: Path | None = None
        self._start = Path.cwd()

    def watch(self, model: nn.Module, optimizer: Any) -> None:
        """Put the hooks on what Fabric set up, and on Fabric."""
        self.model, self._wrapper = model, optimizer
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True),
            model.register_forward_hook(self.leave, always_call=True),
            self._optimizer.register_step_post_hook(self._note_step),
        ]
        self._wrapped = [
            Wrapped(self.fabric, "backward", self._backward),
            Wrapped(self.fabric, "clip_gradients", self._clip),
            Wrapped(self.fabric, "log_dict", self.log_figures),
            Wrapped(self._precision, "unscale_gradients", self._unscale),
            Wrapped(optimizer, "step", self._step),
            Wrapped(optimizer, "zero_grad", self._drop_gradients),
            Wrapped(self.inner, "train", self.set_mode),  # what Fabric wraps it in hands on what is set
        ]
        if self.session.draws_batches:
            self._wrapped.append(Wrapped(self.fabric, "setup_dataloaders", self._set_up_loaders))
        if self._scaler is not None:
            self._wrapped.append(Wrapped(self._precision, "optimizer_step", self._step_scaled))
            if self._own_scaler is not None:
                self._precision.scaler = None
        self._files = [Wrapped(self.fabric, "save", self._save), Wrapped(self.fabric, "load", self._load)]
        atexit.register(self._at_exit)

    def _set_up_loaders(self, method: Callable[..., Any], *loaders: Any, **options: Any) -> Any:
        """Set up loaders, the first of all with the batches of a technique that draws them."""
        if self._batches is not None:
            return method(*loaders, **options)
        made = self.session.draw(loaders[0], self._accumulate)
        self._batches = made.batch_sampler
        self._begin_epoch_again()
        drawn = method(made, **{**options, "use_distributed_sampler": False})
        return [drawn, *(method(one, **options) for one in loaders[1:])] if len(loaders) > 1 else drawn

    def _begin_epoch_again(self) -> None:
        """Have drawn batches begin with the epoch's first: a resumed loop skips those that it has trained on."""
        if self._batches is not None:
            self._batches.begin_epoch_again()

    # --- a step

    def _begin(self) -> None:
        """Begin at the first micro-batch: whatever the script loads is loaded by then."""
        if not self.session.has_begun:
            self.session.begin(
                [self._optimizer],
                total_steps=self.total_steps,
                steps_per_epoch=self.steps_per_epoch,
                wrappers=[self._wrapper],
            )
            self.restore_window()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        trains = module.training and torch.is_grad_enabled()
        if trains:
            self._begin()
        self.surround(trains)

    def _backward(self, method: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._begin()
        if self.is_complete:
            raise TrainingError(
                "fabric",
                "gradients must be clipped once a step, after its last backward, got a backward behind the clipping",
                "clip where the optimizer steps",
            )
        self.micro_batches += 1
        weighs = [key for key, technique in self.session.techniques.items() if technique.weighs_loss]
        if weighs and self.micro_batches > self._accumulate:
            raise TrainingError(
                "fabric",
                f"a step must have at most {self._accumulate} backward with {', '.join(weighs)}, got "
                f"{self.micro_batches}: what is added to the loss must be divided by their number as the loop "
                "divides its own",
                "pass accumulate= to setup",
            )
        # The forward ran under autocast, and other models of a loss belong there too. The loop has divided by the
        # number of micro-batches; a technique adds to the loss of one.
        with self.fabric.autocast():
            parts = self._accumulate if weighs else 1
            loss = self.session.loss(loss * parts) / parts if parts > 1 else self.session.loss(loss)
        return method(loss if self._scaler is None else self._scaler.scale(loss), *args, **kwargs)

    def _unscale(self, method: Callable[..., Any], optimizer: Any) -> None:
        if not self._is_unscaled:  # a GradScaler refuses a second time
            self._is_unscaled = True
            (method if self._scaler is None else self._scaler.unscale_)(optimizer)

    def _step_scaled(self, method: Callable[..., Any], optimizer: Any, **kwargs: Any) -> Any:
        scaler = cast(torch.amp.GradScaler, self._scaler)
        result = scaler.step(optimizer, **kwargs)
        scaler.update()
        return result

    def _complete(self) -> None:
        """Gradients are there, and not clipped: unscale them and show them to the techniques, once a step."""
        if not self.is_complete:
            self.is_complete = True
            self._precision.unscale_gradients(self._optimizer)
            self.session.before_step()

    def _clip(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._complete()
        names = ("module", "optimizer", "clip_val", "max_norm", "norm_type", "error_if_nonfinite")
        # what overflows is no error to a scaler, which skips the step
        usual = {"norm_type": 2.0, "error_if_nonfinite": self._scaler is None}
        asked = {**usual, **dict(zip(names, args, strict=False)), **kwargs}
        if not self.peers:
            return method(**asked)
        # Each by its own norm: Fabric clips all that the optimizer holds together.
        norms = []
        for one in (self.inner, *self.peers):
            if asked.get("max_norm") is None:
                nn.utils.clip_grad_value_(one.parameters(), asked["clip_val"])
            else:
                norm = asked["norm_type"], asked["error_if_nonfinite"]
                norms.append(nn.utils.clip_grad_norm_(one.parameters(), asked["max_norm"], *norm))
        return norms[0] if norms else None

    def _note_step(self, *_: Any) -> None:
        self._has_stepped = True

    def _step(self, method: Callable[..., Any], closure: Any = None) -> Any:
        if closure is not None or not self.micro_batches:
            raise TrainingError(
                "fabric",
                "optimizer.step must follow fabric.backward(loss), got "
                + ("a closure" if closure is not None else "a step without one"),
                "call fabric.backward in place of loss.backward",
            )
        self._complete()
        self._has_stepped = False
        result = method()
        self.is_complete = self._is_unscaled = False
        self.micro_batches = 0
        session = self.session
        if self._has_stepped:
            session.after_step()
        else:  # its scaler found an overflow
            session.after_step(applied=False)
        if session.step + session.skipped >= self.total_steps:
            self.finish()
        return result

    def _drop_gradients(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Count a step that was prepared for and not made as skipped."""
        if self.is_complete:
            self.session.after_step(applied=False)
        if self.micro_batches:
            self.is_complete = self._is_unscaled = False
            self.micro_batches = 0
        return method(*args, **kwargs)

    # --- checkpoints

    def _of_ours(self, state: Any) -> str | None:
        """Return under which key a state holds the model that this loop trains, None if it does not."""
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
        self._folder = self._folder or Path(path).absolute().parent
        if _KEY in state:
            raise ConfigError("fabric", f"state must not have a key {_KEY!r}, which is the techniques'", "rename it")
        self._begin()
        with self.training_weights(), self.session.swapped("checkpoint"):
            return method(path, {_KEY: _SavedState(self), **state}, *args, **kwargs)

    def _check_saved(self, path: Path, key: str) -> None:
        """Count again in the file what the receipt says, and leave the receipt beside it."""
        if not self.fabric.is_global_zero:
            return
        try:
            weights = torch.load(path, "cpu", weights_only=True, mmap=True)[key]
        except Exception:  # a folder of shards, or objects of the script's own: the model's weights are counted
            weights = None
        self._folder = path.absolute().parent
        try:
            if weights is not None or not self._shards:  # one process cannot count in parts of a model
                self.session.verify(weights, str(path))
        finally:
            self.session.receipt().write(path.parent)

    def state_dict(self) -> dict[str, Any]:
        """Return what a file holds of the session, on every process."""
        wrapped = cast(Any, self.model)._forward_module
        return rank_states.gathered(self.session, wrapped, window=self.open_window())

    def read_state(self, state: Mapping[str, Any]) -> None:
        """Look at a saved state before the weights beside it are loaded.

        Raises:
            CheckpointError: If the model has not the structure that it was saved with.
        """
        if not fits(self.session, state):
            raise CheckpointError(
                "fabric",
                "checkpoint must hold layers as the recipe makes them, got others, and the optimizer exists already",
                "start from the weights and the recipe that it was saved with",
            )
        if not self.session.has_begun:
            self.session.prepare_optimizers([self._optimizer])
        self._loaded = state

    def _load(self, method: Callable[..., Any], path: Any, state: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self._of_ours(state) is None or self.session.is_finished:
            return method(path, state, *args, **kwargs)
        self._loaded = None
        with self.training_weights():
            load = self._load_sharded if self._shards else self._load_whole
            result = load(method, path, state, *args, **kwargs)
        if self._loaded is None:
            self._refuse_foreign(path, None)
        own = rank_states.load(self.session, cast(Any, self._loaded))
        self.window = own.get("window", {})
        self._begin_epoch_again()
        if self.session.has_begun:
            self.session.begin_again()
            self.restore_window()
        return result

    def _load_whole(self, method: Callable[..., Any], path: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        asked = {_KEY: _SavedState(self), **state}
        with loading(self.session):
            try:
                result = method(path, asked, *args, **kwargs)
            except KeyError as error:
                if f"'{_KEY}'" not in str(error):
                    raise
                self._refuse_foreign(path, error)
        state.update({name: asked[name] for name in state})
        return result

    def _load_sharded(self, method: Callable[..., Any], path: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        """Load by a strategy that shards: it reads what lies beside the weights last, and parts of them otherwise."""
        path = Path(self.fabric.broadcast(str(path)))
        own = path / LIGHTNING_META if path.is_dir() else path
        saved = load_checked(torch.load, own, "cpu", mmap=True, weights_only=kwargs.get("weights_only"))
        if not isinstance(saved, Mapping) or _KEY not in saved:
            self._refuse_foreign(path, None)
        self.read_state(saved[_KEY])
        wrapped = wrap_loading(self.fabric.strategy, self.session)
        try:
            result = method(path, state, *args, **kwargs)
        finally:
            for one in reversed(wrapped):
                one.undo()
        result.pop(_KEY, None)
        return result

    def _refuse_foreign(self, path: Any, error: BaseException | None) -> None:
        raise CheckpointError(
            "fabric",
            f"{path} must hold the techniques' state under {_KEY!r}, got a file without",
            "load its weights before setup, to start from them",
        ) from error

    # --- the end

    def finish(self) -> None:
        """Finish the model: it is the user's plain one from now on."""
        self.session.finish()
        self.evaluates = False
        for wrapped in self._wrapped:
            wrapped.undo()
        for handle in self._handles:
            handle.remove()
        if self._own_scaler is not None:
            self._precision.scaler = self._own_scaler
        self.session.verify(None, "the trained model")  # by every process: weights in parts are gathered
        if self.fabric.is_global_zero:
            logged = next((getattr(logger, "log_dir", None) for logger in self.fabric.loggers), None)
            self._folder = self._folder or (Path(logged) if logged else None)
            if self._folder is not None:  # else beside what is saved next
                self.session.receipt().write(self._folder)
        say(self.session.receipt().told())

    def _at_exit(self) -> None:
        session = self.session
        if not session.is_finished:
            session.note(
                f"THE MODEL WAS NOT FINISHED: the script ended after {session.step} of {self.total_steps} steps; what "
                "it saved holds the weights of training"
            )
            say(session.receipt().told())
        if self.fabric.is_global_zero and not (session.is_finished and self._folder):
            session.receipt().write(self._folder or self._start)


def _environment(fabric: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    """Return the run environment of a Fabric.

    Raises:
        CompatibilityError: If its strategy or precision changes layers or optimizers by itself.
    """
    strategy, precision = type(fabric.strategy).__name__, type(fabric.strategy.precision).__name__
    if strategy not in _STRATEGIES:
        raise CompatibilityError(
            "fabric",
            f"strategy must be of {', '.join(sorted(_STRATEGIES))}, got {strategy}",
            "use ddp, or ModelParallelStrategy, whose parallelize_fn calls fully_shard",
        )
    if precision not in _PRECISIONS:
        raise CompatibilityError(
            "fabric", f"precision must not replace layers, got {precision}", "use bf16-mixed, and a technique for fewer"
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
    return {"own_loop", *kind, *({"lbfgs"} if isinstance(optimizer, torch.optim.LBFGS) else ())}
