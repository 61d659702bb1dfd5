"""Distillation as a technique: a hook sees the student's batch, the loss verb asks the teacher about it."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shared_core.config.training_time import ParsedPosition, Position, parse_position
from shared_core.distillation.comparison import Comparison, StudentBatch
from shared_core.distillation.config import DistillConfig
from shared_core.distillation.feature_pairs import AttentionPairs, HiddenPairs, WatchedPairs
from shared_core.distillation.forward_capture import ForwardHook, is_causal, named_inputs
from shared_core.distillation.layer_init import copy_layers_
from shared_core.distillation.mutual import MutualComparison, Peers, make_peers, mix
from shared_core.distillation.opening import open_comparison
from shared_core.distillation.outputs import find_logits
from shared_core.distillation.unlabelled import (
    ExampleCounts,
    is_per_token,
    labelled_part,
    positions_ahead,
    split_batch,
    zero_of,
)
from shared_core.distributed.collectives import any_rank
from shared_core.engine.preview import Event, Touched
from shared_core.engine.technique import Context, Technique
from shared_core.errors import ConfigError, MatchError, TrainingError, nearest

# Students that began with their teacher's layers, and what was copied: training on must not begin again.
_BEGUN: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()


class Distillation(Technique):
    """Adds the soft term to the task loss: ``L = alpha * task + (1 - alpha) * T² * KL(teacher || student)``.

    A teacher never becomes part of the model: it is in no state dict and no optimizer, always in eval mode,
    and its parameters are set to ``requires_grad=False``. It runs once a micro-batch, under the autocast that
    the loss verb is called in. Of several forwards before one loss, the last is distilled. Hidden pairs add their own
    term, beside that mixture.

    Args:
        config: The options.
    """

    key = "distill"
    weighs_loss = True
    config: DistillConfig

    def __init__(self, config: DistillConfig) -> None:
        super().__init__(config)
        self.labels: Tensor | None = None
        """Labels of the next loss, where a trainer takes them out of the model's inputs; used once."""
        self.unlabelled: Tensor | None = None
        """Which examples of the next loss are unlabelled, ``(B,)`` bool, where that is told; used once."""
        self._examples = ExampleCounts()
        self._comparison: Comparison | None = None
        self._pairs: dict[str, WatchedPairs] = {}
        self._peers: Peers | None = None
        self._student: nn.Module | None = None
        self._hook = ForwardHook()
        self._handle: RemovableHandle | None = None
        self._first, self._last = 0, math.inf
        self.is_causal = False
        """Whether the student's labels are one position ahead; known from `attach` on."""
        self._batches = 0
        self._positions: Tensor | int = 0
        self._soft: tuple[Tensor, Tensor] | None = None
        self._task: Tensor | None = None
        self._pair_losses: dict[str, Tensor] = {}
        self._on_the_way: dict[str, float] = {}
        self._saved_teachers: Mapping[str, Any] = {}
        self._saved_pairs: dict[str, Any] = {}
        self._told: dict[str, Any] = {}

    @property
    def peers(self) -> list[nn.Module]:
        """The other students of mutual learning, also after the run."""
        return self._peers.modules if self._peers is not None else []

    def one_by_one(self, clip: Callable[[], Any]) -> None:
        """Call `clip` once for each student while no other has gradients, for a norm over an optimizer's parameters."""
        if self._peers is not None:
            self._peers.one_by_one(clip)

    def before_attach(self, model: nn.Module, context: Context) -> None:
        """Make the other students: no technique has touched the model that they are copies of."""
        if self.config.mutual:
            self._peers = make_peers(self.config, model, self._find_student(model), context)

    def attach(self, model: nn.Module, context: Context) -> None:
        """Load and freeze the teacher, compare it with the student, and hook the student's forward."""
        self.detach(model)
        student = self._find_student(model)
        if self._peers is not None:
            comparison: Comparison = MutualComparison(self.config, model, self._peers, context)
        else:
            comparison = open_comparison(self.config, model, student, context)
        self._student, self._comparison = student, comparison
        self._told = self._comparison.told
        self.is_causal = is_causal(student) if self.config.causal is None else self.config.causal
        if self.config.unlabelled_field and getattr(getattr(student, "config", None), "is_encoder_decoder", False):
            raise ConfigError(
                "distill: unlabelled_field must be none for an encoder-decoder, which is fed its labels, got "
                f"{self.config.unlabelled_field!r}; give the teacher's texts as labels"
            )
        self._watch_pairs(student, self._comparison.teachers.modules, context)
        self._handle = student.register_forward_hook(self._hook, with_kwargs=True)

    def _watch_pairs(self, student: nn.Module, teachers: list[nn.Module], context: Context) -> None:
        config = self.config
        if config.init_layers is not None:
            if student not in _BEGUN:
                _BEGUN[student] = copy_layers_(student, teachers[0], config.init_layers)
            self._told["init_layers"] = _BEGUN[student]
        if config.hidden:
            kind, generator = config.hidden_loss, context.generator
            self._pairs["hidden"] = HiddenPairs(student, teachers[0], config.pairs("hidden"), kind, generator)
        if config.attention:
            self._pairs["attention"] = AttentionPairs(student, teachers[0], config.pairs("attention"))
        for name, pairs in self._pairs.items():
            self._told[name] = [f"{ours}={theirs}" for ours, theirs in pairs.pairs]

    def detach(self, model: nn.Module) -> None:
        """Take the hook off the student and release the teacher."""
        if self._handle is not None:
            self._handle.remove()
        self._saved_pairs = self._pair_states()
        for pairs in self._pairs.values():
            pairs.detach()
        self._pairs = {}
        if self._comparison is not None:
            teachers = self._comparison.teachers
            self._saved_teachers = teachers.state_dict() if teachers.is_readable else {}
            self._comparison.detach()
        self._handle = self._student = self._comparison = self.labels = self.unlabelled = None
        self._hook.active = False
        self._hook.take()

    def begin(self, context: Context) -> None:
        """Resolve the range and bring the teacher to the student's device."""
        self._first, self._last = self._range(context)
        self._switch(context)
        if self._student is not None and self._comparison is not None:
            for pairs in self._pairs.values():
                pairs.check_shards(self._student)
            self._comparison.teachers.shard_like(self._student)
            self._comparison.teachers.follow(self._student)
            self._comparison.begin(context)
            if self._saved_teachers:
                self._comparison.teachers.load_state_dict(self._saved_teachers, self._student)
        for name, pairs in self._pairs.items():
            if self._saved_pairs.get(name):
                pairs.load_state_dict(self._saved_pairs[name])
        self._saved_teachers, self._saved_pairs = {}, {}

    def loss(self, task_loss: Tensor, context: Context) -> Tensor:
        """Return the mixed loss for the latest forward of the student, the task loss outside begin..end."""
        forward, labels, self.labels = self._hook.take(), self.labels, None
        told, self.unlabelled = self.unlabelled, None
        inputs = {} if forward is None or self._student is None else named_inputs(self._student, forward)
        labels = inputs.get("labels") if labels is None else labels
        task_loss = labelled_part(task_loss, labels, causal=self.is_causal)
        if not (active := self._is_active(context)) or not torch.is_grad_enabled():
            self._soft = self._soft if active else None  # what was last before the end is no figure of later steps
            return task_loss
        student, comparison = self._student, self._comparison
        if student is None or comparison is None or forward is None:
            raise TrainingError(
                "distill: the student's forward must run before the loss, in train mode and with gradients, "
                "and was not seen; set distill.student to the submodule that computes the logits, and call the "
                "module, not its forward method"
            )
        config = self.config
        if config.unlabelled_field and told is None:
            raise TrainingError(
                f"distill: unlabelled_field {config.unlabelled_field!r} must be told of every micro-batch, and was "
                "not; in a loop of your own call batch = session.techniques['distill'].prepare_batch(batch) before the "
                "student's forward"
            )
        temperature = self._at(context, config.temperature, config.temperature_end)
        batch = StudentBatch(student, forward, inputs, labels, self.is_causal, temperature, told)
        alpha = self._at(context, config.alpha, config.alpha_end)
        moving = {"alpha": (alpha, config.alpha_end), "temperature": (temperature, config.temperature_end)}
        self._on_the_way = {name: value for name, (value, end) in moving.items() if end is not None}
        with torch.set_grad_enabled(alpha != 1 or config.mutual):
            compared = comparison.compare(batch)
        total, count = compared.total, compared.count
        self._examples.add(labels, told, batch.inputs.get("attention_mask"), compared.mask, count)
        self._batches += 1
        self._positions = self._positions + (count if compared.mask is None else compared.mask.sum())
        self._soft, self._task = (total.detach(), count), task_loss.detach()
        mixed = mix(task_loss, context.normalise(total, count), alpha)
        mixed = comparison.join(mixed, task_loss, alpha, count, context)
        for name, pairs in self._pairs.items():
            term = pairs.loss(compared.mask, batch.inputs, context.normalise)
            self._pair_losses[name] = term.detach()
            mixed = mixed + getattr(config, f"{name}_weight") * term.to(mixed.device)
        return mixed

    def prepare_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch as the student may see it, and note for the next loss which of its examples are unlabelled.

        Args:
            batch: A mapping with ``labels``, or with none at all, and `unlabelled_field` if there is one. That key is
                taken out, and the labels of unlabelled examples become -100 (float ones NaN).

        Raises:
            ConfigError: If it does not hold the field, or that is not one bool for each example.
        """
        prepared, self.unlabelled = split_batch(batch, self.config.unlabelled_field)
        self.labels = prepared.get("labels")
        return prepared

    def positions_ahead(self, batch: Mapping[str, Any]) -> Tensor:
        """Return how many positions of a batch the soft term will count, before the student has seen it."""
        prepared, told = split_batch(batch, self.config.unlabelled_field)
        return positions_ahead(prepared, told, causal=self.is_causal, per_token=self._per_token)

    def unlabelled_task(self, output: Any) -> Tensor:
        """Return the task loss of a batch without labels: 0, connected to the student's output.

        Raises:
            TrainingError: If the logits are not what `positions_ahead` took them for.
        """
        latest = self._hook.latest
        if latest is not None:
            logits = find_logits(latest.output, self.config.logits, "student")
            if (logits.ndim > 2) != self._per_token:
                raise TrainingError(
                    f"distill: a batch must have labels where the student's class does not tell what its logits "
                    f"{tuple(logits.shape)} are of; give labels of -100, and unlabelled_field for sequences"
                )
        return zero_of(output)

    @property
    def _per_token(self) -> bool:
        return self._student is not None and is_per_token(self._student, causal=self.is_causal)

    def _at(self, context: Context, first: float, last: float | None) -> float:
        """Return what an option is at this step, on its way from begin to end."""
        if last is None:
            return first
        end = self._last if math.isfinite(self._last) else context.total_steps
        if end is None:
            raise ConfigError("distill: alpha_end and temperature_end need a run of known length, or an end in steps")
        return first + (last - first) * min(1.0, (context.step - self._first) / max(1.0, end - 1 - self._first))

    def after_optimizer_step(self, context: Context) -> None:
        """Let hooks and an average follow; raise `TrainingError` if no loss of the run had a soft term in it."""
        trained = self._student.parameters() if self._student is not None and self._hook.active else ()
        if not self._batches and any(parameter.grad is not None for parameter in trained):
            raise TrainingError(
                "distill: each loss must come from session.loss (Trainer.compute_loss), got a step without; call it"
            )
        self._switch(context)
        if self._student is not None and self._comparison is not None:
            self._comparison.teachers.after_step(self._student)

    def skipped_optimizer_step(self, context: Context) -> None:
        """The gradients of this step are of no use to anyone."""
        if self._peers is not None:
            self._peers.drop_gradients()

    def _switch(self, context: Context) -> None:
        active = self._is_active(context)
        self._hook.active = active
        if self._comparison is not None:
            self._comparison.activate(active)
        for pairs in self._pairs.values():
            pairs.activate(active)

    def evaluating(self, context: Context) -> contextlib.AbstractContextManager[None]:
        """Release the last batch."""
        self._hook.take()
        self.labels = self.unlabelled = None
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def saving(self, context: Context, baked: bool) -> Iterator[None]:
        """Hold an average that is sharded in whole, so that saving needs no other process."""
        teachers = self._comparison.teachers if self._comparison is not None else None
        if teachers is not None:
            teachers.gather()
        try:
            yield
        finally:
            if teachers is not None:
                teachers.release()

    def finish(self, model: nn.Module, context: Context) -> None:
        """Detach: the student is a plain model already."""
        field, seen = self.config.unlabelled_field, self._examples.state_dict().get("unlabelled_examples", 0)
        device = next((parameter.device for parameter in model.parameters()), "cpu")
        if field and not any_rank(seen > 0, device):
            self._told["unlabelled_field"] = f"{field} called not one example unlabelled"
            context.services.say(f"distill: {self._told['unlabelled_field']}; every one was trained on its label")
        if self._comparison is not None:
            self._comparison.teachers.gather()  # its state stays readable
        self.detach(model)

    def write(self, folder: Path) -> None:
        """Write the other students' weights; the student is the user's model."""
        if self._peers is not None:
            self._peers.write(folder)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, projections, and an average; a frozen teacher is not part of a checkpoint."""
        learned = {
            "teachers": self._comparison.teachers.state_dict() if self._comparison else dict(self._saved_teachers),
            "pairs": self._pair_states(),
        }
        counted = {"batches": self._batches, "positions": int(self._positions)} | self._examples.state_dict()
        return counted | {name: tensors for name, tensors in learned.items() if tensors}

    def _pair_states(self) -> dict[str, Any]:
        states = {name: pairs.state_dict() for name, pairs in self._pairs.items()}
        return self._saved_pairs | {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counters."""
        self._batches, self._positions = int(state["batches"]), int(state["positions"])
        self._examples.load_state_dict(state)
        self._saved_teachers, self._saved_pairs = state.get("teachers", {}), dict(state.get("pairs", {}))

    def metrics(self) -> dict[str, float]:
        """Return the latest micro-batch's task loss, its soft term with T² over positions, and options that move."""
        if self._soft is None or self._task is None:
            return {}
        total, count = self._soft
        return {
            "distill/soft_loss": float(total / count.clamp(min=1)),
            "distill/task_loss": float(self._task),
            **{f"distill/{name}_loss": float(term) for name, term in self._pair_losses.items()},
            **{f"distill/{name}": value for name, value in self._on_the_way.items()},
            **self._share(),
            **(self._comparison.metrics() if self._comparison else {}),
        }

    def _share(self) -> dict[str, float]:
        latest = self._examples.latest if self.config.unlabelled_field else None
        return {} if latest is None else {"distill/unlabelled_share": float(latest.float().mean())}

    def report(self) -> dict[str, Any]:
        """Return who taught, how, and how much."""
        examples = self._examples.state_dict()
        weak = self.config.unlabelled_field or examples.get("unlabelled_examples")
        return {
            "divergence": self.config.divergence,
            **self._told,
            "temperature": self.config.temperature,
            "alpha": self.config.alpha,
            "batches": self._batches,
            "positions": int(self._positions),
            **(examples if weak else {}),
        }

    def _find_student(self, model: nn.Module) -> nn.Module:
        name = self.config.student
        if name is None:
            return model
        modules: dict[str, nn.Module] = dict(model.named_modules())
        if name not in modules:
            raise MatchError(
                f"distill: student must name a submodule, got {name!r}{nearest(name, filter(None, modules))}"
            )
        return modules[name]

    def preview(self, model: nn.Module, context: Context) -> Touched:
        """Return what is distilled; load no teacher."""
        student = self._find_student(model)
        return Touched.modules({self.config.student or type(model).__name__: student}, what="student")

    def timeline(self, context: Context) -> list[Event]:
        """Return when the soft term joins the loss, and when it leaves."""
        first, last = self._range(context)
        told: list[Event] = [(first, f"soft term on, alpha {self.config.alpha:g}, T {self.config.temperature:g}")]
        return [*told, (int(last), "soft term off")] if last < math.inf else told

    def _is_active(self, context: Context) -> bool:
        return self._first <= context.step < self._last

    def _range(self, context: Context) -> tuple[int, float]:
        begin, end = self.config.begin, self.config.end
        if context.total_steps is not None:
            context.resolve_range(begin, end, "distill")
        # the edges of the run need no length, so that an endless loader can be distilled on
        first = 0 if _is_fraction(begin, 0.0) else context.resolve(begin, "distill.begin")
        last = math.inf if _is_fraction(end, 1.0) else context.resolve(end, "distill.end")
        if last <= first:
            raise ConfigError(
                f"distill: end must lie after begin, got begin {begin!r} = step {first}, end {end!r} = step {last}"
            )
        return first, last


def _is_fraction(position: Position, value: float) -> bool:
    return parse_position(position) == ParsedPosition(value, "fraction")
