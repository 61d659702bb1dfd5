"""Distillation as a technique: a hook sees the student's batch, the loss verb asks the teacher about it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shared_core.distillation.batch import (
    Forward,
    ForwardHook,
    check_classes,
    counted_positions,
    find_logits,
    is_causal,
    named_inputs,
)
from shared_core.distillation.cache import TeacherCache
from shared_core.distillation.config import EMA, DistillConfig
from shared_core.distillation.divergences import DIVERGENCES
from shared_core.distillation.hidden_pairs import HiddenPairs
from shared_core.distillation.teacher_mean import mean_logits, mean_teacher
from shared_core.distillation.teachers import StudentAverage, Teachers, check_separate
from shared_core.distillation.topk_divergence import kd_topk_sum
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
        self._teachers: Teachers | None = None
        self._hidden: HiddenPairs | None = None
        self._cache: TeacherCache | None = None
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
        self._student, self._teachers = student, self._find_teachers(model, student, context)
        self._causal = is_causal(student) if self.config.causal is None else self.config.causal
        if self.config.hidden:
            (teacher,) = self._teachers.modules
            self._hidden = HiddenPairs(student, teacher, self.config.pairs, self.config.hidden_loss, context.generator)
        self._handle = student.register_forward_hook(self._hook, with_kwargs=True)

    def _open_cache(self, student: nn.Module, folder: str, context: Context) -> Teachers:
        cache = TeacherCache.open(folder)
        cache.check(temperature=self.config.temperature, vocabulary=_num_classes(student))
        self._cache = cache
        manifest = cache.manifest
        self._told = {
            "teacher": f"cached in {folder}",
            "teacher_fingerprint": manifest.fingerprints.get("teacher"),
            "discarded_mass": manifest.tail_mass_mean,
        }
        return Teachers([])

    def _find_teachers(self, model: nn.Module, student: nn.Module, context: Context) -> Teachers:
        config = self.config
        if config.cache is not None:
            return self._open_cache(student, config.cache, context)
        if config.teacher == EMA:
            self._told = {"teacher": f"moving average of the student, decay {config.ema_decay}"}
            return StudentAverage(student, config.ema_decay)
        modules = []
        for teacher in config.teachers:
            if isinstance(teacher, str):
                if teacher.startswith("<"):  # what a saved recipe holds in place of a module
                    raise ConfigError(
                        f"distill: teacher must be given again, got {teacher!r} from a saved recipe; pass the module"
                    )
                teacher = context.services.load_teacher(teacher, student)
            check_separate(model, teacher)
            _check_heads(student, teacher, config.divergence)
            modules.append(teacher)
        names, sizes = [type(module).__name__ for module in modules], [_size(module) for module in modules]
        self._told = {"teacher": ", ".join(names), "teacher_parameters": sum(sizes)}
        if max(sizes) < _size(student):
            self._told["warning"] = "the teacher is smaller than the student; distilling from it may not help"
            context.services.say(
                f"distill: the teacher has {max(sizes):,} parameters, fewer than the student's "
                f"{_size(student):,}; distilling from it may not help"
            )
        return Teachers(modules, config.teacher_weights)

    def detach(self, model: nn.Module) -> None:
        """Take the hook off the student and let go of the teacher."""
        if self._handle is not None:
            self._handle.remove()
        if self._hidden is not None:
            self._saved_hidden = self._hidden.state_dict()
            self._hidden.detach()
        if self._teachers is not None:
            self._saved_teachers = self._teachers.state_dict()
        self._handle = self._student = self._teachers = self._hidden = self._cache = self.labels = None
        self._hook.active = False
        self._hook.take()

    def begin(self, context: Context) -> None:
        """Resolve the range and bring the teacher to the student's device."""
        self._first, self._last = self._range(context)
        self._switch(context)
        if self._student is not None and self._teachers is not None:
            self._teachers.follow(self._student)
            if self._saved_teachers:
                self._teachers.load_state_dict(self._saved_teachers)
        if self._hidden is not None and self._saved_hidden:
            self._hidden.load_state_dict(self._saved_hidden)
        self._saved_teachers, self._saved_hidden = {}, {}

    def loss(self, task_loss: Tensor, context: Context) -> Tensor:
        """Return the mixed loss for the latest forward of the student, the task loss outside begin..end."""
        forward, labels, self.labels = self._hook.take(), self.labels, None
        if not self._is_active(context) or not torch.is_grad_enabled():
            return task_loss
        student, teachers = self._student, self._teachers
        if student is None or teachers is None or forward is None:
            raise TrainingError(
                "distill: the student's forward must run before the loss, in train mode and with gradients, "
                "and was not seen; set distill.student to the submodule that computes the logits, and call the "
                "module, not its forward method"
            )
        config = self.config
        inputs = named_inputs(student, forward)
        logits = find_logits(forward.output, config.logits, "student")
        labels = inputs.get("labels") if labels is None else labels
        mask = None
        numbers = isinstance(labels, Tensor) and labels.is_floating_point()  # regression, multi-label: no -100
        if config.of_classes or not (labels is None or numbers):
            mask = counted_positions(logits, labels, inputs.get("attention_mask"), causal=self._causal)
        if self._cache is not None:
            total, count = self._compare_cached(self._cache, logits, inputs, mask)
        else:
            total, count = self._compare(logits, self._targets(student, teachers, forward, logits), mask, context)
        self._batches += 1
        self._positions = self._positions + count
        self._soft, self._task = (total.detach(), count), task_loss.detach()
        alpha = self._at(context, config.alpha, config.alpha_end)
        mixed = task_loss
        if alpha != 1:  # 0 * inf would be NaN
            soft = context.normalise(total, count).to(task_loss.device)
            mixed = soft if alpha == 0 else alpha * task_loss + (1 - alpha) * soft
        if self._hidden is None:
            return mixed
        hidden = self._hidden.loss(mask, context.normalise)
        self._hidden_loss = hidden.detach()
        return mixed + config.hidden_weight * hidden.to(mixed.device)

    def _targets(self, student: nn.Module, teachers: Teachers, forward: Forward, logits: Tensor) -> list[Tensor]:
        teachers.follow(student)
        targets = [find_logits(output, self.config.logits, "teacher") for output in teachers.ask(student, forward)]
        for target in targets:
            check_classes(logits, target, of_classes=self.config.of_classes)
        return targets

    def _compare_cached(
        self, cache: TeacherCache, logits: Tensor, inputs: Mapping[str, Any], mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        found = cache.lookup(inputs)
        return kd_topk_sum(
            logits, found.indices, found.log_probs, temperature=self.config.temperature, mask=found.counted(mask),
            tail_mass=found.tail_mass, divergence=cast("Any", self.config.divergence),
            scale_by_temperature=self.config.scale_by_temperature,
        )  # fmt: skip

    def _compare(
        self, logits: Tensor, targets: list[Tensor], mask: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of the divergence over the positions that count, and their number."""
        config, weights = self.config, self._teachers.weights if self._teachers else None
        temperature = self._at(context, config.temperature, config.temperature_end)
        if config.confidence:
            sure = mean_teacher(targets, weights, 1.0).amax(-1).exp() >= config.confidence
            sure = sure.to(logits.device)
            mask = sure if mask is None else mask & sure
        options: dict[str, Any] = {"beta": config.beta} if config.divergence == "jsd" else {}
        options |= {"temperature": temperature, "mask": mask, "scale_by_temperature": config.scale_by_temperature}
        compare = DIVERGENCES[config.divergence]
        if len(targets) == 1 or config.divergence == "logit_mse":
            return compare(logits, mean_logits(targets, weights) if len(targets) > 1 else targets[0], **options)
        said = mean_teacher(targets, weights, temperature, multi_label=config.divergence == "bernoulli_kl")
        return compare(logits, teacher_log_probs=said, **options)

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
        if self._student is not None and self._teachers is not None:
            self._teachers.after_step(self._student)

    def _switch(self, context: Context) -> None:
        active = self._is_active(context)
        self._hook.active = active
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
            "teachers": self._teachers.state_dict() if self._teachers else dict(self._saved_teachers),
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


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _check_heads(student: nn.Module, teacher: nn.Module, divergence: str) -> None:
    """Refuse, where the models tell before a batch, what the divergence is not for, and different widths."""
    for whose, module in (("student", student), ("teacher", teacher)):
        problem = getattr(getattr(module, "config", None), "problem_type", None)
        fitting = {"regression": "logit_mse", "multi_label_classification": "bernoulli_kl"}.get(problem or "")
        if fitting and divergence != fitting:
            raise ConfigError(
                f"distill: the {whose} must classify into single labels, got problem_type {problem!r}; take divergence "
                f"{fitting}"
            )
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
