"""LSTM and GRU layers on torch's int8 kernels for CPUs, which quantize inputs and states at run time."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from eff_kernels.quantization.exact_sums import sums_exactly
from eff_kernels.quantization.integer_linear import FBGEMM, fbgemm_engine
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from shared_core.quantization.integer.layers import PackedLayer, channel_codes
from shared_core.quantization.schemes import LayerScheme


class PackedRecurrent(PackedLayer):
    """An LSTM or GRU with the codes of `convert` on torch's FBGEMM kernel: int8 products, sums in 32-bit integers.

    The kernel quantizes the inputs and the states of each step with one range for the whole batch, to 8 bits, or to 7
    where this processor would saturate. So an example's output depends a little on the others in its batch, and states
    are quantized, which they are not in training. Gates and cell states stay in float32. Inputs or states with NaN or
    infinity, and devices other than the CPU, compute in float with the same weight codes.

    Buffers: ``<weight>_codes`` int8 and ``<weight>_scale`` (outputs,) for each weight of the layer, and its biases.

    Args:
        stock: The layer, with baked weights.
        scheme: Its scheme, with weights per channel.

    Example:
        >>> layer = PackedRecurrent(nn.LSTM(4, 3), LayerScheme(input="token"))
        >>> layer.weight_ih_l0_codes.dtype, layer(torch.ones(5, 1, 4))[0].shape
        (torch.int8, torch.Size([5, 1, 3]))
    """

    def __init__(self, stock: nn.LSTM | nn.GRU, scheme: LayerScheme) -> None:
        super().__init__()
        self._class = nn.LSTM if isinstance(stock, nn.LSTM) else nn.GRU
        self.kind = self._class.__name__
        self.kernel = f"FBGEMM int8 dynamic: int8 x int8 -> int32 (torch.quantized_{self.kind.lower()})"
        self.options = {
            name: getattr(stock, name)
            for name in ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "bidirectional")
        }
        self._names: list[str] = list(stock._flat_weights_names)
        for name in self._names:
            value = getattr(stock, name).detach()
            if name.startswith("weight_"):
                codes, scale = channel_codes(value, scheme, {})
                self.register_buffer(f"{name}_codes", codes)
                self.register_buffer(f"{name}_scale", scale)
            else:
                self.register_buffer(name, value.clone())
        self._pack()

    @staticmethod
    def why_not(stock: nn.LSTM | nn.GRU, scheme: LayerScheme) -> str:
        """Return why the kernel cannot run a layer; empty if it can."""
        kind, weight = type(stock).__name__, stock.weight_ih_l0
        if (scheme.weight, scheme.input, scheme.activation_bits) != ("channel", "token", 8):
            return f"torch's int8 kernel for {kind} quantizes inputs to 8 bits at run time: use int8_dynamic"
        if weight.device.type != "cpu" or weight.dtype == torch.float64:
            return f"torch has no int8 kernel for {kind} in {weight.dtype} on {weight.device.type}"
        if FBGEMM not in torch.backends.quantized.supported_engines:
            return f"this torch was built without FBGEMM, whose int8 kernel runs {kind}"
        return f"torch's int8 kernel for {kind} has no proj_size" if stock.proj_size else ""

    def _pack(self) -> None:
        self._packed = None
        if getattr(self, f"{self._names[0]}_codes").device.type != "cpu":
            return
        directions = ("", "_reverse") if self.options["bidirectional"] else ("",)
        layers = range(self.options["num_layers"])
        with fbgemm_engine(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.13 calls its quantized tensors deprecated, without a date
            self._packed = [self._cell(f"l{layer}{end}") for layer in layers for end in directions]

    def _cell(self, suffix: str) -> Any:
        packed, biases = [], []
        for part in ("ih", "hh"):
            codes, scale = (getattr(self, f"weight_{part}_{suffix}_{what}") for what in ("codes", "scale"))
            zeros = torch.zeros(len(scale), dtype=torch.long)
            weight = torch._make_per_channel_quantized_tensor(codes, scale.double(), zeros, 0)
            bias = getattr(self, f"bias_{part}_{suffix}") if self.options["bias"] else torch.zeros(len(scale))
            biases.append(bias.float())
            packed.append(torch.ops.quantized.linear_prepack(weight, biases[-1]))
        return torch.ops.quantized.make_quantized_cell_params_dynamic(*packed, *biases, not sums_exactly("recurrent"))

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # dynamo cannot trace packed weights
    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> Any:
        """Return outputs and last states, as `torch.nn.LSTM` and `torch.nn.GRU` do, in the type of `input`."""
        data = input.data if isinstance(input, PackedSequence) else input
        given = () if hx is None else hx if isinstance(hx, tuple) else (hx,)
        if not self._runs(data) or not all(bool(value.isfinite().all()) for value in (data, *given)):
            return self._in_float(input, hx)
        if isinstance(input, PackedSequence):
            states = [
                _in_order(state, input.sorted_indices) for state in self._states(given, int(input.batch_sizes[0]))
            ]
            y, *last = self._run((data.float(), input.batch_sizes), states, ())
            output: Any = input._replace(data=y.to(data.dtype))
            last = [_in_order(state, input.unsorted_indices) for state in last]
        else:
            batch_first, is_single = self.options["batch_first"], data.dim() == 2
            axis = 0 if batch_first else 1
            x = data.unsqueeze(axis) if is_single else data
            states = self._states([state.unsqueeze(1) for state in given] if is_single else given, x.shape[axis])
            y, *last = self._run((x.float(),), states, (batch_first,))
            output = (y.squeeze(axis) if is_single else y).to(data.dtype)
            last = [state.squeeze(1) for state in last] if is_single else last
        last = [state.to(data.dtype) for state in last]
        return output, last[0] if self._class is nn.GRU else tuple(last)

    def _states(self, given: Any, batch: int) -> list[Tensor]:
        if given:
            return [state.float() for state in given]
        size = (self.options["num_layers"] * (1 + self.options["bidirectional"]), batch, self.options["hidden_size"])
        return [torch.zeros(size) for _ in range(1 if self._class is nn.GRU else 2)]

    def _run(self, data: tuple[Tensor, ...], states: list[Tensor], order: tuple[bool, ...]) -> tuple[Tensor, ...]:
        options = (self._packed, True, self.options["num_layers"], 0.0, False, self.options["bidirectional"], *order)
        if self._class is nn.GRU:
            return torch.quantized_gru(*data, states[0], *options)  # type: ignore[no-any-return, attr-defined]
        return torch.quantized_lstm(  # type: ignore[no-any-return, attr-defined]
            *data, states, *options, dtype=torch.qint8, use_dynamic=True
        )

    def _in_float(self, input: Any, hx: Any) -> Any:
        data = input.data if isinstance(input, PackedSequence) else input
        layer = self._class(**self.options, device="meta")
        values = {name: self._value(name).to(data.dtype) for name in self._names}
        layer.load_state_dict(values, assign=True)
        return layer.eval()(input, hx)

    def _value(self, name: str) -> Tensor:
        if not name.startswith("weight_"):
            return getattr(self, name)  # type: ignore[no-any-return]
        codes, scale = getattr(self, f"{name}_codes"), getattr(self, f"{name}_scale")
        return codes.to(scale.dtype) * scale[:, None]  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Return the options."""
        return ", ".join(f"{name}={value}" for name, value in self.options.items())


def _in_order(state: Tensor, order: Tensor | None) -> Tensor:
    return state if order is None else state.index_select(1, order)
