"""Distillation as a technique: a hook sees the student's batch, the loss verb asks the teacher about it.

What a run needs beside that is chosen once, when it attaches: a `Comparison` of outputs (of a teacher's, a cache's, in
chunks, or of students with each other), and `WatchedPairs` of features, if any.
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
from shared_core.distillation.config import EMA, DistillConfig
from shared_core.distillation.feature_pairs import WatchedPairs, open_pairs
from shared_core.distillation.forward_capture import (
    ForwardHook,
    is_causal,
    labels_are_inputs,
    models_inside,
    named_inputs,
    unseen,
)
from shared_core.distillation.layer_init import copy_layers_
from shared_core.distillation.mutual import Peers, make_peers
from shared_core.distillation.opening import open_comparison
from shared_core.distillation.outputs import find_logits
from shared_core.distillation.task_gradient import FusedHead, Task, TaskLoss, with_own_forward
from shared_core.distillation.unlabelled import Examples, is_per_token, labelled_part, zero_of
from shared_core.engine.observers.micro_batches import StepMeans
from shared_core.engine.plan import Event, Plan, Touched
from shared_core.engine.technique import Context, Purpose, Technique
from shared_core.errors import ConfigError, MatchError, TrainingError, nearest
from shared_core.printing import amount, counted

# Students that began with their teacher's layers, and what was copied: training on must not begin again.
_BEGUN: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()


class Distillation(Technique):
    """Adds the soft term to the task loss: ``L = alpha * task + (1 - alpha) * T² * KL(teacher || student)``.

    A teacher never becomes part of the model: it is in no state dict and no optimizer, always in eval mode,
    and its parameters are set to ``requires_grad=False``. It runs once a micro-batch, under the autocast that
    the loss verb is called in. Of several forwards before one loss, the last is distilled. Feature pairs add their own
    terms, beside that mixture.

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
        self.fuses_head = False
        """True if the trainer calls the student for log-probabilities of labels, not logits; set before `attach`."""
        self.is_causal = False
        """True if the student's labels are one position ahead; known from `attach` on."""
        self._examples = Examples(config.unlabelled_field)
        self._schedule = Schedule(config)
        self._comparison: Comparison | None = None
        self._pairs: dict[str, WatchedPairs] = {}
        self._peers: Peers | None = None
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
        self._told: dict[str, Any] = {}

    # -- start and end

    def before_attach(self, context: Context) -> None:
        """Make the other students: no technique has touched the model that they are copies of."""
        if self.config.mutual and not context.is_preview:
            self._peers = make_peers(self.config, context.model, self._find_student(context.model), context)

    def attach(self, context: Context) -> Touched:
        """Load and freeze the teacher, compare it with the student, and hook the student's forward."""
        model = context.model
        context.undo.callback(self._detach)
        config, student = self.config, self._find_student(model)
        touched = Touched.modules({config.student or type(model).__name__: student}, what="student")
        if context.is_preview:
            return touched
        comparison = open_comparison(config, model, student, context, self._peers, fuses_head=self.fuses_head)
        self._student, self._comparison = student, comparison
        self._told, teachers = comparison.told, comparison.teachers.modules
        if self.fuses_head and config.teaching == EMA:
            with_own_forward(teachers[0])
        self.is_causal = is_causal(student) if config.causal is None else config.causal
        for model in models_inside(student) or [student]:
            self._examples.check(model)
        context.windows["distill.figures"] = self._means
        if config.init_layers is not None:
            if student not in _BEGUN:
                _BEGUN[student] = copy_layers_(student, teachers[0], config.init_layers)
            self._told["init_layers"] = _BEGUN[student]
        self._pairs = open_pairs(config, student, teachers, context.generator)
        for name, pairs in self._pairs.items():
            self._told[name] = [f"{ours}={theirs}" for ours, theirs in pairs.pairs]
        self._fused = FusedHead(student) if self.fuses_head else None  # its hook makes what the next one keeps
        self._handle = student.register_forward_hook(self._hook, with_kwargs=True)
        return touched

    def _detach(self) -> None:
        """Take the hook off the student and release the teacher."""
        if self._handle is not None:
            self._handle.remove()
        # the state stays readable
        self._saved_pairs = self._pair_states()
        for pairs in self._pairs.values():
            pairs.detach()
        self._pairs = {}
        if self._comparison is not None:
            teachers = self._comparison.teachers
            # Gathering a sharded average is a collective; `detach` may run on one rank alone, after an exception.
            self._saved_teachers = teachers.state_dict() if teachers.is_readable else {}
            self._comparison.detach()
        if self._fused is not None:
            self._fused.detach()
        self._handle = self._student = self._comparison = self._fused = None
        self._hook.active = False
        self._forget_batch()

    def begin(self, context: Context, state: Mapping[str, Any] | None) -> None:
        """Resolve the range and bring the teacher to the student's device."""
        saved = state or {}
        if state is not None:
            self._batches, self._positions = int(state["batches"]), int(state["positions"])
            self._examples.load_state_dict(state)
        self._schedule = Schedule.resolved(self.config, context)
        self._schedule.options(context)  # raises where options move and nothing tells until when
        self._switch(context)
        if self._student is not None and self._comparison is not None:
            for pairs in self._pairs.values():
                pairs.check_shards(self._student)
            self._comparison.teachers.begin(self._student)
            self._comparison.begin(context)
            # Only now: the average is where the student is, and sharded as it is.
            if teachers := saved.get("teachers"):
                self._comparison.teachers.load_state_dict(teachers, self._student)
        learned = dict(saved.get("pairs", {}))
        for name, pairs in self._pairs.items():
            if learned.get(name):
                pairs.load_state_dict(learned[name])

    def finish(self, context: Context) -> None:
        """Detach: the student is a plain model already."""
        self._told |= self._examples.finish(context.model, context)
        if self._comparison is not None:
            self._comparison.teachers.gather()  # its state stays readable
        self._detach()

    def _find_student(self, model: nn.Module) -> nn.Module:
        name = self.config.student
        if name is None:
            return model
        modules: dict[str, nn.Module] = dict(model.named_modules())
        if name not in modules:
            rule = f"student must name a submodule, got {name!r}{nearest(name, filter(None, modules))}"
            raise MatchError("distill", rule)
        return modules[name]

    # -- the loss

    def loss(self, task_loss: Tensor, context: Context) -> Tensor:
        """Return the mixed loss for the latest forward of the student, the task loss outside begin..end."""
        missed = self._hook.missed
        forward, student, comparison = self._hook.take(), self._student, self._comparison
        inputs = {} if forward is None or student is None else named_inputs(student, forward)
        labels = inputs.get("labels") if self.labels is None else self.labels
        self.labels, unlabelled = None, self._examples.take()
        given, task_loss = task_loss, labelled_part(task_loss, labels, causal=self.is_causal)
        if not torch.is_grad_enabled():
            return task_loss
        if not (active := self._schedule.is_active(context)):
            # Outside of begin..end the hooks are off, so there is no forward to compare.
            self._means.forget()  # what was last before the end is no figure of later steps
            if not self._waits(context):
                return task_loss
        if student is None or comparison is None or forward is None:
            raise unseen(missed)
        self._examples.check_told(unlabelled)
        if not self._batches and not torch.compiler.is_compiling():
            self._check_causal(student, labels, inputs)
        if not active:
            batch = StudentBatch(student, forward, inputs, labels, self.is_causal, self.config.temperature, unlabelled)
            self._try_out(batch, comparison, context)
            return task_loss
        alpha, temperature = self._schedule.options(context)
        batch = StudentBatch(student, forward, inputs, labels, self.is_causal, temperature, unlabelled)
        task, ratio = None, functools.partial(_task_ratio, alpha, context)
        if self._fused is not None:
            task = self._fused.take(task_loss)
            share = functools.partial(_task_share, task, ratio)
            batch = replace(batch, forward=self._fused.with_logits(forward), task_share=share)
        elif not torch.compiler.is_compiling():
            batch = replace(batch, task=TaskLoss(given, ratio))
        # With alpha 1 the soft term is a figure only: no graph is kept for it.
        with torch.set_grad_enabled(alpha != 1 or comparison.trains_others):
            compared = comparison.compare(batch)
        if task is not None and not compared.with_task:
            task_loss = task.rejoined()
        elif task is None and compared.with_task:
            task_loss = task_loss.detach()
        # `normalise` divides sum by count as this trainer does: over the micro-batch, or over its whole window.
        soft = context.normalise(compared.total, compared.count)
        figures = {"distill/soft_loss": soft.detach(), "distill/task_loss": task_loss.detach()}
        mixed = mix(task_loss, soft, alpha)
        mixed = comparison.join(mixed, task_loss, alpha, compared.count, context)
        for name, pairs in self._pairs.items():
            term = pairs.loss(compared.mask, inputs, context.normalise)
            figures[f"distill/{name}_loss"] = term.detach()
            mixed = mixed + pairs.weight * term.to(mixed.device)
        self._moving = self._schedule.figures(alpha, temperature)
        self._note(batch, compared, {**figures, **comparison.figures}, context)
        return mixed

    def _check_causal(self, student: nn.Module, labels: Any, inputs: Mapping[str, Any]) -> None:
        """Ask for `causal` where the class does not tell that the student is a causal LM, but its labels do."""
        told = self.config.causal is not None or self.is_causal or models_inside(student)
        if not told and labels_are_inputs(labels, inputs):
            raise ConfigError(
                "distill",
                f"causal must be given for {type(student).__name__}, got none: the labels are the inputs, as those of "
                "a causal language model, and its class is not known as one",
                "set distill.causal to True if position i predicts token i + 1, else to False",
            )

    def _note(self, batch: StudentBatch, compared: Compared, figures: dict[str, Tensor], context: Context) -> None:
        """Count a micro-batch, and keep its figures as tensors: reading them waits for a GPU."""
        count, mask = compared.count, compared.mask
        self._means.add(figures, share_of(count, context))
        flags = self._examples.add(batch.labels, batch.unlabelled, batch.inputs.get("attention_mask"), mask, count)
        if flags is not None and self.config.unlabelled_field:
            self._means.add({"distill/unlabelled_share": flags.sum()}, len(flags))
        self._batches += 1
        self._positions = self._positions + (count if mask is None else mask.sum())

    def _waits(self, context: Context) -> bool:
        """Return True until the first micro-batch of a run that begins later was tried out."""
        return not self._is_tried and context.step < self._schedule.first

    @torch.no_grad()
    def _try_out(self, batch: StudentBatch, comparison: Comparison, context: Context) -> None:
        """Raise now what could only be raised at `begin`, hours later; the loss stays as it is."""
        self._is_tried = True
        # Logits that are not computed, or that the trainer's loss does not compute, are not to be had before.
        if not (self.config.chunked or self.fuses_head):
            compared = comparison.compare(batch)
            for pairs in self._pairs.values():
                pairs.try_out(compared.mask, batch.inputs, context.normalise)
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
        """Return a batch as the student may see it, and note for the next loss which of its examples are unlabelled.

        Args:
            batch: A mapping with ``labels``, or with none at all, and `unlabelled_field` if there is one. That key is
                taken out, and the labels of unlabelled examples become -100 (float ones NaN).

        Raises:
            ConfigError: If it does not hold the field, or that is not one bool for each example.
        """
        prepared = self._examples.prepare(batch)
        self.labels = prepared.get("labels")
        return prepared

    def positions_ahead(self, batch: Mapping[str, Any]) -> Tensor:
        """Return how many positions of a batch the soft term will count, before the student has seen it."""
        return self._examples.positions_ahead(batch, causal=self.is_causal, per_token=self._per_token)

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
                    "distill",
                    "a batch must have labels where the student's class does not tell what its logits "
                    f"{tuple(logits.shape)} are of",
                    "give labels of -100, and unlabelled_field for sequences",
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
        """The other students of mutual learning, also after the run."""
        return self._peers.modules if self._peers is not None else []

    def one_by_one(self, clip: Callable[[], Any]) -> None:
        """Call `clip` once for each student while no other has gradients, for a norm over an optimizer's parameters."""
        if self._peers is not None:
            self._peers.one_by_one(clip)

    def write(self, folder: Path) -> None:
        """Write the other students' weights; the student is the user's model."""
        if self._peers is not None:
            self._peers.write(folder)

    # -- events

    def after_step(self, context: Context, applied: bool) -> None:
        """Let hooks and an average follow; raise `TrainingError` if no loss of the run had a soft term in it."""
        self._means.close()
        if not applied:
            if self._peers is not None:
                self._peers.drop_gradients()
            return
        trained = self._student.parameters() if self._student is not None and self._hook.active else ()
        # The hooks were on and gradients came, but no loss was mixed: a trainer that bypasses the loss verb.
        if not self._batches and any(parameter.grad is not None for parameter in trained):
            rule = "each loss must come from session.loss (Trainer.compute_loss), got a step without"
            raise TrainingError("distill", rule, "call it")
        # `step` has moved: the next forward may be the first, or no longer, in begin..end.
        self._switch(context)
        if self._student is not None and self._comparison is not None:
            self._comparison.teachers.after_step(self._student)

    @contextlib.contextmanager
    def swapped(self, context: Context, purpose: Purpose) -> Iterator[None]:
        """Release the last batch for a validation; for a file hold a sharded average whole."""
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
        """Return when the soft term joins the loss, and when it leaves."""
        return Plan(Schedule.resolved(self.config, context).events())

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

    # -- figures

    def figures(self) -> dict[str, float]:
        """Return the latest step's mean task loss, its mean soft term with T², and options that move."""
        figures = self._means.read()
        return figures | self._moving if figures else {}

    def report(self) -> dict[str, Any]:
        """Return who taught, how, and how much."""
        return {
            "divergence": self.config.divergence,
            **self._told,
            "temperature": self.config.temperature,
            "alpha": self.config.alpha,
            "batches": self._batches,
            "positions": int(self._positions),
            **self._examples.report(),
        }

    @staticmethod
    def summary(report: Mapping[str, Any]) -> list[str]:
        """Return a report in plain sentences, the result first. It may have been read from a file."""
        size = report.get("teacher_parameters")
        taught = f"{report['teacher']}{f' ({amount(size)} parameters)' if size else ''}"
        seen = f"{counted(report['positions'], 'position')} in {counted(report['batches'], 'batch', 'batches')}"
        unlabelled = report.get("unlabelled_examples")
        return [
            f"Learned from a teacher on {seen}. Teacher: {taught}.",
            f"The soft loss had temperature {report['temperature']:g}, and the task loss weight {report['alpha']:g}.",
            *([f"{counted(unlabelled, 'example')} had no label."] if unlabelled else []),
            *([f"The best student is {report['best']}."] if report.get("best") else []),
        ]


