"""How a layer turns two matrices into narrow values and multiplies them: one object for each kind of recipe."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from eff_kernels import fp8 as kernels
from torch import Tensor

from shared_core.fp8.casts import Cast, Role
from shared_core.fp8.config import Fp8Config
from shared_core.fp8.scaling import AmaxBank, NonFiniteWatch

_TENSOR, _ROW = (0, 0), (1, 0)
# recipe → block of inputs and gradients, block of weights (both along the contracted axis), rounding of scales
_BLOCKS: dict[str, tuple[kernels.Block, kernels.Block, kernels.Rounding]] = {
    "tensorwise": (_TENSOR, _TENSOR, "exact"),
    "delayed": (_TENSOR, _TENSOR, "exact"),
    "rowwise": (_ROW, _ROW, "power_of_two"),
    "blockwise": ((1, 128), (128, 128), "exact"),
    "mx": ((1, 32), (1, 32), "mx"),
}


class Operand(NamedTuple):
    """A matrix (rows, contracted axis), what it is to the layer, and whether this step remembers it."""

    matrix: Tensor
    role: Role
    record: bool


class Arithmetic(Protocol):
    """What a recipe does to the operands of a product."""

    def uses_scaled_mm(self, device: torch.device) -> bool:
        """Return whether products run on torch's scaled matmul there."""
        ...

    def multiply(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        """Return ``a @ b.t()`` of the cast operands, accumulated in float32, in `dtype`."""
        ...


class ScaledArithmetic:
    """FP8 codes with a scale a block; with a bank, the scale is that of past steps.

    Args:
        config: The options, of a recipe with scales.
        bank: The histories of all layers; None without delayed scaling.
        index: This layer's place in the bank.
        watch: Told of recorded magnitudes where there is no bank, which sees them itself; None without a session.
    """

    def __init__(self, config: Fp8Config, bank: AmaxBank | None, index: int, watch: NonFiniteWatch | None) -> None:
        self.config, self.bank, self.index, self.watch = config, bank, index, watch
        self.block, self.weight_block, self.rounding = _BLOCKS[config.recipe]

    def uses_scaled_mm(self, device: torch.device) -> bool:
        """Return whether products run on torch's scaled matmul there."""
        if self.config.backend != "auto":
            return self.config.backend == "scaled_mm"
        return not self.config.is_always_emulated and kernels.multiplies_fp8(device)

    def multiply(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        """Return the product, on the device's scaled matmul or with the same numbers emulated."""
        left, right = self._quantize(a), self._quantize(b)
        kernels.check_scaled_mm_constraints(left, right)
        if not self.uses_scaled_mm(left.codes.device):
            return kernels.emulated_mm(left, right, dtype)
        return kernels.scaled_mm(left, right, torch.float32 if dtype == torch.float64 else dtype).to(dtype)

    def _quantize(self, operand: Operand) -> kernels.Scaled:
        matrix, role = operand.matrix.contiguous(), operand.role
        dtype = self.config.gradient_dtype if role == "gradient" else torch.float8_e4m3fn
        block = self.weight_block if role == "weight" else self.block
        amax = kernels.block_amax(matrix, block)
        if self.bank is not None:
            if operand.record:
                self.bank.widen(self.index, role, amax)
            past = self.bank.past(self.index, role, matrix.device)
            # before the first applied step there is no past; and what is not finite now must not saturate unseen
            amax = torch.where((past > 0) & torch.isfinite(amax), past, amax)
        elif operand.record and self.watch is not None:
            self.watch.see(amax)
        return kernels.cast(matrix, kernels.block_scale(amax, dtype, self.rounding), dtype, block)


class CastArithmetic:
    """Values rounded to a format and multiplied in float32: for formats that no matmul here takes.

    Args:
        cast: Rounds a matrix.
        watch: Told of recorded operands; None without a session, or where a bank sees them.
    """

    def __init__(self, cast: Cast, watch: NonFiniteWatch | None) -> None:
        self.cast, self.watch = cast, watch

    def uses_scaled_mm(self, device: torch.device) -> bool:
        """Return False: always emulated."""
        return False

    def multiply(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        """Return the product of the rounded values."""
        left, right = (self._values(operand) for operand in (a, b))
        common = torch.promote_types(left.dtype, right.dtype)
        with torch.autocast(left.device.type, enabled=False):
            return (left.to(common) @ right.to(common).t()).to(dtype)

    def _values(self, operand: Operand) -> Tensor:
        values = self.cast.cast(operand.matrix.contiguous(), operand.role, operand.record)
        if operand.record and self.watch is not None:
            self.watch.see(values)  # a cast without a scale may itself overflow
        return values
