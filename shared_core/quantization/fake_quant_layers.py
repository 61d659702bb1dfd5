"""Layers that fake-quantize weight and input. Stock layers become one by changing their class, and back.

Also writes quantized weights in place, reports their error, and rewrites layers as linear ones for some runtimes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_core.checkpoint_formats.released import Grid as ReleasedGrid
from shared_core.distributed.sharded_tensors import apply_in_parts, fill_, is_sharded, whole
from shared_core.engine.checks.claims import Claim, Fits, Grid, Where
from shared_core.errors import CompatibilityError
from shared_core.modules.attention import OpenAttention, each_once, project
from shared_core.modules.like_stock import stock_kind, take_look_alikes
from shared_core.modules.made_classes import derived, importable
from shared_core.modules.matching import (
    StackedExperts,
    change_class,
    conv1d_of,
    gates_between_products,
    is_transformers_conv1d,
    own_class,
    replaced,
)
from shared_core.modules.weight_views import as_rows, compute, weights_of
from shared_core.numerics.block_formats import Element, mx_encode
from shared_core.numerics.formats import FORMATS
from shared_core.numerics.rounding import SignalToNoise, decode
from shared_core.quantization.batch_norm import (
    FOLDED,
    LEARNED,
    PlainState,
    fold_pair_,
    folded_weight,
    unfold_pair_,
)
from shared_core.quantization.batch_norm import STOCK as STOCK_OF_FOLDED
from shared_core.quantization.layer_graph import LAYERS
from shared_core.quantization.layer_quantizer import LayerQuantizer, SavedQuantizer
from shared_core.quantization.low_bit import HALF_DTYPES, beyond_half, to_blocks
from shared_core.quantization.ranges.kept_scales import KeptScale
from shared_core.quantization.schemes import MX, LayerScheme


class _FakeQuant(PlainState):
    """Computes with fake-quantized weight and input."""

    quantizer: LayerQuantizer

    def forward(self: Any, input: Tensor, *args: Any) -> Tensor:
        """Run the stock layer on fake-quantized input and weight."""
        x = self.quantizer.input(self, input)
        weights, context = self.quantizer.weights(self, {"weight": self.weight}, in_autocast=True)
        scale = self.quantizer.output_scale(self, input)
        with context:
            y = compute(self, x, weights["weight"], self.bias if scale is None else None, *args)
        if scale is not None:
            y = times_scale(self, y, scale)
        return self.quantizer.output(self, y)  # type: ignore[no-any-return]

    def stock_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the stock forward, which reads weights as attributes, with fake-quantized weights."""
        weights, context = self.quantizer.weights(self, weights_of(self))
        try:
            vars(self).update(weights)  # Python finds these before the parameters of the same names
            with context:
                return STOCK[own_class(self)].forward(self, *args, **kwargs)
        finally:
            for name in weights:
                del vars(self)[name]


def times_scale(layer: Any, y: Tensor, scale: Tensor) -> Tensor:
    """Return a convolution's output, so far without a bias, multiplied by a scale, plus the bias."""
    y = y * scale
    return y if layer.bias is None else y + layer.bias.view(-1, *[1] * len(layer.kernel_size))


class FakeQuantLinear(_FakeQuant, nn.Linear):
    """`torch.nn.Linear` with fake-quantized weight and input."""


class FakeQuantEmbedding(_FakeQuant, nn.Embedding):
    """`torch.nn.Embedding` that fake-quantizes the vectors it looks up."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the fake-quantized vectors of the indices."""
        # a scale also depends on vectors that are not looked up, or is given for the whole table
        if self.quantizer.scheme.spans_rows or self.quantizer.weight_scale is not None:
            weight = self.quantizer.weight(self, self.weight)
            return F.embedding(input, weight, self.padding_idx, None, self.norm_type, self.scale_grad_by_freq, False)
        # Round only the vectors looked up. The whole table could cost more than the model.
        found = nn.Embedding.forward(self, input)
        if not found.numel():
            return found
        # With a table sharded by rows, a lookup is a pending sum over processes, which must come before any view.
        return apply_in_parts(self._rounded, found, {found.dim() - 1}) if is_sharded(found) else self._rounded(found)

    def _rounded(self, found: Tensor) -> Tensor:
        return self.quantizer.weight(self, found.reshape(-1, self.embedding_dim)).view(found.shape)