def _task_ratio(alpha: float, context: Context, weight: Tensor, count: Tensor) -> Tensor:
    """Return the weight of a position's cross-entropy in the mixture over that of its divergence."""
    of_divergence = (1 - alpha) * context.normalise(torch.ones_like(weight, dtype=torch.float64), count)
    return alpha * weight / of_divergence.to(weight.device)


def _task_share(task: Task, ratio: Callable[[Tensor, Tensor], Tensor], count: Tensor) -> float:
    """Return the share of a task loss in one pass for both terms: the sums that it mixes have unlike divisors."""
    found = float(ratio(torch.tensor(task.weight, device=count.device, dtype=torch.float64), count))
    return found / (1 + found) if 0 < found < math.inf else 0.0


@dataclass(frozen=True)
class Schedule:
    """The steps ``first .. last - 1`` have a soft term; `options` moves alpha and temperature over them."""

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
        # the end of the run needs no length, so that an endless loader can be distilled on
        is_open = parse_position(end) == ParsedPosition(1.0, "fraction")
        last = math.inf if is_open else context.resolve(end, "distill.end")
        if last <= first:
            rule = f"end must lie after begin, got begin {begin!r} = step {first}, end {end!r} = step {last}"
            raise ConfigError("distill", rule)
        return cls(config, first, last)

    def is_active(self, context: Context) -> bool:
        """Return True if this step has a soft term."""
        return self.first <= context.step < self.last

    def options(self, context: Context) -> tuple[float, float]:
        """Return alpha and temperature of this step."""
        config = self.config
        return (
            self._at(context, config.alpha, config.alpha_end),
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
        """Return those of a step's options that move, for the log."""
        moving = {"alpha": (alpha, self.config.alpha_end), "temperature": (temperature, self.config.temperature_end)}
        return {f"distill/{name}": value for name, (value, end) in moving.items() if end is not None}

    def events(self) -> list[Event]:
        """Return when the soft term joins the loss, and when it leaves."""
        config = self.config
        told: list[Event] = [(self.first, f"soft term on, alpha {config.alpha:g}, T {config.temperature:g}")]
        return [*told, (int(self.last), "soft term off")] if self.last < math.inf else told
