"""How released files store the codes and scales of one weight: gpt-oss' MXFP4, FP8 in blocks, compressed-tensors."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.errors import CheckpointError
from shared_core.numerics.block_formats import BEYOND, Element
from shared_core.numerics.formats import FORMATS
from shared_core.numerics.rounding import binade, decode, encode, round_to

_E4M3 = FORMATS["fp8_e4m3"]


@dataclasses.dataclass(frozen=True)
class Stored:
    """A weight's codes as (rows, columns), and one scale per block.

    Attributes:
        codes: Values of the codes, float32.
        scale: As the file holds it, decoded to float32, one per block.
        zero_point: Subtracted from codes; None without.
        global_scale: Divides every scale (NVFP4); None without.
        block: Rows and columns of a block.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    global_scale: Tensor | None
    block: tuple[int, int]

    @property
    def step(self) -> Tensor:
        """The scale that multiplies codes, one per block."""
        return self.scale if self.global_scale is None else self.scale / self.global_scale

    @property
    def values(self) -> Tensor:
        """The weight in float32."""
        codes = self.codes if self.zero_point is None else self.codes - self.spread(self.zero_point)
        return codes * self.spread(self.step)

    def spread(self, blocks: Tensor) -> Tensor:
        """Return one value per weight from one per block."""
        return spread(blocks, self.block, self.codes.shape)


