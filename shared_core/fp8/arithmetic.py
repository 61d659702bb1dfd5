"""Cast two matrices to narrow values and multiply them: one class per kind of recipe, and the table of recipes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from eff_kernels import fp8 as kernels
from torch import Tensor

from shared_core.fp8 import native as probe
from shared_core.fp8.config import Fp8Config
from shared_core.fp8.native import BLOCKS, native_mm
from shared_core.fp8.recipes import Int16Cast, hfp8_cast, mxfp4_cast, nvfp4_cast, s2fp8_cast
from shared_core.fp8.scaling import AmaxBank, NonFiniteWatch

Role = Literal["input", "weight", "gradient"]


Cast = Callable[[Tensor, Role, bool], Tensor]
"""Rounds a matrix (rows, contracted axis) to the format that a recipe has for its role, without a host read.

The last argument is True in a training pass, which may update the state of the current step. The result is
detached, in float32, or float64 for float64.
"""
_STATELESS: dict[str, Cast] = {"s2fp8": s2fp8_cast, "hfp8": hfp8_cast, "mxfp4": mxfp4_cast, "nvfp4": nvfp4_cast}
CAST_RECIPES = (*_STATELESS, "int16")


def cast_for(recipe: str, index: int, bank: Any) -> Cast:
    """Return the cast of one layer."""
    return Int16Cast(bank, index) if recipe == "int16" else _STATELESS[recipe]


_MULTIPLE = 16  # tensor cores contract this many FP8 values at a time


class Operand(NamedTuple):
    """A matrix (rows, contracted axis), its role in the layer, whether this step records it, and its codes if known."""

    matrix: Tensor
    role: Role
    record: bool
    scaled: kernels.Scaled | None = None


class Product(NamedTuple):
    """A product, and True if torch's scaled matmul computed it."""

    value: Tensor
    is_scaled_mm: bool


class Arithmetic(Protocol):
    """Rounds all operands of the products by one recipe."""

    def why_emulated(self, device: torch.device) -> str | None:
        """Return why products do not run on torch's scaled matmul there, to follow "as"; None if they do."""
        ...

    saved_block: tuple[int, ...]
    """The block of inputs if backward reuses the forward's codes of the transpose; empty if it casts again."""

    def layouts(self, operands: Sequence[Operand], both: Sequence[bool]) -> list[tuple[Operand, Operand]]:
        """Return two operands per matrix: the matrix, and its transpose padded with columns of zeros."""
        ...

    def multiply(self, a: Operand, b: Operand, dtype: torch.dtype, fast: bool, bias: Tensor | None = None) -> Product:
        """Return ``a @ b.t() + bias`` of the cast operands, accumulated in float32, in `dtype`."""
        ...


class ScaledArithmetic:
    """FP8 codes with one scale per block. With a bank, the scale comes from past steps."""

    def __init__(self, config: Fp8Config, bank: AmaxBank | None, index: int, watch: NonFiniteWatch | None) -> None:
        self.config, self.bank, self.index, self.watch = config, bank, index, watch
        self.block, self.weight_block, self.rounding = BLOCKS[config.recipe]
        self.saved_block: tuple[int, ...] = self.block

    def why_emulated(self, device: torch.device) -> str | None:
        """Return why products do not run on torch's scaled matmul there, to follow "as"; None if they do."""
        if self.config.backend == "scaled_mm":
            return None
        if self.config.backend == "emulated":
            return "backend=emulated asks for it"
        return probe.why_not_native(self.config.recipe, self.config.gradient_dtype, device)

    def layouts(self, operands: Sequence[Operand], both: Sequence[bool]) -> list[tuple[Operand, Operand]]:
        """Return matrices and their transposes, cast together if their blocks are equal, and recorded once."""
        return [
            (Operand(x, role, False, quantized.matrix), Operand(x, role, False, quantized.transposed))
            for (x, role, _, _), quantized in zip(operands, self._quantized(operands, both), strict=True)
        ]

    def multiply(self, a: Operand, b: Operand, dtype: torch.dtype, fast: bool, bias: Tensor | None = None) -> Product:
        """Return the product, on the device's scaled matmul or with the same numbers emulated."""
        left, right = (one.scaled or self._quantized([one], [False])[0].matrix for one in (a, b))
        kernels.check_scaled_mm_constraints(left, right)
        if self.why_emulated(left.codes.device) is not None:
            return Product(kernels.emulated_mm(left, right, dtype, bias), False)
        value = native_mm(left, right, torch.float32 if dtype == torch.float64 else dtype, fast, bias)
        return Product(value.to(dtype), True)

    def _quantized(self, operands: Sequence[Operand], both: Sequence[bool]) -> list[kernels.Quantized]:
        kinds = [self._kind(operand.role) for operand in operands]
        if any(kind != kinds[0] for kind in kinds):
            return [self._quantized([one], [turn])[0] for one, turn in zip(operands, both, strict=True)]
        sources = [self._source(operand, turn) for operand, turn in zip(operands, both, strict=True)]
        return kernels.quantize_all(sources, *kinds[0], self.rounding)

    def _kind(self, role: Role) -> tuple[torch.dtype, kernels.Block]:
        dtype = self.config.gradient_dtype if role == "gradient" else torch.float8_e4m3fn
        return dtype, self.weight_block if role == "weight" else self.block

    def _source(self, operand: Operand, both: bool) -> kernels.Source:
        matrix, role, record, _ = operand
        past = seen = None
        if self.bank is not None:
            # 0 before the first applied step. Then, and for non-finite values, the scale comes from this matrix.
            past = self.bank.past(self.index, role, matrix.device)
            seen = self.bank.seen(self.index, role) if record else None
        elif record and self.watch is not None:
            seen = self.watch.flag
        return kernels.Source(matrix, past, both, seen)


class CastArithmetic:
    """Values rounded to a format and multiplied in float32, for formats that no matmul here supports."""

    saved_block: tuple[int, ...] = ()

    def __init__(self, cast: Cast, watch: NonFiniteWatch | None) -> None:
        self.cast, self.watch = cast, watch

    def why_emulated(self, device: torch.device) -> str:
        """Return why, on every device."""
        return "this recipe has no scaled matmul here"

    def layouts(self, operands: Sequence[Operand], both: Sequence[bool]) -> list[tuple[Operand, Operand]]:
        """Return matrices and their transposes. Each is cast when it is multiplied."""
        return [(operand, operand._replace(matrix=tokens_last(operand.matrix))) for operand in operands]

    def multiply(self, a: Operand, b: Operand, dtype: torch.dtype, fast: bool, bias: Tensor | None = None) -> Product:
        """Return the product of the rounded values."""
        left, right = (self._values(operand) for operand in (a, b))
        common = torch.promote_types(left.dtype, right.dtype)
        with torch.autocast(left.device.type, enabled=False):
            product = left.to(common) @ right.to(common).t()
            return Product((product if bias is None else product + bias).to(dtype), False)

    def _values(self, operand: Operand) -> Tensor:
        values = self.cast(operand.matrix.contiguous(), operand.role, operand.record)
        if operand.record and self.watch is not None:
            self.watch.see(values)  # a cast without a scale may overflow
        return values


def tokens_last(matrix: Tensor) -> Tensor:
    """Return the transpose, with zeros up to a multiple of 16 columns.

    Zeros add nothing to a product and never set a scale.

    Example:
        >>> tokens_last(torch.ones(3, 2)).shape
        torch.Size([2, 16])
    """
    missing = -matrix.shape[0] % _MULTIPLE
    return (F.pad(matrix, (0, 0, 0, missing)) if missing else matrix).t()
