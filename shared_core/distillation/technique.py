"""Distillation as a technique: a hook records the student's batch, and `loss` runs the teacher on it.

`attach` chooses a `Comparison` of outputs (with a teacher, a cache, in chunks, or between students) and, if the options
ask for it, `WatchedPairs` of features.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shared_core.config.training_time import ParsedPosition, parse_position
from shared_core.distillation.comparison import Compared, Comparison, StudentBatch, mix, share_of
from shared_core.distillation.config import EMA, SELF, DistillConfig
from shared_core.distillation.feature_pairs import WatchedPairs, open_pairs
from shared_core.distillation.forward_capture import (
    ForwardHook,
    is_causal,
    labels_are_inputs,
    lacks_forward,
    models_inside,
    named_inputs,
    unseen,
)
from shared_core.distillation.layer_init import copy_layers_
from shared_core.distillation.mutual import Peers, make_peers
from shared_core.distillation.opening import open_comparison
from shared_core.distillation.outputs import find_logits
from shared_core.distillation.task_gradient import FusedHead, Task, TaskLoss, with_own_forward
from shared_core.distillation.teachers import StartingStudent
from shared_core.distillation.unlabeled import Examples, is_per_token, labeled_part, zero_of
from shared_core.engine.observers.micro_batches import StepMeans
from shared_core.engine.plan import Event, Plan, Touched
from shared_core.engine.technique import Context, Purpose, Technique
from shared_core.errors import ConfigError, MatchError, TrainingError, nearest
from shared_core.modules.calls import RunHook
from shared_core.printing import amount, counted

# Students with copied teacher layers, and what was copied. When training continues, they are not copied again.
_BEGUN: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()


class Distillation(Technique):
    """Adds the soft term to the task loss: ``L = alpha * task + (1 - alpha) * T² * KL(teacher || student)``.

    The teacher never becomes part of the model: it is in no state dict or optimizer, stays in eval mode, and its
    parameters are set to ``requires_grad=False``. It runs once per micro-batch, under the autocast that is active when
    `loss` is called. If the student runs several times before one loss, the last forward is distilled. Feature pairs
    add their own terms to this sum.

    Args:
        config: The options.
    """

    needs_window_mean = True
    config: DistillConfig

    def __init__(self, config: DistillConfig) -> None:
        super().__init__(config)
        self.labels: Tensor | None = None
        """Labels of the next loss, if the trainer removes them from the model's inputs; used once."""
        self.fuses_head = False
        """True if the student returns log-probabilities of the labels instead of logits; set before `attach`."""
        self.is_causal = False
        """True if position i predicts label i + 1; known after `attach`."""
        self._examples = Examples(config.unlabeled_field)
        self._schedule = Schedule(config)
        self._comparison: Comparison | None = None
        self._pairs: dict[str, WatchedPairs] = {}
        self._peers: Peers | None = None
        self._start: StartingStudent | None = None
        self._student: nn.Module | None = None
        self._hook = ForwardHook()
        self._fused: FusedHead | None = None
        self._handle: RemovableHandle | None = None
        self._batches = 0
        self._positions: Tensor | int = 0
        self._is_tried = False
        self._means = StepMeans()
        self._moving: dict[str, float] = {}
        self._saved_teachers: Mapping[str, Any] = {}
        self._saved_pairs: dict[str, Any] = {}
        self._report: dict[str, Any] = {}

    # -- start and end

    def before_attach(self, context: Context) -> None:
        """Copy the model for the other students, or as its own teacher, before any technique changes it."""
        if context.is_preview:
            return
        if self.config.mutual:
            self._peers = make_peers(self.config, context.model, self._find_student(context.model), context)
        elif self.config.teaching == SELF:
            self._start = StartingStudent(self._find_student(context.model), self.config.teacher_dtype)

    def attach(self, context: Context) -> Touched:
        """Load and freeze the teacher, compare it with the student, and hook the student's forward."""
        model = context.model
        context.undo.callback(self._detach)
        config, student = self.config, self._find_student(model)
        touched = Touched.modules({config.student or type(model).__name__: student}, what="student")
        if context.is_preview:
            return touched
        made = self._peers or self._start
        comparison = open_comparison(config, model, student, context, made, fuses_head=self.fuses_head)
        self._student, self._comparison = student, comparison
        self._report, teachers = comparison.report, comparison.teachers.modules
        if self.fuses_head and config.teaching in (SELF, EMA):
            with_own_forward(teachers[0])
        self.is_causal = is_causal(student) if config.causal is None else config.causal
        for model in models_inside(student) or [student]:
            self._examples.check(model)
        context.windows["distill.figures"] = self._means
        if config.init_layers is not None:
            if student not in _BEGUN:
                _BEGUN[student] = copy_layers_(student, teachers[0], config.init_layers)
            self._report["init_layers"] = _BEGUN[student]
        self._pairs = open_pairs(config, student, teachers, context.generator)
        for name, pairs in self._pairs.items():
            self._report[name] = [f"{ours}={theirs}" for ours, theirs in pairs.pairs]
        self._fused = FusedHead(student) if self.fuses_head else None  # hooks run in this order
        self._handle = student.register_forward_hook(RunHook(self._hook), with_kwargs=True)
        return touched

    def _detach(self) -> None:
        """Remove the student's hook and release the teacher."""
        if self._handle is not None:
            self._handle.remove()
        # `state_dict` still works after this.
        self._saved_pairs = self._pair_states()
        for pairs in self._pairs.values():
            pairs.detach()
        self._pairs = {}
        if self._comparison is not None:
            teachers = self._comparison.teachers
            # Gathering a sharded average is a collective, but after an exception this may run on one rank only.
            self._saved_teachers = teachers.state_dict() if teachers.is_readable else {}
            self._comparison.detach()
        if self._fused is not None:
            self._fused.detach()
        self._handle = self._student = self._comparison = self._fused = self._start = None
        self._hook.active = False
        self._forget_batch()

    def begin(self, context: Context, state: Mapping[str, Any] | None) -> None:
        """Resolve begin and end to steps, and move the teacher to the student's device."""
        saved = state or {}
        if state is not None:
            self._batches, self._positions = int(state["batches"]), int(state["positions"])
            self._examples.load_state_dict(state)
        self._schedule = Schedule.resolved(self.config, context)
        self._schedule.options(context)  # raises if options change over the run and its length is unknown
        self._switch(context)
        if self._student is not None and self._comparison is not None:
            for pairs in self._pairs.values():
                pairs.check_shards(self._student)
            self._comparison.teachers.begin(self._student)
            self._comparison.begin(context)
            # Not earlier: the average must first be on the student's device and sharded like it.
            if teachers := saved.get("teachers"):
                self._comparison.teachers.load_state_dict(teachers, self._student)
        learned = dict(saved.get("pairs", {}))
        for name, pairs in self._pairs.items():
            if learned.get(name):
                pairs.load_state_dict(learned[name])

    def finish(self, context: Context) -> None:
        """Detach. The student already is a plain model."""
        self._report |= self._examples.finish(context.model, context)
        if self._comparison is not None:
            self._comparison.teachers.gather()  # so that `state_dict` still works
        self._detach()

    def _find_student(self, model: nn.Module) -> nn.Module:
        name = self.config.student
        modules: dict[str, nn.Module] = dict(model.named_modules())
        if name is None:
            if lacks_forward(model):
                parts = [part for part, module in model.named_children() if any(True for _ in module.parameters())]
                text = f"student must name the part that computes the logits, as {type(model).__name__} has no forward"
                raise ConfigError("distill", text, f'pass student="{parts[0]}"' if parts else "give it a forward")
            return model
        if name not in modules:
            rule = f"student must name a submodule, got {name!r}{nearest(name, filter(None, modules))}"
            raise MatchError("distill", rule)
        return modules[name]

    # -- the loss

    def loss(self, task_loss: Tensor, context: Context) -> Tensor:
        """Return the mixed loss for the student's latest forward, or the task loss outside begin..end."""
        missed = self._hook.missed
        forward, student, comparison = self._hook.take(), self._student, self._comparison
        inputs = {} if forward is None or student is None else named_inputs(student, forward)
        labels = inputs.get("labels") if self.labels is None else self.labels
        self.labels, unlabeled = None, self._examples.take()
        given, task_loss = task_loss, labeled_part(task_loss, labels, causal=self.is_causal)
        if not torch.is_grad_enabled():
            return task_loss
        if not (active := self._schedule.is_active(context)):
            # Outside of begin..end the hooks are off, so there is no forward to compare.
            self._means.forget()  # do not log old figures for later steps
            if not self._waits(context):
                return task_loss
        if student is None or comparison is None or forward is None:
            raise unseen(missed)
        self._examples.check_prepared(unlabeled)
        if not self._batches and not torch.compiler.is_compiling():
            self._check_causal(student, labels, inputs)
        if not active:
            batch = StudentBatch(student, forward, inputs, labels, self.is_causal, self.config.temperature, unlabeled)
            self._try_out(batch, comparison, context)
            return task_loss
        alpha, temperature = self._schedule.options(context)
        batch = StudentBatch(student, forward, inputs, labels, self.is_causal, temperature, unlabeled)
        task, ratio = None, functools.partial(_task_ratio, alpha, context)
        if self._fused is not None:
            task = self._fused.take(task_loss)
            share = functools.partial(_task_share, task, ratio)
            batch = replace(batch, forward=self._fused.with_logits(forward), task_share=share)
        elif not torch.compiler.is_compiling():
            batch = replace(batch, task=TaskLoss(given, ratio))
        # With alpha 1 the soft term is only logged, so it needs no graph.
        with torch.set_grad_enabled(alpha != 1 or comparison.trains_others):
            compared = comparison.compare(batch)
        if task is not None and not compared.with_task:
            task_loss = task.rejoined()
        elif task is None and compared.with_task:
            task_loss = task_loss.detach()
        # `normalize` averages as this trainer does: over the micro-batch or over the whole accumulation window.
        soft = context.normalize(compared.total, compared.count)
        figures = {"distill/soft_loss": soft.detach(), "distill/task_loss": task_loss.detach()}
        mixed = mix(task_loss, soft, alpha)
        mixed = comparison.join(mixed, task_loss, alpha, compared.count, context)
        for name, pairs in self._pairs.items():
            term = pairs.loss(compared.mask, inputs, context.normalize)
            figures[f"distill/{name}_loss"] = term.detach()
            mixed = mixed + pairs.weight * term.to(mixed.device)
        self._moving = self._schedule.figures(alpha, temperature)
        self._note(batch, compared, {**figures, **comparison.figures}, context)
        return mixed

    def _check_causal(self, student: nn.Module, labels: Any, inputs: Mapping[str, Any]) -> None:
        """Raise if the labels look like a causal LM's but the student's class is unknown and `causal` is not set."""
        is_known = self.config.causal is not None or self.is_causal or models_inside(student)
        if not is_known and labels_are_inputs(labels, inputs):
            raise ConfigError(
                "distill",
                f"causal must be given for {type(student).__name__}, got none: its labels equal its inputs, as in a "
                "causal language model, but its class is not a known one",
                "set distill.causal to True if position i predicts token i + 1, otherwise to False",
            )

    def _note(self, batch: StudentBatch, compared: Compared, figures: dict[str, Tensor], context: Context) -> None:
        """Count a micro-batch and keep its figures as tensors, since reading them would wait for the GPU."""
        count, mask = compared.count, compared.mask
        self._means.add(figures, share_of(count, context))
        flags = self._examples.add(batch.labels, batch.unlabeled, batch.inputs.get("attention_mask"), mask, count)
        if flags is not None and self.config.unlabeled_field:
            self._means.add({"distill/unlabeled_share": flags.sum()}, len(flags))
        self._batches += 1
        self._positions = self._positions + (count if mask is None else mask.sum())

    def _waits(self, context: Context) -> bool:
        """Return True if the soft term begins later and no micro-batch has been tried out yet."""
        return not self._is_tried and context.step < self._schedule.first

    @torch.no_grad()
    def _try_out(self, batch: StudentBatch, comparison: Comparison, context: Context) -> None:
        """Raise errors now that would otherwise appear only at `begin`, hours later. The loss does not change."""
        self._is_tried = True
        # In these modes no logits are computed before the soft term begins.
        if not (self.config.chunked or self.fuses_head):
            compared = comparison.compare(batch)
            for pairs in self._pairs.values():
                pairs.try_out(compared.mask, batch.inputs, context.normalize)
        self._switch(context)

    def _switch(self, context: Context) -> None:
        active = self._schedule.is_active(context)
        self._hook.active = active or self._waits(context)
        if self._fused is not None:
            self._fused.active = active
        if self._comparison is not None:
            self._comparison.activate(active)
        for pairs in self._pairs.values():
            pairs.activate(active)
            if self._waits(context):
                pairs.watch()

    def _forget_batch(self) -> None:
        self._hook.take()
        self._examples.take()
        self.labels = None
        if self._fused is not None:
            self._fused.forget()

    # -- examples without a label

    def prepare_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch for the student's forward, and remember its unlabeled examples for the next loss.

        Args:
            batch: A mapping with or without ``labels``, and with `unlabeled_field` if that option is set. The field
                is removed, and labels of unlabeled examples become -100 (NaN if they are floats).

        Raises:
            ConfigError: If the field is missing or does not hold one bool per example.
        """
        prepared = self._examples.prepare(batch)
        self.labels = prepared.get("labels")
        return prepared

    def positions_ahead(self, batch: Mapping[str, Any]) -> Tensor:
        """Return how many positions of a batch the soft term will count, before the student's forward."""
        return self._examples.positions_ahead(batch, causal=self.is_causal, per_token=self._per_token)

    def unlabeled_task(self, output: Any) -> Tensor:
        """Return the task loss of a batch without labels: 0, connected to the student's output.

        Raises:
            TrainingError: If the logits do not have the shape that `positions_ahead` assumed.
        """
        latest = self._hook.latest
        if latest is not None:
            logits = find_logits(latest.output, self.config.logits, "student")
            if (logits.ndim > 2) != self._per_token:
                raise TrainingError(
                    "distill",
                    "a batch must have labels, because the student's class does not tell whether its logits "
                    f"{tuple(logits.shape)} are per example or per token",
                    "add labels of -100, and for sequences also set unlabeled_field",
                )
        return zero_of(output)

    @property
    def _per_token(self) -> bool:
        student = self._student
        inside = [] if student is None else models_inside(student) or [student]
        return any(is_per_token(model, causal=self.is_causal) for model in inside)

    # -- students that teach each other

    @property
    def peers(self) -> list[nn.Module]:
        """The other students in mutual learning, also available after the run."""
        return self._peers.modules if self._peers is not None else []

    def one_by_one(self, clip: Callable[[], Any]) -> None:
        """Call `clip` once per student while the others have no gradients, so that each norm covers one model."""
        if self._peers is not None:
            self._peers.one_by_one(clip)

    def write(self, folder: Path) -> None:
        """Write the weights of the other students. The student itself is the user's model."""
        if self._peers is not None:
            self._peers.write(folder)

    # -- events

    def after_step(self, context: Context, applied: bool) -> None:
        """Update hooks and the moving average; raise `TrainingError` if no loss so far had a soft term."""
        self._means.close()
        if not applied:
            if self._peers is not None:
                self._peers.drop_gradients()
            return
        trained = self._student.parameters() if self._student is not None and self._hook.active else ()
        # The hooks were active and gradients arrived, but no loss was mixed: the trainer bypasses `loss`.
        if not self._batches and any(parameter.grad is not None for parameter in trained):
            rule = "each loss must come from session.loss (Trainer.compute_loss), got a step without it"
            raise TrainingError("distill", rule, "call it")
        # `step` has advanced, so the next forward may enter or leave begin..end.
        self._switch(context)
        if self._student is not None and self._comparison is not None:
            self._comparison.teachers.after_step(self._student)

    @contextlib.contextmanager
    def swapped(self, context: Context, purpose: Purpose) -> Iterator[None]:
        """Release the last batch before validation; gather a sharded average before saving."""
        if purpose == "evaluate":
            self._forget_batch()
        teachers = None if purpose == "evaluate" or self._comparison is None else self._comparison.teachers
        if teachers is not None:
            teachers.gather()
        try:
            yield
        finally:
            if teachers is not None:
                teachers.release()

    # -- saved state

    def plan(self, context: Context) -> Plan:
        """Return the steps where the soft term starts and stops."""
        return Plan(Schedule.resolved(self.config, context).events())

    def state_dict(self) -> dict[str, Any]:
        """Return counters, projections and the moving average. Of a frozen teacher, at most a digest is saved."""
        learned = {
            "teachers": self._comparison.teachers.state_dict() if self._comparison else dict(self._saved_teachers),
            "pairs": self._pair_states(),
        }
        counted = {"batches": self._batches, "positions": int(self._positions)} | self._examples.state_dict()
        return counted | {name: tensors for name, tensors in learned.items() if tensors}

    def _pair_states(self) -> dict[str, Any]:
        states = {name: pairs.state_dict() for name, pairs in self._pairs.items()}
        return self._saved_pairs | {name: state for name, state in states.items() if state}

    # -- figures

    def figures(self) -> dict[str, float]:
        """Return the latest step's mean task loss, mean soft term (with T²), and options that change over the run."""
        figures = self._means.read()
        return figures | self._moving if figures else {}

    def report(self) -> dict[str, Any]:
        """Return the teacher, the options and the counts for the receipt."""
        return {
            "divergence": self.config.divergence,
            **self._report,
            "temperature": self.config.temperature,
            "alpha": self.config.task_weight,
            "batches": self._batches,
            "positions": int(self._positions),
            **self._examples.report(),
        }

    @staticmethod
    def summary(report: Mapping[str, Any]) -> list[str]:
        """Return a report as plain sentences, the result first. The report may come from a file."""
        size = report.get("teacher_parameters")
        taught = f"{report['teacher']}{f' ({amount(size)} parameters)' if size else ''}"
        seen = f"{counted(report['positions'], 'position')} in {counted(report['batches'], 'batch', 'batches')}"
        unlabeled = report.get("unlabeled_examples")
        return [
            f"Learned from a teacher on {seen}. Teacher: {taught}.",
            f"The soft loss had temperature {report['temperature']:g}, and the task loss weight {report['alpha']:g}.",
            *([f"{counted(unlabeled, 'example')} had no label."] if unlabeled else []),
            *([f"The best student is {report['best']}."] if report.get("best") else []),
        ]