def spread(blocks: Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
    """Return one value per weight from one per block. The last blocks may be cut.

    Example:
        >>> spread(torch.tensor([[1, 2]]), (2, 2), (2, 3)).tolist()
        [[1, 1, 2], [1, 1, 2]]
    """
    rows = blocks.repeat_interleave(block[0], 0)[: shape[0]]
    return rows.repeat_interleave(block[1], 1)[:, : shape[1]]


def over_blocks(values: Tensor, block: tuple[int, int], reduce: str) -> Tensor:
    """Return the largest (``amax``), smallest (``amin``) or the conjunction (``all``) of the values of each block.

    Example:
        >>> over_blocks(torch.tensor([[1, 2, 3]]), (1, 2), "amax").tolist()
        [[2, 3]]
    """
    rows, columns = (-(-size // part) for size, part in zip(values.shape, block, strict=True))
    # a cut block repeats its last values, which changes no result
    down = torch.arange(rows * block[0]).clamp(max=values.shape[0] - 1)
    right = torch.arange(columns * block[1]).clamp(max=values.shape[1] - 1)
    if len(down) != values.shape[0] or len(right) != values.shape[1]:
        values = values[down][:, right]
    blocks = values.view(rows, block[0], columns, block[1])
    if reduce == "all":
        return blocks.all(3).all(1)
    return blocks.amax((1, 3)) if reduce == "amax" else blocks.amin((1, 3))


def block_sums(values: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the sum of the values of each block.

    Example:
        >>> block_sums(torch.tensor([[1, 2, 3]]), (1, 2)).tolist()
        [[3, 3]]
    """
    rows, columns = values.shape
    values = nn.functional.pad(values, (0, -columns % block[1], 0, -rows % block[0]))
    return values.view(len(values) // block[0], block[0], -1, block[1]).sum((1, 3))


class Layout(ABC):
    """The tensors of one weight in a released file.

    Attributes:
        keys: Part → its name in the file. Codes, scales and zero points; others are not read.
        kind: A weight format of `QatConfig`.
        inputs: A format of inputs of `QatConfig`.
        element: The floating-point format of codes, or the bits of integers.
        options: More options of `QatConfig` for it.
    """

    kind: str = ""
    inputs: str = "none"
    element: Element | int = "fp8_e4m3"

    def __init__(self, name: str, keys: Mapping[str, str]) -> None:
        self.name, self.keys = name, dict(keys)
        self.options: dict[str, Any] = {}

    def pieces(self, parts: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Yield the file's tensors in parts of whole rows, which take less memory to decode."""
        yield dict(parts)

    @abstractmethod
    def read(self, parts: Mapping[str, Tensor]) -> Stored:
        """Return the codes and scales in the file's tensors."""

    @abstractmethod
    def write(self, stored: Stored, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the file's tensors for codes and scales, in the shapes and dtypes of the released ones."""

    def loaded(self, stored: Stored, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the weight as the format's own package computes it, which may round the product to 16 bits."""
        return stored.values

    @abstractmethod
    def fresh(self, low: Tensor, high: Tensor, like: Stored) -> tuple[Tensor, Tensor | None]:
        """Return (scale, zero point) by the format's own rule for blocks with these smallest and largest values."""

    def encoded(self, rows: Tensor, stored: Stored) -> Stored:
        """Return the nearest codes of a weight on the scales of `stored`."""
        ratio = _ratio(rows, stored)
        if isinstance(self.element, int):
            half = 2 ** (self.element - 1)
            return dataclasses.replace(stored, codes=ratio.round().clamp(-half, half - 1))
        return dataclasses.replace(stored, codes=round_to(ratio, self.element))

    def clipped(self, rows: Tensor, stored: Stored) -> Tensor:
        """Return which values of a weight lie beyond the codes on the scales of `stored`."""
        ratio = _ratio(rows, stored)
        if isinstance(self.element, int):
            half = 2 ** (self.element - 1)
            ratio = ratio.round()
            return torch.logical_or(ratio < -half, ratio > half - 1)
        beyond: Tensor = ratio.abs() >= BEYOND[self.element]
        return beyond


def _ratio(rows: Tensor, stored: Stored) -> Tensor:
    """Return w/s (+ zero point), whose nearest code is wanted."""
    step = stored.spread(stored.step)
    ratio = torch.where(step == 0, 0.0, rows.float() / step)
    return ratio if stored.zero_point is None else ratio + stored.spread(stored.zero_point)


_FP4 = decode(torch.arange(16, device="cpu"), "fp4_e2m1")
_CODE_OF_TWICE = torch.tensor([0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7], dtype=torch.uint8, device="cpu")


def _unpacked(packed: Tensor) -> Tensor:
    """Return the values of two E2M1 codes per byte, the first in the low half."""
    return _FP4[torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()]


def _packed(values: Tensor) -> Tensor:
    codes = _CODE_OF_TWICE[(2 * values.abs()).int()] | torch.signbit(values).to(torch.uint8) << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4


class Mxfp4Layout(Layout):
    """gpt-oss: stacked experts, uint8 ``*_blocks`` (experts, out, in/32, 16) and E8M0 ``*_scales``."""

    kind, element = "mxfp4", "fp4_e2m1"

    def pieces(self, parts: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Yield one expert at a time."""
        for expert in range(len(parts["blocks"])):
            yield {part: value[expert : expert + 1] for part, value in parts.items()}

    def read(self, parts: Mapping[str, Tensor]) -> Stored:
        """Return all experts' rows one after the other."""
        blocks, scales = parts["blocks"], parts["scales"]
        codes = _unpacked(blocks.flatten(-2)).flatten(0, -2)
        return Stored(codes, decode(scales.flatten(0, -2), "e8m0"), None, None, (1, 32))

    def write(self, stored: Stored, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return blocks and scales."""
        scales = encode(stored.scale, "e8m0")
        return {
            "blocks": _packed(stored.codes).view(parts["blocks"].shape),
            "scales": scales.view(parts["scales"].shape),
        }

    def fresh(self, low: Tensor, high: Tensor, like: Stored) -> tuple[Tensor, Tensor | None]:
        """Return ``2^(floor(log2 amax) - 2)``, the rule of OCP Microscaling Formats 1.0."""
        amax = torch.maximum(high, -low)
        return (binade(amax, FORMATS["fp32"]) / 4).clamp(2.0**-126, 2.0**127), None


class Fp8Layout(Layout):
    """DeepSeek and Qwen: e4m3 ``weight`` and ``weight_scale_inv`` for blocks, or one for the matrix."""

    def __init__(self, name: str, keys: Mapping[str, str], config: Mapping[str, Any]) -> None:
        super().__init__(name, keys)
        size = config.get("weight_block_size")
        self.size = None if size is None else (int(size[0]), int(size[1]))
        dynamic = config.get("activation_scheme", "dynamic") == "dynamic"
        self.kind = "fp8_tensor" if size is None else "fp8_block"
        self.inputs = ("fp8_token" if size is None else "fp8_group") if dynamic else "fp8_static"

    def read(self, parts: Mapping[str, Tensor]) -> Stored:
        """Return codes and block scales."""
        codes, scale = parts["weight"].float(), parts["scale"]
        scale = decode(scale, "e8m0") if scale.dtype == torch.uint8 else scale.float()
        block = (codes.shape[0], codes.shape[1]) if self.size is None else self.size
        return Stored(codes, scale.reshape(1, 1) if self.size is None else scale, None, None, block)

    def write(self, stored: Stored, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return codes and scales."""
        like = parts["scale"]
        scale = encode(stored.scale, "e8m0") if like.dtype == torch.uint8 else stored.scale
        return {"weight": stored.codes.to(parts["weight"].dtype), "scale": scale.to(like.dtype).view(like.shape)}

    def fresh(self, low: Tensor, high: Tensor, like: Stored) -> tuple[Tensor, Tensor | None]:
        """Return ``amax/448``, rounded up to a power of two if all released scales are."""
        scale = torch.maximum(high, -low) / _E4M3.largest
        if bool((torch.frexp(like.scale).mantissa == 0.5).all()):
            below = binade(scale, FORMATS["fp32"])
            scale = torch.where(below < scale, 2 * below, scale)
        return torch.where(scale > 0, scale, 1.0), None


class CompressedLayout(Layout):
    """compressed-tensors: packed integers or E2M1 codes, or int8 and e4m3 weights, with the package's own math."""

    def __init__(self, name: str, keys: Mapping[str, str], scheme: Any, format: str) -> None:
        super().__init__(name, keys)
        self.scheme, self.format, self.args = scheme, scheme.format or format, scheme.weights
        self.kind, self.options = _kind(name, self.args)
        self.inputs = _inputs(name, scheme.input_activations)
        floats: Element = "fp4_e2m1" if self._bits == 4 else "fp8_e4m3"
        self.element = self._bits if self.args.type == "int" else floats

    @property
    def _bits(self) -> int:
        return int(self.args.num_bits)

    @property
    def _has_exponents(self) -> bool:
        return self.kind in ("mxfp4", "mxfp8")

    def read(self, parts: Mapping[str, Tensor]) -> Stored:
        """Return codes and scales."""
        from compressed_tensors.compressors.pack_quantized import unpack_from_int32

        if "weight_shape" in parts:
            shape = torch.Size(parts["weight_shape"].tolist())
            codes = unpack_from_int32(parts["weight_packed"], self._bits, shape).float()
        elif "weight_packed" in parts:
            codes = _unpacked(parts["weight_packed"])
        else:
            codes = parts["weight"].float()
        scale = parts["weight_scale"]
        scale = decode(scale, "e8m0") if self._has_exponents else scale.float()
        block = self._block(codes.shape)
        scale = scale.reshape(-(-codes.shape[0] // block[0]), -(-codes.shape[1] // block[1]))
        zero_point = parts.get("weight_zero_point")
        if zero_point is not None and zero_point.dtype == torch.int32:
            zero_point = unpack_from_int32(zero_point, self._bits, torch.Size(scale.shape), packed_dim=0)
        zero_point = None if zero_point is None else zero_point.float().view(scale.shape)
        whole = parts.get("weight_global_scale")
        return Stored(codes, scale, zero_point, None if whole is None else whole.float(), block)

    def _block(self, shape: torch.Size) -> tuple[int, int]:
        rows, columns = shape
        if self.args.strategy == "tensor":
            return rows, columns
        if self.args.strategy == "block":
            return tuple(self.args.block_structure)
        return 1, columns if self.args.strategy == "channel" else self.args.group_size

    def write(self, stored: Stored, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors in the package's packing."""
        from compressed_tensors.compressors.pack_quantized import pack_to_int32

        found: dict[str, Tensor] = {}
        if "weight_shape" in parts:
            found["weight_packed"] = pack_to_int32(stored.codes.to(torch.int8), self._bits)
        elif "weight_packed" in parts:
            found["weight_packed"] = _packed(stored.codes)
        else:
            found["weight"] = stored.codes.to(parts["weight"].dtype)
        like = parts["weight_scale"]
        scale = encode(stored.scale, "e8m0") if self._has_exponents else stored.scale
        found["weight_scale"] = scale.to(like.dtype).view(like.shape)
        if stored.zero_point is not None:
            zeros, like = stored.zero_point.to(torch.int8), parts["weight_zero_point"]
            packs = like.dtype == torch.int32
            found["weight_zero_point"] = (
                pack_to_int32(zeros, self._bits, packed_dim=0) if packs else zeros.to(like.dtype).view(like.shape)
            )
        if stored.global_scale is not None:
            like = parts["weight_global_scale"]
            found["weight_global_scale"] = stored.global_scale.to(like.dtype).view(like.shape)
        return found

    def loaded(self, stored: Stored, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the package's own decompression."""
        from compressed_tensors.compressors import BaseCompressor

        written = {**parts, **self.write(stored, parts)}
        compressor = BaseCompressor.get_value_from_registry(self.format)
        return compressor.decompress(written, self.scheme)["weight"]  # type: ignore[no-any-return]

    def fresh(self, low: Tensor, high: Tensor, like: Stored) -> tuple[Tensor, Tensor | None]:
        """Return the qparams of the package's observers."""
        from compressed_tensors.quantization.utils import calculate_qparams

        scale, zero_point = calculate_qparams(low, high, self.args, like.global_scale)
        return scale.float(), None if like.zero_point is None else zero_point.float()


_INTEGERS = {("group", True): "int4", ("group", False): "int4_asym", ("channel", True): "int8"}
_FLOATS = {
    (8, "channel"): "fp8", (8, "tensor"): "fp8_tensor", (8, "block"): "fp8_block", (8, "group"): "mxfp8",
    (4, "group"): "mxfp4", (4, "tensor_group"): "nvfp4",
}  # fmt: skip


def _kind(name: str, args: Any) -> tuple[str, dict[str, Any]]:
    """Return the format of weights and its options."""
    strategy, bits = str(getattr(args.strategy, "value", args.strategy)), int(args.num_bits)
    if args.type == "int":
        kind = _INTEGERS.get((strategy, bool(args.symmetric)))
        options = {"weight_bits": bits} if bits != (8 if strategy == "channel" else 4) else {}
        if kind is not None and strategy == "group":
            options["group_size"] = int(args.group_size)
    else:
        kind, options = _FLOATS.get((bits, strategy)), {}
        mx = kind in ("mxfp4", "mxfp8")
        if (mx and (args.group_size != 32 or args.scale_dtype != torch.uint8)) or (
            kind == "fp8_block" and list(args.block_structure) != [128, 128]
        ):
            kind = None
    if kind is None:
        text = f"{args.type} of {bits} bits per {strategy}{'' if args.symmetric else ' with zero points'}"
        rule = f"{name} must be quantized in a format that can be trained, got {text}"
        raise CheckpointError("released", rule, "use a release in W4A16, W8A8, FP8, MXFP4 or NVFP4")
    if args.actorder not in (None, "weight", "static"):
        rule = f"{name} must have groups of neighboring weights, got actorder {args.actorder}"
        raise CheckpointError("released", rule, "use a release without activation ordering")
    return kind, options


def _inputs(name: str, args: Any) -> str:
    """Return the format of inputs."""
    if args is None:
        return "none"
    strategy, bits = str(getattr(args.strategy, "value", args.strategy)), int(args.num_bits)
    known = {
        ("int", 8, "token"): "int8_token" if args.symmetric else "int8_token_asym", ("int", 8, "tensor"): "int8_static",
        ("float", 8, "token"): "fp8_token", ("float", 8, "tensor"): "fp8_static",
        ("float", 8, "group"): "mxfp8" if args.group_size == 32 else "fp8_group",
        ("float", 4, "group"): "mxfp4", ("float", 4, "tensor_group"): "nvfp4",
    }  # fmt: skip
    found = known.get((str(args.type), bits, strategy))
    if found is None:
        rule = f"{name} must have inputs in a known format, got {args.type} of {bits} bits per {strategy}"
        raise CheckpointError("released", rule, "use another release")
    return found


def layout_of(name: str, keys: Mapping[str, str], config: Mapping[str, Any]) -> Layout:
    """Return the layout of a weight whose parts have these names in the file."""
    method = config["quant_method"]
    if method == "mxfp4":
        return Mxfp4Layout(name, keys)
    if method == "fp8":
        return Fp8Layout(name, keys, config)
    scheme, format = scheme_of(name, config)
    return CompressedLayout(name, keys, scheme, format)


def scheme_of(name: str, config: Mapping[str, Any]) -> tuple[Any, str]:
    """Return compressed-tensors' scheme of a weight by its name in the file, and the format of the whole model.

    Names and patterns come before classes: everything that has codes in a file is a ``Linear`` there.
    """
    format, groups = parsed_groups(config)
    module = name.removesuffix(".weight")
    for group in groups:
        if any(re.match(t[3:], module) if t.startswith("re:") else t == module for t in group.targets):
            return group, format
    for group in groups:
        if any(not t.startswith("re:") and "." not in t for t in group.targets):
            return group, format
    raise CheckpointError("released", f"no group of quantization_config targets {module}, which has codes")


def parsed_groups(config: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """Return compressed-tensors' format of the whole model, and its groups."""
    from compressed_tensors.quantization import QuantizationConfig

    parsed = QuantizationConfig.model_validate(
        {k: v for k, v in config.items() if k in QuantizationConfig.model_fields}
    )
    return str(parsed.format), list(parsed.config_groups.values())
