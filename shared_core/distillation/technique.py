"""Distillation as a technique: a hook sees the student's batch, the loss verb asks the teacher about it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shared_core.distillation.batch import (
    ForwardHook,
    ask_teacher,
    check_classes,
    counted_positions,
    find_logits,
    is_causal,
    named_inputs,
)
from shared_core.distillation.config import DistillConfig
from shared_core.distillation.losses import kd_sum
from shared_core.errors import CompatibilityError, ConfigError, MatchError, TrainingError, nearest
from shared_core.positions import ParsedPosition, Position, parse_position
from shared_core.technique import Context, Technique


class Distillation(Technique):
    """Adds the soft term to the task loss: ``L = alpha * task + (1 - alpha) * T² * KL(teacher || student)``.

    The teacher never becomes part of the model: it is in no state dict and no optimizer, always in eval mode,
    and its parameters are set to ``requires_grad=False``. It runs once a micro-batch, under the autocast that
    the loss verb is called in. Of several forwards before one loss, the last is distilled.

    Args:
        config: The options.
    """

    key = "distill"
    config: DistillConfig

    def __init__(self, config: DistillConfig) -> None:
        super().__init__(config)
        self.labels: Tensor | None = None
        """Labels of the next loss, where a trainer takes them out of the model's inputs; used once."""
        self._teacher: nn.Module | None = None
        self._student: nn.Module | None = None
        self._hook = ForwardHook()
        self._handle: RemovableHandle | None = None
        self._first, self._last = 0, math.inf
        self._causal = False
        self._batches = 0
        self._positions: Tensor | int = 0
        self._soft: tuple[Tensor, Tensor] | None = None
        self._task: Tensor | None = None
        self._told: dict[str, Any] = {}

    def attach(self, model: nn.Module, context: Context) -> None:
        """Load and freeze the teacher, compare it with the student, and hook the student's forward."""
        self.detach(model)
        student = self._find_student(model)
        teacher = self.config.teacher
        if isinstance(teacher, str):
            if teacher.startswith("<"):  # what a saved recipe holds in place of a module
                raise ConfigError(
                    f"distill: teacher must be given again, got {teacher!r} from a saved recipe; pass the module"
                )
            teacher = context.services.load_teacher(teacher, student)
        _check_separate(model, teacher)
        _check_heads(student, teacher)
        teacher.requires_grad_(False).eval()
        self._student, self._teacher = student, teacher
        self._causal = is_causal(student) if self.config.causal is None else self.config.causal
        self._handle = student.register_forward_hook(self._hook, with_kwargs=True)
        self._told = {"teacher": type(teacher).__name__, "teacher_parameters": _size(teacher)}
        if _size(teacher) < _size(student):
            self._told["warning"] = "the teacher is smaller than the student; distilling from it may not help"
            context.services.say(
                f"distill: the teacher has {_size(teacher):,} parameters, fewer than the student's "
                f"{_size(student):,}; distilling from it may not help"
            )

    def detach(self, model: nn.Module) -> None:
        """Take the hook off the student and let go of the teacher."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._student = self._teacher = self.labels = None
        self._hook.active = False
        self._hook.take()

    def begin(self, context: Context) -> None:
        """Resolve the range and bring the teacher to the student's device."""
        self._first, self._last = self._range(context)
        self._hook.active = self._is_active(context)
        self._move_teacher()

    def loss(self, task_loss: Tensor, context: Context) -> Tensor:
        """Return the mixed loss for the latest forward of the student, the task loss outside begin..end."""
        forward, labels, self.labels = self._hook.take(), self.labels, None
        if not self._is_active(context) or not torch.is_grad_enabled():
            return task_loss
        student, teacher = self._student, self._teacher
        if student is None or teacher is None or forward is None:
            raise TrainingError(
                "distill: the student's forward must run before the loss, in train mode and with gradients, "
                "and was not seen; set distill.student to the submodule that computes the logits, and call the "
                "module, not its forward method"
            )
        inputs = named_inputs(student, forward)
        logits = find_logits(forward.output, self.config.logits, "student")
        self._move_teacher()
        targets = find_logits(ask_teacher(teacher, student, forward), self.config.logits, "teacher")
        check_classes(logits, targets)
        labels = inputs.get("labels") if labels is None else labels
        mask = counted_positions(logits, labels, inputs.get("attention_mask"), causal=self._causal)
        total, count = kd_sum(logits, targets, temperature=self.config.temperature, mask=mask)
        self._batches += 1
        self._positions = self._positions + count
        self._soft, self._task = (total.detach(), count), task_loss.detach()
        alpha = self.config.alpha
        if alpha == 1:  # 0 * inf would be NaN
            return task_loss
        soft = context.normalise(total, count).to(task_loss.device)
        return soft if alpha == 0 else alpha * task_loss + (1 - alpha) * soft

    def after_optimizer_step(self, context: Context) -> None:
        """Switch the hook on or off for the next step."""
        self._hook.active = self._is_active(context)

    def before_eval(self, context: Context) -> None:
        """Let go of the last batch."""
        self._hook.take()
        self.labels = None

    def finish(self, model: nn.Module, context: Context) -> None:
        """Detach: the student is a plain model already."""
        self.detach(model)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters; the teacher is not part of a checkpoint."""
        return {"batches": self._batches, "positions": int(self._positions)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back the counters."""
        self._batches, self._positions = int(state["batches"]), int(state["positions"])

    def metrics(self) -> dict[str, float]:
        """Return the latest micro-batch's task loss, and its soft term with T², averaged over positions."""
        if self._soft is None or self._task is None:
            return {}
        total, count = self._soft
        return {
            "distill/soft_loss": float(total / count.clamp(min=1)),
            "distill/task_loss": float(self._task),
        }

    def report(self) -> dict[str, Any]:
        """Return who taught, how, and how much."""
        return {
            **self._told,
            "temperature": self.config.temperature,
            "alpha": self.config.alpha,
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

    def _move_teacher(self) -> None:
        if self._teacher is None or self._student is None:
            return
        # placed by accelerate or quantised by bitsandbytes: `to` is refused or would undo it
        if hasattr(self._teacher, "hf_device_map") or getattr(self._teacher, "is_quantized", False):
            return
        there = next((parameter.device for parameter in self._student.parameters()), None)
        here = next((parameter.device for parameter in self._teacher.parameters()), None)
        if there is not None and here is not None and here != there:
            self._teacher.to(there)


def _is_fraction(position: Position, value: float) -> bool:
    return parse_position(position) == ParsedPosition(value, "fraction")


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _check_separate(model: nn.Module, teacher: nn.Module) -> None:
    """Refuse a teacher that is, or is part of, the model: freezing it would freeze the model."""
    own = {id(parameter) for parameter in model.parameters()}
    if teacher in set(model.modules()) or any(id(parameter) in own for parameter in teacher.parameters()):
        raise CompatibilityError(
            f"distill: teacher must share no weights with the model, got {type(teacher).__name__} that does; "
            "pass a copy (copy.deepcopy), kept outside the model"
        )


def _check_heads(student: nn.Module, teacher: nn.Module) -> None:
    """Refuse, where the models tell before a batch, regression and different numbers of classes."""
    for whose, module in (("student", student), ("teacher", teacher)):
        problem = getattr(getattr(module, "config", None), "problem_type", None)
        if problem in ("regression", "multi_label_classification"):
            raise ConfigError(f"distill: the {whose} must classify into single labels, got problem_type {problem!r}")
    ours, theirs = _num_classes(student), _num_classes(teacher)
    if ours is not None and theirs is not None and ours != theirs:
        raise ConfigError(
            f"distill: teacher must have the student's {ours} classes, got {theirs}; both must share labels "
            "or vocabulary"
        )


def _num_classes(module: nn.Module) -> int | None:
    """Return the width of the logits where a Transformers model tells it, else None."""
    head = getattr(module, "get_output_embeddings", lambda: None)()
    weight = getattr(head, "weight", None)
    if isinstance(weight, Tensor):
        return weight.shape[0]
    if "Classification" in type(module).__name__:
        num_labels = getattr(getattr(module, "config", None), "num_labels", None)
        return num_labels if isinstance(num_labels, int) else None
    return None