def _task_ratio(alpha: float, context: Context, weight: Tensor, count: Tensor) -> Tensor:
    """Return the weight of a position's cross-entropy divided by the weight of its divergence."""
    of_divergence = (1 - alpha) * context.normalize(torch.ones_like(weight, dtype=torch.float64), count)
    return alpha * weight / of_divergence.to(weight.device)


def _task_share(task: Task, ratio: Callable[[Tensor, Tensor], Tensor], count: Tensor) -> float:
    """Return the task loss's weight in a joint pass, where the sums of both terms have different divisors."""
    found = float(ratio(torch.tensor(task.weight, device=count.device, dtype=torch.float64), count))
    return found / (1 + found) if 0 < found < math.inf else 0.0


@dataclass(frozen=True)
class Schedule:
    """Steps ``first .. last - 1`` have a soft term; `options` interpolates alpha and temperature over them."""

    config: DistillConfig
    first: int = 0
    last: float = math.inf

    @classmethod
    def resolved(cls, config: DistillConfig, context: Context) -> Schedule:
        """Return the schedule of a run."""
        begin, end = config.begin, config.end
        if context.total_steps is not None:
            context.resolve_range(begin, end, "distill")
        first = context.resolve(begin, "distill.begin")
        # An end of 1.0 needs no run length, so that endless loaders work.
        is_open = parse_position(end) == ParsedPosition(1.0, "fraction")
        last = math.inf if is_open else context.resolve(end, "distill.end")
        if last <= first:
            rule = f"end must come after begin, got begin {begin!r} = step {first}, end {end!r} = step {last}"
            raise ConfigError("distill", rule)
        return cls(config, first, last)

    def is_active(self, context: Context) -> bool:
        """Return True if this step has a soft term."""
        return self.first <= context.step < self.last

    def options(self, context: Context) -> tuple[float, float]:
        """Return alpha and temperature of this step."""
        config = self.config
        return (
            self._at(context, config.task_weight, config.alpha_end),
            self._at(context, config.temperature, config.temperature_end),
        )

    def _at(self, context: Context, first: float, last: float | None) -> float:
        if last is None:
            return first
        end = self.last if math.isfinite(self.last) else context.total_steps
        if end is None:
            raise ConfigError("distill", "alpha_end and temperature_end need a run of known length, or an end in steps")
        return first + (last - first) * min(1.0, (context.step - self.first) / max(1.0, end - 1 - self.first))

    def figures(self, alpha: float, temperature: float) -> dict[str, float]:
        """Return the options that change over the run, for the log."""
        moving = {"alpha": (alpha, self.config.alpha_end), "temperature": (temperature, self.config.temperature_end)}
        return {f"distill/{name}": value for name, (value, end) in moving.items() if end is not None}

    def events(self) -> list[Event]:
        """Return the steps where the soft term starts and stops."""
        config = self.config
        lines: list[Event] = [(self.first, f"soft term on, alpha {config.task_weight:g}, T {config.temperature:g}")]
        return [*lines, (int(self.last), "soft term off")] if self.last < math.inf else lines
