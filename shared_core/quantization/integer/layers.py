"""Layers on integers: references of an int8 runtime, LSTM and GRU of torch, and an embedding with int8 codes."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from eff_kernels.quantization import affine as kernels
from eff_kernels.quantization.integer_linear import FBGEMM, pack_for_fbgemm, sums_exactly
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from shared_core.errors import CompatibilityError
from shared_core.quantization.ranges.observers import range_qparams
from shared_core.quantization.schemes import LayerScheme


def weight_qmin(scheme: LayerScheme, learned: Mapping[str, Any]) -> int:
    """Return the smallest code of a weight. With learned scales it is one lower."""
    return -scheme.weight_qmax - int("weight_scale" in learned)


def channel_codes(weight: Tensor, scheme: LayerScheme, learned: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return (int8 codes, scale per channel) of a weight that holds quantized values.

    Example:
        >>> channel_codes(torch.tensor([[0.5, 1.27]]), LayerScheme(), {})
        (tensor([[ 50, 127]], dtype=torch.int8), tensor([0.0100]))
    """
    scale = kernels.symmetric_scale(weight, 0, scheme.weight_qmax)
    if "weight_scale" in learned:
        scale = torch.tensor(learned["weight_scale"], dtype=scale.dtype, device=scale.device).view_as(scale)
    if not bool(torch.isfinite(scale).all()):
        raise CompatibilityError(
            "convert", "weights must be finite, got NaN or infinity", "find the step that diverged"
        )
    codes = (weight.to(scale.dtype) / kernels.along(scale, weight.dim(), 0)).round()
    return codes.clamp_(weight_qmin(scheme, learned), scheme.weight_qmax).to(torch.int8), scale


class CodeModule(nn.Module):
    """A module with codes and scales, which stay as they are when the model is cast.

    Buffers: ``weight_codes`` int8, output channels first, ``weight_scale`` (channels,).
    """

    weight_codes: Tensor
    weight_scale: Tensor

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, ``s_w·q_w``, for code that reads a layer's weight."""
        scale = kernels.along(self.weight_scale, self.weight_codes.dim(), 0)
        return self.weight_codes.to(scale.dtype) * scale

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `.half()` and `.to(dtype)` cast every floating buffer. Scales in half precision would change outputs.
        dtypes = {name: value.dtype for name, value in self._buffers.items() if value is not None}
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, dtype in dtypes.items():
            after = self._buffers[name]
            kept = before[name]
            if after is not None and kept is not None and after.dtype != dtype:
                self._buffers[name] = kept.to(after.device)
        return self


class PackedLayer(CodeModule):
    """Base class of layers that also hold weight codes in the layout of a CPU's kernel, while they are on a CPU."""

    kind: str
    """The stock layer's name."""
    kernel: str
    """The kernel, as `conversion_report` names it."""
    _layouts: ClassVar[tuple[str, ...]] = ("_packed",)
    _packed: Any

    @classmethod
    def take(cls, module: Any, kernel: str) -> Self:
        """Change a converted layer's class to this one and return it. Its buffers stay as they are."""
        module.__class__ = cls
        taken: Self = module
        taken.kernel = kernel
        taken._pack()
        return taken

    @abc.abstractmethod
    def _pack(self) -> None: ...

    def _runs(self, input: Tensor) -> bool:
        return self._packed is not None and input.device.type == "cpu" and input.numel() > 0

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | dict.fromkeys(self._layouts)  # a kernel's layout can be neither copied nor saved

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._pack()

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._pack()


