"""Teachers: frozen models, one or several, or the moving average of the student itself.

A teacher may be loaded in fewer bits than it was saved in. The teacher of a sharded student is sharded in the same way,
so that no process holds a whole one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from shared_core.distillation.config import TeacherDtype
from shared_core.distillation.forward_capture import Forward, ask_teacher, first_parameter
from shared_core.distributed.collectives import local_part
from shared_core.distributed.sharded_tensors import fill_, is_sharded, reshard_, whole
from shared_core.engine.checks.model_guards import refuse_scripted
from shared_core.errors import CheckpointError, CompatibilityError, EffError, MatchError, TrainingError
from shared_core.libraries import optional
from shared_core.modules.calls import cache_configs, without_cache
from shared_core.modules.four_bits import linear_of_four_bits
from shared_core.modules.running_average import move_towards_


def change_dtype_(teacher: nn.Module, dtype: TeacherDtype) -> None:
    """Turn a teacher's weights into another format, in place.

    ``int8`` (one scale a row, torchao) and ``nf4`` (64 weights a scale, bitsandbytes) are of linear layers alone, but
    for the output head; what else there is stays as it was saved.

    Source: Dettmers et al., 2023, arXiv:2305.14314, section 3.
    """
    if dtype == "as_saved":
        return
    if dtype not in ("int8", "nf4"):
        teacher.to(getattr(torch, dtype))
        return
    head = getattr(teacher, "get_output_embeddings", lambda: None)()
    linears = {
        name: layer for name, layer in teacher.named_modules() if isinstance(layer, nn.Linear) and layer is not head
    }
    if not linears:
        raise MatchError("distill", f"teacher_dtype {dtype} needs a linear layer, got {type(teacher).__name__} without")
    # a run attaches more than once
    found = [name for name, layer in linears.items() if is_plain(layer.weight)]
    try:
        if dtype == "int8":
            torchao: Any = optional("torchao.quantization", "torchao", "distill")
            torchao.quantize_(teacher, torchao.Int8WeightOnlyConfig(), filter_fn=lambda layer, name: name in found)
        else:
            _to_nf4_(teacher, found)
    except (NotImplementedError, RuntimeError, OSError, ValueError) as error:
        rule = f"teacher_dtype {dtype} must run on the teacher's device, got {type(error).__name__}: {error}"
        raise CompatibilityError("distill", rule, "take bfloat16, which runs anywhere") from error


def is_plain(weight: Tensor) -> bool:
    """Return True if a weight is of floating point and not packed by a library."""
    return weight.is_floating_point() and type(weight.data) is Tensor


def _to_nf4_(teacher: nn.Module, names: list[str]) -> None:
    optional("bitsandbytes", "bnb", "distill")
    for name in names:
        linear = teacher.get_submodule(name)
        weight: Tensor = linear.weight.detach()  # type: ignore[assignment, operator]
        layer = linear_of_four_bits(weight, bias=linear.bias is not None)
        layer.bias = linear.bias
        teacher.set_submodule(name, layer.train(linear.training))


def shard_like_(teacher: nn.Module, student: nn.Module) -> None:
    """Shard a teacher over the processes that share the student, in place; nothing if the student is whole.

    Each layer of a stack (``nn.ModuleList``) is gathered by itself, like the rest of the model. A teacher that is
    sharded already, or quantised, stays as it is. Products are made in the student's dtype.
    """
    mesh = next((part.device_mesh for part in student.parameters() if isinstance(part, DTensor)), None)
    # packed weights have no rows to share: every process holds them, as they are few
    if mesh is None or any(isinstance(part, DTensor) or not is_plain(part) for part in teacher.parameters()):
        return
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True, "mp_policy": _policy(student)}
    stacks = [module for module in teacher.modules() if isinstance(module, nn.ModuleList)]
    inner = {id(part) for stack in stacks for layer in stack for part in layer.modules() if part is not layer}
    for stack in stacks:
        for layer in stack:
            if id(layer) not in inner:
                fully_shard(layer, **options)
    fully_shard(teacher, **options)


def _policy(student: nn.Module) -> MixedPrecisionPolicy:
    wrapped = next((module for module in student.modules() if isinstance(module, FSDPModule)), None)
    state = wrapped._get_fsdp_state() if wrapped is not None else None
    found = getattr(state, "_mp_policy", None)  # not public as of torch 2.15
    return found if isinstance(found, MixedPrecisionPolicy) else MixedPrecisionPolicy()


_TRAINING = attrgetter("training")
# `eval` changes nothing about them; every micro-batch asks the others
_ALIKE_IN_BOTH_MODES = frozenset(
    (nn.Conv1d, nn.Conv2d, nn.Embedding, nn.GELU, nn.LayerNorm, nn.Linear, nn.ModuleList, nn.ReLU, nn.Sequential)
)


class Teachers:
    """Frozen models outside of the student: in no state dict, no optimizer, always in eval mode.

    `weights` tell how much each counts; empty for equally.
    """

    def __init__(self, modules: Sequence[nn.Module], weights: Sequence[float] = ()) -> None:
        self.weights = list(weights) or None
        self._freeze(modules)

    def _freeze(self, modules: Sequence[nn.Module]) -> None:
        self.modules = [module.requires_grad_(False).eval() for module in modules]
        parts = [part for module in self.modules for part in module.modules()]
        self._parts = [*self.modules, *(part for part in parts if type(part) not in _ALIKE_IN_BOTH_MODES)]
        self._caches = cache_configs(*self.modules)

    def ask(self, student: nn.Module, forward: Forward) -> list[Any]:
        """Return what each says to the student's inputs."""
        if any(map(_TRAINING, self._parts)):  # `eval` goes through all of a model, slowly
            for module in self.modules:
                module.eval()
        with without_cache(self._caches):
            return [self._ask(module, student, forward) for module in self.modules]

    def _ask(self, module: nn.Module, student: nn.Module, forward: Forward) -> Any:
        try:
            return ask_teacher(module, student, forward)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, EffError | torch.OutOfMemoryError):
                raise
            values = (*forward.args, *forward.kwargs.values())
            shapes = [tuple(value.shape) for value in values if isinstance(value, torch.Tensor)]
            raise TrainingError(
                "distill",
                f"teacher must compute from the student's inputs, of shapes {shapes}, got {type(module).__name__}: "
                f"{error}",
                "give a teacher of these inputs, or name as distill.student the part of the model that has the "
                "teacher's",
            ) from error

    def begin(self, student: nn.Module) -> None:
        """Give every process the parts of each teacher that it has of a sharded student, on the student's device."""
        for module in self.modules:
            if not _is_placed(module):
                shard_like_(module, student)
        self.follow(student)

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
        """True if `state_dict` needs no other process."""
        return True

    def gather(self) -> None:
        """Hold whole what `state_dict` returns, until `release`; every process must call it."""

    def release(self) -> None:
        """Undo `gather`."""

    def state_dict(self) -> dict[str, Any]:
        """Return what changes during training: nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], student: nn.Module) -> None:
        """Restore the state returned by `state_dict`; the student's own was restored before."""


