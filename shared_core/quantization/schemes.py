"""Quantization schemes: formats of weights and of inputs by name, and the scheme of a layer as plain values."""

from __future__ import annotations

import dataclasses
from typing import Literal

Weight = Literal[
    "channel", "group", "fp16", "bf16", "fp8", "fp8_tensor", "fp8_block", "mxfp4", "mxfp6", "mxfp8", "nvfp4", "ternary",
    "binary",
]  # fmt: skip
Input = Literal[
    "none", "static", "token", "fp8", "fp8_static", "fp8_group", "mxfp4", "mxfp8", "nvfp4", "binary", "binary_scaled"
]  # fmt: skip
WITH_RANGE = ("static", "fp8_static")
"""Inputs whose range is observed and saved."""
WIDE = 16
"""Bits of an input in ``int16_static``."""
FP8_GROUP = 128
"""Features of an input that share a scale in ``fp8_group``."""
Element = Literal["fp4_e2m1", "fp6_e2m3", "fp8_e4m3"]
MX: dict[str, Element] = {"mxfp4": "fp4_e2m1", "mxfp6": "fp6_e2m3", "mxfp8": "fp8_e4m3"}
"""Formats whose blocks of 32 share a power of two → their elements."""
FEW = ("ternary", "binary")
"""Weights of two or three values."""
HALF = ("fp16", "bf16")
"""Weights as floats of 16 bits, without scales."""
_LARGEST_IN_E4M3 = 16
"""e4m3 holds every integer up to it."""


