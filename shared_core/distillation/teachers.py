"""Who teaches: frozen models, one or several, or the moving average of the student itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.distillation.batch import Forward, ask_teacher, first_parameter
from shared_core.distillation.sharding import shard_like_
from shared_core.errors import CheckpointError, CompatibilityError
from shared_core.ranks import local_part
from shared_core.sharded import fill_, is_sharded, reshard_, whole
from shared_core.wrappers import copied

_TRAINING = attrgetter("training")
# `eval` changes nothing about them; every micro-batch asks the others
_ALIKE_IN_BOTH_MODES = frozenset(
    (nn.Conv1d, nn.Conv2d, nn.Embedding, nn.GELU, nn.LayerNorm, nn.Linear, nn.ModuleList, nn.ReLU, nn.Sequential)
)


class Teachers:
    """Frozen models outside of the student: in no state dict, no optimizer, always in eval mode.

    Args:
        modules: The models; their parameters are set to ``requires_grad=False``.
        weights: How much each counts; empty for equally.
    """

    def __init__(self, modules: Sequence[nn.Module], weights: Sequence[float] = ()) -> None:
        self.weights = list(weights) or None
        self._freeze(modules)

    def _freeze(self, modules: Sequence[nn.Module]) -> None:
        self.modules = [module.requires_grad_(False).eval() for module in modules]
        parts = [part for module in self.modules for part in module.modules()]
        self._parts = [*self.modules, *(part for part in parts if type(part) not in _ALIKE_IN_BOTH_MODES)]

    def ask(self, student: nn.Module, forward: Forward) -> list[Any]:
        """Return what each says to the student's inputs."""
        if any(map(_TRAINING, self._parts)):  # `eval` goes through all of a model, slowly
            for module in self.modules:
                module.eval()
        return [ask_teacher(module, student, forward) for module in self.modules]

    def shard_like(self, student: nn.Module) -> None:
        """Give every process the parts of each teacher that it has of a sharded student."""
        for module in self.modules:
            if not _is_placed(module):
                shard_like_(module, student)

    def follow(self, student: nn.Module) -> None:
        """Bring every teacher to the student's device."""
        there = first_parameter(student)
        for module in self.modules:
            here = first_parameter(module)
            if there is None or here is None or here.device == there.device or _is_placed(module):
                continue
            module.to(there.device)

    def after_step(self, student: nn.Module) -> None:
        """The student took a step; frozen teachers do not."""

    @property
    def is_readable(self) -> bool:
        """Whether `state_dict` needs no other process."""
        return True

    def gather(self) -> None:
        """Hold whole what `state_dict` returns, until `let_go`; every process must call it."""

    def let_go(self) -> None:
        """Undo `gather`."""

    def state_dict(self) -> dict[str, Any]:
        """Return what changes during training: nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], student: nn.Module) -> None:
        """Take back what `state_dict` returned; the student's own was restored before."""


class StudentAverage(Teachers):
    """The student's moving average as its teacher: ``θ' ← d·θ' + (1 - d)·θ`` after each applied step.

    Buffers are those of the student (Tarvainen and Valpola 2017, arXiv:1703.01780). Under FSDP2 a process averages its
    own part.

    Args:
        student: Copied as it is now.
        decay: ``d``, in [0, 1).

    Raises:
        CompatibilityError: If the student is sharded already.
    """

    def __init__(self, student: nn.Module, decay: float) -> None:
        if any(map(is_sharded, student.parameters())):
            raise CompatibilityError(
                "distill: teacher must not be ema for a model that is sharded already, which FSDP2 does not let be "
                "copied; use strategy eff_fsdp or the Hugging Face Trainer, which shard later, or DDP"
            )
        super().__init__([_copied(student)])
        self._decay = decay
        self._gathered: dict[str, Tensor] | None = None

    @torch.no_grad()
    def after_step(self, student: nn.Module) -> None:
        """Move the average one step towards the student."""
        (average,) = self.modules
        for mean, now in zip(average.parameters(), student.parameters(), strict=True):
            if not _is_codes(mean):
                local_part(mean).lerp_(local_part(now.detach()).to(mean.dtype), 1 - self._decay)
        for its, buffer in zip(average.buffers(), student.buffers(), strict=True):
            its.copy_(buffer)
        reshard_(average)

    @property
    def is_readable(self) -> bool:
        """Whether the average is whole here, or gathered."""
        return self._gathered is not None or not any(map(is_sharded, self._tensors().values()))

    def gather(self) -> None:
        """Hold the average whole, on the CPU, if it is sharded."""
        if not self.is_readable:
            self._gathered = {name: whole(tensor.detach()).cpu() for name, tensor in self._tensors().items()}

    def let_go(self) -> None:
        """Hold this process's part alone."""
        self._gathered = None

    def state_dict(self) -> dict[str, Any]:
        """Return the average's tensors, whole; of sharded ones those gathered, or every process must call it."""
        if self._gathered is not None:
            return dict(self._gathered)
        return {name: whole(tensor.detach()).clone() for name, tensor in self._tensors().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], student: nn.Module) -> None:
        """Take back a saved average.

        Raises:
            CheckpointError: If it is of another model.
        """
        (average,) = self.modules
        for path, module in list(student.named_modules()):
            if any(map(_is_codes, module._parameters.values())):
                average.set_submodule(path, _copied(module))
        self._freeze(self.modules)  # the copies are in the student's mode
        tensors = self._tensors()
        if set(state) != set(tensors) or any(state[name].shape != tensor.shape for name, tensor in tensors.items()):
            raise CheckpointError(
                "distill: the saved average must be of this model; resume with the model that wrote the checkpoint"
            )
        for name, tensor in tensors.items():
            fill_(tensor, state[name])

    def _tensors(self) -> dict[str, Tensor]:
        (average,) = self.modules
        reshard_(average)  # its forward leaves the outermost module gathered
        parameters = {name: mean for name, mean in average.named_parameters() if not _is_codes(mean)}
        return {**parameters, **dict(average.named_buffers())}


def _copied(module: nn.Module) -> nn.Module:
    """Return a copy that shares the codes of a frozen base, which no training changes."""
    codes = [parameter for parameter in module.parameters() if _is_codes(parameter)]
    return copied(module, {id(parameter): parameter for parameter in codes})


def _is_codes(parameter: Tensor | None) -> bool:
    """Return whether a parameter is of a frozen base in 4 or 8 bits: the student's, as are its scales, not averaged."""
    return parameter is not None and not parameter.is_floating_point()


def _is_placed(module: nn.Module) -> bool:
    """Return whether accelerate placed a model, or bitsandbytes quantised it: `to` is refused or would undo it."""
    return hasattr(module, "hf_device_map") or bool(getattr(module, "is_quantized", False))


def check_separate(model: nn.Module, teacher: nn.Module) -> None:
    """Refuse a teacher that is, or is part of, the model: freezing it would freeze the model.

    Raises:
        CompatibilityError: If it shares a module or a weight.
    """
    own = {id(parameter) for parameter in model.parameters()}
    if teacher in set(model.modules()) or any(id(parameter) in own for parameter in teacher.parameters()):
        raise CompatibilityError(
            f"distill: teacher must share no weights with the model, got {type(teacher).__name__} that does; "
            "pass a copy (copy.deepcopy), kept outside the model"
        )
