"""Quantised LSTM and GRU layers in ONNX: codes and scales in the file, ONNX's own operators on their values.

ONNX's LSTM and GRU take floats, so that an engine dequantises the weights: a quarter of the bytes, or an eighth, and no
integer product. onnxruntime's DynamicQuantizeLSTM is not written: it rounds the states between steps as well, and
inputs with one range for the whole batch, where training rounds neither so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shared_core.modules.weight_views import weights_of
from shared_core.quantization.schemes import LayerScheme
from shared_core.tools.export.onnx_layers import Exported, Quantized, dequantize, hold_codes_, input_grid, shared_grid

# The gates of a row of weights, as torch stacks them, in ONNX's order: input, output, forget, cell; update, reset, new.
_GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2)}


class _ExportRecurrent(Exported):
    """A recurrent layer that holds the codes of all its weights."""

    def forward(self: Any, input: Tensor, hx: Any = None) -> Any:
        """Return what the stock layer returns, of the values that the codes stand for."""
        alone, axis = input.dim() == 2, 0 if self.batch_first else 1
        x = self.quantized_input(input.unsqueeze(axis) if alone else input)
        directions, is_lstm = 2 if self.bidirectional else 1, isinstance(self, nn.LSTM)
        if hx is None:
            zeros = x.new_zeros(self.num_layers * directions, x.shape[axis], self.hidden_size)
            states = (zeros, zeros) if is_lstm else (zeros,)
        else:
            given = hx if is_lstm else (hx,)
            states = tuple(state.unsqueeze(1) for state in given) if alone else given
        values = [self.value_of(name) for name in self._flat_weights_names]
        run: Any = torch._VF.lstm if is_lstm else torch._VF.gru  # type: ignore[attr-defined]
        options = (self.bias, self.num_layers, 0.0, False, self.bidirectional, self.batch_first)
        y, *left = run(x, states if is_lstm else states[0], values, *options)
        if alone:
            y, left = y.squeeze(axis), [state.squeeze(1) for state in left]
        return y, tuple(left) if is_lstm else left[0]

    def value_of(self: Any, name: str) -> Tensor:
        """Return a weight from its codes, or a bias."""
        if not hasattr(self, f"{name}_codes"):
            return getattr(self, name)  # type: ignore[no-any-return]
        tensors = (getattr(self, f"{name}_{part}") for part in ("codes", "scale", "zero_point"))
        found: Tensor = dequantize(*tensors, *self.grids[name])
        return found


class ExportLSTM(_ExportRecurrent, nn.LSTM):  # type: ignore[misc]
    """`torch.nn.LSTM` of codes."""


class ExportGRU(_ExportRecurrent, nn.GRU):  # type: ignore[misc]
    """`torch.nn.GRU` of codes."""


RECURRENT: dict[type[nn.Module], type[nn.Module]] = {nn.LSTM: ExportLSTM, nn.GRU: ExportGRU}


@torch.no_grad()
def to_export_recurrent(
    name: str,
    module: Any,
    scheme: LayerScheme,
    qparams: tuple[Tensor, Tensor] | None,
    shared: dict[int, Quantized],
) -> None:
    """Turn a stock recurrent layer whose weights hold the values of their codes into one that holds the codes."""
    tensors: dict[str, Tensor] = {}
    grids: dict[str, tuple[int, int]] = {}
    for key, weight in weights_of(module).items():
        grid = shared_grid(f"{name}.{key}", module, weight, scheme, shared)
        zeros = torch.zeros(grid.scale.shape, dtype=torch.int8)
        tensors |= {f"{key}_codes": grid.codes, f"{key}_scale": grid.scale, f"{key}_zero_point": zeros}
        grids[key] = grid.axis, grid.block
    if qparams is not None:
        tensors |= input_grid(scheme, qparams)
    module.scheme, module.grids = scheme, grids
    hold_codes_(module, tensors, RECURRENT)


def recurrent_translations(opset: Any) -> dict[Any, Callable[..., Any]]:
    """Return what torch.onnx makes of torch's recurrent operators: its own, but for layers of codes.

    It takes weights apart into their gates, and would take apart values that an engine has to dequantise in each run.
    Here the codes change places, and are dequantised as the operator wants them.
    """
    from onnxscript.function_libs.torch_lib.ops import core as torchlib

    aten = torch.ops.aten
    return {
        aten.lstm.input: _to_recurrent(opset, "LSTM", torchlib.aten_lstm),
        aten.gru.input: _to_recurrent(opset, "GRU", torchlib.aten_gru),
    }


def _to_recurrent(opset: Any, kind: str, of_floats: Callable[..., Any]) -> Callable[..., Any]:
    def to_recurrent(
        input: Any,
        hx: Any,
        params: Sequence[Any],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        if not any(map(_dequantised, params)):
            options = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
            return of_floats(input, hx, params, *options)
        states = hx if kind == "LSTM" else (hx,)
        size, directions = states[0].shape[2], 2 if bidirectional else 1
        rows = opset.Constant(
            value_ints=np.arange(size * len(_GATES[kind])).reshape(-1, size)[[*_GATES[kind]]].ravel().tolist()
        )
        first = opset.Constant(value_ints=[0])

        def gates(value: Any) -> Any:
            """Return weights or biases of one direction in ONNX's order, with an axis for directions."""
            if (maker := _dequantised(value)) is not None:
                constants = [opset.Gather(constant, rows, axis=0) for constant in maker.inputs]
                attributes = {name: attribute.as_int() for name, attribute in maker.attributes.items()}
                value = opset.DequantizeLinear(*constants, **attributes)
            else:
                value = opset.Gather(value, rows, axis=0)
            return opset.Unsqueeze(value, first)

        def joined(values: Sequence[Any], axis: int = 0) -> Any:
            return values[0] if len(values) == 1 else opset.Concat(*values, axis=axis)

        x = opset.Transpose(input, perm=[1, 0, 2]) if batch_first else input
        ends: list[Any] = []
        for layer in range(num_layers):
            own = params[layer * (len(params) // num_layers) :][: len(params) // num_layers]
            parts = [[gates(value) for value in own[place :: len(own) // directions]] for place in range(2)]
            biases = [gates(value) for value in (*own[2:4], *own[6:8])] if has_biases else []
            pairs = [joined(biases[place : place + 2], axis=1) for place in range(0, len(biases), 2)]
            begin, end = (opset.Constant(value_ints=[n * directions]) for n in (layer, layer + 1))
            y, *last = getattr(opset, kind)(
                x, *map(joined, parts), joined(pairs) if pairs else None, None,
                *(opset.Slice(state, begin, end, first) for state in states),
                hidden_size=size, direction="bidirectional" if bidirectional else "forward",
                **({"linear_before_reset": 1} if kind == "GRU" else {}),
            )  # fmt: skip
            ends.append(last)
            # (steps, directions, batch, size) → (steps, batch, directions · size)
            x = opset.Reshape(opset.Transpose(y, perm=[0, 2, 1, 3]), opset.Constant(value_ints=[0, 0, -1]))
        y = opset.Transpose(x, perm=[1, 0, 2]) if batch_first else x
        return (y, *(joined(state) for state in zip(*ends, strict=True)))

    return to_recurrent


def _dequantised(value: Any) -> Any:
    """Return the node that makes a value of codes, None if another makes it."""
    maker = value.producer()
    return maker if maker is not None and maker.op_type == "DequantizeLinear" else None
