"""Distillation as a technique: a hook sees the student's batch, the loss verb asks the teacher about it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shared_core.distillation.batch import ForwardHook, is_causal, named_inputs
from shared_core.distillation.comparison import Comparison, StudentBatch, open_comparison
from shared_core.distillation.config import DistillConfig
from shared_core.distillation.hidden_pairs import HiddenPairs
from shared_core.errors import ConfigError, MatchError, TrainingError, nearest
from shared_core.positions import ParsedPosition, Position, parse_position
from shared_core.technique import Context, Technique


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
    config: DistillConfig

    def __init__(self, config: DistillConfig) -> None:
        super().__init__(config)
        self.labels: Tensor | None = None
        """Labels of the next loss, where a trainer takes them out of the model's inputs; used once."""
        self._comparison: Comparison | None = None
        self._hidden: HiddenPairs | None = None
        self._student: nn.Module | None = None
        self._hook = ForwardHook()
        self._handle: RemovableHandle | None = None
        self._first, self._last = 0, math.inf
        self._causal = False
        self._batches = 0
        self._positions: Tensor | int = 0
        self._soft: tuple[Tensor, Tensor] | None = None
        self._task: Tensor | None = None
        self._hidden_loss: Tensor | None = None
        self._saved_teachers: Mapping[str, Any] = {}
        self._saved_hidden: Mapping[str, Any] = {}
        self._told: dict[str, Any] = {}

    def attach(self, model: nn.Module, context: Context) -> None:
        """Load and freeze the teacher, compare it with the student, and hook the student's forward."""
        self.detach(model)
        student = self._find_student(model)
        self._student, self._comparison = student, open_comparison(self.config, model, student, context)
        self._told = self._comparison.told
        self._causal = is_causal(student) if self.config.causal is None else self.config.causal
        if self.config.hidden:
            (teacher,) = self._comparison.teachers.modules
            self._hidden = HiddenPairs(student, teacher, self.config.pairs, self.config.hidden_loss, context.generator)
        self._handle = student.register_forward_hook(self._hook, with_kwargs=True)

    def detach(self, model: nn.Module) -> None:
        """Take the hook off the student and let go of the teacher."""
        if self._handle is not None:
            self._handle.remove()
        if self._hidden is not None:
            self._saved_hidden = self._hidden.state_dict()
            self._hidden.detach()
        if self._comparison is not None:
            self._saved_teachers = self._comparison.teachers.state_dict()
            self._comparison.detach()
        self._handle = self._student = self._comparison = self._hidden = self.labels = None
        self._hook.active = False
        self._hook.take()

    def begin(self, context: Context) -> None:
        """Resolve the range and bring the teacher to the student's device."""
        self._first, self._last = self._range(context)
        self._switch(context)
        if self._student is not None and self._comparison is not None:
            self._comparison.teachers.follow(self._student)
            if self._saved_teachers:
                self._comparison.teachers.load_state_dict(self._saved_teachers)
        if self._hidden is not None and self._saved_hidden:
            self._hidden.load_state_dict(self._saved_hidden)
        self._saved_teachers, self._saved_hidden = {}, {}

    def loss(self, task_loss: Tensor, context: Context) -> Tensor:
        """Return the mixed loss for the latest forward of the student, the task loss outside begin..end."""
        forward, labels, self.labels = self._hook.take(), self.labels, None
        if not self._is_active(context) or not torch.is_grad_enabled():
            return task_loss
        student, comparison = self._student, self._comparison
        if student is None or comparison is None or forward is None:
            raise TrainingError(
                "distill: the student's forward must run before the loss, in train mode and with gradients, "
                "and was not seen; set distill.student to the submodule that computes the logits, and call the "
                "module, not its forward method"
            )
        config = self.config
        labels = named_inputs(student, forward).get("labels") if labels is None else labels
        temperature = self._at(context, config.temperature, config.temperature_end)
        alpha = self._at(context, config.alpha, config.alpha_end)
        with torch.set_grad_enabled(alpha != 1):
            compared = comparison.compare(StudentBatch(student, forward, labels, self._causal, temperature))
        total, count = compared.total, compared.count
        self._batches += 1
        self._positions = self._positions + count
        self._soft, self._task = (total.detach(), count), task_loss.detach()
        mixed = task_loss
        if alpha != 1:  # 0 * inf would be NaN
            soft = context.normalise(total, count).to(task_loss.device)
            mixed = soft if alpha == 0 else alpha * task_loss + (1 - alpha) * soft
        if self._hidden is None:
            return mixed
        hidden = self._hidden.loss(compared.mask, context.normalise)
        self._hidden_loss = hidden.detach()
        return mixed + config.hidden_weight * hidden.to(mixed.device)

    def _at(self, context: Context, first: float, last: float | None) -> float:
        """Return what an option is at this step, on its way from begin to end."""
        if last is None:
            return first
        end = self._last if math.isfinite(self._last) else context.total_steps
        if end is None:
            raise ConfigError("distill: alpha_end and temperature_end need a run of known length, or an end in steps")
        return first + (last - first) * min(1.0, (context.step - self._first) / max(1.0, end - 1 - self._first))

    def after_optimizer_step(self, context: Context) -> None:
        """Switch hooks on or off for the next step, and let an average follow."""
        self._switch(context)
        if self._student is not None and self._comparison is not None:
            self._comparison.teachers.after_step(self._student)

    def _switch(self, context: Context) -> None:
        active = self._is_active(context)
        self._hook.active = active
        if self._comparison is not None:
            self._comparison.activate(active)
        if self._hidden is not None:
            self._hidden.activate(active)

    def before_eval(self, context: Context) -> None:
        """Let go of the last batch."""
        self._hook.take()
        self.labels = None

    def finish(self, model: nn.Module, context: Context) -> None:
        """Detach: the student is a plain model already."""
        self.detach(model)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, projections, and an average; a frozen teacher is not part of a checkpoint."""
        learned = {
            "teachers": self._comparison.teachers.state_dict() if self._comparison else dict(self._saved_teachers),
            "hidden": self._hidden.state_dict() if self._hidden else dict(self._saved_hidden),
        }
        counted = {"batches": self._batches, "positions": int(self._positions)}
        return counted | {name: tensors for name, tensors in learned.items() if tensors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back the counters."""
        self._batches, self._positions = int(state["batches"]), int(state["positions"])
        self._saved_teachers, self._saved_hidden = state.get("teachers", {}), state.get("hidden", {})

    def metrics(self) -> dict[str, float]:
        """Return the latest micro-batch's task loss, and its soft term with T², averaged over positions."""
        if self._soft is None or self._task is None:
            return {}
        total, count = self._soft
        return {
            "distill/soft_loss": float(total / count.clamp(min=1)),
            "distill/task_loss": float(self._task),
            **({} if self._hidden_loss is None else {"distill/hidden_loss": float(self._hidden_loss)}),
        }

    def report(self) -> dict[str, Any]:
        """Return who taught, how, and how much."""
        return {
            **self._told,
            "divergence": self.config.divergence,
            "temperature": self.config.temperature,
            "alpha": self.config.alpha,
            **({"hidden": list(self.config.hidden)} if self.config.hidden else {}),
            "batches": self._batches,
            "positions": int(self._positions),
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
