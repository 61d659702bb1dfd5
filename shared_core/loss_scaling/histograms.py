"""Histograms of log2|x|: the powers of two that weights, activations, gradients and updates of a step use."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from eff_kernels.loss_scaling import Exponents, count_exponents
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from shared_core.distributed.collectives import all_reduce_, local_part, world_size
from shared_core.loss_scaling.floors import FORMATS
from shared_core.modules.calls import RunHook, remove_hooks

_COUNTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# On a CPU the float64 difference stays in cache; on a GPU fewer launches matter.
_CPU_PIECE, _DEVICE_PIECE = 1 << 15, 1 << 22


@dataclass
class Log2Histogram:
    """Counts of ``⌊log2|x|⌋``, and separately of values without logarithm."""

    zeros: int = 0
    infinite: int = 0
    nan: int = 0
    exponents: Counter[int] = field(default_factory=Counter)
    """Exponent e → number of elements with ``2^e <= |x| < 2^(e + 1)``, without empty entries."""

    @property
    def elements(self) -> int:
        """Number of elements that were counted."""
        return self.zeros + self.infinite + self.nan + self.exponents.total()

    def add(self, other: Log2Histogram) -> None:
        """Add the counts of other elements."""
        self.zeros += other.zeros
        self.infinite += other.infinite
        self.nan += other.nan
        self.exponents.update(other.exponents)

    def below(self, exponent: int) -> float:
        """Return the share of elements with ``0 < |x| < 2^exponent``."""
        return sum(count for e, count in self.exponents.items() if e < exponent) / max(self.elements, 1)

    @property
    def median(self) -> int | None:
        """The exponent of the median magnitude of finite nonzero elements, or None."""
        half, order = self.exponents.total() / 2, sorted(self.exponents)
        seen = itertools.accumulate(self.exponents[exponent] for exponent in order)
        return next((exponent for exponent, count in zip(order, seen, strict=True) if count >= half), None)

    def summary(self, format: str) -> dict[str, Any]:
        """Return element count, shares below a format's smallest normal and subnormal number, and the range."""
        normal, subnormal = smallest_exponents(format)
        return {
            "elements": self.elements,
            "zero": self.zeros / max(self.elements, 1),
            "infinite": self.infinite,
            "nan": self.nan,
            "below_normal": self.below(normal),
            "below_subnormal": self.below(subnormal),
            "log2_lowest": min(self.exponents, default=None),
            "log2_median": self.median,
            "log2_highest": max(self.exponents, default=None),
        }

    def counts(self) -> dict[str, int]:
        """Return the counts by exponent in ascending order, for JSON."""
        return {str(exponent): self.exponents[exponent] for exponent in sorted(self.exponents)}

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"zeros": self.zeros, "infinite": self.infinite, "nan": self.nan, "exponents": self.counts()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Log2Histogram:
        """Return the histogram of a `state_dict`."""
        exponents = Counter({int(exponent): count for exponent, count in state["exponents"].items()})
        return cls(state["zeros"], state["infinite"], state["nan"], exponents)


def smallest_exponents(format: str) -> tuple[int, int]:
    """Return log2 of a format's smallest normal and smallest subnormal number."""
    limits = torch.finfo(FORMATS[format])
    normal = limits.smallest_normal
    # a subnormal number is a multiple of the smallest one, which is one ulp of the smallest normal
    return int(math.log2(normal)), int(math.log2(normal * limits.eps))


def log2_histogram(tensors: Iterable[Tensor]) -> Log2Histogram:
    """Return the exact histogram of log2|x| over all elements of some tensors, in one pass over their bits.

    ``⌊log2|x|⌋`` is read from the exponent field, or for subnormal numbers from their highest bit.

    Args:
        tensors: Floating point, any shape and device; 8-bit floats are counted as their float32 values.

    Example:
        >>> found = log2_histogram([torch.tensor([0.0, 0.75, -3.0]), torch.tensor([2.0**-24]).half()])
        >>> found.zeros, found.counts()
        (1, {'-24': 1, '-1': 1, '1': 1})
    """
    found = Log2Histogram()
    for tensor in tensors:
        found.add(read_counts(device_counts(tensor)))
    return found