@dataclasses.dataclass(frozen=True)
class LayerScheme:
    """The quantization of one layer, as plain values.

    Args:
        weight: Granularity of scales, or the number format. ``channel`` and ``fp8``: one scale per output channel;
            ``fp8_tensor``: one; ``fp8_block``: per `group_size` inputs of 128 channels; ``fp16`` and ``bf16``: none.
        weight_bits: Bits of a code.
        group_size: Weights that share a scale; 0 unless `weight` is ``group`` or ``fp8_block``.
        affine: True if groups have a zero point.
        input: ``static`` and ``fp8_static``: one range per layer; ``token`` and ``fp8``: one per vector, computed at
            run time; ``fp8_group``: one per 128 features of a vector. ``binary``: signs; ``binary_scaled``: signs times
            mean magnitudes, computed at run time.
        activation_bits: Bits of a code.
        affine_input: True if tokens have a zero point.
        symmetric: True if a static input has none: ``s = max|x| / (2^(b-1) - 1)``.
    """

    weight: Weight = "channel"
    weight_bits: int = 8
    group_size: int = 0
    affine: bool = False
    input: Input = "static"
    activation_bits: int = 8
    affine_input: bool = False
    symmetric: bool = False

    @property
    def of_weight(self) -> tuple[Weight, int, int, bool]:
        """The fields that concern only the weight."""
        return self.weight, self.weight_bits, self.group_size, self.affine

    @property
    def of_input(self) -> tuple[Input, int, bool, bool]:
        """The fields that concern only the input."""
        return self.input, self.activation_bits, self.affine_input, self.symmetric

    @property
    def has_range(self) -> bool:
        """True if the input has a range that is observed and saved."""
        return self.input in WITH_RANGE

    @property
    def has_integers(self) -> bool:
        """True if weights are integers of `weight_bits` bits."""
        return self.weight in ("channel", "group")

    @property
    def is_half(self) -> bool:
        """True if weights are floats of 16 bits, without scales."""
        return self.weight in HALF

    @property
    def has_integer_inputs(self) -> bool:
        """True if inputs are integers of `activation_bits` bits."""
        return self.input in ("static", "token")

    @property
    def has_byte_inputs(self) -> bool:
        """True if inputs are integers of at most 8 bits."""
        return self.has_integer_inputs and not self.has_wide_inputs

    @property
    def has_wide_inputs(self) -> bool:
        """True if inputs are integers of 16 bits."""
        return self.input == "static" and self.activation_bits == WIDE

    @property
    def has_binary_inputs(self) -> bool:
        """True if inputs are signs, with or without scales."""
        return self.input.startswith("binary")

    @property
    def spans_rows(self) -> bool:
        """True if weights of several rows share a scale."""
        return self.weight in ("fp8_tensor", "fp8_block", "nvfp4")

    @property
    def block(self) -> int:
        """Weights per scale in a block format, 0 in others."""
        return 16 if self.weight == "nvfp4" else 32 if self.weight in MX else 0

    @property
    def element(self) -> Element | None:
        """The float format of a code; None for integers."""
        if self.weight == "nvfp4":
            return "fp4_e2m1"
        return "fp8_e4m3" if self.weight.startswith("fp8") else MX.get(self.weight)

    @property
    def weight_range(self) -> tuple[int, int]:
        """Smallest and largest code of a weight whose scale is given: learned, searched or kept."""
        return -(1 << (self.weight_bits - 1)), self.weight_qmax

    def group_of(self, width: int) -> int:
        """Return how many weights of a row share a scale: `group_size` if it divides the width, else all."""
        return width if width % self.group_size else self.group_size

    @property
    def weight_qmax(self) -> int:
        """Largest code of a symmetric weight; the smallest is its negative."""
        return (1 << (self.weight_bits - 1)) - 1

    @property
    def input_range(self) -> tuple[int, int]:
        """Smallest and largest code of an input."""
        return -(2 ** (self.activation_bits - 1)), 2 ** (self.activation_bits - 1) - 1

    def __str__(self) -> str:
        size = f" of {self.group_size}" if self.group_size else ""
        kind, detail = {
            "channel": (f"int{self.weight_bits}", " per channel"),
            "group": (f"int{self.weight_bits}", f" in groups{size}{' with zero points' if self.affine else ''}"),
            "fp8": ("fp8", " per channel"), "fp8_tensor": ("fp8", " per tensor"),
            "fp8_block": ("fp8", " in blocks of 128 x 128"),
        }.get(self.weight, (self.weight, ""))  # fmt: skip
        inputs, how = {
            "none": ("float", ""),
            "static": (f"int{self.activation_bits}", f" with fixed {'symmetric ' * self.symmetric}ranges"),
            "token": (f"int{self.activation_bits}", f" per token{' with zero points' if self.affine_input else ''}"),
            "fp8": ("fp8", " per token"), "fp8_static": ("fp8", " with fixed ranges"),
            "fp8_group": ("fp8", f" in groups of {FP8_GROUP}"), "binary_scaled": ("binary", " with scales"),
        }.get(self.input, (self.input, ""))  # fmt: skip
        return f"{kind} weights{detail} and {inputs} inputs{how}"

    @property
    def mismatch(self) -> str:
        """Why weights and inputs cannot be multiplied by their codes; empty if they can.

        Example:
            >>> LayerScheme(*WEIGHTS["nvfp4"], *INPUTS["mxfp8"]).mismatch
            'mxfp8 inputs have a power of two per 32 features, which nvfp4 weights lack'
        """
        kind = f"int{self.weight_bits}" if self.has_integers else self.weight
        if self.input in MX and self.weight not in MX:
            return f"{self.input} inputs have a power of two per 32 features, which {kind} weights lack"
        if self.is_half and self.input != "none":
            return f"{self.weight} weights multiply only float inputs"
        if self.input == "binary_scaled" and self.weight not in FEW:
            return f"binary_scaled inputs are those of XNOR-Net, for binary or ternary weights, got {kind}"
        if self.input == "nvfp4" and self.weight != "nvfp4":
            return f"nvfp4 inputs have an fp8 scale per 16 features, which {kind} weights lack"
        if self.has_integer_inputs and self.element in ("fp6_e2m3", "fp8_e4m3"):
            return f"integer inputs need weights with integer codes, which {self.weight} lacks"
        if self.input.startswith("fp8") and self.has_integers:
            largest = 2**self.weight_bits - 1 if self.affine else self.weight_qmax
            if largest > _LARGEST_IN_E4M3:
                text = f"fp8 inputs need weights that fp8 represents, integers up to {_LARGEST_IN_E4M3}"
                return f"{text}, got {self.weight_bits} bits{' with zero points' if self.affine else ''}"
        return ""


Weights = Literal[
    "int8", "int4", "int4_asym", "fp16", "bf16", "fp8", "fp8_tensor", "fp8_block", "mxfp4", "mxfp6", "mxfp8", "nvfp4",
    "ternary", "binary",
]  # fmt: skip
WEIGHTS: dict[str, tuple[Weight, int, int, bool]] = {
    "int8": ("channel", 8, 0, False), "int4": ("group", 4, 0, False), "int4_asym": ("group", 4, 0, True),
    "fp16": ("fp16", 16, 0, False), "bf16": ("bf16", 16, 0, False),
    "fp8": ("fp8", 8, 0, False), "fp8_tensor": ("fp8_tensor", 8, 0, False), "fp8_block": ("fp8_block", 8, 128, False),
    "mxfp4": ("mxfp4", 4, 0, False), "mxfp6": ("mxfp6", 6, 0, False),
    "mxfp8": ("mxfp8", 8, 0, False), "nvfp4": ("nvfp4", 4, 0, False),
    "ternary": ("ternary", 2, 0, False), "binary": ("binary", 1, 0, False),
}  # fmt: skip
"""Format of weights → fields of `LayerScheme`."""

