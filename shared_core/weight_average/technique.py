"""The running average of a run's weights: beside them while they train, in their place for validation, at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal, cast

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
    """Return the decay of the update that follows `num_updates` earlier ones.

    ``min(decay, (1 + n) / (10 + n))`` with warm-up, so that the first weights, which are far off, are soon forgotten.

    Args:
        decay: The final one, in [0, 1).
        num_updates: ``n``, 0 or more.
        warmup: Whether it begins low.

    Source: TensorFlow's ``ExponentialMovingAverage(num_updates=...)``, Abadi et al., 2016, arXiv:1605.08695.

    Example:
        >>> ema_decay(0.999, 0), ema_decay(0.999, 90), ema_decay(0.999, 10**6), ema_decay(0.999, 0, warmup=False)
        (0.1, 0.91, 0.999, 0.999)
    """
    # A first average of the random start would otherwise be remembered for 1 / (1 - decay) updates.
    return min(decay, (1 + num_updates) / (10 + num_updates)) if warmup else decay


class RunningAverage:
    """The average of tensors of the same names, shown one after another.

    ``ema``: ``m ← m + (1 − d)(x − m)``; ``swa``: ``m ← m + (x − m) / (n + 1)``; both begin with the first values
    themselves. ``last_k``: the mean of the last k values, which are kept as they are. Averages are of float32 at least
    (float64 for float64 values), and of equal values they are that value to the bit.

    Args:
        kind: Which of the three.
        decay: Of ``ema``, as of `ema_decay`.
        warmup: Of ``ema``, as of `ema_decay`.
        k: Of ``last_k``.

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
        """The average alone, or the last values, oldest first."""

    @torch.no_grad()
    def update(self, values: Mapping[str, Tensor]) -> None:
        """Take the next values into the average."""
        if self.kind == "last_k":
            # the oldest copy's memory is written over
            into = self.kept.pop(0) if len(self.kept) == self._k else {}
            self.kept.append(
                {name: into[name].copy_(value) if name in into else value.clone() for name, value in values.items()}
            )
        elif not self.kept:
            self.kept = [{name: value.to(_wide(value), copy=True) for name, value in values.items()}]
        else:
            decay = ema_decay(self._decay, self.num_updates, warmup=self._warmup)
            # swa: the plain mean of n + 1 values (arXiv:1803.05407, algorithm 1)
            weight = 1 - decay if self.kind == "ema" else 1 / (self.num_updates + 1)
            move_towards_(self.kept[0].values(), (values[name] for name in self.kept[0]), weight)
        self.num_updates += 1

    @torch.no_grad()
    def add(self, values: Mapping[str, Tensor]) -> None:
        """Take in the names that are new, as if their values had been these at all updates so far."""
        new = {name: value for name, value in values.items() if self.kept and name not in self.kept[0]}
        for kept in self.kept:
            for name, value in new.items():
                kept[name] = value.to(value.dtype if self.kind == "last_k" else _wide(value), copy=True)

    @torch.no_grad()
    def average(self, name: str) -> Tensor:
        """Return the average of one name: for ``ema`` and ``swa`` the tensor that updates write to, else a new one."""
        mean, *later = (values[name] for values in self.kept)
        if self.kind != "last_k":
            return mean
        mean = mean.to(_wide(mean), copy=True)
        # The mean of k values by running means: no sum that could overflow, and one tensor of memory.
        for number, value in enumerate(later, 2):
            mean.lerp_(value.to(mean.dtype), 1 / number)
        return mean

    @property
    def nbytes(self) -> int:
        """The memory of all that is kept."""
        return sum(tensor.nbytes for values in self.kept for tensor in values.values())


def _wide(value: Tensor) -> torch.dtype:
    # float32 at least: with decay 0.999, a 16-bit mean would not move by a thousandth of a difference.
    return torch.promote_types(value.dtype, torch.float32)


_STATISTICS = ("running_mean", "running_var")