class _FakeQuantRecurrent(_FakeQuant):
    """Computes with fake-quantized weights and input; states between steps stay in float."""

    # cuDNN and oneDNN take the whole sequence at once, which dynamo cannot trace either
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self: Any, input: Any, hx: Any = None) -> Any:
        flat = self._flat_weights
        try:
            # The stock forward, which calls cuDNN, reads `_flat_weights`, so it is replaced during the call.
            self._flat_weights = [
                self.quantizer.weight(self, weight, name) if name.startswith("weight_") else weight
                for name, weight in zip(self._flat_weights_names, flat, strict=True)
            ]
            if isinstance(input, Tensor):
                input = self.quantizer.input(self, input)
            else:  # a PackedSequence
                input = input._replace(data=self.quantizer.input(self, input.data))
            return STOCK[own_class(self)].forward(self, input, hx)
        finally:
            self._flat_weights = flat


class _FakeQuantCell(_FakeQuant):
    # dynamo cannot trace attributes that are added and removed
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self: Any, input: Tensor, hx: Any = None) -> Any:
        return self.stock_forward(self.quantizer.input(self, input), hx)


class FakeQuantLSTMCell(_FakeQuantCell, nn.LSTMCell):
    """`torch.nn.LSTMCell` with fake-quantized weights and input. Its state stays in float."""


class FakeQuantGRUCell(_FakeQuantCell, nn.GRUCell):
    """`torch.nn.GRUCell` with fake-quantized weights and input. Its state stays in float."""


class FakeQuantRNNCell(_FakeQuantCell, nn.RNNCell):
    """`torch.nn.RNNCell` with fake-quantized weights and input. Its state stays in float."""


class FakeQuantAttention(_FakeQuant, OpenAttention):
    """`torch.nn.MultiheadAttention` with fake-quantized projection weights, query, key and value.

    The three inputs have one range. The output projection is a layer of its own.
    """

    forward = OpenAttention.forward  # type: ignore[assignment]

    def project(self: Any, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return the projected query, key and value."""
        inputs = each_once(functools.partial(self.quantizer.input, self), query, key, value)
        weights, context = self.quantizer.weights(self, weights_of(self), in_autocast=True)

        def product(x: Tensor, name: str, rows: slice, bias: Tensor | None) -> Tensor:
            return F.linear(x, weights[name][rows], bias)

        with context:
            return project(self, inputs, product)


class _FakeQuantExperts(_FakeQuant):
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the stock experts with fake-quantized weights, and inputs if the scheme quantizes those."""
        if self.quantizer.scheme.input != "none":
            if not gates_between_products(self):
                raise CompatibilityError(
                    "qat",
                    "experts implementation must stay batched_mm or grouped_mm if inputs of experts are quantized, "
                    f"got {self.config._experts_implementation}",
                    "set it before training, or use a weight-only scheme",
                )
            input = self.quantizer.input(self, input)
        return self.stock_forward(input, *args, **kwargs)

    def _apply_gate(self: Any, gate_up: Tensor) -> Tensor:
        hidden: Tensor = STOCK[own_class(self)]._apply_gate(self, gate_up)  # type: ignore[attr-defined]
        return hidden if self.quantizer.scheme.input == "none" else self.quantizer.input(self, hidden)


FAKE_QUANT: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: FakeQuantLinear,
    **{
        kind: importable(f"FakeQuant{kind.__name__}", (base, kind), __name__)
        for base, kinds in ((_FakeQuant, LAYERS[1:]), (_FakeQuantRecurrent, (nn.LSTM, nn.GRU, nn.RNN)))
        for kind in kinds
    },
    nn.Embedding: FakeQuantEmbedding,
    nn.LSTMCell: FakeQuantLSTMCell,
    nn.GRUCell: FakeQuantGRUCell,
    nn.RNNCell: FakeQuantRNNCell,
    nn.MultiheadAttention: FakeQuantAttention,
}
STOCK: dict[type[nn.Module], type[nn.Module]] = {fake: stock for stock, fake in FAKE_QUANT.items()}


def know_layers(model: nn.Module) -> None:
    """Register more layer classes of a model: transformers' Conv1D, stacked experts and subclasses of known layers.

    Subclasses count if they compute what their base class does, and other classes too (`take_look_alikes`).
    transformers is not imported.
    """
    take_look_alikes(model)
    experts = {own_class(module) for module in model.modules() if isinstance(module, StackedExperts)} - STOCK.keys()
    kinds = {own_class(module) for module in model.modules()} - STOCK.keys()
    made: list[tuple[type[nn.Module], type]] = [
        *((kind, _FakeQuant) for kind in conv1d_of(model)),
        *((kind, _FakeQuantExperts) for kind in experts),
        *((kind, FAKE_QUANT[base]) for kind in kinds if (base := stock_kind(kind)) in FAKE_QUANT),
    ]
    for kind, base in made:
        fake_quant_kind(kind, base)


