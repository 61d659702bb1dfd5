"""Converted layers with binary weights and binary inputs: bits in the file, integers in the product."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from eff_kernels.quantization.affine import along
from eff_kernels.quantization.integer_linear import integer_linear, pack
from eff_kernels.quantization.low_bit import signs
from eff_kernels.quantization.packed_bits import pack_signs, product_words, unpack_signs, xnor_product
from torch import Tensor, nn

from shared_core.errors import CompatibilityError
from shared_core.modules.like_stock import stock_kind
from shared_core.modules.made_classes import importable
from shared_core.quantization.integer.layers import PackedLayer
from shared_core.quantization.integer.onednn import OneDnnConv2d
from shared_core.quantization.low_bit import box_means, mean_magnitude
from shared_core.quantization.schemes import LayerScheme

XNOR = "binary: XNOR and popcount on packed bits (numpy)"
_SAME = 1e-5  # a row of weights is −α and α up to this part of α
_ZERO = 128  # the code of 0: those of signs are 127 and 129
_FEW_ROWS = 8  # up to which reading the weight takes longest, and bits are the least to read


class BinaryLayer(PackedLayer):
    """Base class of layers of signs: ``y = α·K·Σ sign(x)·sign(w) + b``, the sum an exact integer. sign(0) is +1.

    ``α`` is a scale per output channel. ``K`` is 1, or with `scaled` the mean of ``|x|``: of each token of a linear
    layer, under the kernel for a convolution (`box_means`). Inputs with NaN, and devices other than the CPU, are
    computed in float with the same values.

    Buffers: ``weight_bits`` uint8 (outputs, ceil(width / 8)), 1 for −1; ``weight_scale`` (outputs,); ``bias`` or None.
    A convolution packs each position's channels by themselves.
    """

    weight_bits: Tensor
    bias: Tensor | None
    scaled: bool
    _call: ClassVar[str]
    _layouts = ("_codes", "_words")
    _codes: Any  # of the int8 product
    _words: Any  # of the product of bits, for each group

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, ``α·sign(w)``, for code that reads a layer's weight."""
        found = self.signs()
        return found.to(self.weight_scale.dtype) * along(self.weight_scale, found.dim(), 0)

    def signs(self) -> Tensor:
        """Return the weight's signs as int8, in the stock weight's shape."""
        raise NotImplementedError

    def use_int8(self) -> str:
        """Compute on oneDNN's int8 product, with signs unpacked in memory. Return why not; empty if it does.

        The buffers stay bits. All processors sum these small products exactly.
        """
        why = self._why_no_int8()
        if not why:
            self.kernel = f"oneDNN int8 of signs: int8 x int8 -> int32 ({self._call})"
            self._pack()
        return why

    def _why_no_int8(self) -> str:
        if self.weight_bits.device.type != "cpu" or not hasattr(torch.ops.onednn, self._call.partition(".")[2]):
            return "oneDNN multiplies int8 only on CPUs"
        return "oneDNN computes in float32 at most" if self.weight_scale.dtype == torch.float64 else ""

    def _pack(self) -> None:
        """Hold the signs in the layouts of the products."""
        self._codes = self._words = None
        if self.weight_bits.device.type == "cpu":
            self._codes = None if self.kernel == XNOR else self._for_onednn()
            groups = int(getattr(self, "groups", 1))
            self._words = [product_words(part) for part in self.weight_bits.chunk(groups)]

    def _for_onednn(self) -> Any:
        raise NotImplementedError

    # numpy computes on the bits, which dynamo cannot trace
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output in the type of `input`."""
        x = input.detach()
        exact = x if x.dtype == torch.float64 else x.float()
        on_bits = self._words is not None and x.device.type == "cpu" and x.numel() and not bool(x.amax().isnan())
        y = self._total(exact) if on_bits else self._in_float(exact)
        y = y.to(exact.dtype) * along(self.weight_scale.to(exact.dtype), y.dim(), self._channel_axis(y))
        if self.scaled:
            y = y * self._scale(exact)
        if self.bias is not None:
            y = y + along(self.bias.to(exact.dtype), y.dim(), self._channel_axis(y))
        return y.to(input.dtype)

    def _channel_axis(self, y: Tensor) -> int:
        return y.dim() - 1

    def _total(self, x: Tensor) -> Tensor:
        """Return the sums of signs."""
        raise NotImplementedError

    def _in_float(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _scale(self, x: Tensor) -> Tensor:
        return mean_magnitude(x, -1)


class _BinaryLinear(BinaryLayer):
    in_features: int
    out_features: int
    _call = "onednn.qlinear_pointwise"

    def signs(self) -> Tensor:
        """Return the weight's signs as int8, (outputs, inputs)."""
        return unpack_signs(self.weight_bits, self.in_features)

    def _total(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if self._codes is not None and len(rows) > _FEW_ROWS:
            ones = torch.ones(self.out_features)
            total = integer_linear(_codes_of(rows), 1.0, _ZERO, self._codes, ones, None)
        else:
            total = xnor_product(pack_signs(rows), self._words[0], self.in_features)
        return total.view(*x.shape[:-1], self.out_features)

    def _in_float(self, x: Tensor) -> Tensor:
        return F.linear(signs(x), self.signs().to(x.dtype))

    def _for_onednn(self) -> Any:
        return pack(self.signs())


class _BinaryConv(BinaryLayer):
    _call = "onednn.qconv2d_pointwise"
    _positions: Tensor

    def _pack(self) -> None:
        super()._pack()
        self._positions = self.signs().float().sum(1, keepdim=True)  # sums over channels

    def signs(self: Any) -> Tensor:
        """Return the weight's signs as int8, (outputs, channels of a group, …)."""
        channels = self.in_channels // self.groups
        positions = self.weight_bits.view(self.out_channels, -1, math.ceil(channels / 8))
        found = unpack_signs(positions, channels).transpose(1, 2)
        return found.reshape(self.out_channels, channels, *self.kernel_size)  # type: ignore[no-any-return]

    def _channel_axis(self: Any, y: Tensor) -> int:
        return y.dim() - 1 - len(self.kernel_size)  # type: ignore[no-any-return]

    def _scale(self: Any, x: Tensor) -> Tensor:
        return box_means(self, x)

    def _in_float(self: Any, x: Tensor) -> Tensor:
        return self._conv_forward(signs(x), self.signs().to(x.dtype), None)  # type: ignore[no-any-return]

    def _total(self: Any, x: Tensor) -> Tensor:
        dims = len(self.kernel_size)
        batch = x if x.dim() == dims + 2 else x.unsqueeze(0)
        total: Tensor = self._of_int8(batch) if self._codes is not None else self._of_bits(batch)
        return total if x.dim() == dims + 2 else total.squeeze(0)

    def _of_bits(self: Any, x: Tensor) -> Tensor:
        dims, groups = len(self.kernel_size), self.groups
        size, padding, is_zero = x.shape[2:], self._reversed_padding_repeated_twice, self.padding_mode == "zeros"
        # padded before signs are taken: a 0 is +1 here, which `_padded` takes out again
        x = F.pad(x, padding, mode="constant" if is_zero else self.padding_mode)
        split = torch.unflatten(x, 1, (groups, -1)).movedim(2, -1)  # (batch, groups, …, channels)
        windows = _windows(pack_signs(split), self.kernel_size, self.stride, self.dilation)
        channels = self.in_channels // groups
        # bytes of one window: those of each of its positions
        rows = windows.reshape(*windows.shape[: 2 + dims], -1)
        width = channels * math.prod(self.kernel_size)
        parts = [
            xnor_product(rows[:, group].reshape(-1, rows.shape[-1]), words, width)
            for group, words in enumerate(self._words)
        ]
        found = torch.stack(parts, 1).view(len(x), *rows.shape[2 : 2 + dims], self.out_channels).movedim(-1, 1)
        return found - self._padded(size) if is_zero and any(padding) else found

    def _padded(self: Any, size: Sequence[int]) -> Tensor:
        """Return the sums of the weight's signs at positions of the padding, where the input's sign is 0."""
        convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[len(size) - 1]
        outside = 1 - F.pad(torch.ones(1, 1, *size), self._reversed_padding_repeated_twice)
        found: Tensor = convolve(outside, self._positions, None, self.stride, 0, self.dilation)
        return found.round().int()

    def _why_no_int8(self: Any) -> str:
        if len(self.kernel_size) != 2:
            return f"oneDNN's kernel for signs is 2-d, not {len(self.kernel_size)}-d"
        return OneDnnConv2d.why_not(self) or super()._why_no_int8()

    def _for_onednn(self: Any) -> Any:
        ones = torch.ones(self.out_channels)
        return torch.ops.onednn.qconv_prepack(
            self.signs(), ones, 1.0, _ZERO, self.stride, self.padding, self.dilation, self.groups, None
        )

    def _of_int8(self: Any, x: Tensor) -> Tensor:
        ones, zeros = torch.ones(self.out_channels), torch.zeros(self.out_channels, dtype=torch.int32)
        codes = _codes_of(x).contiguous(memory_format=torch.channels_last)
        found: Tensor = torch.ops.onednn.qconv2d_pointwise(
            codes, 1.0, _ZERO, self._codes, ones, zeros, None, self.stride, self.padding, self.dilation, self.groups,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return found


BINARY: dict[type[nn.Module], type[nn.Module]] = {
    kind: importable(f"Binary{kind.__name__}", (base, kind), __name__)
    for base, kinds in ((_BinaryLinear, (nn.Linear,)), (_BinaryConv, (nn.Conv1d, nn.Conv2d, nn.Conv3d)))
    for kind in kinds
}
"""Stock class → its class of signs. Padding with zeros adds 0, which is no sign."""


def binary_layer(stock: Any, scheme: LayerScheme) -> nn.Module:
    """Return a layer on bits from a stock one whose weights are −α and α per output channel.

    Raises:
        CompatibilityError: If its weights are not.

    Example:
        >>> layer = nn.Linear(3, 1, bias=False)
        >>> _ = layer.weight.data.copy_(torch.tensor([[0.5, -0.5, 0.5]]))
        >>> binary_layer(layer, LayerScheme("binary", 1, input="binary"))(torch.tensor([[2.0, -1.0, 0.0]]))
        tensor([[1.5000]])
    """
    weight = stock.weight.detach()
    rows = weight.flatten(1)
    scale = rows.abs().amax(1)
    if not bool(((rows.abs() - scale[:, None]).abs() <= _SAME * scale[:, None]).all()):  # NaN fails too
        rule = "binary weights must be −α and α in each channel"
        raise CompatibilityError("convert", rule, "convert the model in or after training, or with baked weights")
    # the channels of a position lie together, as those of a packed input do
    bits = pack_signs(weight.movedim(1, -1).contiguous().cpu()).flatten(1).to(weight.device)
    bias = None if stock.bias is None else stock.bias.detach().clone()
    kind: Any = stock_kind(type(stock))
    if kind is nn.Linear:
        made: Any = nn.Linear(weight.shape[1], len(weight), False, device="meta")
    else:
        options = {name: getattr(stock, name) for name in ("stride", "padding", "dilation", "groups", "padding_mode")}
        channels = weight.shape[1] * stock.groups, len(weight)
        made = kind(*channels, tuple(weight.shape[2:]), bias=False, device="meta", **options)
    made._parameters.clear()
    made.__class__ = BINARY[kind]
    made.scaled, made.kind, made.kernel = scheme.input == "binary_scaled", kind.__name__, XNOR
    for name, value in (("weight_bits", bits), ("weight_scale", scale), ("bias", bias)):
        made.register_buffer(name, value)
    made._pack()
    return made  # type: ignore[no-any-return]


def _codes_of(x: Tensor) -> Tensor:
    """Return signs as unsigned codes."""
    return _ZERO + 1 - 2 * (x < 0).view(torch.uint8)


def _windows(bits: Tensor, size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """Return a view of (…, positions, bytes) as (…, windows, positions of a window, bytes)."""
    dims = len(size)
    first = bits.dim() - 1 - dims
    counts = [
        (total - d * (k - 1) - 1) // s + 1
        for total, k, s, d in zip(bits.shape[first:-1], size, stride, dilation, strict=True)
    ]
    steps = bits.stride()[first:-1]
    shape = (*bits.shape[:first], *counts, *size, bits.shape[-1])
    strides = (
        *bits.stride()[:first],
        *(step * s for step, s in zip(steps, stride, strict=True)),
        *(step * d for step, d in zip(steps, dilation, strict=True)),
        bits.stride(-1),
    )
    return bits.as_strided(shape, strides)
