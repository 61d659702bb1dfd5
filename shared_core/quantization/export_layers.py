"""Quantised layers whose forward torch.onnx writes with explicit QuantizeLinear and DequantizeLinear nodes."""

from __future__ import annotations

from typing import Any

import torch
from eff_kernels.quantization_group import group_codes, group_qparams
from torch import Tensor, nn

from shared_core.errors import CompatibilityError
from shared_core.quantization.export_codes import Quantized, bias_codes, shared_grid
from shared_core.quantization.export_ops import dequantize, integer_linear, linear, quantize
from shared_core.quantization.layer_quantizer import LayerQuantizer
from shared_core.quantization.layers import TRANSPOSED, compute, from_rows
from shared_core.quantization.modules import STOCK, restore
from shared_core.quantization.schemes import LayerScheme

_BIAS_TOLERANCE = 1e-6
INTEGER_WEIGHTS = ("channel", "group", "ternary", "binary")


class _Exported(nn.Module):
    """A layer that holds codes: ``weight_codes``, ``weight_scale`` and, if they are quantised, input and bias."""

    scheme: LayerScheme

    def quantized_input(self: Any, x: Tensor) -> Tensor:
        """Return the input as its codes can hold it."""
        if self.scheme.input == "static":
            codes = quantize(x, self.input_scale, self.input_zero_point, self.scheme.activation_bits)
            x = dequantize(codes, self.input_scale, self.input_zero_point, 0, 0)
        elif self.scheme.input == "token":
            axis = -1 - len(getattr(self, "kernel_size", ()))
            x = of_tokens(x.movedim(axis, -1), self.scheme).movedim(-1, axis)
        return x

    def quantized_weight(self: Any) -> Tensor:
        """Return the values that the codes stand for."""
        values: Tensor = dequantize(
            self.weight_codes, self.weight_scale, self.weight_zero_point, self.scale_axis, self.block
        )
        return values

    def quantized_bias(self: Any) -> Tensor | None:
        """Return the bias, from its codes if it has some."""
        bias: Tensor | None = self.bias
        if hasattr(self, "bias_codes"):
            bias = dequantize(self.bias_codes, self.bias_scale, self.bias_zero_point, 0, 0)
        return bias


def of_tokens(x: Tensor, scheme: LayerScheme) -> Tensor:
    """Return values as codes with a range for each token, the last axis, can hold them."""
    if not scheme.affine_input:
        codes, scale = _token_codes(x, scheme.activation_bits)
        return codes * scale
    size = x.shape[-1]
    scale, zero_point = group_qparams(x, size, scheme.activation_bits, False)
    codes = group_codes(x, scale, zero_point, size, scheme.activation_bits).squeeze(-2)
    return (codes - zero_point) * scale