def fake_quant_kind(kind: type[nn.Module], mixin: type) -> type[nn.Module]:
    """Return the fake-quantizing class of a layer's class. One for a user's class is made once."""
    if kind not in FAKE_QUANT:
        FAKE_QUANT[kind] = derived("FakeQuant", mixin, kind, fake_quant_kind)
        STOCK[FAKE_QUANT[kind]] = kind
    return FAKE_QUANT[kind]


def conv1d_as_linear(model: nn.Module) -> nn.Module:
    """Replace transformers' Conv1D layers by linear ones, (out, in), in place, for integer kernels; return the model.

    Layers that share a weight still share it.
    """
    know_layers(model)
    weights: dict[int, nn.Parameter] = {}
    made: dict[nn.Module, nn.Module] = {}
    for module in [*model.modules()]:
        if not is_transformers_conv1d(module) or not (type(module) in FAKE_QUANT or is_quantized(module)):
            continue
        layer: Any = nn.Linear(module.nx, module.nf, device="meta")  # type: ignore[arg-type]
        layer.__class__ = FakeQuantLinear if is_quantized(module) else nn.Linear
        vars(layer).update({name: value for name, value in vars(module).items() if name not in ("nx", "nf")})
        layer._parameters = dict(module._parameters)
        old: Any = module.weight
        if id(old) not in weights:
            # Tied weights stay one parameter after the transpose.
            weights[id(old)] = nn.Parameter(old.detach().t().contiguous(), old.requires_grad)
        layer._parameters["weight"] = weights[id(old)]
        made[module] = layer
    return replaced(model, made)


def with_stock_classes(model: nn.Module) -> nn.Module:
    """Give layers of other classes that compute a stock layer its class, in place, for exporters; return the model."""
    for module in model.modules():
        kind = type(module)
        made = FAKE_QUANT if kind in STOCK else FOLDED if kind in STOCK_OF_FOLDED else {}
        own = STOCK.get(kind) or STOCK_OF_FOLDED.get(kind, kind)
        base = None if kind not in STOCK and issubclass(kind, OpenAttention) else stock_kind(own)  # that stays open
        if base in FAKE_QUANT and base is not own:
            constants: list[str] = base.__constants__  # type: ignore[attr-defined]
            sizes = {name: getattr(module, name) for name in constants if name not in vars(module)}
            change_class(module, kind, made.get(base, base))
            vars(module).update(sizes)  # of classes that don't store them
    return model


def swap(module: nn.Module, quantizer: LayerQuantizer) -> None:
    """Make a stock layer fake-quantize. Its parameters and keys stay as they are."""
    module.quantizer = quantizer  # type: ignore[assignment]
    kind = own_class(module)
    change_class(module, kind, FAKE_QUANT[kind])


def fold_and_swap(module: nn.Module, batch_norm: nn.Module, quantizer: LayerQuantizer) -> None:
    """Make a stock layer compute itself and the following batch norm with one fake-quantized weight."""
    module.quantizer = quantizer  # type: ignore[assignment]
    fold_pair_(module, batch_norm, quantizer)


def is_quantized(module: nn.Module) -> bool:
    """Return True if a layer has a quantizer."""
    return own_class(module) in STOCK or (type(module) in STOCK_OF_FOLDED and "quantizer" in vars(module))


def restore(module: nn.Module) -> None:
    """Restore the stock class of a layer and of the batch norm folded into it. Stock layers stay as they are."""
    if is_quantized(module):
        unfold_pair_(module)
        kind = own_class(module)
        change_class(module, kind, STOCK.get(kind, kind))
        del module.quantizer
        for name in LEARNED:
            module._parameters.pop(name, None)


def layer_entry(module: nn.Module) -> dict[str, Any] | None:
    """Return a layer's scheme and range, from its quantizer or from an earlier training; None if it has none."""
    if not is_quantized(module):
        return getattr(module, "quantized_range", None)
    quantizer: LayerQuantizer = module.quantizer  # type: ignore[assignment]
    return quantizer.entry(module)


