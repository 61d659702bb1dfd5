"""Teachers: one or several frozen models, or the student itself: as the run started, or its moving average.

A teacher may be loaded in fewer bits than it was saved in. If the student is sharded, its teacher is sharded in the
same way, so that no process holds a whole teacher.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from shared_core.distillation.config import TeacherDtype
from shared_core.distillation.forward_capture import Forward, ask_teacher, first_parameter, lacks_forward
from shared_core.distillation.teacher_cache.keys import teacher_fingerprint
from shared_core.distributed.collectives import broadcast_, from_main, local_part, world_size
from shared_core.distributed.sharded_tensors import fill_, is_sharded, reshard_, whole
from shared_core.engine.checks.model_guards import refuse_scripted
from shared_core.errors import CheckpointError, CompatibilityError, EffError, MatchError, TrainingError, require
from shared_core.libraries import optional
from shared_core.modules.calls import cache_configs, without_cache
from shared_core.modules.four_bits import linear_of_four_bits
from shared_core.modules.running_average import move_towards_


def change_dtype_(teacher: nn.Module, dtype: TeacherDtype) -> None:
    """Convert a teacher's weights to another format, in place.

    ``int8`` (one scale per row, torchao) and ``nf4`` (one scale per 64 weights, bitsandbytes) apply to linear layers
    except the output head. Other weights do not change.

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
        raise MatchError("distill", f"teacher_dtype {dtype} needs a linear layer, got none in {type(teacher).__name__}")
    # A run may attach more than once.
    found = [name for name, layer in linears.items() if is_plain(layer.weight)]
    try:
        if dtype == "int8":
            torchao: Any = optional("torchao.quantization", "torchao", "distill")
            torchao.quantize_(teacher, torchao.Int8WeightOnlyConfig(), filter_fn=lambda layer, name: name in found)
        else:
            _to_nf4_(teacher, found)
    except (NotImplementedError, RuntimeError, OSError, ValueError) as error:
        rule = f"teacher_dtype {dtype} must run on the teacher's device, got {type(error).__name__}: {error}"
        raise CompatibilityError("distill", rule, "use bfloat16, which runs anywhere") from error


def is_plain(weight: Tensor) -> bool:
    """Return True if a weight is floating point and not packed by a quantization library."""
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
    """Shard a teacher over the student's processes, in place. A no-op if the student is not sharded.

    Each layer of a stack (``nn.ModuleList``) is gathered separately, and the rest of the model together. A teacher that
    is already sharded or quantized does not change. Products are computed in the student's dtype.
    """
    mesh = next((part.device_mesh for part in student.parameters() if isinstance(part, DTensor)), None)
    # Packed weights have no rows to shard. They are small, so every process holds them.
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
    found = getattr(state, "_mp_policy", None)  # not public in torch 2.15
    return found if isinstance(found, MixedPrecisionPolicy) else MixedPrecisionPolicy()


_TRAINING = attrgetter("training")
# `eval` does not change these modules; the others are checked in every micro-batch
_ALIKE_IN_BOTH_MODES = frozenset(
    (nn.Conv1d, nn.Conv2d, nn.Embedding, nn.GELU, nn.LayerNorm, nn.Linear, nn.ModuleList, nn.ReLU, nn.Sequential)
)


class Teachers:
    """Frozen models outside the student: in no state dict or optimizer, always in eval mode.

    A checkpoint holds digests of teachers that a function built: it may return another model when a run resumes.

    Args:
        modules: The teachers.
        weights: Their relative weights. Empty for equal ones.
        built: Digest of each teacher that a function built, by the function's name.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        weights: Sequence[float] = (),
        built: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.weights, self._built = list(weights) or None, built
        self._freeze(modules)

    def _freeze(self, modules: Sequence[nn.Module]) -> None:
        self.modules = [module.requires_grad_(False).eval() for module in modules]
        parts = [part for module in self.modules for part in module.modules()]
        self._parts = [*self.modules, *(part for part in parts if type(part) not in _ALIKE_IN_BOTH_MODES)]
        self._caches = cache_configs(*self.modules)

    def ask(self, student: nn.Module, forward: Forward) -> list[Any]:
        """Return each teacher's output for the student's inputs."""
        if any(map(_TRAINING, self._parts)):  # calling `eval` on a whole model is slow
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
            remedy = "pass a teacher for these inputs, or set distill.student to the part of the model that has them"
            if lacks_forward(module):
                remedy = "pass the network inside it, such as module.net, or give it a forward"
            raise TrainingError(
                "distill",
                f"teacher must compute from the student's inputs, of shapes {shapes}, got {type(module).__name__}: "
                f"{error}",
                remedy,
            ) from error

    def begin(self, student: nn.Module) -> None:
        """Shard each teacher like the student, and move it to the student's device."""
        for module in self.modules:
            if not _is_placed(module):
                shard_like_(module, student)
        self.follow(student)

    def follow(self, student: nn.Module) -> None:
        """Move every teacher to the student's device."""
        there = first_parameter(student)
        for module in self.modules:
            here = first_parameter(module)
            if there is None or here is None or here.device == there.device or _is_placed(module):
                continue
            module.to(there.device)

    def after_step(self, student: nn.Module) -> None:
        """Called after each applied step; a no-op for frozen teachers."""

    @property
    def is_readable(self) -> bool:
        """True if `state_dict` needs no communication with other processes."""
        return True

    def gather(self) -> None:
        """Gather the tensors for `state_dict`, until `release`. Every process must call it."""

    def release(self) -> None:
        """Undo `gather`."""

    def state_dict(self) -> dict[str, Any]:
        """Return what changes during training, or digests of teachers that may have changed when a run resumes."""
        return {"built": dict(self._built)} if self._built else {}

    def load_state_dict(self, state: Mapping[str, Any], student: nn.Module) -> None:
        """Restore the state returned by `state_dict`, after the student's was restored.

        Raises:
            CheckpointError: If a function built another teacher than in the run that wrote the state.
        """
        for name, digest in state.get("built", {}).items():
            rule = f"teacher {name} must return the model that the run started with, got other weights"
            is_same = self._built.get(name, digest) == digest
            require(is_same, "distill", rule, "load its weights from a file, or seed it", CheckpointError)