class StudentAverage(Teachers):
    """The student's moving average as its teacher: ``θ' ← d·θ' + (1 - d)·θ`` after each applied step.

    Buffers are those of the student (Tarvainen and Valpola 2017, arXiv:1703.01780). Under FSDP2 a process averages its
    own part.
    """

    def __init__(self, student: nn.Module, decay: float) -> None:
        if any(map(is_sharded, student.parameters())):
            raise CompatibilityError(
                "distill",
                "teacher must not be ema for a model that is sharded already, which FSDP2 does not let be copied",
                "use strategy eff_fsdp or the Hugging Face Trainer, which shard later, or DDP",
            )
        super().__init__([_copied(student)])
        self._decay = decay
        self._gathered: dict[str, Tensor] | None = None

    @torch.no_grad()
    def after_step(self, student: nn.Module) -> None:
        """Move the average one step towards the student."""
        (average,) = self.modules
        parameters = zip(average.parameters(), student.parameters(), strict=True)
        buffers = zip(average.buffers(), student.buffers(), strict=True)
        try:  # shapes are compared name by name only where they do not fit: that takes long in every step
            pairs = [(local_part(mean), local_part(now.detach())) for mean, now in parameters if not _is_codes(mean)]
            move_towards_([mean for mean, _ in pairs], [now for _, now in pairs], 1 - self._decay)
            for its, buffer in buffers:
                its.copy_(buffer)
        except (RuntimeError, ValueError):
            self._check_same(student)
            raise
        reshard_(average)

    def begin(self, student: nn.Module) -> None:
        """Bring the average to the device of the student, which must have the layers that it had."""
        self._check_same(student)
        super().begin(student)

    def _check_same(self, student: nn.Module) -> None:
        (average,) = self.modules
        kept, now = (shapes_of(tensors_of(module)) for module in (average, student))
        if [*kept.values()] == [*now.values()]:
            return
        name = next((name for name in [*now, *kept] if now.get(name) != kept.get(name)), "the order of its tensors")
        raise TrainingError(
            "distill",
            f"the student of teacher: ema must keep its layers, got a difference at {name}",
            "add, remove or replace layers before techniques attach (in Lightning in __init__ or configure_model)",
        )

    @property
    def is_readable(self) -> bool:
        """True if the average is whole here, or gathered."""
        return self._gathered is not None or not any(map(is_sharded, self._tensors().values()))

    def gather(self) -> None:
        """Hold the average whole, on the CPU, if it is sharded."""
        if not self.is_readable:
            self._gathered = {name: whole(tensor.detach()).cpu() for name, tensor in self._tensors().items()}

    def release(self) -> None:
        """Hold this process's part alone."""
        self._gathered = None

    def state_dict(self) -> dict[str, Any]:
        """Return the average's tensors, whole; of sharded ones those gathered, or every process must call it."""
        if self._gathered is not None:
            return dict(self._gathered)
        return {name: whole(tensor.detach()).clone() for name, tensor in self._tensors().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], student: nn.Module) -> None:
        """Restore a saved average."""
        (average,) = self.modules
        for path, module in list(student.named_modules()):
            if any(map(_is_codes, module._parameters.values())):
                average.set_submodule(path, _copied(module))
        self._freeze(self.modules)  # the copies are in the student's mode
        tensors = self._tensors()
        if set(state) != set(tensors) or any(state[name].shape != tensor.shape for name, tensor in tensors.items()):
            rule = "the saved average must be of this model"
            raise CheckpointError("distill", rule, "resume with the model that wrote the checkpoint")
        for name, tensor in tensors.items():
            fill_(tensor, state[name])

    def _tensors(self) -> dict[str, Tensor]:
        (average,) = self.modules
        reshard_(average)  # its forward leaves the outermost module gathered
        parameters = {name: mean for name, mean in average.named_parameters() if not _is_codes(mean)}
        return {**parameters, **dict(average.named_buffers())}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model, by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def copied(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a deep copy that computes with its own weights.

    Lightning sets the compiled ``forward`` of a `torch.compile`d module on the instance, and its copy would call the
    original's.
    """
    refuse_scripted(model, "distill")
    for name, module in model.named_modules():
        # deepcopy refuses tensors with a history; told by module here, and by tensor there.
        if any(isinstance(value, Tensor) and not value.is_leaf for value in vars(module).values()):
            raise CompatibilityError(
                "distill",
                f"a student that is copied must hold parameters alone, got {name or 'a model'} with a tensor that is "
                "computed from them (torch.nn.utils.weight_norm or spectral_norm)",
                "use the functions of torch.nn.utils.parametrizations",
            )
    other = copy.deepcopy(model, memo)
    for module in other.modules():
        # A compiled forward is bound to the original's weights: the copy would compute with them.
        if hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable"):
            del module.forward
    return other


def _copied(module: nn.Module) -> nn.Module:
    """Return a copy that shares the codes of a frozen base, which no training changes."""
    codes = [parameter for parameter in module.parameters() if _is_codes(parameter)]
    return copied(module, {id(parameter): parameter for parameter in codes})


def _is_codes(parameter: Tensor | None) -> bool:
    """Return True if a parameter is of a frozen base in 4 or 8 bits: the student's, as are its scales, not averaged."""
    return parameter is not None and not parameter.is_floating_point()


def _is_placed(module: nn.Module) -> bool:
    """Return True if accelerate placed a model, or bitsandbytes quantised it: `to` is refused or would undo it."""
    return hasattr(module, "hf_device_map") or bool(getattr(module, "is_quantized", False))


def check_separate(model: nn.Module, teacher: nn.Module) -> None:
    """Refuse a teacher that is, or is part of, the model: freezing it would freeze the model."""
    own = {id(parameter) for parameter in model.parameters()}
    if teacher in set(model.modules()) or any(id(parameter) in own for parameter in teacher.parameters()):
        rule = f"teacher must share no weights with the model, got {type(teacher).__name__} that does"
        raise CompatibilityError("distill", rule, "pass a copy (copy.deepcopy), kept outside the model")
