"""How a layer turns two matrices into narrow values and multiplies them: one object for each kind of recipe."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from eff_kernels import fp8 as kernels
from torch import Tensor

from shared_core.fp8 import probe
from shared_core.fp8.casts import Cast, Role
from shared_core.fp8.config import Fp8Config
from shared_core.fp8.native import BLOCKS, native_mm
from shared_core.fp8.scaling import AmaxBank, NonFiniteWatch


class Operand(NamedTuple):
    """A matrix (rows, contracted axis), what it is to the layer, and whether this step remembers it."""

    matrix: Tensor
    role: Role
    record: bool


class Product(NamedTuple):
    """A product, and whether torch's scaled matmul computed it."""

    value: Tensor
    is_scaled_mm: bool


class Arithmetic(Protocol):
    """What a recipe does to the operands of a product."""

    def why_emulated(self, device: torch.device) -> str | None:
        """Return why products do not run on torch's scaled matmul there, to follow "as"; None if they do."""
        ...

    def multiply(self, a: Operand, b: Operand, dtype: torch.dtype) -> Product:
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
        self.block, self.weight_block, self.rounding = BLOCKS[config.recipe]

    def why_emulated(self, device: torch.device) -> str | None:
        """Return why products do not run on torch's scaled matmul there, to follow "as"; None if they do."""
        if self.config.backend == "scaled_mm":
            return None
        if self.config.backend == "emulated":
            return "backend=emulated asks"
        return probe.why_not_native(self.config.recipe, self.config.gradient_dtype, device)

    def multiply(self, a: Operand, b: Operand, dtype: torch.dtype) -> Product:
        """Return the product, on the device's scaled matmul or with the same numbers emulated."""
        left, right = self._quantize(a), self._quantize(b)
        kernels.check_scaled_mm_constraints(left, right)
        if self.why_emulated(left.codes.device) is not None:
            return Product(kernels.emulated_mm(left, right, dtype), False)
        return Product(native_mm(left, right, torch.float32 if dtype == torch.float64 else dtype).to(dtype), True)

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

    def why_emulated(self, device: torch.device) -> str:
        """Return why, on every device."""
        return "this recipe has no scaled matmul here"

    def multiply(self, a: Operand, b: Operand, dtype: torch.dtype) -> Product:
        """Return the product of the rounded values."""
        left, right = (self._values(operand) for operand in (a, b))
        common = torch.promote_types(left.dtype, right.dtype)
        with torch.autocast(left.device.type, enabled=False):
            return Product((left.to(common) @ right.to(common).t()).to(dtype), False)

    def _values(self, operand: Operand) -> Tensor:
        values = self.cast.cast(operand.matrix.contiguous(), operand.role, operand.record)
        if operand.record and self.watch is not None:
            self.watch.see(values)  # a cast without a scale may itself overflow
        return values