class IntegerLayer(CodeModule):
    """Base class of integer layers with weight codes, scales and a float bias. Quantizes its input.

    ``y = s_x·s_w·Σ(q_x − z)·q_w + b``. The sum is a 32-bit integer, or a 64-bit one for int16 inputs. It is computed in
    float64, where every partial sum below 2^53 is exact, because torch has no integer convolutions on any device. The
    rest is computed in float64 too and rounded once to the type of the input.

    Buffers: ``weight_codes`` int8, ``weight_scale`` float32 (channels,), ``input_scale`` float32 (),
    ``input_zero_point`` int32 (), ``bias`` (channels,) or None. They stay as they are when the model is cast.
    """

    input_scale: Tensor
    input_zero_point: Tensor
    bias: Tensor | None
    kind: str
    kernel = "reference: integers, summed in float64"

    def __init__(
        self, stock: Any, bounds: tuple[float, float], scheme: LayerScheme, learned: Mapping[str, Any]
    ) -> None:
        super().__init__()
        weight = stock.weight.detach()
        self.weight_bits, self.activation_bits = scheme.weight_bits, scheme.activation_bits
        self.qmin, self.qmax = scheme.input_range
        codes, scale = channel_codes(weight, scheme, learned)
        terms = weight[0].numel()
        # float64 sums are exact, but an int8 runtime's 32-bit sums must be too: |code| · range · terms < 2^31. One with
        # int16 inputs sums in 64 bits, of which float64 holds 53.
        bits = 53 if scheme.has_wide_inputs else 31
        if terms * -weight_qmin(scheme, learned) * (self.qmax - self.qmin) >= 2**bits:
            rule = f"sums of {terms} products per output can overflow {bits + 1} bits"
            raise CompatibilityError("convert", rule, "skip it in qat")
        ranges = torch.tensor([bounds], dtype=torch.float32, device=weight.device)
        codes_of_range = torch.tensor([scheme.input_range], dtype=torch.float64, device=weight.device)
        symmetric = torch.tensor([scheme.symmetric], device=weight.device)
        found = range_qparams(ranges, codes_of_range, symmetric)
        input_scale, zero_point = (value.squeeze(0) for value in found)
        if "scale" in learned:
            input_scale.fill_(float(learned["scale"]))
            zero_point.fill_(int(learned["zero_point"]))
        self.register_buffer("weight_codes", codes)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("input_scale", input_scale)
        self.register_buffer("input_zero_point", zero_point)
        bias = None if stock.bias is None else stock.bias.detach().clone()
        self.register_buffer("bias", bias)

    def quantize_input(self, x: Tensor) -> Tensor:
        """Return the codes of `x` as int8, or as int16 if they have 16 bits."""
        centered = kernels.quantize(x, self.input_scale, self.input_zero_point, self.qmin, self.qmax)
        return (centered + self.input_zero_point).to(torch.int8 if self.activation_bits <= 8 else torch.int16)

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output in the type of `input`."""
        # Subtract the zero point from codes first, so that the sum needs no correction.
        centered = kernels.quantize(input, self.input_scale, self.input_zero_point, self.qmin, self.qmax).double()
        # Rounding restores whole sums if a device's library used a transform (FFT, Winograd).
        total = self._accumulate(centered, self.weight_codes.double()).round_()
        axis = total.dim() - self._channel_axis_from_end
        # float64 products of codes are whole numbers below 2^53, so sums are exact in any order.
        scale = self.input_scale.double() * self.weight_scale.double()
        y = total * kernels.along(scale, total.dim(), axis)
        if self.bias is not None:
            y = y + kernels.along(self.bias.double(), total.dim(), axis)
        return y.to(input.dtype)

    _channel_axis_from_end: int = 1

    @abc.abstractmethod
    def _accumulate(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def extra_repr(self) -> str:
        """Return shape and widths."""
        shape = tuple(self.weight_codes.shape)
        return f"{shape}, weight_bits={self.weight_bits}, activation_bits={self.activation_bits}"


class IntLinear(IntegerLayer):
    """A linear layer on integer codes."""

    kind = "Linear"

    def _accumulate(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)


class _IntConv(IntegerLayer):
    _convolve: ClassVar[Callable[..., Tensor]]

    def __init__(
        self, stock: Any, bounds: tuple[float, float], scheme: LayerScheme, learned: Mapping[str, Any]
    ) -> None:
        super().__init__(stock, bounds, scheme, learned)
        self.stride, self.padding, self.dilation, self.groups = (
            stock.stride,
            stock.padding,
            stock.dilation,
            stock.groups,
        )
        self.padding_mode = stock.padding_mode
        self._pad = tuple(stock._reversed_padding_repeated_twice)
        self._channel_axis_from_end = len(stock.kernel_size) + 1

    def _accumulate(self, x: Tensor, weight: Tensor) -> Tensor:
        # Codes have the zero point subtracted, so padding with 0 is exact.
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._pad, mode=self.padding_mode), 0
        return type(self)._convolve(x, weight, None, self.stride, padding, self.dilation, self.groups)


class IntConv1d(_IntConv):
    """A 1-d convolution on integer codes."""

    kind = "Conv1d"
    _convolve = staticmethod(F.conv1d)


class IntConv2d(_IntConv):
    """A 2-d convolution on integer codes."""

    kind = "Conv2d"
    _convolve = staticmethod(F.conv2d)


class IntConv3d(_IntConv):
    """A 3-d convolution on integer codes."""

    kind = "Conv3d"
    _convolve = staticmethod(F.conv3d)


INTEGER: dict[type[nn.Module], type[IntegerLayer]] = {
    nn.Linear: IntLinear,
    nn.Conv1d: IntConv1d,
    nn.Conv2d: IntConv2d,
    nn.Conv3d: IntConv3d,
}


class IntEmbedding(CodeModule):
    """Look up int8 codes and return ``s·q``, one scale per vector, equal to the baked embedding bit for bit.

    Example:
        >>> layer = IntEmbedding(nn.Embedding(9, 4), LayerScheme(input="none"), {})
        >>> layer.weight_codes.dtype, layer(torch.tensor([[2, 3]])).shape
        (torch.int8, torch.Size([1, 2, 4]))
    """

    def __init__(self, stock: nn.Embedding, scheme: LayerScheme, learned: Mapping[str, Any]) -> None:
        super().__init__()
        weight = stock.weight.detach()
        codes, scale = channel_codes(weight, scheme, learned)
        self.num_embeddings, self.embedding_dim, self.dtype = stock.num_embeddings, stock.embedding_dim, weight.dtype
        self.register_buffer("weight_codes", codes)
        self.register_buffer("weight_scale", scale)

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, for code that reads an embedding's weight."""
        return super().weight.to(self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Return the vectors of the indices, in the type that the embedding had."""
        scale = self.weight_scale[input].unsqueeze(-1)
        return (self.weight_codes[input].to(scale.dtype) * scale).to(self.dtype)

    def extra_repr(self) -> str:
        """Return the shape."""
        return f"{self.num_embeddings}, {self.embedding_dim}"


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
        if (scheme.weight, *scheme.of_input) != ("channel", "token", 8, False, False):
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
        self._packed = [self._cell(f"l{layer}{end}") for layer in layers for end in directions]

    def _cell(self, suffix: str) -> Any:
        packed, biases = [], []
        for part in ("ih", "hh"):
            codes, scale = (getattr(self, f"weight_{part}_{suffix}_{what}") for what in ("codes", "scale"))
            bias = getattr(self, f"bias_{part}_{suffix}") if self.options["bias"] else torch.zeros(len(scale))
            biases.append(bias.float())
            packed.append(pack_for_fbgemm(codes, scale, biases[-1]))
        return torch.ops.quantized.make_quantized_cell_params_dynamic(*packed, *biases, not sums_exactly("fbgemm"))

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
