"""Measure what the number format loses of scaled gradients.

Telemetry counts parameter gradients that are subnormal or zero. The flush probe counts activation gradients that the
half-precision backward made zero, by a second backward in fp32.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch
from eff_kernels.loss_scaling import NUM_BINS, count_magnitudes
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from shared_core.distributed.collectives import all_finite, all_reduce_, local_part
from shared_core.loss_scaling.floors import FORMATS
from shared_core.modules.calls import remove_hooks

_FLOAT32 = torch.finfo(torch.float32)
_BIAS = 127  # column k of the histogram starts at 2**(k - 127)


@dataclass
class Figures:
    """Counts of one layer's gradients, or of all, at one step."""

    elements: int = 0
    zeros: int = 0
    subnormal: int = 0
    amax: float = 0.0

    def shares(self, scale: float, largest: float) -> dict[str, float | None]:
        """Return the shares of subnormal and zero elements and the headroom in bits, None if all are zero."""
        total = max(self.elements, 1)
        return {
            "underflow": self.subnormal / total,
            "zero": self.zeros / total,
            "headroom": math.log2(largest) - math.log2(self.amax) - math.log2(scale) if self.amax else None,
        }


class UnderflowTelemetry:
    """Measures scaled parameter gradients in the number format, since a scaler only sees overflow.

    - *underflow*: share of elements with ``0 < |g|·S < smallest normal``, which have lost bits;
    - *zero*: share that is exactly 0, including flushed gradients;
    - *headroom*: ``log2(format maximum / (amax·S))``, the doublings until overflow.

    Args:
        format: ``"fp16"`` or ``"fp8_e5m2"``.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(4))
        >>> weight.grad = torch.tensor([0.0, 1e-5, 0.5, 2.0])
        >>> telemetry = UnderflowTelemetry()
        >>> telemetry.measure([("head.weight", weight)], scale=1.0)
        True
        >>> {name: round(value, 2) for name, value in telemetry.figures().items()}
        {'loss_scale/underflow': 0.25, 'loss_scale/zero': 0.25, 'loss_scale/headroom': 15.0}
    """

    def __init__(self, format: str = "fp16") -> None:
        self.format = format
        self._limits = torch.finfo(FORMATS[format])
        self.step: int | None = None
        """Applied steps before the latest measurement; None before the first."""
        self.scale = 1.0
        """Scale of the latest measurement."""
        self.layers: dict[str, Figures] = {}
        """Counts of the latest measurement, by the name of the module that owns the parameters."""
        self.histograms = torch.zeros(0, NUM_BINS, dtype=torch.int64)
        """int64 ``[layers, 256]``: column k counts unscaled gradients with ``2^(k − 127) <= |g| < 2^(k − 126)``,
        column 0 also smaller ones and zeros."""

    @torch.no_grad()
    def measure(self, parameters: Iterable[tuple[str, Tensor]], scale: float, step: int = 0) -> bool:
        """Measure the gradients of these parameters, and return True if it was possible.

        A step without gradients, or with Inf or NaN in them, is skipped. Under FSDP2 every process must
        call it. Gradients are unscaled, and `scale` is the factor that they had in the backward.
        """
        grads = [(name, parameter.grad) for name, parameter in parameters if parameter.grad is not None]
        smallest = min(max(self._limits.smallest_normal / scale, _FLOAT32.tiny), _FLOAT32.max)
        counts, amax = _count([grad for _, grad in grads], smallest)
        if not grads or counts[:, NUM_BINS - 1].any():
            return False
        self.step, self.scale = step, scale
        # a few operations for all layers, because row by row would delay the step of a large model
        layers: dict[str, int] = {}
        rows = torch.tensor([layers.setdefault(name.rpartition(".")[0] or name, len(layers)) for name, _ in grads])
        summed = counts.new_zeros(len(layers), counts.shape[1]).index_add_(0, rows, counts)
        largest = amax.new_zeros(len(layers)).scatter_reduce_(0, rows, amax, "amax")
        self.histograms = summed[:, :NUM_BINS].clone()
        columns = self.histograms.sum(1).tolist(), *summed[:, NUM_BINS:].t().tolist(), largest.tolist()
        self.layers = {name: Figures(*found) for name, *found in zip(layers, *columns, strict=True)}
        return True

    @property
    def total(self) -> Figures:
        """The counts of all layers together."""
        elements, zeros, subnormal, amax = zip(*map(astuple, [Figures(), *self.layers.values()]), strict=True)
        return Figures(sum(elements), sum(zeros), sum(subnormal), max(amax))

    def figures(self) -> dict[str, float]:
        """Return the figures of all layers together; empty before the first measurement."""
        if self.step is None:
            return {}
        shares = self.total.shares(self.scale, self._limits.max)
        return {f"loss_scale/{name}": value for name, value in shares.items() if value is not None}

    def report(self) -> dict[str, Any]:
        """Return the latest figures, total and by layer, and the histogram of log2 of the unscaled magnitudes."""
        if self.step is None:
            return {}
        largest = self._limits.max
        total = self.histograms.sum(0).tolist()
        return {
            "format": self.format,
            "measured_step": self.step,
            "measured_scale": self.scale,
            **self.total.shares(self.scale, largest),
            "layers": {name: figures.shares(self.scale, largest) for name, figures in self.layers.items()},
            "log2_histogram": {str(column - _BIAS): count for column, count in enumerate(total) if count and column},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the latest figures."""
        return {
            "step": self.step,
            "scale": self.scale,
            "layers": {name: list(astuple(figures)) for name, figures in self.layers.items()},
            "histograms": self.histograms,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`; an empty state changes nothing."""
        if state:
            self.step, self.scale = state["step"], state["scale"]
            self.layers = {name: Figures(*figures) for name, figures in state["layers"].items()}
            self.histograms = state["histograms"]


def _count(grads: list[Tensor], smallest: float) -> tuple[Tensor, Tensor]:
    """Return on the CPU int64 ``[n, 256 + 2]`` (histogram, zeros, small ones) and float32 ``[n]`` (largest)."""
    counts = torch.zeros(len(grads), NUM_BINS + 2, dtype=torch.int64)
    amax = torch.zeros(len(grads))
    groups: dict[tuple[torch.device, bool], list[int]] = {}
    for row, grad in enumerate(grads):
        groups.setdefault((grad.device, hasattr(grad, "to_local")), []).append(row)
    for (_, sharded), rows in groups.items():
        dense = [local_part(grads[row]) for row in rows]
        found = count_magnitudes([grad.coalesce().values() if grad.is_sparse else grad for grad in dense], smallest)
        part = torch.cat((found.histogram, found.zeros[:, None], found.small[:, None]), dim=1)
        largest = found.amax
        if sharded:
            part, largest = all_reduce_(part, "sum"), all_reduce_(largest.contiguous(), "max")
        counts[rows], amax[rows] = part.cpu(), largest.cpu()
    return counts, amax


class FlushProbe:
    """Repeats one micro-batch's forward and backward with fp32 activation gradients, and counts flushed ones.

    Under autocast flushed gradients become exact zeros, which cannot be distinguished later from true zeros. The second
    pass has autocast off, but every module without children returns its first values, so that both backwards
    take the same branches. It starts from the gradients of the model's outputs in the first pass, including the scale.
    For that micro-batch the model returns its outputs in fp32, as with Accelerate. Parameters, their
    gradients, buffers and the random state are not changed. It costs one more forward and backward, and the memory of
    the activations and their gradients.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        >>> probe = FlushProbe()
        >>> probe.watch(model)
        >>> probe.arm()
        >>> with torch.autocast("cpu", torch.float16):
        ...     loss = model(torch.ones(2, 4)).float().sum() * 1e-9
        >>> loss.backward()
        >>> probe.measure(step=0), probe.figures()
        (True, {'loss_scale/flushed': 1.0})
    """

    def __init__(self) -> None:
        self.step: int | None = None
        """Applied steps before the latest measurement; None before the first."""
        self.layers: dict[str, tuple[int, int]] = {}
        """Flushed elements, and elements that are not zero in fp32, per leaf module's output."""
        self._model: nn.Module | None = None
        self._waiting: list[RemovableHandle] = []
        self._recording: list[RemovableHandle] = []
        self._clear()

    def _clear(self) -> None:
        for handle in [*self._waiting, *self._recording]:
            handle.remove()
        self._waiting, self._recording = [], []
        self._called: tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | None = None
        self._rng: Any = None
        self._values: list[Tensor] = []
        self._names: list[str] = []
        self._grads: dict[int, Tensor] = {}
        self._ends: dict[int, Tensor] = {}

    def watch(self, model: nn.Module) -> None:
        """Set the model for `arm`. There are no hooks until then."""
        self.leave()
        self._model = model

    def leave(self) -> None:
        """Remove every hook."""
        self._clear()
        self._model = None

    @property
    def is_watching(self) -> bool:
        """True if there is a model to measure."""
        return self._model is not None

    def arm(self) -> None:
        """Record the next forward in train mode of the first called module that has children."""
        # We don't know which module the user's loop calls. The first called one with children is the model or its
        # core.
        self._clear()
        if self._model is not None:
            self._waiting = [
                module.register_forward_pre_hook(self._before, with_kwargs=True)
                for module in self._model.modules()
                if any(module.children())
            ]

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (self._waiting and module.training and torch.is_grad_enabled()):
            return
        remove_hooks(self._waiting)
        self._called = (module, args, kwargs)
        self._rng = _rng_state(module)
        self._recording = [
            leaf.register_forward_hook(lambda _, __, output, name=name: self._record(name, output))
            for name, leaf in self._leaves(module)
        ]
        self._recording.append(module.register_forward_hook(self._after, always_call=True))

    def _leaves(self, called: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the modules without children inside the called one, by their names in the whole model."""
        inside = set(called.modules()) - {called}
        everything = self._model.named_modules() if self._model is not None else ()
        return [(name, module) for name, module in everything if module in inside and not any(module.children())]

    def _record(self, name: str, output: Any) -> None:
        for tensor in _tensors(output):
            index = len(self._names)
            self._names.append(name)
            # The fp32 repetition uses the same forward values, so that only the gradients' rounding differs.
            self._values.append(tensor.detach().clone())  # it may be changed in place
            _keep_gradient(tensor, self._grads, index)

    def _after(self, model: nn.Module, args: Any, output: Any) -> Any:
        remove_hooks(self._recording)
        indices = itertools.count()

        def watched(part: Any) -> Any:
            index = next(indices)
            if not (isinstance(part, Tensor) and part.requires_grad):
                return part
            # Outputs become fp32 here, so that the loss and its gradient are exact from here on.
            whole = part.float() if part.dtype in (torch.float16, torch.bfloat16) else part
            _keep_gradient(whole, self._ends, index)
            return whole

        return tree_map(watched, output)

    def measure(self, step: int) -> bool:
        """Compare the recorded backward with one in fp32. Return True if it was possible. Every process must call it.

        A backward with Inf or NaN is skipped. A model that can never be measured, because its parameters are not
        fp32 or its output is no tree of tensors, is not tried again.
        """
        if self._model is None:
            return False
        names = [name for name, _ in self._leaves(self._model)]
        # Counts of all processes are summed in one tensor. Its last row lets any process veto: it counts
        # processes that could not measure this time, and those that never can
        counts = torch.zeros(len(names) + 1, 2, dtype=torch.int64)
        counts[-1] = torch.tensor((not self._usable(), self._is_hopeless()))
        if not counts[-1].any():
            row = {name: index for index, name in enumerate(names)}
            for index, exact in self._exact_gradients().items():
                # Flushed: 0 in half precision, not 0 in fp32.
                lost = (self._grads[index] == 0) & (exact != 0)
                part = torch.stack((lost.sum(), torch.count_nonzero(exact)))
                counts[row[self._names[index]]] += part.cpu()
        device = next(self._model.parameters()).device
        counts = all_reduce_(counts.to(device), "sum").cpu()
        self._clear()
        if counts[-1, 1]:
            self.leave()
        if counts[-1].any():
            return False
        self.step = step
        self.layers = {
            name: (int(lost), int(seen)) for name, (lost, seen) in zip(names, counts.tolist(), strict=False) if seen
        }
        return True

    def _usable(self) -> bool:
        grads = [*self._grads.values(), *self._ends.values()]
        return self._called is not None and all_finite(grads)

    def _is_hopeless(self) -> bool:
        if self._called is None:
            return False
        floating = [parameter for parameter in self._called[0].parameters() if parameter.is_floating_point()]
        return any(parameter.dtype is not torch.float32 for parameter in floating) or not (self._grads and self._ends)

    def _exact_gradients(self) -> dict[int, Tensor]:
        if self._called is None:
            return {}
        model, args, kwargs = self._called
        exact: dict[int, Tensor] = {}
        indices = itertools.count()

        def repeated(module: nn.Module, inputs: Any, output: Any) -> Any:
            # Outputs get the half-precision forward's values, but their graph is fp32.
            numbers = [next(indices) for _ in _tensors(output)]
            if isinstance(output, Tensor) and output.requires_grad:
                output = _WithValues.apply(output, self._values[numbers[0]])  # type: ignore[no-untyped-call]
            for number, tensor in zip(numbers, _tensors(output), strict=True):
                _keep_gradient(tensor, exact, number)
            return output

        handles = [module.register_forward_hook(repeated) for _, module in self._leaves(model)]
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        device = next(model.parameters()).device
        try:
            autocast = torch.autocast(device.type, enabled=False)
            with _earlier_random_state(model, self._rng), torch.enable_grad(), autocast:
                # the forward of the class, because trainers wrap the instance's in autocast
                ends = tree_leaves(type(model).forward(model, *args, **kwargs))
                # `grad`, not `backward`: it changes no parameter's gradient and triggers no DDP hook
                torch.autograd.grad(
                    [ends[index] for index in self._ends],
                    [parameter for parameter in model.parameters() if parameter.requires_grad],
                    [grad.to(ends[index].dtype) for index, grad in self._ends.items()],
                    allow_unused=True,
                )
        finally:
            remove_hooks(handles)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
        return {number: grad for number, grad in exact.items() if number in self._grads}

    def figures(self) -> dict[str, float]:
        """Return the share of nonzero activation gradients that were flushed; empty before the first measurement."""
        lost, seen = (sum(column) for column in zip((0, 0), *self.layers.values(), strict=True))
        return {} if self.step is None else {"loss_scale/flushed": lost / max(seen, 1)}

    def report(self) -> dict[str, Any]:
        """Return the share, total and by leaf module."""
        if self.step is None:
            return {}
        by_layer = {name: lost / seen for name, (lost, seen) in self.layers.items()}
        return {"flushed": self.figures()["loss_scale/flushed"], "flushed_layers": by_layer}

    def state_dict(self) -> dict[str, Any]:
        """Return the latest counts."""
        return {"step": self.step, "layers": {name: list(counts) for name, counts in self.layers.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`; an empty state changes nothing."""
        if state:
            self.step = state["step"]
            self.layers = {name: (lost, seen) for name, (lost, seen) in state["layers"].items()}


class _WithValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, values: Tensor) -> Tensor:
        return values.to(output.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Straight through: the fp32 output gets the gradient of the value that replaces it.
        return grads[0], None


def _keep_gradient(tensor: Tensor, into: dict[int, Tensor], index: int) -> None:
    hooked: Any = tensor  # register_hook has no annotations
    hooked.register_hook(lambda grad: into.__setitem__(index, grad.detach()))


def _tensors(output: Any) -> list[Tensor]:
    parts = output if isinstance(output, tuple | list) else (output,)
    return [part for part in parts if isinstance(part, Tensor) and part.requires_grad]


def _rng_state(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    device = next(model.parameters()).device
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextlib.contextmanager
def _earlier_random_state(model: nn.Module, state: tuple[Tensor, Tensor | None]) -> Iterator[None]:
    """Run a block from an earlier random state, and restore the current one."""
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if state[1] is not None else []):
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], device)
        yield