def recomputable(module: nn.Module) -> bool:
    """Return True for a layer that can round its weights again in backward, see `LayerQuantizer.weights`.

    A folded batch norm scales the weight by statistics that change, and recurrent kernels copy it. An embedding saves
    only indices.
    """
    return isinstance(module, _FakeQuant) and not isinstance(
        module, (nn.Embedding, _FakeQuantRecurrent, _FakeQuantCell)
    )


@torch.no_grad()
def bake_(module: nn.Module, baked: set[int]) -> None:
    """Overwrite a fake-quantizing layer's weights with their quantized values.

    Weights that FSDP2 shards are gathered one at a time, so every process must call it.
    """
    quantizer: LayerQuantizer = module.quantizer  # type: ignore[assignment]
    for name, weight in weights_of(module).items():
        if id(weight) not in baked:
            baked.add(id(weight))
            fill_(weight, quantizer.baked_weight(module, whole(weight), name))


@torch.no_grad()
def weight_report(module: nn.Module, *, gather: bool = False) -> dict[str, float | int]:
    """Return a fake-quantizing layer's size, its weights' SQNR in dB, and its largest error / largest weight.

    For weights that FSDP2 shards it returns only the size, unless `gather`: then every process must call it.
    """
    weights = weights_of(module)
    numel = sum(weight.numel() for weight in weights.values())
    if not gather and any(map(is_sharded, weights.values())):
        return {"weights": numel}
    quantizer: LayerQuantizer = module.quantizer  # type: ignore[assignment]
    sums, peak, largest, clipped, flushed = SignalToNoise(), 0.0, 0.0, 0, 0
    for name, weight in weights.items():
        exact = whole(weight)
        if not exact.numel():
            continue
        rounded = quantizer.baked_weight(module, exact, name)
        if isinstance(quantizer.weight_scale, KeptScale):
            clipped += quantizer.weight_scale.clipped(module, folded_weight(module, exact), name)
        sums.add(exact, rounded)
        if quantizer.scheme.is_half:
            clipped += int(beyond_half(exact, quantizer.scheme.weight).sum())
            flushed += int(((exact != 0) & (rounded == 0)).sum())
        error = (exact.double() - rounded.double()).abs().max().item()
        peak, largest = max(peak, exact.abs().max().item()), max(largest, error)
    counted = {"weights_clipped": clipped} if isinstance(quantizer.weight_scale, KeptScale) else {}
    if quantizer.scheme.is_half:
        counted = {"weights_clipped": clipped, "weights_flushed": flushed}
    return {
        "weights": numel,
        "sqnr_db": sums.decibels,
        "largest_relative_error": largest / peak if peak else 0.0,
        **counted,
    }


def _rows_of_scales(module: nn.Module, scheme: LayerScheme, weight: Tensor) -> Tensor:
    """Return a weight with one row per scale. No scale of several rows spans two experts."""
    if scheme.weight not in ("fp8_tensor", "fp8_block"):
        return as_rows(module, weight)
    parts = weight.chunk(len(weight)) if isinstance(module, StackedExperts) else (weight,)
    if scheme.weight == "fp8_tensor":
        return torch.stack([part.flatten() for part in parts])
    return torch.cat(
        [to_blocks(rows, scheme.group_of(rows.shape[1])) for rows in (as_rows(module, one) for one in parts)]
    )


def _mx_codes(module: nn.Module, scheme: LayerScheme, weight: Tensor) -> Tensor:
    """Return a weight's blocks in units of their scales."""
    rows = as_rows(module, weight)
    blocks = F.pad(rows, (0, -rows.shape[1] % scheme.block)).reshape(-1, scheme.block).float()
    return blocks / decode(mx_encode(blocks, cast("Element", scheme.element)).scale, "e8m0")


def grid_of(
    module: nn.Module, scheme: LayerScheme, entry: Mapping[str, Any], kept: ReleasedGrid | None = None
) -> Claim:
    """Return the grid on which a baked weight must lie: the one that was kept, or that of the weight's own values."""
    kind, element = scheme.weight, scheme.element
    if scheme.is_half:
        return Fits(HALF_DTYPES[kind], holds=Where.SAVED)
    # both zeros are one value
    levels = 2**scheme.weight_bits - (kind not in ("channel", "group", "binary"))
    # A folded layer saves the unfolded weight, whose rows are multiples of other steps.
    is_folded = "batch_norm" in entry
    if kept is not None and not is_folded:
        return Grid(
            functools.partial(as_rows, module),
            levels,
            kept.group_size,
            scheme.weight_qmax if element is None else int(FORMATS[element].largest),
            kept.scale.flatten(),
            element,
            zeros=None if kept.zero_point is None else kept.zero_point.flatten(),
            holds=Where.SAVED,
        )
    is_mx = kind in MX
    # With a learned scale the smallest code is -(qmax + 1). Without a scale the step follows from the largest weight.
    largest = scheme.weight_qmax + is_folded if kind == "channel" else None
    if element is not None and kind != "nvfp4":
        largest = int(FORMATS[element].largest)
    scales = [1.0] if is_mx else None if is_folded else entry.get("weight_scale")
    return Grid(
        functools.partial(_mx_codes if is_mx else _rows_of_scales, module, scheme),
        levels,
        scheme.group_size if kind == "group" else 0 if is_mx else scheme.block,
        largest,
        None if scales is None else torch.tensor(scales),
        element,
        any_step=is_folded,
        holds=Where.SAVED,
    )


