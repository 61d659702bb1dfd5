"""The running average of a run's weights: beside them while they train, in their place for validation, at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from shared_core.errors import CheckpointError, ConfigError, MatchError, TrainingError
from shared_core.ranks import broadcast_, local_part
from shared_core.sharded import part_of, whole_of
from shared_core.soup.average.config import AverageConfig
from shared_core.soup.average.running import RunningAverage
from shared_core.soup.batch_norms import batch_norms, estimate_norms_
from shared_core.technique import Context, Technique

_STATISTICS = ("running_mean", "running_var")


class WeightAverage(Technique):
    """Averages the trained parameters and the statistics of batch norms after steps that were applied.

    Checkpoints to go on from hold the weights in training, and the average beside them. Validation, saved models and
    the end of training have the average: weights and average change places in the model, tensor by tensor, and back,
    whatever happens in between. Under FSDP2 each process averages its own part.

    Args:
        config: The options.

    Example:
        >>> from shared_core.recipe import Recipe
        >>> from shared_core.session import Session
        >>> model = nn.ParameterList([nn.Parameter(torch.zeros(1))])
        >>> session = Session(Recipe.from_dict({"average": {"kind": "swa", "begin": 1}}))
        >>> session.attach(model)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> session.begin([optimizer], total_steps=3)
        >>> for _ in range(3):
        ...     model[0].grad = torch.full((1,), -2.0)
        ...     session.before_optimizer_step()
        ...     optimizer.step()
        ...     _ = session.after_optimizer_step()
        >>> with session.evaluating():
        ...     model[0].item()
        4.0
        >>> model[0].item()
        6.0
        >>> session.finish()
        >>> model[0].item()
        4.0
    """

    key: ClassVar[str] = "average"
    config: AverageConfig

    def __init__(self, config: AverageConfig) -> None:
        super().__init__(config)
        self._running = self._new()
        self._model: nn.Module = nn.Module()
        self._parameters: dict[str, nn.Parameter] = {}
        self._norms: dict[str, Tensor] = {}
        """Mean, variance and count of batches of every batch norm; the count is not averaged."""
        self._estimated: dict[str, Tensor] = {}
        self._estimated_at = 0
        """After which update the norms were estimated."""
        self._aside: dict[str, Tensor] = {}
        """While the average is in the model: what was there. For tensors of the average's dtype it is the average's
        own memory, otherwise a copy."""
        self._is_paused = self._is_lent = self._is_over = False
        self._gathered: RunningAverage | None = None
        self._saved: Mapping[str, Any] | None = None
        self._first = 0
        self._told: dict[str, Any] = {"validations": {"average": 0, "weights": 0}}

    def _new(self) -> RunningAverage:
        config = self.config
        return RunningAverage(config.kind, decay=config.decay, warmup=config.warmup, k=config.k)

    # -- start

    def attach(self, model: nn.Module, context: Context) -> None:
        """Check that there is something to average.

        Raises:
            MatchError: If no parameter is trained, or `bn_batches` is given without BatchNorm.
        """
        if not any(map(_is_trained, model.parameters())):
            raise MatchError("average: model must have a trainable parameter, got none; unfreeze what is to be trained")
        if self.config.bn_batches and not batch_norms(model):
            raise MatchError(
                f"average: bn_batches must be 0 for a model without BatchNorm, got {self.config.bn_batches}; remove it"
            )
        self._model = model

    def begin(self, context: Context) -> None:
        """Resolve `begin` and put a saved average back.

        Raises:
            ConfigError: If the average would never be updated.
            CheckpointError: If a saved average is of another kind, or of other weights.
        """
        config = self.config
        self._first, _ = context.resolve_range(config.start, config.start, "average")
        self._first = self._first or config.every
        if context.total_steps is not None and self._first > context.total_steps:
            raise ConfigError(
                f"average: every must be at most the {context.total_steps} steps of this run, got {config.every}; "
                "the average would never be updated"
            )
        saved, self._saved = self._saved, None
        if saved is not None:
            self._restore(saved)

    def _find(self) -> None:
        self._parameters = {name: value for name, value in self._model.named_parameters() if _is_trained(value)}
        self._norms = {
            name: buffer
            for name, buffer in self._model.named_buffers()
            if name.rpartition(".")[2] in (*_STATISTICS, "num_batches_tracked")
        }

    def _live(self) -> dict[str, Tensor]:
        """Return what is averaged, as it is in the model; of sharded parameters this process's part."""
        statistics = {name: buffer for name, buffer in self._norms.items() if name.endswith(_STATISTICS)}
        return {name: local_part(parameter.detach()) for name, parameter in self._parameters.items()} | statistics

    # -- one step

    def after_optimizer_step(self, context: Context) -> None:
        """Take the new weights into the average if that is due.

        Raises:
            TrainingError: If parameters became trainable, or no longer are, since the first update.
        """
        if context.step < self._first or (context.step - self._first) % self.config.every:
            return
        if not self._parameters:
            self._find()
        elif len(self._parameters) != sum(map(_is_trained, self._model.parameters())):
            raise TrainingError(
                f"average: the same {len(self._parameters)} parameters must be trainable from the first update on, got "
                f"{sum(map(_is_trained, self._model.parameters()))}; begin after the last (un)freezing"
            )
        with torch.no_grad():
            self._running.update(self._live())
            for kept in self._running.kept:
                context.constrain({parameter: kept[name] for name, parameter in self._parameters.items()})

    # -- in the weights' place

    def before_eval(self, context: Context) -> None:
        """Put the average into the model, if there is one yet."""
        if not self.config.evaluate or self._is_over:
            return
        found = "average" if self._running.kept else "weights"
        if found == "weights" and not self._told["validations"][found]:
            context.services.say(
                f"efftrain: average: validation sees the weights in training, as no average begins before step "
                f"{self._first}"
            )
        self._told["validations"][found] += 1
        if self._running.kept:
            self._put_in()
            try:
                self._settle_norms(context)
            except BaseException:
                self._put_out()
                raise

    def after_eval(self, context: Context) -> None:
        """Put the weights back."""
        self._put_out()

    def before_save(self, context: Context, baked: bool) -> None:
        """See to it that the model holds what is to be saved, and gather what is sharded: every process must call."""
        if self._is_over or not self._running.kept:
            return
        if self._aside and not baked:
            self._exchange()
            self._is_paused = True
        elif baked and not self._aside:
            self._put_in()
            self._is_lent = True
        if not baked and any(hasattr(parameter, "device_mesh") for parameter in self._parameters.values()):
            self._gathered = self._new()
            self._gathered.kept = [
                {name: whole_of(value, self._parameters.get(name)).cpu() for name, value in kept.items()}
                for kept in self._running.kept
            ]

    def after_save(self, context: Context) -> None:
        """Undo `before_save`."""
        self._gathered = None
        if self._is_lent:
            self._put_out()
        if self._is_paused:
            self._exchange()
        self._is_paused = self._is_lent = False

    def _put_in(self) -> None:
        with _writing():
            for name, value in self._live().items():
                self._aside[name] = self._running.average(name)
                if name in self._norms or self._aside[name].dtype != value.dtype:
                    self._aside[name] = self._aside[name].to(value.dtype, copy=True)
            for name, buffer in self._norms.items():
                self._aside.setdefault(name, buffer.clone())
            for name, value in self._estimates().items():
                self._aside[name].copy_(value)
        self._exchange()

    def _put_out(self) -> None:
        if self._aside:
            if not self._is_paused:
                self._exchange()
            self._aside, self._is_paused = {}, False

    def _exchange(self) -> None:
        with _writing():
            for name, value in {**self._live(), **self._norms}.items():
                other = self._aside[name]
                held = value.clone()
                value.copy_(other)
                other.copy_(held)
        self._reshard()

    def _reshard(self) -> None:
        # FSDP2 keeps the outermost module gathered after forward, and would compute with the weights of before
        for module in self._model.modules():
            if hasattr(module, "set_reshard_after_forward"):
                cast(Any, module).reshard()

    def _estimates(self) -> dict[str, Tensor]:
        return self._estimated if self._estimated_at == self._running.num_updates else {}

    def _settle_norms(self, context: Context) -> None:
        """Let every process have the same statistics of batch norms for the average that is in the model."""
        if self.config.bn_batches and not self._estimates():
            estimate_norms_(self._model, context.services.calibrate, self.config.bn_batches)
            self._estimated = {name: buffer.clone() for name, buffer in self._norms.items()}
            self._estimated_at = self._running.num_updates
        for buffer in self._norms.values():
            broadcast_(buffer)  # under DDP the first process's are the model's

    # -- end

    def finish(self, model: nn.Module, context: Context) -> None:
        """Leave the average in the model; without one the weights stay, and a line says so."""
        self._is_over = True
        running = self._running
        if not running.kept:
            context.services.say("efftrain: average: it was never updated, so the model holds the weights in training")
            return
        self._told["bytes"] = running.nbytes
        with _writing():
            live = self._live()
            self._told["distance"] = _distance(live, {name: running.average(name) for name in self._parameters})
            self._put_in()
            norms = {name: buffer.clone() for name, buffer in self._norms.items()}
            context.weights_replaced()
            for name, buffer in norms.items():  # ranges are estimated in train mode
                self._norms[name].copy_(buffer)
            self._settle_norms(context)
        self._aside, running.kept = {}, []

    def detach(self, model: nn.Module) -> None:
        """Leave the weights in training in the model, if the run was cut short."""
        self._put_out()
        self._model, self._parameters, self._norms = nn.Module(), {}, {}

    def bake(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the average in place of the weights, if there is one and it is not in the model already."""
        if not self._running.kept or (self._aside and not self._is_paused):
            return state_dict
        averages, baked = self._gathered or self._running, dict(state_dict)
        names = {id(value): name for name, value in {**self._parameters, **self._norms}.items()}
        model = self._model
        own = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
        for key in own.keys() & state_dict.keys():
            name = names.get(id(own[key]))
            if name in averages.kept[0]:
                average = self._estimates().get(name, averages.average(name))
                baked[key] = average.to(state_dict[key].dtype)
        # adapters are merged into weights that the model has not as parameters
        merged = [key for key, value in state_dict.items() if isinstance(value, Tensor) and key not in own]
        if merged:
            self._put_in()
            try:
                baked |= {key: value.clone() for key, value in model.state_dict().items() if key in merged}
            finally:
                self._put_out()
        return baked

    # -- saved state

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept, whole tensors by name, and statistics that were estimated for it."""
        kept = (self._gathered or self._running).kept
        if self._aside and not self._is_paused and kept:
            live = self._live()
            kept = [{name: live[name] if self._aside[name] is value else value for name, value in kept[0].items()}]
        return {
            "kind": self.config.kind,
            "updates": self._running.num_updates,
            "kept": kept if self.config.kind == "last_k" else kept[:1],
            "norms": self._estimates(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep a saved state until `begin`."""
        self._saved = dict(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._find()
        like = {**self._parameters, **self._norms}
        try:
            kind, updates, kept, norms = state["kind"], int(state["updates"]), list(state["kept"]), state["norms"]
            shapes = {name: tensor.shape for values in kept for name, tensor in values.items()}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(f"average: state must be one that average saved, got {error!r}") from error
        if kind != self.config.kind:
            raise CheckpointError(
                f"average: saved average must be of kind {self.config.kind}, got {kind}; resume with that kind"
            )
        odd = sorted(set(shapes) ^ set(self._live())) if kept else []
        odd = odd or sorted(name for name, shape in shapes.items() if shape != like[name].shape)
        if odd:
            raise CheckpointError(
                f"average: saved average must be of the parameters trained now, got a difference at {odd[0]}; resume "
                "with the model and recipe that wrote the checkpoint"
            )
        self._running.num_updates = updates if kept else 0
        self._running.kept = [
            {name: part_of(tensor.to(like[name].device, copy=True), like[name]) for name, tensor in values.items()}
            for values in kept
        ]
        self._estimated = {name: tensor.to(like[name].device, copy=True) for name, tensor in norms.items()}
        self._estimated_at = updates
        if not kept:
            self._parameters, self._norms = {}, {}

    # -- figures

    def metrics(self) -> dict[str, float]:
        """Return ``average/updates``, the number of weights that the average has seen."""
        return {"average/updates": float(self._running.num_updates)}

    def report(self) -> dict[str, Any]:
        """Return what was averaged how often, its memory, what validations saw, and how far it is from the weights."""
        return {
            "kind": self.config.kind,
            "updates": self._running.num_updates,
            "first_update_step": self._first,
            "parameters": len(self._parameters),
            "elements": sum(parameter.numel() for parameter in self._parameters.values()),
            "norm_statistics": sum(name.endswith(_STATISTICS) for name in self._norms),
            "bytes": self._running.nbytes,
            **self._told,
        }


def _is_trained(parameter: Tensor) -> bool:
    return parameter.requires_grad and (parameter.is_floating_point() or parameter.is_complex())


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Allow writing into weights, and make tensors that may be written later: Lightning validates in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _distance(live: Mapping[str, Tensor], averages: Mapping[str, Tensor]) -> float:
    """Return ``‖average − weights‖ / ‖weights‖`` over all parameters."""
    apart = sum(float((mean - live[name]).double().square().sum()) for name, mean in averages.items())
    size = sum(float(live[name].double().square().sum()) for name in averages)
    return (apart / size) ** 0.5 if size else 0.0
