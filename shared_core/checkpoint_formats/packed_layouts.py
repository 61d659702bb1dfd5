"""How GPTQ and AWQ files store the codes, scales and zero points of one weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shared_core.checkpoint_formats.released_layouts import Layout, Stored
from shared_core.errors import CheckpointError

METHODS = ("gptq", "awq")
NAMES = ("qweight", "qzeros", "scales", "g_idx")
_NEEDED = NAMES[:3]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclasses.dataclass(frozen=True)
class _Packing:
    """What a quantization_config says: bits, group, True if zero points are all in the middle, and what is stored."""

    method: str
    bits: int
    group_size: int
    symmetric: bool
    subtracted: int  # GPTQ's first format stores zero points minus one


def _packing(config: Mapping[str, Any]) -> _Packing:
    """Return the packing of a quantization_config, or refuse it."""
    method, bits, size = (config.get(name) for name in ("quant_method", "bits", "group_size"))
    gptq = method == "gptq"
    format = str(config.get("checkpoint_format") or "gptq" if gptq else config.get("version") or "gemm").lower()
    allowed, formats = ((2, 4, 8), ("gptq", "gptq_v2")) if gptq else ((4,), ("gemm",))
    # a JSON true is an int in Python
    is_size = isinstance(size, int) and not isinstance(size, bool) and 0 < size <= 2**20
    rule = ""
    if isinstance(bits, bool) or bits not in allowed:
        rule = f"bits of {method} must be one of {', '.join(map(str, allowed))}, got {bits!r}"
    elif not is_size:
        rule = f"group_size of {method} must be a positive integer, got {size!r}"
    elif format not in formats:
        rule = f"{'checkpoint_format' if gptq else 'version'} must be one of {', '.join(formats)}, got {format!r}"
    elif config.get("dynamic"):
        rule = "all layers must be quantized alike, got a quantization_config with dynamic"
    elif not isinstance(config.get("sym", True) if gptq else config.get("zero_point", True), bool):
        rule = f"{'sym' if gptq else 'zero_point'} must be true or false"
    elif not gptq and not config.get("zero_point", True):
        rule = "awq must have zero points, got zero_point false"
    if rule:
        raise CheckpointError("released", rule, "use another release of the model")
    symmetric = gptq and bool(config.get("sym", True))
    return _Packing(str(method), int(bits or 0), int(size or 0), symmetric, int(format == "gptq"))


class PackedLayout(Layout):
    """GPTQ or AWQ: int32 ``qweight`` and ``qzeros``, ``scales`` as (groups, out), and GPTQ's ``g_idx``.

    GPTQ packs ``qweight`` along the inputs. AWQ packs it along the outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7. Codes
    count from 0 in the file, and from ``-2^(bits-1)`` in `Stored`.

    Raises:
        CheckpointError: If the config has another format.

    Source: the packing loops of AutoGPTQ (`qlinear_cuda_old`) and GPTQModel, and those of AutoAWQ (`gemm`).
    """

    def __init__(self, name: str, keys: Mapping[str, str], config: Mapping[str, Any]) -> None:
        super().__init__(name, keys)
        self.packing = _packing(config)
        self.element = self.packing.bits
        self.kind = "int4" if self.packing.symmetric else "int4_asym"
        self.options = {"group_size": self.packing.group_size}
        if self.packing.bits != 4:
            self.options["weight_bits"] = self.packing.bits

    @property
    def _half(self) -> int:
        return int(2 ** (self.packing.bits - 1))

    def read(self, parts: Mapping[str, Tensor]) -> Stored:
        """Return codes, scales and zero points."""
        lacking = [part for part in _NEEDED if part not in parts]
        if lacking:
            raise self._damaged(f"have {', '.join(_NEEDED)}, but the files lack {lacking[0]}")
        odd = [
            f"{part} of {parts[part].ndim} axes in {parts[part].dtype}" for part in _NEEDED if not _fits(part, parts)
        ]
        if odd:
            raise self._damaged(f"have int32 matrices and scales of 16 or 32 bits, got {odd[0]}")
        codes = self._unpack(parts["qweight"], along_inputs=self.packing.method == "gptq")
        scale, zeros = parts["scales"].float(), self._unpack(parts["qzeros"], along_inputs=False)
        groups = -(-codes.shape[0] // self.packing.group_size)
        if not scale.shape == zeros.shape == (groups, codes.shape[1]):
            got = f"scales of {[*scale.shape]} and zero points of {[*zeros.shape]}"
            raise self._damaged(f"have {[groups, codes.shape[1]]} groups by group_size and qweight, got {got}")
        self._check_order(parts, codes.shape[0])
        zeros = zeros + (self.packing.subtracted - self._half)
        if self.packing.symmetric and bool(zeros.any()):
            raise self._damaged("have zero points in the middle, because quantization_config says sym, but it does not")
        zero_point = None if self.packing.symmetric else zeros.t().float().contiguous()
        shifted = (codes - self._half).t().float().contiguous()
        return Stored(shifted, scale.t().contiguous(), zero_point, None, (1, self.packing.group_size))

    def _damaged(self, rule: str) -> CheckpointError:
        return CheckpointError("released", f"{self.name} must {rule}", "download the release again, or use another")

    def _check_order(self, parts: Mapping[str, Tensor], inputs: int) -> None:
        if "g_idx" in parts:
            plain = torch.arange(inputs, device=parts["g_idx"].device) // self.packing.group_size
            if not torch.equal(parts["g_idx"].to(plain.dtype), plain):
                rule = f"{self.name} must have groups of neighboring weights, got an activation order (desc_act, g_idx)"
                raise CheckpointError("released", rule, "use a release without activation ordering")

    def write(self, stored: Stored, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors in the file's packing."""
        codes = (stored.codes.int() + self._half).t()
        found = {
            "qweight": self._pack(codes, along_inputs=self.packing.method == "gptq"),
            "scales": stored.scale.t().to(parts["scales"].dtype).contiguous(),
        }
        if stored.zero_point is not None:
            zeros = (stored.zero_point.int() + (self._half - self.packing.subtracted)).t()
            found["qzeros"] = self._pack(zeros, along_inputs=False)
        return found

    def _unpack(self, packed: Tensor, along_inputs: bool) -> Tensor:
        """Return unsigned codes as (inputs, outputs)."""
        rows = packed.t() if along_inputs else packed
        shifts = torch.arange(0, 32, self.packing.bits, device=packed.device, dtype=torch.int32)
        codes = (rows.unsqueeze(-1) >> shifts) & (2**self.packing.bits - 1)
        if self.packing.method == "awq":
            codes = codes[..., [_AWQ_ORDER.index(place) for place in range(8)]]
        flat: Tensor = codes.flatten(1)
        return flat.t() if along_inputs else flat

    def _pack(self, codes: Tensor, along_inputs: bool) -> Tensor:
        """Return int32 words of unsigned codes (inputs, outputs)."""
        rows = codes.t() if along_inputs else codes
        words = rows.reshape(len(rows), -1, 32 // self.packing.bits)
        if self.packing.method == "awq":
            words = words[..., [*_AWQ_ORDER]]
        shifts = torch.arange(0, 32, self.packing.bits, device=codes.device)
        # bits of different codes do not overlap; int64 holds the sum, and its low half is the word
        packed: Tensor = (words.long() << shifts).sum(-1).to(torch.int32)
        return (packed.t() if along_inputs else packed).contiguous()

    def fresh(self, low: Tensor, high: Tensor, like: Stored) -> tuple[Tensor, Tensor | None]:
        """Return the scales of AutoGPTQ and AutoAWQ: ``2·amax/(2^b-1)``, or ``(max-min)/(2^b-1)`` with zero points."""
        low, high, last = low.clamp(max=0), high.clamp(min=0), 2**self.packing.bits - 1
        span = 2 * torch.maximum(high, -low) if self.packing.symmetric else high - low
        scale = torch.where(span > 0, span / last, 1.0)
        if like.zero_point is None:
            return scale, None
        return scale, (-low / scale).round().clamp(self.packing.subtracted, last) - self._half


def _fits(part: str, parts: Mapping[str, Tensor]) -> bool:
    value = parts[part]
    dtypes = (torch.float16, torch.bfloat16, torch.float32) if part == "scales" else (torch.int32,)
    return value.ndim == 2 and value.dtype in dtypes