Inputs = Literal[
    "auto", "none", "int8_static", "int16_static", "int8_token", "int8_token_asym", "fp8_static", "fp8_token",
    "fp8_group", "mxfp4", "mxfp8", "nvfp4", "binary", "binary_scaled",
]  # fmt: skip
INPUTS: dict[str, tuple[Input, int, bool, bool]] = {
    "none": ("none", 0, False, False), "int8_static": ("static", 8, False, False),
    "int16_static": ("static", WIDE, False, True), "int8_token": ("token", 8, False, False),
    "int8_token_asym": ("token", 8, True, False), "fp8_static": ("fp8_static", 8, False, False),
    "fp8_token": ("fp8", 8, False, False), "fp8_group": ("fp8_group", 8, False, False),
    "mxfp4": ("mxfp4", 4, False, False), "mxfp8": ("mxfp8", 8, False, False), "nvfp4": ("nvfp4", 4, False, False),
    "binary": ("binary", 1, False, False), "binary_scaled": ("binary_scaled", 1, False, False),
}  # fmt: skip
"""Format of inputs → fields of `LayerScheme`. ``auto`` stands for those of the preset."""

Scheme = Literal[
    "int8", "int8_weight", "int8_dynamic", "int16", "int4_weight", "int8_dynamic_int4_weight", "fp16", "bf16", "fp8",
    "fp8_static", "fp8_block", "mxfp4", "nvfp4", "ternary", "binary", "xnor_net", "W2A16", "W3A16", "W4A16",
    "W5A16", "W6A16", "W7A16", "W8A16", "W4A16_ASYM", "W8A8", "W4A8", "W4AFP8", "FP8_DYNAMIC", "NVFP4A16", "MXFP4A16",
    "MXFP4XFP8", "MXFP6A16", "MXFP6A8", "MXFP8A16", "MXFP8", "released",
]  # fmt: skip
_PAIRS = {
    "int8": ("int8", "int8_static"), "int8_weight": ("int8", "none"), "int8_dynamic": ("int8", "int8_token"),
    "int16": ("int8", "int16_static"), "int4_weight": ("int4_asym", "none"),
    "int8_dynamic_int4_weight": ("int4", "int8_token_asym"),
    "fp16": ("fp16", "none"), "bf16": ("bf16", "none"),
    "fp8": ("fp8", "fp8_token"), "fp8_static": ("fp8", "fp8_static"), "fp8_block": ("fp8_block", "fp8_group"),
    "mxfp4": ("mxfp4", "mxfp4"), "nvfp4": ("nvfp4", "nvfp4"), "ternary": ("ternary", "none"),
    "binary": ("binary", "none"), "xnor_net": ("binary", "binary_scaled"),
    "W4A16_ASYM": ("int4_asym", "none"), "W8A8": ("int8", "int8_token"), "W4A8": ("int4", "int8_token"),
    "W4AFP8": ("int4", "fp8_token"), "FP8_DYNAMIC": ("fp8", "fp8_token"), "NVFP4A16": ("nvfp4", "none"),
    "MXFP4A16": ("mxfp4", "none"), "MXFP4XFP8": ("mxfp4", "fp8_group"), "MXFP8A16": ("mxfp8", "none"),
    "MXFP8": ("mxfp8", "mxfp8"), "MXFP6A16": ("mxfp6", "none"), "MXFP6A8": ("mxfp6", "mxfp8"),
}  # fmt: skip
SCHEMES: dict[str, LayerScheme] = {
    name: LayerScheme(*WEIGHTS[weights], *INPUTS[inputs]) for name, (weights, inputs) in _PAIRS.items()
} | {f"W{bits}A16": LayerScheme("group", bits, input="none", activation_bits=0) for bits in range(2, 9)}
"""Preset → its scheme. Those in capitals, and ``fp8_block``, ``mxfp4`` and ``nvfp4``, are those of compressed-tensors.
Groups have no size yet: they get the largest usual one that divides a layer's inputs, 128 if possible."""
_OTHERWISE = {
    "FP8": "one scale per tensor: weights=fp8_tensor with inputs=fp8_static. FP8_DYNAMIC is fp8",
    "INT8": "int8_dynamic",
}


def preset_name(name: str) -> str:
    """Return a preset's name as it is written in `SCHEMES`, from any spelling of it.

    Raises:
        ValueError: If compressed-tensors uses the name in another sense than we do.

    Example:
        >>> preset_name("mxfp4a16"), preset_name("MXFP4"), preset_name("gold")
        ('MXFP4A16', 'mxfp4', 'gold')
    """
    if name in _OTHERWISE:
        raise ValueError(f"{name} means in compressed-tensors {_OTHERWISE[name]}")
    return next((known for known in (*SCHEMES, "released") if known.lower() == name.lower()), name)