class _LinearCell(nn.Module):
    """A recurrent cell whose two products, with input and state, are linear layers."""

    def __init__(self, cell: Any) -> None:
        super().__init__()
        self.hidden_size = cell.hidden_size
        of_cell: LayerQuantizer = cell.quantizer
        scheme = dataclasses.replace(of_cell.scheme, input="none")  # the state stays in float
        bank = of_cell.bank
        of_state = SavedQuantizer(bank, None, scheme, {}) if of_cell.baked else LayerQuantizer(bank, None, scheme)
        for part, quantizer in (("ih", of_cell), ("hh", of_state)):
            weight, bias = getattr(cell, f"weight_{part}"), getattr(cell, f"bias_{part}")
            layer: Any = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
            layer._parameters |= {"weight": weight, "bias": bias}
            swap(layer, quantizer)
            setattr(self, part, layer)
        for name in LEARNED:
            if name in cell._parameters:
                self.ih._parameters[name] = cell._parameters[name]  # type: ignore[union-attr]
        self.train(cell.training)


class LinearLSTMCell(_LinearCell):
    """`torch.nn.LSTMCell` on two linear layers."""

    def forward(self: Any, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return the new hidden state and the new cell state."""
        hidden, cell = hx if hx is not None else (input.new_zeros(*input.shape[:-1], self.hidden_size),) * 2
        into, forget, candidate, out = (self.ih(input) + self.hh(hidden)).chunk(4, -1)
        cell = forget.sigmoid() * cell + into.sigmoid() * candidate.tanh()
        return out.sigmoid() * cell.tanh(), cell


class LinearGRUCell(_LinearCell):
    """`torch.nn.GRUCell` on two linear layers."""

    def forward(self: Any, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Return the new hidden state."""
        hidden = hx if hx is not None else input.new_zeros(*input.shape[:-1], self.hidden_size)
        (reset, update, candidate), state = self.ih(input).chunk(3, -1), self.hh(hidden).chunk(3, -1)
        new = torch.tanh(candidate + (reset + state[0]).sigmoid() * state[2])
        mixed: Tensor = new + (update + state[1]).sigmoid() * (hidden - new)
        return mixed


class LinearRNNCell(_LinearCell):
    """`torch.nn.RNNCell` on two linear layers."""

    def __init__(self, cell: Any) -> None:
        super().__init__(cell)
        self.activation = {"tanh": torch.tanh, "relu": torch.relu}[cell.nonlinearity]

    def forward(self: Any, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Return the new hidden state."""
        hidden = hx if hx is not None else input.new_zeros(*input.shape[:-1], self.hidden_size)
        new: Tensor = self.activation(self.ih(input) + self.hh(hidden))
        return new


def cells_as_linear(model: nn.Module) -> nn.Module:
    """Replace fake-quantizing recurrent cells by two linear layers, ``ih`` and ``hh``, in place; return the model.

    Weight codes and input quantization stay the same, and the state stays in float.

    Example:
        >>> from shared_core.quantization import apply_ranges
        >>> cell = apply_ranges(nn.GRUCell(4, 3), {"": {"input": "none"}})
        >>> [name for name, _ in cells_as_linear(cell).named_children()]
        ['ih', 'hh']
    """
    kinds: dict[type[nn.Module], type[_LinearCell]] = {
        FakeQuantLSTMCell: LinearLSTMCell, FakeQuantGRUCell: LinearGRUCell, FakeQuantRNNCell: LinearRNNCell
    }  # fmt: skip
    found = [module for module in model.modules() if type(module) in kinds]
    return replaced(model, {module: kinds[type(module)](module) for module in found})