def device_counts(tensor: Tensor) -> Exponents:
    """Return the counts on the tensor's device, without waiting for it."""
    return count_exponents(tensor if tensor.dtype in _COUNTED else tensor.detach().float())


def update_counts(new: Tensor, old: Tensor) -> Exponents:
    """Return the counts of ``new − old``, subtracted in float64, which is exact for differences of up to 53 bits."""
    size = _CPU_PIECE if new.device.type == "cpu" else _DEVICE_PIECE
    pieces = (torch.split(tensor.detach().reshape(-1), size) for tensor in (new, old))
    # float64: the difference of two float32 numbers 2^29 apart is still exact.
    parts = (count_exponents(after.double() - before.double()) for after, before in zip(*pieces, strict=True))
    return functools.reduce(lambda total, part: Exponents(part.lowest, total.counts + part.counts), parts)


def read_counts(found: Exponents) -> Log2Histogram:
    """Return the counts as a histogram. This waits for the device."""
    lowest, counts = found
    zeros, *finite, infinite, nan = counts.tolist()
    exponents = Counter({lowest + i: count for i, count in enumerate(finite) if count})
    return Log2Histogram(zeros, infinite, nan, exponents)


KINDS = ("weights", "activations", "activation_gradients", "gradients", "updates")
_LOWEST, _COLUMNS = -1074, 2101  # of float64, which holds the exponents of every other format
_Key = tuple[str, str]
_Layers = dict[_Key, Log2Histogram]


