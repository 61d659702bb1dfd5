"""Smaller versions of a trained model: which sizes and bits to try, cutting to them, and the cost of each."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from shared_core.config.options import checked
from shared_core.errors import CompatibilityError, EffError, nearest, require
from shared_core.files.atomic import scratch_folder
from shared_core.hardware import milliseconds
from shared_core.modules.like_stock import look_alikes_taken
from shared_core.modules.weight_views import as_rows
from shared_core.quantization import BitPlan, layer_sensitivity, plan_bits, quantize
from shared_core.quantization.post_training.quality import code_bytes
from shared_core.quantization.schemes import LayerScheme
from shared_core.quantization.selection import select_layers
from shared_core.tools import measuring
from shared_core.tools.shrink import model_config as configured
from shared_core.tools.shrink.sizes import Loss, path_of, shrink_to

CostKind = Literal["bytes", "flops", "latency", "onnxruntime"]
BitScheme = Literal["int8", "int8_dynamic", "int8_weight"]
BITS = "bits"
_CODES = (4, 8)
"""Bits of a code that files store without padding."""
_SHOWN_BATCHES = 4
SIZES = ("layers", "hidden_size", "intermediate_size", "attention_heads", "key_value_heads")
_QUARTERS = (1 / 4, 1 / 2, 3 / 4)
_ROUNDS = 40


@dataclass(frozen=True)
class Cost:
    """The cost of a candidate."""

    value: float
    """Bytes, FLOPs or milliseconds."""
    share: float
    """Its ratio to the uncut model's cost."""
    noise: float = 0.0
    """Half of the 95 % confidence interval of the share; 0 for costs that are counted."""


