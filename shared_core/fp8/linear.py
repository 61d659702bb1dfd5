"""The layer: a stock `Linear` becomes one by a change of class, and back; its weight stays what it is."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from eff_kernels import fp8 as kernels
from torch import Tensor, nn

from shared_core.fp8.config import Fp8Config
from shared_core.fp8.scaling import AmaxBank

PRODUCTS = ("forward", "grad_input", "grad_weight")
_TENSOR, _ROW = (0, 0), (1, 0)
# recipe → block of inputs and gradients, block of weights (both along the contracted axis), rounding of scales
RECIPES: dict[str, tuple[kernels.Block, kernels.Block, kernels.Rounding]] = {
    "tensorwise": (_TENSOR, _TENSOR, "exact"),
    "delayed": (_TENSOR, _TENSOR, "exact"),
    "rowwise": (_ROW, _ROW, "power_of_two"),
    "blockwise": ((1, 128), (128, 128), "exact"),
    "mx": ((1, 32), (1, 32), "mx"),
}
_MULTIPLE = 16  # tensor cores contract this many FP8 values at a time


class LayerFp8:
    """What a layer needs beside its weight: the recipe, its rows of the histories, counts of its products.

    Args:
        config: The options.
        bank: The histories of all layers; None without delayed scaling.
        index: This layer's place in the bank.
    """

    def __init__(self, config: Fp8Config, bank: AmaxBank | None, index: int) -> None:
        self.config, self.bank, self.index = config, bank, index
        self.block, self.weight_block, self.rounding = RECIPES[config.recipe]
        self.scaled: Counter[str] = Counter()
        self.emulated: Counter[str] = Counter()

    def uses_scaled_mm(self, device: torch.device) -> bool:
        """Return whether this layer's products run on torch's scaled matmul there."""
        if self.config.backend != "auto":
            return self.config.backend == "scaled_mm"
        return self.block in (_TENSOR, _ROW) and kernels.multiplies_fp8(device)

    def quantize(self, matrix: Tensor, role: str, record: bool) -> kernels.Scaled:
        """Return a matrix (rows, contracted axis) in FP8 by the recipe; `record` widens the step's window."""
        matrix = matrix.contiguous()
        dtype = self.config.gradient_dtype if role == "gradient" else torch.float8_e4m3fn
        block = self.weight_block if role == "weight" else self.block
        amax = kernels.block_amax(matrix, block)
        if self.bank is not None:
            if record:
                self.bank.widen(self.index, role, amax)
            past = self.bank.past(self.index, role, matrix.device)
            # before the first applied step there is no past; and what is not finite now must not saturate unseen
            amax = torch.where((past > 0) & torch.isfinite(amax), past, amax)
        return kernels.cast(matrix, kernels.block_scale(amax, dtype, self.rounding), dtype, block)

    def multiply(self, product: str, a: kernels.Scaled, b: kernels.Scaled, dtype: torch.dtype) -> Tensor:
        """Return ``a @ b.t()`` in `dtype` and count it."""
        kernels.check_scaled_mm_constraints(a, b)
        if self.uses_scaled_mm(a.codes.device):
            out = kernels.scaled_mm(a, b, torch.float32 if dtype == torch.float64 else dtype).to(dtype)
            self.scaled[product] += 1
        else:
            out = kernels.emulated_mm(a, b, dtype)
            self.emulated[product] += 1
        return out


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: LayerFp8, record: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.record = layer, record
        a, b = layer.quantize(x, "input", record), layer.quantize(weight, "weight", record)
        return layer.multiply("forward", a, b, x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer, record, gradient = ctx.layer, ctx.record, grads[0]
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            a = layer.quantize(gradient, "gradient", record)
            b = layer.quantize(weight.t().contiguous(), "weight", False)
            grad_input = layer.multiply("grad_input", a, b, x.dtype)
        if ctx.needs_input_grad[1]:
            a = layer.quantize(_tokens_last(gradient), "gradient", record)
            b = layer.quantize(_tokens_last(x), "input", False)
            grad_weight = layer.multiply("grad_weight", a, b, weight.dtype)
        return grad_input, grad_weight, None, None


def _tokens_last(matrix: Tensor) -> Tensor:
    # zeros add nothing to a product and never set a scale
    return F.pad(matrix, (0, 0, 0, -matrix.shape[0] % _MULTIPLE)).t().contiguous()


class Fp8Linear(nn.Linear):
    """`torch.nn.Linear` whose forward product and both backward products multiply FP8 values.

    ``y = (X̂·Ŵᵀ)·(s_x·s_w) + b`` with ``X̂ = cast(clamp(x/s_x))``, accumulated in float32; dX and dW likewise. The
    weight is an ordinary parameter. The output has the type of the input, or of the autocast region.
    """

    fp8: LayerFp8

    # counts and windows are kept on the host: a compiled graph would keep them once, when it is traced
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: Tensor) -> Tensor:
        """Return ``x wᵀ + b``, multiplied in FP8."""
        kind = input.device.type
        if torch.is_autocast_enabled(kind) and input.dtype != torch.float64:
            input = input.to(torch.get_autocast_dtype(kind))
        if input.numel() == 0:
            return F.linear(input, self.weight.to(input.dtype), None if self.bias is None else self.bias.to(input))
        bank = self.fp8.bank
        # a forward without gradients is an evaluation, a calibration, or will be recomputed with them
        record = bank is not None and bank.observing and self.training and torch.is_grad_enabled()
        y: Tensor = _Fp8Product.apply(  # type: ignore[no-untyped-call]
            input.reshape(-1, self.in_features), self.weight, self.fp8, record
        )
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y.view(*input.shape[:-1], self.out_features)


def swap(module: nn.Module, layer: LayerFp8) -> None:
    """Make a stock layer multiply in FP8; its parameters and keys stay as they are."""
    module.fp8 = layer  # type: ignore[assignment]
    module.__class__ = Fp8Linear


def restore(module: nn.Module) -> None:
    """Make a layer stock again; one that is stock stays so."""
    if type(module) in (Fp8Linear,):
        module.__class__ = nn.Linear
        del module.fp8
