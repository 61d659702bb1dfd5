"""Encodings of saved tensors: exact ones (bits for booleans, smaller integers) and rounding ones.

The rounding ones are 16-bit floats, and 8-bit codes in groups with stochastic rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from eff_kernels.masks import pack_bits, unpack_bits
from torch import Tensor

_CHUNK = 1 << 18  # bounds the temporary 64-bit indices


def take(flat: Tensor, mask: Tensor) -> Tensor:
    """Return the values of a row where `mask` is true, in order."""
    # Indexing by masks is fast on a GPU; for the CPU see `_places`.
    if flat.device.type != "cpu":
        return flat[mask]
    return torch.cat([part.index_select(0, _places(m)) for part, m in zip(_chunks(flat), _chunks(mask), strict=True)])


def put(values: Tensor, mask: Tensor) -> Tensor:
    """Undo `take`: return zeros with the values placed in order where `mask` is true."""
    flat = values.new_zeros(mask.numel())
    if flat.device.type != "cpu":
        return flat.masked_scatter_(mask, values)
    start = 0
    for part, m in zip(_chunks(flat), _chunks(mask), strict=True):
        places = _places(m)
        part.scatter_(0, places, values[start : start + len(places)])
        start += len(places)
    return flat


def _places(mask: Tensor) -> Tensor:
    # On a CPU torch's nonzero, and thus indexing by masks, takes about ten times longer (torch 2.13).
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def _chunks(flat: Tensor) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = flat.split(_CHUNK)  # type: ignore[no-untyped-call]
    return parts


Parts = tuple[Tensor, ...]
_FLOATS = {
    torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64,
}  # fmt: skip
_NARROW = (torch.uint8, torch.int8, torch.int16, torch.int32)
_SAMPLE = 256
_WORTH_IT = 0.9
"""A form is used if it needs at most this share of the bytes: smaller savings are not worth the passes over data."""


class Form(NamedTuple):
    """A flat tensor in another form. `rebuild` restores it from the parts, which may have moved in between."""

    kind: str
    parts: Parts
    rebuild: Callable[[Parts], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


def as_is(flat: Tensor) -> Form:
    """Return a tensor unchanged as a form."""
    return Form("as_is", (flat,), lambda parts: parts[0])


def sign_form(flat: Tensor) -> Form:
    """Return where a ReLU's result is not ``<= 0``, one bit per value (Jain et al. 2018, Gist). NaN is positive."""
    count, dtype = flat.numel(), flat.dtype
    # relu keeps NaN, which counts as true. On a CPU a comparison takes longer than both passes (torch 2.13).
    return Form("sign", (pack_bits(flat.relu().bool()),), lambda parts: unpack_bits(parts[0], (count,)).to(dtype))


def exact_form(flat: Tensor, *, sparse: bool, values: Callable[[Tensor], Form] | None = None) -> Form | None:
    """Return the smallest exact form of a tensor, None if none is worth it.

    - booleans: one bit each;
    - integers: the narrowest type that holds their range;
    - floats with two values, such as dropout noise: one bit each, plus the two values;
    - floats with zeros: a bitmap or the indices of the nonzero values, plus these values.

    Values are compared bitwise: -0.0 is not zero, and NaN keeps its payload. Floats are examined only if `sparse`;
    `values` stores the nonzero ones.
    """
    form = _candidate(flat, sparse, values or as_is)
    # Forms that save little would only cost their passes over the data.
    return form if form is not None and form.nbytes <= _WORTH_IT * flat.nbytes else None


