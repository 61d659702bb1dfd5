"""The running average of a run's weights: kept during training, and used for validation and the final model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from shared_core.distributed.collectives import all_reduce_, broadcast_, local_part
from shared_core.distributed.sharded_tensors import is_sharded, part_of, reshard_, whole, whole_of
from shared_core.engine.checks.claims import Claim, Same
from shared_core.engine.checks.model_guards import refuse_scripted
from shared_core.engine.observers.optimizer_modes import OptimizerModes
from shared_core.engine.plan import Plan, Touched, every, trained
from shared_core.engine.technique import Context, Purpose, Technique
from shared_core.errors import CheckpointError, ConfigError, MatchError
from shared_core.modules.matching import plain_name
from shared_core.modules.running_average import move_towards_
from shared_core.printing import amount, counted, share_text, size_text
from shared_core.soup.averaging import estimate_norms_, refuse_no_norms
from shared_core.weight_average.config import AverageConfig


def ema_decay(decay: float, num_updates: int, *, warmup: bool = True) -> float:
    """Return the decay of the update after `num_updates` earlier ones.

    With warm-up ``min(decay, (1 + n) / (10 + n))``, so that the first weights, which are far off, are soon forgotten.

    Args:
        decay: The final decay, in [0, 1).
        num_updates: ``n``, 0 or more.
        warmup: True to start low.

    Source: TensorFlow's ``ExponentialMovingAverage(num_updates=...)``, Abadi et al., 2016, arXiv:1605.08695.

    Example:
        >>> ema_decay(0.999, 0), ema_decay(0.999, 90), ema_decay(0.999, 10**6), ema_decay(0.999, 0, warmup=False)
        (0.1, 0.91, 0.999, 0.999)
    """
    # Otherwise the random initial weights would be remembered for about 1 / (1 - decay) updates.
    return min(decay, (1 + num_updates) / (10 + num_updates)) if warmup else decay


class RunningAverage:
    """The running average of named tensors.

    ``ema``: ``m ← m + (1 − d)(x − m)``; ``swa``: ``m ← m + (x − m) / (n + 1)``. Both start with the first values.
    ``last_k``: the mean of copies of the last k values. Averages are at least float32 (float64 for float64 values), and
    the average of equal values is exactly that value.

    Args:
        kind: ``ema``, ``swa`` or ``last_k``.
        decay: For ``ema``, see `ema_decay`.
        warmup: For ``ema``, see `ema_decay`.
        k: For ``last_k``.

    Source: ``swa``: Izmailov et al., 2018, arXiv:1803.05407; ``ema``: Tarvainen and Valpola, 2017, arXiv:1703.01780;
    ``last_k``: Kaddour, 2022, arXiv:2209.14981.

    Example:
        >>> means = {kind: RunningAverage(kind, decay=0.5, warmup=False, k=2) for kind in ("ema", "swa", "last_k")}
        >>> for value in (0.0, 4.0, 8.0):
        ...     for mean in means.values():
        ...         mean.update({"w": torch.tensor(value)})
        >>> [mean.average("w").item() for mean in means.values()]
        [5.0, 4.0, 6.0]
    """

    def __init__(
        self, kind: Literal["ema", "swa", "last_k"], *, decay: float = 0.999, warmup: bool = True, k: int = 5
    ) -> None:
        self.kind, self._decay, self._warmup, self._k = kind, decay, warmup, k
        self.num_updates = 0
        self.kept: list[dict[str, Tensor]] = []
        """Only the average, or the last values, oldest first."""

    @torch.no_grad()
    def update(self, values: Mapping[str, Tensor]) -> None:
        """Add the next values to the average."""
        if self.kind == "last_k":
            # Reuse the memory of the oldest copy.
            into = self.kept.pop(0) if len(self.kept) == self._k else {}
            self.kept.append(
                {name: into[name].copy_(value) if name in into else value.clone() for name, value in values.items()}
            )
        elif not self.kept:
            self.kept = [{name: value.to(_wide(value), copy=True) for name, value in values.items()}]
        else:
            decay = ema_decay(self._decay, self.num_updates, warmup=self._warmup)
            # swa is the plain mean of n + 1 values (arXiv:1803.05407, algorithm 1).
            weight = 1 - decay if self.kind == "ema" else 1 / (self.num_updates + 1)
            move_towards_(self.kept[0].values(), (values[name] for name in self.kept[0]), weight)
        self.num_updates += 1

    @torch.no_grad()
    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add new names, as if their values had been the same at all earlier updates."""
        new = {name: value for name, value in values.items() if self.kept and name not in self.kept[0]}
        for kept in self.kept:
            for name, value in new.items():
                kept[name] = value.to(value.dtype if self.kind == "last_k" else _wide(value), copy=True)

    @torch.no_grad()
    def average(self, name: str) -> Tensor:
        """Return the average of one name: for ``ema`` and ``swa`` the internal tensor, for ``last_k`` a new one."""
        mean, *later = (values[name] for values in self.kept)
        if self.kind != "last_k":
            return mean
        mean = mean.to(_wide(mean), copy=True)
        # The mean of k values as a running mean: no sum that could overflow, and memory for one tensor.
        for number, value in enumerate(later, 2):
            mean.lerp_(value.to(mean.dtype), 1 / number)
        return mean

    @property
    def nbytes(self) -> int:
        """Memory of all copies, in bytes."""
        return sum(tensor.nbytes for values in self.kept for tensor in values.values())