class Candidates:
    """The candidates of a search: a trained model, the values of each size, and how to cut and measure.

    Args:
        model: A trained model with a ``config``, as transformers models are. It is not changed.
        calibration: Batches that show which layers and units matter, as for `shrink_to`.
        example_inputs: A small batch for tracing; FLOPs and latency are those of its forward pass.
        sizes: Values to try per size, such as ``{"layers": [2, 4]}``; the model's own is always tried too. None: a
            quarter, a half and three quarters of every size that `shrink_to` can cut. ``"bits": [4, 6]`` tries weights
            with at most that mean number of bits, 4 to 8. Each layer gets 4 or 8, chosen by `plan_bits`.
        cost: ``bytes`` of parameters and buffers, ``flops`` or ``latency`` of a forward pass in torch, or latency in
            ``onnxruntime`` of the exported model. Bits change the first and the last.
        scheme: For bits: what trains them.
        loss: ``loss(model, batch)``, as for `shrink_to`.
        seed: Seed of `shrink_to`.

    Attributes:
        values: Size → values, ascending. The last one is the model's own.
        left_out: Size → why it cannot be cut, of those that were not named.

    Raises:
        ConfigError: If a size or another option breaks its rule.
        CompatibilityError: If `shrink_to` cannot cut the model.
    """

    def __init__(
        self,
        model: nn.Module,
        calibration: Sequence[Any],
        example_inputs: Any,
        *,
        sizes: Mapping[str, Sequence[int]] | None = None,
        cost: CostKind = "bytes",
        scheme: BitScheme = "int8",
        loss: Loss | None = None,
        seed: int = 0,
    ) -> None:
        self.kind: CostKind = checked(cost, CostKind, "search", "cost")
        self.scheme: BitScheme = checked(scheme, BitScheme, "search", "scheme")
        rule = f"sizes need a model with a config, got {type(model).__name__}"
        if not configured.is_configured(model):
            raise CompatibilityError("search", rule, "use a transformers model")
        self.model, self._batches, self._example = model, list(calibration), example_inputs
        self._loss, self._seed = loss, checked(seed, int, "search", "seed", low=0)
        # Batches that a loss takes may not be what the model takes.
        self._shown = self._batches[:_SHOWN_BATCHES] if loss is None else [example_inputs]
        self.left_out: dict[str, str] = {}
        self.values = self._given(sizes) if sizes else self._possible()
        if sizes:
            self.cut({name: values[0] for name, values in self.values.items()})  # fails now, not after a training
        self._whole = self._counted(model)

    @property
    def uncut(self) -> dict[str, int]:
        """The model's own sizes."""
        return {name: values[-1] for name, values in self.values.items()}

    @property
    def count(self) -> int:
        """The number of candidates."""
        return math.prod(map(len, self.values.values()))

    def uniform(self, shares: Sequence[float] = tuple(reversed(_QUARTERS))) -> list[dict[str, int]]:
        """Return candidates with the same share of every size, or the nearest value to it."""
        return [
            {name: _nearest(values, share * values[-1]) for name, values in self.values.items()} for share in shares
        ]

    def cut(self, sizes: Mapping[str, int]) -> nn.Module:
        """Return the model cut to these sizes; itself for its own sizes.

        Raises:
            CompatibilityError: If these sizes do not fit together.
            ConfigError: If the config rejects them.
        """
        changed = {name: value for name, value in sizes.items() if name != BITS and value != self._own(name)}
        if not changed:
            return self.model
        return shrink_to(
            self.model, changed, self._batches, self._example, loss=self._loss, seed=self._seed, latency_repeats=0
        ).model

    def plan(self, model: nn.Module, sizes: Mapping[str, int]) -> BitPlan | None:
        """Return the bits of each layer of a cut model; None if its weights stay in float.

        Layers with a small divergence of the outputs, ``KL(p || p of the rounded layer)``, get 4 bits. Tied weights
        get 8.

        Raises:
            MatchError: If no layer can be quantized.
        """
        if (budget := sizes.get(BITS, math.inf)) > max(_CODES):
            return None
        with look_alikes_taken(model):
            layers = select_layers(model, (), ())[0]
            owners = [id(weight) for module in model.modules() for weight in module._parameters.values()]
            tied = {name: max(_CODES) for name, module in layers.items() if owners.count(id(module.weight)) > 1}
            free = [name for name in layers if name not in tied]
            costs = layer_sensitivity(model, self._shown, metric="kl", layers=free, bits=_CODES) if free else {}
        counts = {name: module.weight.numel() for name, module in layers.items()}  # type: ignore[operator, union-attr]
        return plan_bits(costs, counts, budget, _CODES, fixed=tied)

    def cost(self, model: nn.Module, plan: BitPlan | None = None) -> Cost:
        """Return the cost of a candidate. Latencies are measured in turns with the uncut model.

        Args:
            model: The cut model, in float.
            plan: The bits of its layers; None: float. Bytes are those of the codes, and a float32 scale per channel.
        """
        if self.kind == "latency":
            return _compared(*measuring.alternating(self.model, model, self._example, _ROUNDS))
        if self.kind == "onnxruntime":
            runs = [self._whole_run, self._run(model, plan)]
            return _compared(*milliseconds(runs, torch.device("cpu"), _ROUNDS))
        found = self._counted(model) - (saved_bytes(model, plan) if plan is not None else 0)
        return Cost(found, found / self._whole)

    def _given(self, sizes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        found = {}
        for name, asked in sizes.items():
            is_bits = name == BITS
            now: Any = self._own(name) if name in SIZES else self._float_bits if is_bits else None
            rule = f"sizes must be numbers of {type(self.model.config).__name__}, got {name!r}{nearest(name, SIZES)}"
            require(now is not None, "search", rule)
            low, high = (min(_CODES), max(_CODES)) if is_bits else (1, now)
            values = checked(tuple(asked), tuple[int, ...], "search", name, low=low, high=high)
            found[name] = tuple(sorted({*values, now}))
        rule = f"cost must be bytes or onnxruntime if bits are searched, got {self.kind}, which bits do not change"
        require(BITS not in found or self.kind in ("bytes", "onnxruntime"), "search", rule)
        require(any(len(values) > 1 for values in found.values()), "search", "sizes must have one to try, got none")
        return found

    def _own(self, name: str) -> Any:
        path = path_of(self.model.config, name)
        found = configured.read(self.model.config, path) if path else None
        return found if isinstance(found, int) else None  # a number per layer is none

    @property
    def _float_bits(self) -> int:
        return 8 * next(weight.element_size() for weight in self.model.parameters() if weight.is_floating_point())

    def _possible(self) -> dict[str, tuple[int, ...]]:
        """Return the sizes that `shrink_to` can cut together, to a quarter of each."""
        found: dict[str, tuple[int, ...]] = {}
        for name in SIZES[:-1]:
            now = self._own(name) or 0
            values = tuple(sorted({round(share * now) for share in _QUARTERS} - {0, now}))
            if name == "attention_heads":  # as many per key-value head, and a divisor of the hidden size
                keys = self._own("key_value_heads") or 1
                keys = 1 if keys == now else keys
                values = tuple(value for value in values if now % value == 0 and value % keys == 0)
            if not values:
                continue
            try:
                self.cut({**{size: of[0] for size, of in found.items()}, name: values[0]})
            except EffError as error:
                self.left_out[name] = str(error)
            else:
                found[name] = (*values, now)
        if not found:
            why = next(iter(self.left_out.values()), "it has no such size")
            raise CompatibilityError("search", f"{type(self.model).__name__} cannot be cut to another size: {why}")
        return found

    def _counted(self, model: nn.Module) -> float:
        if self.kind == "bytes":
            return float(measuring.state_bytes(model))
        return float(measuring.forward_flops(model, self._example)) if self.kind == "flops" else math.nan

    @functools.cached_property
    def _whole_run(self) -> Callable[[], Any]:
        return self._run(self.model, None)

    def _run(self, model: nn.Module, plan: BitPlan | None) -> Callable[[], Any]:
        """Return a function that runs the exported model in onnxruntime once, after quantization if there is a plan."""
        from shared_core.tools.export.onnx import export_onnx  # imports onnx
        from shared_core.tools.export.onnx_files import feeds, session_of

        if plan is not None:
            model = quantize(model, plan.qat_options(self.scheme), self._shown)
        with scratch_folder() as folder:
            file = folder / "model.onnx"
            export_onnx(model, self._example, file, verify=False)
            session = session_of(file, optimize=True)
        inputs = feeds(session, self._example)
        return lambda: session.run(None, inputs)


def saved_bytes(model: nn.Module, plan: BitPlan) -> int:
    """Return by how many bytes codes and scales of a plan are smaller than the float weights, tied weights once.

    Example:
        >>> saved_bytes(nn.Linear(8, 2, bias=False), BitPlan({"": 4}, {"": 16}))  # 64 - 8 - 2 scales of 4 bytes
        48
    """
    saved = {}
    for name in plan.quantized:
        layer: Any = model.get_submodule(name)
        channels, width = as_rows(layer, layer.weight).shape
        scheme = LayerScheme(weight_bits=plan.bits[name])
        saved[layer.weight] = layer.weight.nbytes - code_bytes(channels, width, scheme)
    return sum(saved.values())


def _compared(whole: Sequence[float], times: Sequence[float]) -> Cost:
    """Return the cost of a candidate from the milliseconds of rounds in which it took turns with the uncut model."""
    ratios = sorted(mine / its for its, mine in zip(whole, times, strict=True))
    # Order statistics bound the median without an assumption about the noise: ranks n/2 ± 0.98·√n.
    low, high = (round(len(ratios) / 2 + sign * 0.98 * math.sqrt(len(ratios))) for sign in (-1, 1))
    spread = ratios[min(high, len(ratios) - 1)] - ratios[max(low - 1, 0)]
    return Cost(statistics.median(times), statistics.median(ratios), spread / 2)


def _nearest(values: Sequence[int], wanted: float) -> int:
    return min(values, key=lambda value: abs(value - wanted))