def _candidate(flat: Tensor, sparse: bool, values: Callable[[Tensor], Form]) -> Form | None:
    if flat.dtype is torch.bool:
        count = flat.numel()
        return Form("bits", (pack_bits(flat),), lambda parts: unpack_bits(parts[0], (count,)))
    if flat.dtype in (torch.int16, torch.int32, torch.int64):
        return _integers(flat)
    if not sparse or flat.dtype not in _FLOATS:
        return None
    # Compared as bits: -0.0 differs from 0.0, and NaN equals itself. Both must be restored exactly.
    integers = flat.view(_FLOATS[flat.dtype])
    # Sampling a few values skips the passes for most dense tensors. An odd step reaches every column.
    sample = integers[:: (integers.numel() // _SAMPLE) | 1].tolist()
    if len(set(sample)) <= 2 and (form := _two_values(flat, integers)) is not None:
        return form
    return _without_zeros(flat, integers, values) if 0 in sample else None


def _integers(flat: Tensor) -> Form | None:
    # aminmax needs one pass and one read from the device for both.
    low, high = (int(bound) for bound in flat.aminmax())
    for dtype in _NARROW:
        bounds = torch.iinfo(dtype)
        if bounds.min <= low and high <= bounds.max:
            return Form("integers", (flat.to(dtype),), partial(_widened, dtype=flat.dtype))
    return None


def _two_values(flat: Tensor, integers: Tensor) -> Form | None:
    # If there are two values, they are the smallest and the largest, as integers.
    low, high = integers.aminmax()
    mask = _equals(integers, high)
    # The smallest byte: `all` takes seventy times as long on a CPU.
    if not bool((mask | _equals(integers, low)).view(torch.uint8).amin()):
        return None
    count, dtype = flat.numel(), flat.dtype

    def rebuild(parts: Parts) -> Tensor:
        first, second = parts[1]
        # Integer differences wrap around. `where` with single values takes several times as long on a CPU.
        return unpack_bits(parts[0], (count,)).to(first.dtype).mul_(second - first).add_(first).view(dtype)

    return Form("two_values", (pack_bits(mask), torch.stack([low, high])), rebuild)


def _equals(integers: Tensor, value: Tensor) -> Tensor:
    # torch's own comparison takes five times as long on a CPU (torch 2.13).
    return torch.from_numpy(integers.numpy() == value.numpy()) if integers.is_cpu else integers == value


def _without_zeros(flat: Tensor, integers: Tensor, values: Callable[[Tensor], Form]) -> Form | None:
    mask, count = integers.bool(), flat.numel()
    # Waits for the device, because the memory to allocate depends on the count (option `sparse`).
    others = int(mask.count_nonzero())
    # The cost per value, so that zeros are also compared with rounded values.
    cost = values(flat[:_SAMPLE]).nbytes / min(count, _SAMPLE)
    # A bitmap costs 1/8 byte for every value, an index 4 bytes for each that is kept.
    by_bits, by_index = count / 8 + others * cost, others * (4 + cost) if count < 2**31 else math.inf
    if min(by_bits, by_index) > _WORTH_IT * count * cost:
        return None
    inner = values(take(flat, mask))
    if by_bits <= by_index:
        where, kind = pack_bits(mask), "bitmap"
    else:
        where, kind = mask.nonzero().flatten().to(torch.int32), "index"

    def rebuild(parts: Parts) -> Tensor:
        kept = inner.rebuild(parts[1:])
        if kind == "bitmap":
            return put(kept, unpack_bits(parts[0], (count,)))
        return kept.new_zeros(count).scatter_(0, parts[0].to(torch.int64), kept)

    name = kind if inner.kind == "as_is" else f"{kind}+{inner.kind}"
    return Form(name, (where, *inner.parts), rebuild)


LEVELS = 255


def narrow_form(flat: Tensor, dtype: torch.dtype) -> Form:
    """Return values rounded to nearest in 16 bits, clamped to float16's range. NaN and infinity stay."""
    # Clamped to the largest number, because infinity would turn whole gradients into NaN.
    if dtype is torch.float16:
        bound = torch.finfo(dtype).max
        flat = flat.where(flat.isinf(), flat.clamp(-bound, bound))
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    return Form(name, (flat.to(dtype),), partial(_widened, dtype=flat.dtype))


def _widened(parts: Parts, dtype: torch.dtype) -> Tensor:
    return parts[0].to(dtype)


def int8_form(flat: Tensor, group_size: int, generator: torch.Generator | None = None) -> Form:
    """Return values as 8-bit codes, with a scale and zero point per group of consecutive values.

    ``code = ⌊(x - min) / s + u⌋`` with ``s = (max - min) / 255`` and u uniform on [0, 1), so the mean over draws of
    ``code · s + min`` is x, and its variance at most s²/4. A group with NaN or infinity becomes NaN; the last one may
    have fewer values.

    Source: Chen et al. 2021, ActNN, arXiv:2104.14294.
    """
    count, dtype = flat.numel(), flat.dtype
    groups = flat.float()
    if padding := -count % group_size:
        # Padded with copies of the last value, because zeros would widen the last group's range.
        groups = torch.cat([groups, groups[-1:].expand(padding)])
    groups = groups.view(-1, group_size)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    # codes = floor((x - low) / scale + u), u uniform in [0, 1): the expectation of low + code * scale is x, so that
    # rounding adds noise to gradients and no bias (ActNN, Chen et al. 2021, arXiv:2104.14129).
    scale = (high - low) / LEVELS
    # Multiplying by the inverse would not always give 255 for the largest value.
    codes = (groups - low).div_(scale.where(scale > 0, 1.0))
    codes += torch.rand(codes.shape, generator=generator, device=codes.device)
    # NaN has no code. Its group's scale is NaN, so the whole group becomes NaN.
    codes = codes.floor_().clamp_(0, LEVELS).nan_to_num_(0.0).to(torch.uint8)
    scale = scale.where(scale.isfinite(), torch.nan)

    def rebuild(parts: Parts) -> Tensor:
        # The padding is not stored; add it again, since groups must be complete.
        codes = torch.cat([parts[0], parts[0].new_zeros(padding)]) if padding else parts[0]
        return (codes.view(-1, group_size) * parts[1]).add_(parts[2]).view(-1)[:count].to(dtype)

    return Form("int8", (codes.view(-1)[:count].clone() if padding else codes.view(-1), scale, low), rebuild)