class HistogramProbe:
    """Counts the powers of two that one step uses. Between measurements it has no hooks and keeps nothing.

    - *weights*: parameters before the step;
    - *activations*: outputs of modules without children in the first training micro-batch of the step, without
      evaluations and recomputations by activation checkpointing;
    - *activation gradients*: gradients of those outputs in the backward, including the loss scale;
    - *gradients*: of the parameters, unscaled, before clipping;
    - *updates*: weights after the step minus weights before it, which needs a copy of the weights for that step.

    Under DDP the activations of all processes are summed once per measurement. Values equal on all ranks count once.

    Args:
        format: ``"fp16"`` or ``"fp8_e5m2"``, whose smallest numbers the shares refer to.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.constant_(model.weight, 0.5)
        >>> probe = HistogramProbe()
        >>> probe.watch(model)
        >>> probe.arm()
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> probe.before_step(scale=1.0, step=0)
        >>> with torch.no_grad():
        ...     _ = model.weight.sub_(0.25 * model.weight.grad)
        >>> probe.after_step()
        True
        >>> {kind: probe.total(kind).counts() for kind in ("activations", "gradients", "updates")}
        {'activations': {'0': 1}, 'gradients': {'0': 2}, 'updates': {'-2': 2}}
    """

    def __init__(self, format: str = "fp16") -> None:
        self.format = format
        self.step: int | None = None
        """Applied steps before the latest measurement; None before the first."""
        self.scale = 1.0
        """Loss scale of the latest measurement."""
        self.snapshot_bytes = 0
        """Memory of the copy of the weights in the latest measurement, on this process."""
        self.layers: _Layers = {}
        """The latest histograms, by kind and layer: the module that owns a parameter or returns an output."""
        self._model: nn.Module | None = None
        self._restored: _Layers = {}
        self._handles: list[RemovableHandle] = []
        self._forget()

    def _forget(self) -> None:
        remove_hooks(self._handles)
        self._armed = self._ended = False
        self._calls: list[bool] = []  # for each module being called: True if the outermost one is in training
        self._recorded: dict[_Key, list[Exponents]] = {}
        self._carried: _Layers = {}
        self._without_gradient: set[str] = set()
        self._before: dict[str, Tensor] = {}
        self._measured: dict[_Key, list[Exponents]] = {}
        self._at = (0, 1.0)

    def watch(self, model: nn.Module) -> None:
        """Set the model for `arm`. There are no hooks until then."""
        self.leave()
        self._model = model

    def leave(self) -> None:
        """Remove every hook and drop the copy of the weights."""
        self._forget()
        self._model = None

    @property
    def is_armed(self) -> bool:
        """True if a step is being measured."""
        return self._armed

    def arm(self) -> None:
        """Measure the step that begins now. A partial measurement is restarted."""
        self._forget()
        if self._model is None:
            return
        self._armed = True
        self._carried, self._restored = self._restored, {}
        # A histogram of an interrupted step is joined with later records.
        if self._carried:
            return  # the run was resumed within this step, after recording its first micro-batch
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(RunHook(self._enter)))
            leave = RunHook(functools.partial(self._leave, name))
            self._handles.append(module.register_forward_hook(leave, always_call=True))

    # -- activations

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # a traced hook would stay in the graph forever
        # The first forward after a backward is the next micro-batch, and one is enough.
        if not self._calls and self._ended and not _in_backward():
            remove_hooks(self._handles)  # the next micro-batch
            return
        # The mode of the outermost module decides for all inside, also in checkpointing's no_grad forward.
        self._calls.append(self._calls[0] if self._calls else module.training and torch.is_grad_enabled())

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        trains = self._calls.pop() if self._calls else False
        if any(module.children()) or not trains:
            return
        parts = [part for part in tree_leaves(output) if isinstance(part, Tensor) and part.is_floating_point()]
        if _in_backward():
            self._ended = True
            # A recomputed forward: hook only outputs that had no gradient in the first one.
            if name not in self._without_gradient:
                return
        else:
            for part in parts:
                self._record("activations", name, part)
                if not part.requires_grad:
                    self._without_gradient.add(name)
        for part in parts:
            if part.requires_grad:
                hooked: Any = part  # register_hook has no annotations
                hooked.register_hook(functools.partial(self._record_gradient, name))

    def _record_gradient(self, name: str, gradient: Tensor) -> None:
        self._ended = True
        self._record("activation_gradients", name, gradient)

    def _record(self, kind: str, name: str, tensor: Tensor) -> None:
        if self._armed:
            self._recorded.setdefault((kind, name or "(model)"), []).append(device_counts(local_part(tensor)))

    # -- parameters

    def _parameters(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        for name, parameter in self._model.named_parameters() if self._model is not None else ():
            if parameter.is_floating_point():
                yield name, name.rpartition(".")[0] or name, parameter

    @torch.no_grad()
    def before_step(self, scale: float, step: int) -> None:
        """Count weights and (unscaled, unclipped) gradients, and copy the weights that have a gradient."""
        # Gradients of the step, before clipping changes them.
        self._measured, self._before, self._at = {}, {}, (step, scale)
        for name, layer, parameter in self._parameters():
            self._measured.setdefault(("weights", layer), []).append(device_counts(local_part(parameter)))
            gradient = parameter.grad
            if gradient is None:
                continue
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            self._measured.setdefault(("gradients", layer), []).append(device_counts(local_part(values)))
            self._before[name] = local_part(parameter).detach().clone()

    @torch.no_grad()
    def after_step(self) -> bool:
        """Count the updates, and return True if the step could be measured. Every process must call it.

        A step without gradients, or with Inf or NaN in them, is skipped, and the latest histograms stay.
        """
        for name, layer, parameter in self._parameters():
            if name in self._before:
                counts = update_counts(local_part(parameter), self._before[name])
                self._measured.setdefault(("updates", layer), []).append(counts)
        # Replicated tensors must not be summed. Shards and activations differ between processes.
        sharded = {layer for _, layer, parameter in self._parameters() if hasattr(parameter, "to_local")}
        found = {**_read(self._measured), **_read(self._recorded)}
        for key, histogram in self._carried.items():
            found.setdefault(key, Log2Histogram()).add(histogram)
        gradients = [histogram for (kind, _), histogram in found.items() if kind == "gradients"]
        # A step that will be skipped has no update to measure.
        usable = bool(gradients) and not any(histogram.infinite + histogram.nan for histogram in gradients)
        usable = self._add_up(found, sharded, usable)
        if usable:
            self.step, self.scale = self._at
            self.snapshot_bytes = sum(copy.nbytes for copy in self._before.values())
            self.layers = found
        self._forget()
        return usable

    def _add_up(self, found: _Layers, sharded: set[str], usable: bool) -> bool:
        """Sum the counts that differ between processes, and return True if all can use them."""
        if world_size() == 1 or self._model is None:
            return usable
        names = [name or "(model)" for name, module in self._model.named_modules() if not any(module.children())]
        keys = [(kind, name) for kind in ("activations", "activation_gradients") for name in names]
        keys += [(kind, layer) for kind in ("weights", "gradients", "updates") for layer in sorted(sharded)]
        # One table with a row per histogram needs a single collective.
        table = torch.zeros(len(keys) + 1, _COLUMNS, dtype=torch.int64)
        for row, key in zip(table, keys, strict=False):
            histogram = found.pop(key, Log2Histogram())
            row[0], row[-2], row[-1] = histogram.zeros, histogram.infinite, histogram.nan
            for exponent, count in histogram.exponents.items():
                row[1 + exponent - _LOWEST] = count
        table[-1, 0] = not usable
        table = all_reduce_(table.to(next(self._model.parameters()).device), "sum").cpu()
        for row, key in zip(table, keys, strict=False):
            if row.any():
                found[key] = read_counts(Exponents(_LOWEST, row))
        return not table[-1, 0]

    # -- results

    def total(self, kind: str) -> Log2Histogram:
        """Return the latest histogram of a kind over all layers."""
        total = Log2Histogram()
        for (other, _), histogram in self.layers.items():
            if other == kind:
                total.add(histogram)
        return total

    def figures(self) -> dict[str, float]:
        """Return the share of unscaled gradients lost by the format, and log2 of median update / median weight."""
        if self.step is None:
            return {}
        gradients = self.total("gradients").summary(self.format)
        update, weight = self.total("updates").median, self.total("weights").median
        figures = {f"loss_scale/grad_{name}": gradients[name] for name in ("below_normal", "below_subnormal")}
        if update is not None and weight is not None:
            figures["loss_scale/update_to_weight"] = float(update - weight)
        return figures

    def report(self) -> dict[str, Any]:
        """Return by kind the histogram of all layers with its shares, and the shares by layer."""
        if self.step is None:
            return {}
        report: dict[str, Any] = {
            "format": self.format,
            "measured_step": self.step,
            "measured_scale": self.scale,
            "snapshot_bytes": self.snapshot_bytes,
        }
        for kind in KINDS:
            total = self.total(kind)
            layers = {layer: found.summary(self.format) for (k, layer), found in self.layers.items() if k == kind}
            report[kind] = {**total.summary(self.format), "log2_histogram": total.counts(), "layers": layers}
        return {"histograms": report}

    def state_dict(self) -> dict[str, Any]:
        """Return the latest histograms, and the records of the current step."""
        recorded = self._restored or self._carried or _read(self._recorded)
        return {
            "step": self.step,
            "scale": self.scale,
            "snapshot_bytes": self.snapshot_bytes,
            "layers": _to_state(self.layers.items()),
            "recorded": _to_state(recorded.items()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`, before `arm`. An empty state changes nothing."""
        if state:
            self.step, self.scale = state["step"], state["scale"]
            self.snapshot_bytes = state["snapshot_bytes"]
            self.layers, self._restored = _from_state(state["layers"]), _from_state(state["recorded"])


def _in_backward() -> bool:
    # private in torch, which uses it for its own checkpointing
    return bool(torch._C._current_graph_task_id() != -1)


def _read(counts: Mapping[_Key, Iterable[Exponents]]) -> _Layers:
    found: _Layers = {}
    for key, parts in counts.items():
        found[key] = Log2Histogram()
        for part in parts:
            found[key].add(read_counts(part))
    return found


def _to_state(layers: Iterable[tuple[_Key, Log2Histogram]]) -> dict[str, dict[str, Any]]:
    state: dict[str, dict[str, Any]] = {}
    for (kind, layer), histogram in layers:
        state.setdefault(kind, {})[layer] = histogram.state_dict()
    return state


def _from_state(state: Mapping[str, Mapping[str, Any]]) -> _Layers:
    return {
        (kind, layer): Log2Histogram.from_state(found)
        for kind, layers in state.items()
        for layer, found in layers.items()
    }