class SwappedWeights:
    """Puts an average in the place of a model's trained parameters and batch norm statistics, and takes it out again.

    Tensors are exchanged one by one, so that beside the average one more tensor is held; parameters of another dtype
    than the average's (16 bit) need a copy of the weights as long as it is in. Nothing else may write into the
    parameters meanwhile.
    """

    def __init__(self, model: nn.Module, trained: Iterable[Tensor] = (), modes: OptimizerModes | None = None) -> None:
        self._model, known = model, set(map(id, trained))
        self._modes = modes or OptimizerModes()
        named = model.named_parameters()
        # Also what trained when the run began: layers that are frozen in turns stay in the average.
        self.parameters = {name: value for name, value in named if is_trained(value) or id(value) in known}
        averaged = set(map(id, self.parameters.values()))
        self._others = [value for value in model.parameters() if id(value) not in averaged]
        self.norms = {
            name: buffer
            for name, buffer in model.named_buffers()
            if name.rpartition(".")[2] in (*_STATISTICS, "num_batches_tracked")
        }
        """Mean, variance and count of batches of every batch norm; the count is not averaged."""
        # The count of batches is no quantity to average; mean and variance are.
        self._averaged = self.parameters | {n: buffer for n, buffer in self.norms.items() if n.endswith(_STATISTICS)}
        self._is_sharded = any(map(is_sharded, self.parameters.values()))
        self._aside: dict[str, Tensor] = {}
        self._exchanged: set[str] = set()

    def is_short(self) -> bool:
        """Return True if parameters train that did not then."""
        return any(map(is_trained, self._others))

    def live(self) -> Mapping[str, Tensor]:
        """Return what is averaged, as it is in the model now, to use without gradients."""
        if not self._is_sharded:
            return self._averaged
        return {name: local_part(value) for name, value in self._averaged.items()}

    def own_names(self) -> dict[str, str]:
        """Return the name here of every parameter and buffer of the model, empty for those that are left alone.

        A tied parameter has several names in the model and one here.
        """
        here = {id(value): name for name, value in {**self.parameters, **self.norms}.items()}
        model = self._model
        own = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        return {name: here.get(id(value), "") for name, value in own}

    @property
    def has_average(self) -> bool:
        """True if there is an average to exchange with, in the model or, for the moment, beside it."""
        return bool(self._aside)

    @property
    def is_in(self) -> bool:
        """True if the model holds the average."""
        return bool(self._exchanged)

    def put_in(self, running: RunningAverage, norms: Mapping[str, Tensor]) -> None:
        """Put an average in, with other buffers of batch norms where `norms` has them."""
        with writing():
            for name, value in self.live().items():
                average = running.average(name)
                # Of the same dtype: the average's own memory goes in, and comes out again unchanged. Norms get
                # copies, as estimates are written over them.
                alike = average.dtype == value.dtype and name not in self.norms
                self._aside[name] = average if alike else average.to(value.dtype, copy=True)
            for name, buffer in self.norms.items():
                # Counts of batches are put aside as well: estimating them raises the model's.
                self._aside.setdefault(name, buffer.clone())
                self._aside[name].copy_(norms.get(name, self._aside[name]))
        self.exchange(average=True)

    def put_out(self) -> None:
        """Put the weights back; the average has its memory again. Without an average nothing happens."""
        if self._aside:
            self.exchange(average=False)
            self._aside = {}

    @contextlib.contextmanager
    def lent(self, put_in: Callable[[], None]) -> Iterator[None]:
        """Have the average in for a while: the one that was taken out for the moment, or what `put_in` puts in."""
        # An evaluation may save: the average was taken out for that, and must be in again after it.
        was_beside = self.has_average
        self.exchange(average=True) if was_beside else put_in()
        try:
            yield
        finally:
            self.exchange(average=False) if was_beside else self.put_out()

    def stay_in(self) -> None:
        """Let the weights go that the average has taken the place of."""
        self._aside, self._exchanged = {}, set()
        self._modes.release()

    def exchange(self, *, average: bool) -> None:
        """Let the model hold the average, or its weights again; those that it holds already stay."""
        if average:
            self._modes.hold()
        with writing():
            # Values are exchanged, not tensors: optimizers, DDP and FSDP2 hold the parameters themselves.
            for name, value in {**self.live(), **self.norms}.items():
                if (name in self._exchanged) is average:
                    continue
                other, held = self._aside[name], value.clone()
                try:
                    value.copy_(other)
                finally:  # interrupted in between, the weights are not lost
                    other.copy_(held)
                    # By name: interrupted halfway, the next exchange moves back what was moved, and no other.
                    self._exchanged ^= {name}
        reshard_(self._model)  # FSDP2 would compute with the weights of before
        if not average:
            self._modes.release()

    def kept(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return values of the average, where their memory holds the model's weights those in the model."""
        live = self.live() if self._exchanged else {}
        # While exchanged, the average's memory holds the weights in training, and the model the average.
        borrowed = {name for name in self._exchanged if self._aside[name] is values.get(name)}
        return {name: live[name].detach() if name in borrowed else value for name, value in values.items()}


def is_trained(parameter: Tensor) -> bool:
    """Return True if a parameter is one to average: trainable and not an integer."""
    return parameter.requires_grad and (parameter.is_floating_point() or parameter.is_complex())


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Allow writing into weights, and make tensors that may be written later: Lightning validates in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class WeightAverage(Technique):
    """Averages the trained parameters and the statistics of batch norms after steps that were applied.

    Checkpoints to go on from hold the weights in training, and the average beside them. Validation, saved models and
    the end of training have the average: weights and average change places in the model, tensor by tensor, and back,
    whatever happens in between. Under FSDP2 each process averages its own part.

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

    key: ClassVar[str] = "average"
    replaces_weights = True
    config: AverageConfig

    def __init__(self, config: AverageConfig) -> None:
        super().__init__(config)
        self._running = self._new()
        self._model: nn.Module | None = None
        self._swapped = SwappedWeights(nn.Module())
        self._trained: list[Tensor] = []
        """Parameters that trained when the run began: half of them may be frozen while the other half has its turn."""
        self._estimated: dict[str, Tensor] = {}
        self._estimated_at = 0
        """After which update the norms were estimated."""
        self._is_lent = self._is_over = False
        self._gathered: RunningAverage | None = None
        self._merged: dict[str, Tensor] = {}
        self._first = self._projection_changes = 0
        self._told: dict[str, Any] = {}
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
            raise MatchError("average", rule, "unfreeze what is to be trained")
        refuse_no_norms("average", self.config.bn_batches, model)
        self._model = model
        return trained(model)

    def plan(self, context: Context) -> Plan:
        """Return when the average takes in weights for the first time."""
        config = self.config
        # Step 0 has no weights of a step: the first update is after `every` steps.
        self._first = context.resolve(config.start, "average.begin") or config.every
        if context.total_steps is not None and self._first > context.total_steps:
            got = f"got step {self._first} from begin {config.start!r} and every {config.every}"
            rule = f"first update must come within the {context.total_steps} steps of this run, {got}"
            raise ConfigError("average", rule, "begin earlier")
        first = f"first weights in the average ({config.kind}), more {every(config.every)}"
        return Plan(
            [(self._first, first), (None, "the model holds the average, if it was updated")],
            "" if self._running.num_updates else f"no weights in the average yet, the first at step {self._first}",
            guards=self._swapped.parameters if self._running.kept else {},
            looks_at_batches=bool(config.bn_batches),  # statistics of batch norms are estimated for the average
        )

    def begin(self, context: Context, state: Mapping[str, Any] | None) -> None:
        """Resolve `begin` and put a saved average back."""
        self.plan(context)
        # Those that train now, though layers may be frozen later.
        self._trained = [one for one in filter(is_trained, context.model.parameters()) if one not in context.unheld]
        if state is not None:
            self._restore(state, context)

    # -- one step

    def after_step(self, context: Context, applied: bool) -> None:
        """Take the new weights into the average if that is due, and prune it when they are."""
        if not applied:
            return
        if self._running.kept and self._swapped.is_short():
            # Unfrozen since: the value of now, one step after the frozen one, stands for those of earlier updates.
            self._swapped = SwappedWeights(context.model, self._swapped.parameters.values(), context.modes)
            self._running.add(context.in_full_precision(self._swapped.live()))
        is_due = context.step >= self._first and (context.step - self._first) % self.config.every == 0
        if is_due:
            self._update(context)
        # Pruned or clustered weights: the average of masked weights has other zeros where masks have changed, so the
        # newest projection is applied to it, at each update and at each change of the projection.
        if context.projections and (is_due or context.projection_changes != self._projection_changes):
            for kept in self._running.kept:
                context.project({parameter: kept[name] for name, parameter in self._swapped.parameters.items()})
        self._projection_changes = context.projection_changes

    def _update(self, context: Context) -> None:
        if not self._running.kept:
            # At the first update and not before: layers may be replaced or frozen until then.
            self._swapped = SwappedWeights(context.model, self._trained, context.modes)
        self._running.update(context.in_full_precision(self._swapped.live()))

    # -- in the weights' place

    @contextlib.contextmanager
    def swapped(self, context: Context, purpose: Purpose) -> Iterator[None]:
        """Have in the model what is validated, saved or gone on from: the average, or the weights in training."""
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
                f"efftrain: average: validation sees the weights in training, as no average begins before step "
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
        # A checkpoint to go on from holds the weights in training; what a user saves holds the average.
        if swapped.is_in and not baked:
            swapped.exchange(average=False)
        elif baked and not swapped.is_in:
            self._put_in()
            self._is_lent = True
        # Sharded: gathered now, as a state dict is asked of the main process alone.
        if not baked and any(hasattr(parameter, "device_mesh") for parameter in swapped.parameters.values()):
            self._gathered = self._new()
            self._gathered.kept = [
                {name: whole_of(value, swapped.parameters.get(name)).cpu() for name, value in kept.items()}
                for kept in self._running.kept
            ]
            self._merged = {key: whole(value).detach().cpu() for key, value in self._merge().items()}

    def _merge(self, keys: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return weights that the model has not as parameters, but adapters of the average are merged into."""
        swapped, model = self._swapped, cast(nn.Module, self._model)
        keys = model.state_dict().keys() - swapped.own_names().keys() if keys is None else set(keys)
        if not keys:
            return {}
        # The merge is that of the average's adapters: they have to be in the model while its state dict is made.
        with swapped.lent(self._put_in):
            found = {key: value for key, value in model.state_dict().items() if key in keys}
            return {key: value.clone() for key, value in found.items() if isinstance(value, Tensor)}

    def _put_in(self) -> None:
        self._swapped.put_in(self._running, self._estimates())

    def _estimates(self) -> dict[str, Tensor]:
        # Estimates belong to one average: after the next update they are stale.
        return self._estimated if self._estimated_at == self._running.num_updates else {}

    def _settle_norms(self, context: Context) -> None:
        """Let every process have the same statistics of batch norms for the average that is in the model."""
        norms = self._swapped.norms
        # Once an average, not once a validation: batches cost a forward each.
        if self.config.bn_batches and not self._estimates():
            estimate_norms_(context.model, context.services.calibrate, self.config.bn_batches)
            with writing():
                self._estimated = {name: buffer.clone() for name, buffer in norms.items()}
            self._estimated_at = self._running.num_updates
        for buffer in norms.values():
            broadcast_(buffer)  # under DDP the first process's are the model's

    # -- end

    def finish(self, context: Context) -> None:
        """Leave the average in the model; without one the weights stay, and a line says so."""
        self._is_over = True
        running = self._running
        if not running.kept:
            context.services.say("efftrain: average: it was never updated, so the model holds the weights in training")
            return
        swapped = self._swapped
        context.unvalidated |= not self.config.evaluate
        self._told |= self._size()
        with writing():
            live = swapped.live()
            self._told["distance"] = _distance(live, {name: running.average(name) for name in swapped.parameters})
            # Before `weights_replaced`: this lets others (qat) estimate ranges of the new weights.
            self._put_in()
            norms = {name: buffer.clone() for name, buffer in swapped.norms.items()}
            context.weights_replaced()
            for name, buffer in norms.items():  # ranges are estimated in train mode
                swapped.norms[name].copy_(buffer)
            self._settle_norms(context)
        swapped.stay_in()
        running.kept = []

    def claims(self, context: Context) -> Mapping[str, Claim]:
        """Return that parameters stay what the average has become, masks and quantisers of the recipe included."""
        names = [plain_name(name) for name, _ in context.model.named_parameters()]
        return dict.fromkeys(names if self._running.num_updates else [], Same())

    def _detach(self) -> None:
        """Leave the weights in training in the model, if the run was cut short."""
        self._swapped.put_out()
        self._model, self._swapped, self._trained = None, SwappedWeights(nn.Module()), []

    def bake(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the average in place of the weights, if there is one and it is not in the model already."""
        if self._model is None or not self._running.kept or self._swapped.is_in:
            return state_dict
        if any(hasattr(value, "device_mesh") for value in state_dict.values()):
            return state_dict  # each process saves its parts: a checkpoint to go on from
        averages, own, baked = self._gathered or self._running, self._swapped.own_names(), dict(state_dict)
        for key, value in state_dict.items():
            name = own.get(key, "")
            # A tied weight has a name of its own for each key; `own_names` leads all of them to the average's.
            if name in self._estimates():
                baked[key] = self._estimates()[name]
            elif name in averages.kept[0]:
                baked[key] = averages.average(name).to(value.dtype)
        # adapters are merged into weights that the model has not as parameters
        merged = [key for key, value in state_dict.items() if isinstance(value, Tensor) and key not in own]
        found = self._merge(merged) if self._gathered is None else self._merged
        return baked | {key: found[key].to(baked[key]) for key in merged}

    # -- saved state

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept, whole tensors by name, and statistics that were estimated for it."""
        kept = (self._gathered or self._running).kept
        return {
            "kind": self.config.kind,
            "updates": self._running.num_updates,
            "kept": [self._swapped.kept(values) for values in kept],
            "norms": self._estimates(),
            "validations": dict(self._validations),
        }

    def _restore(self, state: Mapping[str, Any], context: Context) -> None:
        for name, count in state.get("validations", {}).items():  # those since an earlier checkpoint stay counted
            self._validations[name] = max(self._validations[name], int(count))
        try:
            kind, updates, kept, norms = state["kind"], int(state["updates"]), list(state["kept"]), state["norms"]
            # A larger k than now: the newest copies stay.
            kept = kept[-self.config.k :]
            shapes = {name: tensor.shape for values in kept for name, tensor in values.items()}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError("average", f"state must be one that average saved, got {error!r}") from error
        # With the layers that were frozen since: the best checkpoint may be of an earlier step.
        known = [value for name, value in context.model.named_parameters() if name in shapes]
        swapped = SwappedWeights(context.model, known, context.modes)
        like = {**swapped.parameters, **swapped.norms}
        odd = sorted(set(shapes) - set(swapped.live()))
        odd = odd or sorted(name for name, shape in shapes.items() if shape != like[name].shape)
        if odd or kind != self.config.kind:
            rule = f"be of kind {self.config.kind}, got {kind}"
            if kind == self.config.kind:
                rule = f"be of this model's parameters, got a difference at {odd[0]}"
            remedy = "resume with the model and recipe that wrote the checkpoint"
            raise CheckpointError("average", f"saved average must {rule}", remedy)
        self._swapped = swapped
        # An empty state: the count begins anew, as warm-up and the mean go by it.
        self._running.num_updates = updates if kept else 0
        self._running.kept = [
            {name: part_of(tensor.to(like[name].device, copy=True), like[name]) for name, tensor in values.items()}
            for values in kept
        ]
        self._running.add(context.in_full_precision(swapped.live()))  # what trains since the checkpoint
        self._estimated = {name: tensor.to(like[name].device, copy=True) for name, tensor in norms.items()}
        self._estimated_at = updates

    # -- figures

    def figures(self) -> dict[str, float]:
        """Return ``average/updates``, the number of weights that the average has seen."""
        return {"average/updates": float(self._running.num_updates)}

    def report(self) -> dict[str, Any]:
        """Return what was averaged how often, its memory, what validations saw, and how far it is from the weights."""
        return {
            "kind": self.config.kind,
            "updates": self._running.num_updates,
            "first_update_step": self._first,
            **self._size(),
            **self._validations,
            **self._told,
        }

    @staticmethod
    def summary(report: Mapping[str, Any]) -> list[str]:
        """Return a report in plain sentences, the result first. It may have been read from a file."""
        kinds = {"ema": "A moving average", "swa": "An average", "last_k": "An average of the last copies"}
        if not report["updates"]:
            return [f"Averaged nothing yet: averaging begins at step {report['first_update_step']:,}."]
        told = f"{kinds.get(report['kind'], 'An average')} of {amount(report['elements'])} weights"
        updates = counted(report["updates"], "update")
        final = (
            []
            if report.get("distance") is None
            else [f"It replaced the weights of the last step, which differ by {share_text(report['distance'])}."]
        )
        return [
            f"{told} had {updates} since step {report['first_update_step']:,} and took {size_text(report['bytes'])}.",
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
    """Return ``‖average − weights‖ / ‖weights‖`` over all parameters, of all processes; all must call it."""
    # float64 sums of squares, added over processes before the root: shards are parts of one vector.
    apart = sum(float((mean - live[name]).double().square().sum()) for name, mean in averages.items())
    size = sum(float(live[name].double().square().sum()) for name in averages)
    device = next(iter(averages.values())).device
    apart, size = all_reduce_(torch.tensor([apart, size], dtype=torch.float64, device=device), "sum").tolist()
    return (apart / size) ** 0.5 if size else 0.0