class StartingStudent(Teachers):
    """A frozen copy of the student as it is when the run starts, before any technique changes it.

    The copy keeps the model's dtype unless `dtype` says otherwise. Frozen quantized weights are shared with the
    student. A checkpoint holds only a digest of the copy. A resumed run copies the model again and compares digests.

    Args:
        student: The student. Call this before techniques attach.
        dtype: Format of the copy's weights.

    Raises:
        CompatibilityError: If the student is already sharded, so that no process holds it.
    """

    def __init__(self, student: nn.Module, dtype: TeacherDtype = "as_saved") -> None:
        _refuse_sharded(student, "self")
        start, self._digest = _copied(student), ""
        if any(tensor.is_meta for tensor in tensors_of(start).values()):
            start.to_empty(device="cpu")  # cpu_ram_efficient_loading: only the main process has read the weights
        else:
            self._digest = teacher_fingerprint(start)
        if any(map(_is_codes, start.parameters())) and dtype != "as_saved":
            rule = f"teacher_dtype must be as_saved for a copy that shares quantized weights, got {dtype}"
            raise CompatibilityError("distill", rule, "leave teacher_dtype out")
        change_dtype_(start, dtype)
        super().__init__([start])

    def report(self) -> dict[str, Any]:
        """Return the copy's memory and digest for the receipt."""
        size = sum(tensor.nbytes for tensor in _own_tensors(self.modules[0]).values())
        return {"teacher_mib": round(size / 2**20, 3), "teacher_fingerprint": self._digest}

    def begin(self, student: nn.Module) -> None:
        """Take the main process's weights, as DDP and FSDP2 do for the student, then shard the copy and move it."""
        (start,) = self.modules
        there = first_parameter(student)
        if world_size() > 1 and there is not None and not any(map(is_sharded, start.parameters())):
            self._digest = from_main(self._digest)
            for tensor in _own_tensors(start).values():
                # One tensor at a time: before sharding, the whole copy may not fit on the device.
                tensor.detach().copy_(broadcast_(tensor.detach().to(there.device)))
        super().begin(student)

    def state_dict(self) -> dict[str, Any]:
        """Return the digest of the model as the run started."""
        return {"digest": self._digest}

    def load_state_dict(self, state: Mapping[str, Any], student: nn.Module) -> None:
        """Raise `CheckpointError` if the run that wrote this state started with other weights."""
        if state.get("digest", self._digest) != self._digest:
            rule = "with teacher self the model must have the weights that the run started with, got others"
            remedy = "build the model as in the first run, not from the checkpoint, and resume again"
            raise CheckpointError("distill", rule, remedy)