def _token_codes(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (x / scale).round(), scale


class ExportLinear(_Exported, nn.Linear):
    """A linear layer; one Gemm on a matrix, whatever the axes of its input."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``x̂ ŵᵀ + b``."""
        if self.scheme.input == "token" and not self.scheme.affine_input and not self.block:
            codes, scale = _token_codes(input, self.scheme.activation_bits)
            # onnxruntime's kernels for unsigned inputs are the faster ones
            total = integer_linear((codes + 128).to(torch.uint8), self.weight_codes, 128)
            y: Tensor = total.to(input.dtype) * scale * self.weight_scale
            return y if self.bias is None else y + self.bias
        rows = input if input.dim() == 2 else input.reshape(-1, self.in_features)
        y = linear(self.quantized_input(rows), self.quantized_weight(), self.quantized_bias())
        return y if input.dim() == 2 else y.reshape(*input.shape[:-1], self.out_features)


class _ExportConv(_Exported):
    def forward(self: Any, input: Tensor) -> Tensor:
        x = self.quantized_input(input)
        return self._conv_forward(x, self.quantized_weight(), self.quantized_bias())  # type: ignore[no-any-return]


class ExportConv1d(_ExportConv, nn.Conv1d):
    """A 1-d convolution."""


class ExportConv2d(_ExportConv, nn.Conv2d):
    """A 2-d convolution."""


class ExportConv3d(_ExportConv, nn.Conv3d):
    """A 3-d convolution."""


class _ExportTransposed(_Exported):
    def forward(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        x = self.quantized_input(input)
        weight = self.quantized_weight()
        if self.groups > 1:
            weight = from_rows(self, weight, self.weight)
        return compute(self, x, weight, self.quantized_bias(), output_size)


class ExportConvTranspose1d(_ExportTransposed, nn.ConvTranspose1d):
    """A transposed 1-d convolution."""


class ExportConvTranspose2d(_ExportTransposed, nn.ConvTranspose2d):
    """A transposed 2-d convolution."""


class ExportConvTranspose3d(_ExportTransposed, nn.ConvTranspose3d):
    """A transposed 3-d convolution."""


class ExportEmbedding(_Exported, nn.Embedding):
    """An embedding that gathers codes and dequantises those alone."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the vectors of the indices."""
        indices = input.reshape(-1)
        codes: Tensor = self.weight_codes.index_select(0, indices)  # type: ignore[operator]
        scale: Tensor = self.weight_scale.index_select(0, indices)  # type: ignore[operator]
        found: Tensor = dequantize(codes, scale, None, self.scale_axis, self.block)
        return found.reshape(*input.shape, self.embedding_dim)


EXPORTED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: ExportLinear,
    nn.Conv1d: ExportConv1d,
    nn.Conv2d: ExportConv2d,
    nn.Conv3d: ExportConv3d,
    nn.ConvTranspose1d: ExportConvTranspose1d,
    nn.ConvTranspose2d: ExportConvTranspose2d,
    nn.ConvTranspose3d: ExportConvTranspose3d,
    nn.Embedding: ExportEmbedding,
}


def check_begun(name: str, module: Any, where: str = "export_onnx") -> None:
    """Refuse a layer that does not quantise yet.

    Raises:
        CompatibilityError: Naming the layer.
    """
    if not module.quantizer.bank.quantizing:
        raise CompatibilityError(
            f"{where}: {name} must be quantised, got a layer before qat's begin; train past it, or let qat finish"
        )


def check_exportable(name: str, module: Any, where: str = "export_onnx") -> None:
    """Refuse a fake-quantising layer that no exported file can hold as it is.

    Raises:
        CompatibilityError: Naming the layer, and what would work.
    """
    scheme: LayerScheme = module.quantizer.scheme
    if STOCK[type(module)] not in EXPORTED:
        raise CompatibilityError(
            f"{where}: {name} must be one of {', '.join(kind.__name__ for kind in EXPORTED)}, got "
            f"{STOCK[type(module)].__name__}, whose ONNX operator has no quantised form; skip it in qat"
        )
    if scheme.weight not in INTEGER_WEIGHTS or scheme.input not in ("none", "static", "token"):
        raise CompatibilityError(
            f"{where}: {name} must have integer codes, got weight {scheme.weight} and input {scheme.input}; "
            "train with scheme int8, int8_weight, int8_dynamic, int4_weight or ternary"
        )
    if getattr(module, "max_norm", None) is not None:
        raise CompatibilityError(f"{where}: {name} must have no max_norm, which rescales rows; skip it in qat")
    weight: Tensor = module.weight
    if weight.dtype != torch.float32:
        raise CompatibilityError(f"{where}: {name} must be float32, got {weight.dtype}; call model.float() first")


def input_qparams(module: Any) -> tuple[Tensor, Tensor] | None:
    """Return (scale, zero point) of a layer's static input, in signed codes; None if it has none."""
    quantizer: LayerQuantizer = module.quantizer
    if quantizer.index is None or not quantizer.has_range:
        return None
    if quantizer.learned_input is not None and quantizer.learned_input.learns:
        entry = quantizer.learned_input.entry(module)
        return torch.tensor(entry["scale"]), torch.tensor(entry["zero_point"], dtype=torch.int32)
    return quantizer.bank.scale[quantizer.index].clone(), quantizer.bank.zero_point[quantizer.index].clone()


@torch.no_grad()
def to_export(
    name: str,
    module: Any,
    scheme: LayerScheme,
    qparams: tuple[Tensor, Tensor] | None,
    shared: dict[int, Quantized],
    exact_bias: bool = True,
) -> None:
    """Turn a stock layer whose weight holds the values of its codes into one that holds the codes.

    Args:
        name: What errors call it.
        module: The layer.
        scheme: How it is quantised.
        qparams: Scale and signed zero point of a static input.
        shared: Identity of a weight → its codes, so that tied layers hold the same tensors; is added to.
        exact_bias: Whether a convolution's bias must be exact even where it then runs in float.
    """
    grid = shared_grid(name, module, scheme, shared)
    if scheme.input != "none" and not isinstance(module, TRANSPOSED) and grid.codes[0].numel() * 128 * 255 >= 2**31:
        raise CompatibilityError(
            f"export_onnx: {name} must sum fewer products than overflow 32 bits, got {grid.codes[0].numel()} per "
            "output; skip it in qat"
        )
    # onnxruntime has integer kernels for weights with a zero point alone
    weight_zeros = torch.zeros(grid.scale.shape, dtype=torch.int8)
    tensors = {"weight_codes": grid.codes, "weight_scale": grid.scale, "weight_zero_point": weight_zeros}
    if qparams is not None:
        input_scale, zero_point = qparams
        lowest = scheme.input_range[0]
        # moved to unsigned codes: 0 is then the smallest value of what a ReLU gives, and the ReLU folds
        tensors |= {"input_scale": input_scale, "input_zero_point": (zero_point - lowest).to(torch.uint8)}
        if module.bias is not None and not grid.block:
            tolerance = torch.full((len(grid.scale),), _BIAS_TOLERANCE)
            if isinstance(module, nn.modules.conv._ConvNd) and not exact_bias:
                # onnxruntime's QLinearConv wants the very scale, and what it rounds away is far below the step of
                # what reads it
                span = input_scale * (2**scheme.activation_bits - 1)
                norm = grid.scale * grid.codes.float().movedim(grid.axis, 0).flatten(1).norm(dim=1)
                tolerance = 1e-5 * (span * norm).clamp_min(1)
            found = None
            if len(grid.scale) == len(module.bias):
                found = bias_codes(module.bias, input_scale * grid.scale, tolerance)
            if found is not None:
                zeros = torch.zeros(len(module.bias), dtype=torch.int32)
                tensors |= {"bias_codes": found[0], "bias_scale": found[1], "bias_zero_point": zeros}
    restore(module)
    for buffer, value in tensors.items():
        module.register_buffer(buffer, value)
    module.scheme, module.scale_axis, module.block = scheme, grid.axis, grid.block
    module.__class__ = EXPORTED[type(module)]
