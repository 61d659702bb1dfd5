"""Recurrent cells written as two linear layers, for runtimes that have kernels for these."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.modules.matching import replaced
from shared_core.quantization.layers.fake_quant_layers import FakeQuantGRUCell, FakeQuantLSTMCell, swap
from shared_core.quantization.layers.layer_quantizer import LayerQuantizer, SavedQuantizer
from shared_core.quantization.layers.plain_state import LEARNED


class _LinearCell(nn.Module):
    """A cell whose products with its input and with its state are layers of their own."""

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


def cells_as_linear(model: nn.Module) -> nn.Module:
    """Return a model whose fake-quantising cells of LSTM and GRU are ``ih`` and ``hh``, two linear layers; in place.

    The weights have the codes that they had, the input is quantised as it was, and the state stays in float.

    Example:
        >>> from shared_core.quantization import apply_ranges
        >>> cell = apply_ranges(nn.GRUCell(4, 3), {"": {"input": "none"}})
        >>> [name for name, _ in cells_as_linear(cell).named_children()]
        ['ih', 'hh']
    """
    kinds: dict[type[nn.Module], type[_LinearCell]] = {
        FakeQuantLSTMCell: LinearLSTMCell, FakeQuantGRUCell: LinearGRUCell
    }  # fmt: skip
    found = [module for module in model.modules() if type(module) in kinds]
    return replaced(model, {module: kinds[type(module)](module) for module in found})
