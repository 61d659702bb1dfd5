"""What a recipe that is emulated everywhere does to the operands of a product, and which recipes there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

from torch import Tensor

from shared_core.errors import ConfigError, nearest
from shared_core.fp8.fp4 import Mxfp4Cast, Nvfp4Cast
from shared_core.fp8.hfp8 import Hfp8Cast
from shared_core.fp8.int16 import Int16Cast, SharedExponentBank
from shared_core.fp8.s2fp8 import S2fp8Cast

Role = Literal["input", "weight", "gradient"]


class Cast(Protocol):
    """How a recipe turns an operand of a product into the values that its format holds."""

    def cast(self, matrix: Tensor, role: Role, record: bool) -> Tensor:
        """Return the values that the product multiplies, without a host read.

        Args:
            matrix: (rows, contracted axis); float64, float32, bfloat16 or float16. Not changed.
            role: What the matrix is; transposed, it stays what it is.
            record: Whether this is a training pass, which may widen the state of the open step.

        Returns:
            The shape of `matrix`, detached; float32, or float64 for float64.
        """


_STATELESS: dict[str, Callable[[], Cast]] = {
    "s2fp8": S2fp8Cast,
    "hfp8": Hfp8Cast,
    "mxfp4": Mxfp4Cast,
    "nvfp4": Nvfp4Cast,
}
CAST_RECIPES = (*_STATELESS, "int16")


def cast_for(recipe: str, index: int, bank: Any) -> Cast:
    """Return the cast of one layer.

    Args:
        recipe: "s2fp8", "hfp8", "mxfp4", "nvfp4" or "int16".
        index: The layer's place in the bank.
        bank: int16's `SharedExponentBank`; the others keep nothing and do not look at it.

    Raises:
        ConfigError: Unknown recipe, or int16 without a bank.

    Example:
        >>> import torch
        >>> cast = cast_for("hfp8", 0, None)
        >>> cast.cast(torch.tensor([[0.3]]), "input", record=True).item()
        0.3125
    """
    if recipe in _STATELESS:
        return _STATELESS[recipe]()
    if recipe != "int16":
        raise ConfigError(f"fp8: recipe must be a known one, got {recipe!r}{nearest(str(recipe), CAST_RECIPES)}")
    if not isinstance(bank, SharedExponentBank):
        raise ConfigError(
            f"fp8: recipe int16 must have a SharedExponentBank, got {type(bank).__name__}; "
            "use a Session, which counts steps"
        )
    return Int16Cast(bank, index)