class StudentAverage(Teachers):
    """The student's moving average as its teacher: ``θ' ← d·θ' + (1 - d)·θ`` after each applied step.

    After ``n`` steps the next one has ``d = min(decay, 1 - 1/(n + 2))``: until that reaches `decay`, the average is the
    plain mean of all weights so far, the initial ones included. Buffers are copied from the student. Under FSDP2 each
    process averages its own shard.

    Source: Tarvainen and Valpola 2017, arXiv:1703.01780; the start is that of their published code.
    """

    def __init__(self, student: nn.Module, decay: float) -> None:
        _refuse_sharded(student, "ema")
        super().__init__([_copied(student)])
        self._decay = decay
        self._num_updates = 0
        self._gathered: dict[str, Tensor] | None = None

    @torch.no_grad()
    def after_step(self, student: nn.Module) -> None:
        """Update the average with the student's weights."""
        (average,) = self.modules
        parameters = zip(average.parameters(), student.parameters(), strict=True)
        buffers = zip(average.buffers(), student.buffers(), strict=True)
        try:  # comparing shapes by name is slow, so it is done only after an error
            pairs = [(local_part(mean), local_part(now.detach())) for mean, now in parameters if not _is_codes(mean)]
            # With `decay` from the start, a run of 100 steps at 0.999 would be taught by its random initial weights.
            weight = max(1 - self._decay, 1 / (self._num_updates + 2))
            move_towards_([mean for mean, _ in pairs], [now for _, now in pairs], weight)
            for its, buffer in buffers:
                its.copy_(buffer)
        except (RuntimeError, ValueError):
            self._check_same(student)
            raise
        self._num_updates += 1
        reshard_(average)

    def begin(self, student: nn.Module) -> None:
        """Move the average to the student's device. The student's layers must not have changed."""
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
            f"with teacher ema the student must keep its layers, got a difference at {name}",
            "add, remove or replace layers before techniques attach (in Lightning in __init__ or configure_model)",
        )

    @property
    def is_readable(self) -> bool:
        """True if the average is not sharded, or is gathered."""
        return self._gathered is not None or not any(map(is_sharded, self._tensors().values()))

    def gather(self) -> None:
        """Gather a sharded average on the CPU."""
        if not self.is_readable:
            self._gathered = {name: whole(tensor.detach()).cpu() for name, tensor in self._tensors().items()}

    def release(self) -> None:
        """Keep only this process's shard."""
        self._gathered = None

    def state_dict(self) -> dict[str, Any]:
        """Return the average's full tensors. If it is sharded and not gathered, every process must call this."""
        tensors = self._gathered
        if tensors is None:
            tensors = {name: whole(tensor.detach()).clone() for name, tensor in self._tensors().items()}
        return {"average": dict(tensors), "num_updates": self._num_updates}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], student: nn.Module) -> None:
        """Restore a saved average."""
        (average,) = self.modules
        for path, module in list(student.named_modules()):
            if any(map(_is_codes, module._parameters.values())):
                average.set_submodule(path, _copied(module))
        self._freeze(self.modules)  # the copies start in the student's mode
        tensors, saved = self._tensors(), state["average"]
        if set(saved) != set(tensors) or any(saved[name].shape != tensor.shape for name, tensor in tensors.items()):
            rule = "the saved average does not fit this model"
            raise CheckpointError("distill", rule, "resume with the model that wrote the checkpoint")
        for name, tensor in tensors.items():
            fill_(tensor, saved[name])
        self._num_updates = int(state["num_updates"])

    def _tensors(self) -> dict[str, Tensor]:
        (average,) = self.modules
        reshard_(average)  # after a forward the outermost module stays gathered
        return _own_tensors(average)


def _refuse_sharded(student: nn.Module, teacher: str) -> None:
    """Raise `CompatibilityError` if a student that would be copied is sharded."""
    if any(map(is_sharded, student.parameters())):
        raise CompatibilityError(
            "distill",
            f"teacher must not be {teacher} for a model that is already sharded, because FSDP2 cannot copy it",
            "use strategy eff_fsdp or the Hugging Face Trainer, which shard later, or DDP",
        )


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model, by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a copy that `_copied` made, without shared codes."""
    parameters = {name: value for name, value in module.named_parameters() if not _is_codes(value)}
    return {**parameters, **dict(module.named_buffers())}


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def copied(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a deep copy that computes with its own weights.

    Lightning sets a `torch.compile`d module's compiled ``forward`` on the instance. A plain copy would still call the
    original's.
    """
    refuse_scripted(model, "distill")
    for name, module in model.named_modules():
        # deepcopy fails for tensors with a graph. This error names the module.
        if any(isinstance(value, Tensor) and not value.is_leaf for value in vars(module).values()):
            raise CompatibilityError(
                "distill",
                f"a student that is copied must hold only parameters, got {name or 'a model'} with a tensor that is "
                "computed from them (torch.nn.utils.weight_norm or spectral_norm)",
                "use torch.nn.utils.parametrizations instead",
            )
    other = copy.deepcopy(model, memo)
    for module in other.modules():
        # A compiled forward is bound to the original's weights, and the copy would use them.
        if hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable"):
            del module.forward
    return other


def _copied(module: nn.Module) -> nn.Module:
    """Return a copy that shares the quantized weights of a frozen base."""
    codes = [parameter for parameter in module.parameters() if _is_codes(parameter)]
    return copied(module, {id(parameter): parameter for parameter in codes})


def _is_codes(parameter: Tensor | None) -> bool:
    """Return True if a parameter belongs to a frozen 4- or 8-bit base, which is shared and not averaged."""
    return parameter is not None and not parameter.is_floating_point()


def _is_placed(module: nn.Module) -> bool:
    """Return True if Accelerate placed a model or bitsandbytes quantized it, so that `to` would fail or undo this."""
    return hasattr(module, "hf_device_map") or bool(getattr(module, "is_quantized", False))


def check_separate(model: nn.Module, teacher: nn.Module) -> None:
    """Raise if the teacher shares weights with the model, because freezing it would freeze the model."""
    own = {id(parameter) for parameter in model.parameters()}
    if teacher in set(model.modules()) or any(id(parameter) in own for parameter in teacher.parameters()):
        rule = f"teacher must not share weights with the model, got {type(teacher).__name__}, which does"
        raise CompatibilityError("distill", rule, "pass a copy (copy.deepcopy) that is not part of the model")