def _wide(value: Tensor) -> torch.dtype:
    # At least float32: with decay 0.999, a 16-bit mean could not follow by a thousandth of a difference.
    return torch.promote_types(value.dtype, torch.float32)


_STATISTICS = ("running_mean", "running_var")


class SwappedWeights:
    """Exchanges a model's trained parameters and batch norm statistics with an average, and back.

    Tensors are exchanged one by one, so that only one extra tensor is needed. If parameters have another dtype than the
    average (16 bit), a copy of the weights is needed while exchanged. Nothing else may write to the parameters
    meanwhile.
    """

    def __init__(self, model: nn.Module, trained: Iterable[Tensor] = (), modes: OptimizerModes | None = None) -> None:
        self._model, known = model, set(map(id, trained))
        self._modes = modes or OptimizerModes()
        named = model.named_parameters()
        # Include parameters that trained when the run began, so that layers frozen in turns stay in the average.
        self.parameters = {name: value for name, value in named if is_trained(value) or id(value) in known}
        averaged = set(map(id, self.parameters.values()))
        self._others = [value for value in model.parameters() if id(value) not in averaged]
        self.norms = {
            name: buffer
            for name, buffer in model.named_buffers()
            if name.rpartition(".")[2] in (*_STATISTICS, "num_batches_tracked")
        }
        """Mean, variance and count of batches of every batch norm. The count is not averaged."""
        # A count of batches cannot be averaged, but mean and variance can.
        self._averaged = self.parameters | {n: buffer for n, buffer in self.norms.items() if n.endswith(_STATISTICS)}
        self._is_sharded = any(map(is_sharded, self.parameters.values()))
        self._aside: dict[str, Tensor] = {}
        self._exchanged: set[str] = set()

    def is_short(self) -> bool:
        """Return True if parameters train now that did not train then."""
        return any(map(is_trained, self._others))

    def live(self) -> Mapping[str, Tensor]:
        """Return the current values of the averaged tensors in the model, for use without gradients."""
        if not self._is_sharded:
            return self._averaged
        return {name: local_part(value) for name, value in self._averaged.items()}

    def own_names(self) -> dict[str, str]:
        """Return the name here of every parameter and buffer of the model, empty for those that are not averaged.

        A tied parameter has several names in the model but one here.
        """
        here = {id(value): name for name, value in {**self.parameters, **self.norms}.items()}
        model = self._model
        own = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        return {name: here.get(id(value), "") for name, value in own}

    @property
    def has_average(self) -> bool:
        """True if there is an average to exchange with, inside or outside the model."""
        return bool(self._aside)

    @property
    def is_in(self) -> bool:
        """True if the model holds the average."""
        return bool(self._exchanged)

    def put_in(self, running: RunningAverage, norms: Mapping[str, Tensor]) -> None:
        """Put an average into the model, with the batch norm buffers of `norms` if given."""
        with writing():
            for name, value in self.live().items():
                average = running.average(name)
                # With equal dtypes the average's own memory is exchanged, and later restored unchanged. Norms get
                # copies, because estimates overwrite them.
                alike = average.dtype == value.dtype and name not in self.norms
                self._aside[name] = average if alike else average.to(value.dtype, copy=True)
            for name, buffer in self.norms.items():
                # Counts of batches are also put aside, because estimating statistics increases the model's.
                self._aside.setdefault(name, buffer.clone())
                self._aside[name].copy_(norms.get(name, self._aside[name]))
        self.exchange(average=True)

    def put_out(self) -> None:
        """Restore the weights, and the average's memory. A no-op without an average."""
        if self._aside:
            self.exchange(average=False)
            self._aside = {}

    @contextlib.contextmanager
    def lent(self, put_in: Callable[[], None]) -> Iterator[None]:
        """Put the average into the model temporarily: the one that was taken out, or the one that `put_in` puts in."""
        # A save during an evaluation takes the average out. It must be in the model again afterwards.
        was_beside = self.has_average
        self.exchange(average=True) if was_beside else put_in()
        try:
            yield
        finally:
            self.exchange(average=False) if was_beside else self.put_out()

    def stay_in(self) -> None:
        """Release the training weights that the average replaced."""
        self._aside, self._exchanged = {}, set()
        self._modes.release()

    def exchange(self, *, average: bool) -> None:
        """Put the average into the model, or its weights back. Tensors that are already there stay."""
        if average:
            self._modes.hold()
        with writing():
            # Exchange values instead of tensors, because optimizers, DDP and FSDP2 hold the parameters themselves.
            for name, value in {**self.live(), **self.norms}.items():
                if (name in self._exchanged) is average:
                    continue
                other, held = self._aside[name], value.clone()
                try:
                    value.copy_(other)
                finally:  # don't lose the weights if interrupted
                    other.copy_(held)
                    # By name: after an interruption, the next exchange moves back exactly those that were moved.
                    self._exchanged ^= {name}
        reshard_(self._model)  # otherwise FSDP2 would compute with the previous weights
        if not average:
            self._modes.release()

    def kept(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return values of the average, from the model if their memory currently holds the training weights."""
        live = self.live() if self._exchanged else {}
        # While exchanged, the average's memory holds the training weights, and the model holds the average.
        borrowed = {name for name in self._exchanged if self._aside[name] is values.get(name)}
        return {name: live[name].detach() if name in borrowed else value for name, value in values.items()}


def is_trained(parameter: Tensor) -> bool:
    """Return True if a parameter should be averaged: trainable and not an integer."""
    return parameter.requires_grad and (parameter.is_floating_point() or parameter.is_complex())


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Allow writing to weights, and create tensors that can be written later: Lightning validates in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class WeightAverage(Technique):
    """Averages the trained parameters and batch norm statistics after applied steps.

    Checkpoints hold the training weights, and the average in addition. Validation, saved models and the final model use
    the average: it is exchanged with the weights, tensor by tensor, and back, even after an error. Under FSDP2 each
    process averages its own part.

    Example:
        >>> from shared_core.engine.recipe import Recipe
        >>> from shared_core.engine.session import Session
        >>> model = nn.ParameterList([nn.Parameter(torch.zeros(1))])
        >>> session = Session(Recipe.from_dict({"average": {"kind": "swa", "begin": 1}}))
        >>> session.attach(model)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> session.begin([optimizer], total_steps=3)
        >>> for _ in range(3):
        ...     model[0].grad = torch.full((1,), -2.0)
        ...     session.before_step()
        ...     optimizer.step()
        ...     _ = session.after_step()
        >>> with session.swapped("evaluate"):
        ...     model[0].item()
        4.0
        >>> model[0].item()
        6.0
        >>> session.finish()
        >>> model[0].item()
        4.0
    """

    replaces_weights = True
    config: AverageConfig

    def __init__(self, config: AverageConfig) -> None:
        super().__init__(config)
        self._running = self._new()
        self._model: nn.Module | None = None
        self._swapped = SwappedWeights(nn.Module())
        self._trained: list[Tensor] = []
        """Parameters that trained when the run began. Half of them may be frozen while the other half trains."""
        self._estimated: dict[str, Tensor] = {}
        self._estimated_at = 0
        """The update after which the norms were estimated."""
        self._is_lent = self._is_over = False
        self._gathered: RunningAverage | None = None
        self._merged: dict[str, Tensor] = {}
        self._first = self._projection_changes = 0
        self._report: dict[str, Any] = {}
        self._validations = {"validations_of_average": 0, "validations_of_weights": 0}

    def _new(self) -> RunningAverage:
        config = self.config
        return RunningAverage(config.kind, decay=config.decay, warmup=config.warmup, k=config.k)

    # -- start

    def attach(self, context: Context) -> Touched:
        """Check that there is something to average."""
        model = context.model
        context.undo.callback(self._detach)
        refuse_scripted(model, "average")
        if not any(map(is_trained, model.parameters())):
            rule = "model must have a trainable parameter, got none"
            raise MatchError("average", rule, "unfreeze the parameters to train")
        refuse_no_norms("average", self.config.bn_batches, model)
        self._model = model
        return trained(model)

    def plan(self, context: Context) -> Plan:
        """Return when the average gets its first weights."""
        config = self.config
        # Step 0 has no trained weights, so the first update is after `every` steps.
        self._first = context.resolve(config.start, "average.begin") or config.every
        if context.total_steps is not None and self._first > context.total_steps:
            got = f"got step {self._first} from begin {config.start!r} and every {config.every}"
            rule = f"first update must come within the {context.total_steps} steps of this run, {got}"
            raise ConfigError("average", rule, "begin earlier, or train longer")
        first = f"first weights in the average ({config.kind}), more {every(config.every)}"
        return Plan(
            [(self._first, first), (None, "the model holds the average, if it was updated")],
            missing=""
            if self._running.num_updates
            else f"the average has no weights yet, the first at step {self._first}",
            guards=self._swapped.parameters if self._running.kept else {},
            looks_at_batches=bool(config.bn_batches),  # to estimate batch norm statistics for the average
        )

    def begin(self, context: Context, state: Mapping[str, Any] | None) -> None:
        """Resolve `begin` and restore a saved average."""
        self.plan(context)
        # Those that train now, even if layers are frozen later.
        self._trained = [one for one in filter(is_trained, context.model.parameters()) if one not in context.unheld]
        if state is not None:
            self._restore(state, context)

    # -- one step

    def after_step(self, context: Context, applied: bool) -> None:
        """Add the new weights to the average if an update is due, and prune it like the weights."""
        if not applied:
            return
        if self._running.kept and self._swapped.is_short():
            # Newly unfrozen: the current value, one step after the frozen one, replaces those of earlier updates.
            self._swapped = SwappedWeights(context.model, self._swapped.parameters.values(), context.modes)
            self._running.add(context.in_full_precision(self._swapped.live()))
        is_due = context.step >= self._first and (context.step - self._first) % self.config.every == 0
        if is_due:
            self._update(context)
        # Pruned or clustered weights: the average of masked weights is nonzero where masks have changed, so apply the
        # newest projection to it, at each update and each change of the projection.
        if context.projections and (is_due or context.projection_changes != self._projection_changes):
            for kept in self._running.kept:
                context.project({parameter: kept[name] for name, parameter in self._swapped.parameters.items()})
        self._projection_changes = context.projection_changes

    def _update(self, context: Context) -> None:
        if not self._running.kept:
            # Not before the first update: layers may be replaced or frozen until then.
            self._swapped = SwappedWeights(context.model, self._trained, context.modes)
        self._running.update(context.in_full_precision(self._swapped.live()))

    # -- in the weights' place

    @contextlib.contextmanager
    def swapped(self, context: Context, purpose: Purpose) -> Iterator[None]:
        """Hold the weights to validate, save or resume from in the model: the average, or the training weights."""
        with self._evaluating(context) if purpose == "evaluate" else self._saving(baked=purpose == "export"):
            yield

    @contextlib.contextmanager
    def _evaluating(self, context: Context) -> Iterator[None]:
        try:
            if self.config.evaluate and not self._is_over:
                self._validate_average(context)
            yield
        finally:
            self._swapped.put_out()

    def _validate_average(self, context: Context) -> None:
        found = "validations_of_average" if self._running.kept else "validations_of_weights"
        if not self._running.kept and not self._validations[found]:
            context.services.say(
                f"efftrain: average: validation uses the training weights, because averaging begins at step "
                f"{self._first}"
            )
        self._validations[found] += 1
        if self._running.kept:
            self._put_in()
            self._settle_norms(context)

    @contextlib.contextmanager
    def _saving(self, *, baked: bool) -> Iterator[None]:
        try:
            if self._running.kept and not self._is_over:
                self._prepare_saving(baked)
            yield
        finally:
            self._gathered, self._merged = None, {}
            if self._is_lent:
                self._swapped.put_out()
                self._is_lent = False
            elif self._swapped.has_average:
                self._swapped.exchange(average=True)

    def _prepare_saving(self, baked: bool) -> None:
        swapped = self._swapped
        # A checkpoint to resume from holds the training weights, a model for the user holds the average.
        if swapped.is_in and not baked:
            swapped.exchange(average=False)
        elif baked and not swapped.is_in:
            self._put_in()
            self._is_lent = True
        # Sharded: gather now, because only the main process asks for a state dict.
        if not baked and any(hasattr(parameter, "device_mesh") for parameter in swapped.parameters.values()):
            self._gathered = self._new()
            self._gathered.kept = [
                {name: whole_of(value, swapped.parameters.get(name)).cpu() for name, value in kept.items()}
                for kept in self._running.kept
            ]
            self._merged = {key: whole(value).detach().cpu() for key, value in self._merge().items()}

    def _merge(self, keys: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return weights that are no parameters of the model, but into which the average's adapters are merged."""
        swapped, model = self._swapped, cast(nn.Module, self._model)
        keys = model.state_dict().keys() - swapped.own_names().keys() if keys is None else set(keys)
        if not keys:
            return {}
        # The average's adapters must be in the model while its state dict is made.
        with swapped.lent(self._put_in):
            found = {key: value for key, value in model.state_dict().items() if key in keys}
            return {key: value.clone() for key, value in found.items() if isinstance(value, Tensor)}

    def _put_in(self) -> None:
        self._swapped.put_in(self._running, self._estimates())

    def _estimates(self) -> dict[str, Tensor]:
        # Estimates belong to one average. After the next update they are outdated.
        return self._estimated if self._estimated_at == self._running.num_updates else {}

    def _settle_norms(self, context: Context) -> None:
        """Give every process the same batch norm statistics for the average in the model."""
        norms = self._swapped.norms
        # Once per average instead of per validation, because each batch costs a forward.
        if self.config.bn_batches and not self._estimates():
            estimate_norms_(context.model, context.services.calibrate, self.config.bn_batches)
            with writing():
                self._estimated = {name: buffer.clone() for name, buffer in norms.items()}
            self._estimated_at = self._running.num_updates
        for buffer in norms.values():
            broadcast_(buffer)  # DDP uses those of the first process

    # -- end

    def finish(self, context: Context) -> None:
        """Leave the average in the model. Without one, keep the weights and report it."""
        self._is_over = True
        running = self._running
        if not running.kept:
            context.services.say("efftrain: average: it was never updated, so the model keeps the training weights")
            return
        swapped = self._swapped
        context.unvalidated |= not self.config.evaluate
        self._report |= self._size()
        with writing():
            live = swapped.live()
            self._report["distance"] = _distance(live, {name: running.average(name) for name in swapped.parameters})
            # Before `weights_replaced`, so that others (qat) estimate ranges of the new weights.
            self._put_in()
            norms = {name: buffer.clone() for name, buffer in swapped.norms.items()}
            context.report_weights_replaced()
            for name, buffer in norms.items():  # estimating ranges in train mode changed them
                swapped.norms[name].copy_(buffer)
            self._settle_norms(context)
        swapped.stay_in()
        running.kept = []

    def claims(self, context: Context) -> Mapping[str, Claim]:
        """Return the claim that parameters stay as the average left them, including masks and quantizers."""
        names = [plain_name(name) for name, _ in context.model.named_parameters()]
        return dict.fromkeys(names if self._running.num_updates else [], Same())

    def _detach(self) -> None:
        """Restore the training weights, if the run was cut short."""
        self._swapped.put_out()
        self._model, self._swapped, self._trained = None, SwappedWeights(nn.Module()), []

    def bake(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the state dict with the average, unless there is none or it is already in the model."""
        if self._model is None or not self._running.kept or self._swapped.is_in:
            return state_dict
        if any(hasattr(value, "device_mesh") for value in state_dict.values()):
            return state_dict  # each process saves its part, as a checkpoint to resume from
        averages, own, baked = self._gathered or self._running, self._swapped.own_names(), dict(state_dict)
        for key, value in state_dict.items():
            name = own.get(key, "")
            # A tied weight has a separate key for each use. `own_names` maps all of them to the averaged one.
            if name in self._estimates():
                baked[key] = self._estimates()[name]
            elif name in averages.kept[0]:
                baked[key] = averages.average(name).to(value.dtype)
        # Adapters are merged into weights that are not parameters of the model.
        merged = [key for key, value in state_dict.items() if isinstance(value, Tensor) and key not in own]
        found = self._merge(merged) if self._gathered is None else self._merged
        return baked | {key: found[key].to(baked[key]) for key in merged}

    # -- saved state

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, as whole tensors by name, and the estimated statistics."""
        kept = (self._gathered or self._running).kept
        return {
            "kind": self.config.kind,
            "updates": self._running.num_updates,
            "kept": [self._swapped.kept(values) for values in kept],
            "norms": self._estimates(),
            "validations": dict(self._validations),
        }

    def _restore(self, state: Mapping[str, Any], context: Context) -> None:
        for name, count in state.get("validations", {}).items():  # keep the counts since an earlier checkpoint
            self._validations[name] = max(self._validations[name], int(count))
        try:
            kind, updates, kept, norms = state["kind"], int(state["updates"]), list(state["kept"]), state["norms"]
            # If the saved k is larger, keep the newest copies.
            kept = kept[-self.config.k :]
            shapes = {name: tensor.shape for values in kept for name, tensor in values.items()}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError("average", f"state is not one that average saved: {error!r}") from error
        # Includes layers frozen since, because the best checkpoint may be of an earlier step.
        known = [value for name, value in context.model.named_parameters() if name in shapes]
        swapped = SwappedWeights(context.model, known, context.modes)
        like = {**swapped.parameters, **swapped.norms}
        odd = sorted(set(shapes) - set(swapped.live()))
        odd = odd or sorted(name for name, shape in shapes.items() if shape != like[name].shape)
        if odd or kind != self.config.kind:
            rule = f"be of kind {self.config.kind}, got {kind}"
            if kind == self.config.kind:
                rule = f"match this model's parameters, got a difference at {odd[0]}"
            remedy = "resume with the model and recipe that wrote the checkpoint"
            raise CheckpointError("average", f"saved average must {rule}", remedy)
        self._swapped = swapped
        # With an empty state the count restarts, because warm-up and the mean depend on it.
        self._running.num_updates = updates if kept else 0
        self._running.kept = [
            {name: part_of(tensor.to(like[name].device, copy=True), like[name]) for name, tensor in values.items()}
            for values in kept
        ]
        self._running.add(context.in_full_precision(swapped.live()))  # parameters unfrozen since the checkpoint
        self._estimated = {name: tensor.to(like[name].device, copy=True) for name, tensor in norms.items()}
        self._estimated_at = updates

    # -- figures

    def figures(self) -> dict[str, float]:
        """Return ``average/updates``, the number of updates."""
        return {"average/updates": float(self._running.num_updates)}

    def report(self) -> dict[str, Any]:
        """Return the kind, number of updates, memory, validations, and distance of the average from the weights."""
        return {
            "kind": self.config.kind,
            "updates": self._running.num_updates,
            "first_update_step": self._first,
            **self._size(),
            **self._validations,
            **self._report,
        }

    @staticmethod
    def summary(report: Mapping[str, Any]) -> list[str]:
        """Return a report in plain sentences, the result first. It may have been read from a file."""
        kinds = {"ema": "A moving average", "swa": "An average", "last_k": "An average of the last copies"}
        if not report["updates"]:
            return [f"Averaged nothing yet: averaging begins at step {report['first_update_step']:,}."]
        text = f"{kinds.get(report['kind'], 'An average')} of {amount(report['elements'])} weights"
        updates = counted(report["updates"], "update")
        final = (
            []
            if report.get("distance") is None
            else [f"It replaced the weights of the last step, which differ by {share_text(report['distance'])}."]
        )
        return [
            f"{text} had {updates} since step {report['first_update_step']:,} and took {size_text(report['bytes'])}.",
            *final,
        ]

    def _size(self) -> dict[str, int]:
        parameters = self._swapped.parameters
        return {
            "parameters": len(parameters),
            "elements": sum(parameter.numel() for parameter in parameters.values()),
            "norms": sum(name.endswith("running_mean") for name in self._swapped.norms),
            "bytes": self._running.nbytes,
        }


def _distance(live: Mapping[str, Tensor], averages: Mapping[str, Tensor]) -> float:
    """Return ``‖average − weights‖ / ‖weights‖`` over all parameters and processes. All must call it."""
    # Sums of squares in float64, added over processes before the root: shards are parts of one vector.
    apart = sum(float((mean - live[name]).double().square().sum()) for name, mean in averages.items())
    size = sum(float(live[name].double().square().sum()) for name in averages)
    device = next(iter(averages.values())).device
    apart, size = all_reduce_(torch.tensor([apart, size], dtype=torch.float64, device=device), "sum").tolist()
    return (apart / size) ** 0.5 if size else 0.0
