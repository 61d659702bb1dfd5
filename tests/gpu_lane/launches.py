"""Calls of the launchers, by family: over sizes at which Triton specializes differently, and those to be measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

B, H, F = torch.bfloat16, torch.float16, torch.float32
DTYPES = B, F, H
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
N = 4096
_SHAPES = (1, 1), (1, 16), (16, 1), (1, 3), (3, 1), (17, 33), (16, 48), (1, N), (N, N), (2**16 + 1, 2**16)
_WIDE = 3, 2**24
"""More tiles beside one another than a grid has on its second axis."""
_PATTERNS = {B: (torch.int16, 7, 8), H: (torch.int16, 10, 5), F: (torch.int32, 23, 8)}

Call = Callable[[], object]


class Measured(NamedTuple):
    """A call whose machine code is measured."""

    name: str
    call: Call
    elements: int
    moved: tuple[float, ...]
    """By launch: bytes read and written an element, all sweeps together."""
    loaded: float
    """Bytes that one sweep reads an element."""
    wide: bool = True
    """Whether addresses and sizes allow vectors of at least 8 bytes."""
    apart: bool = False
    """Whether a program runs one side of a branch, and other programs, with other elements, the other."""


def empty(*shape: int, dtype: torch.dtype = B, offset: int = 0) -> Tensor:
    """Return a tensor without memory, its address so many elements from a multiple of 16."""
    if offset:
        return torch.empty(*shape[:-1], shape[-1] + offset, dtype=dtype, device="meta")[..., offset:]
    return torch.empty(*shape, dtype=dtype, device="meta")


def flat(count: int, dtype: torch.dtype, offset: int = 0) -> Tensor:
    return empty(count, dtype=dtype, offset=offset)


def fp8_sweep() -> Iterator[Call]:
    from eff_kernels._triton.fp8 import fake_quantize_triton, measure_amax, quantize_triton
    from eff_kernels.fp8 import Source

    exact = [(block, "exact") for block in ((0, 0), (1, 0), (1, 128), (128, 128))]
    blocks = [*exact, ((1, 0), "power_of_two"), ((1, 32), "mx")]
    past, flag, largest = empty(1, dtype=F), empty(1, dtype=torch.int32), empty(1, dtype=F)
    for dtype, shape, both in itertools.product(DTYPES, (*_SHAPES, _WIDE), (False, True)):
        x = empty(*shape, dtype=dtype)
        for block, rounding in blocks:
            for seen in (None, flag):
                source = Source(x, None, both, seen)
                yield lambda source=source, b=block, r=rounding: quantize_triton([source], E4M3, b, r)
        delayed, plain = Source(x, past, both, largest), Source(x, None, both, flag)
        weight = Source(empty(48, shape[1]).t(), None, True, flag)
        yield lambda source=delayed: quantize_triton([source], E4M3, (0, 0), "exact")
        yield lambda pair=[plain, weight]: quantize_triton(pair, E4M3, (0, 0), "exact")
        yield lambda pair=[delayed, delayed]: quantize_triton(pair, E5M2, (0, 0), "exact")
        yield lambda x=x, by_row=both: fake_quantize_triton(x, E4M3, by_row)
    for dtype in DTYPES:
        odd, turned = empty(33, 40_000, dtype=dtype, offset=1), empty(48, 16, dtype=dtype).t()
        for x, (block, rounding), kind in itertools.product((odd, turned), blocks, (E4M3, E5M2)):
            source = Source(x, None, True)
            yield lambda source=source, b=block, r=rounding, k=kind: quantize_triton([source], k, b, r)
        for shape in _SHAPES:
            x = empty(*shape, dtype=dtype)
            yield lambda x=x: measure_amax(x)


def fp8_measured(dtype: torch.dtype) -> Iterator[Measured]:
    from eff_kernels._triton.fp8 import fake_quantize_triton, quantize_triton
    from eff_kernels.fp8 import Source

    size, n = dtype.itemsize, N * N

    def case(name: str, block: tuple[int, int], rounding: str, both: bool, *moved: float, turned=False, kind=E4M3):
        x = empty(N, N, dtype=dtype)
        x = x.t() if turned else x
        source = Source(x, None, both)
        return Measured(name, lambda: quantize_triton([source], kind, block, rounding), n, moved, size)

    once, twice = size + 1, size + 2
    yield case("tensor", (0, 0), "exact", False, size, once)
    yield case("rows of 4096", (1, 0), "exact", False, once)
    yield case("1x128", (1, 128), "exact", False, once)
    if dtype == H:
        return
    yield case("tensor both layouts", (0, 0), "exact", True, size, twice)
    yield case("1x128 both layouts", (1, 128), "exact", True, twice)
    yield case("128x128", (128, 128), "exact", False, once)
    if dtype == F:
        return
    past, x = empty(1, dtype=F), empty(N, N)
    delayed, watched = Source(x, past, False), Source(x, None, True, empty(1, dtype=torch.int32))
    yield Measured("delayed", lambda: quantize_triton([delayed], E4M3, (0, 0), "exact"), n, (once, once), size)
    pair = [watched, watched]
    yield Measured(
        "two watched", lambda: quantize_triton(pair, E4M3, (0, 0), "exact"), 2 * n, (size, twice), size, apart=True
    )
    yield Measured("fake quantize", lambda: fake_quantize_triton(x, E4M3, False), n, (size, 2 * size), size)
    yield Measured("fake quantize rows", lambda: fake_quantize_triton(x, E4M3, True), n, (2 * size,), size)
    yield case("rows both layouts", (1, 0), "exact", True, size, twice)
    yield case("rows power of two e5m2", (1, 0), "power_of_two", False, once, kind=E5M2)
    long = empty(1024, 40_000)
    yield Measured(
        "rows of 40000", lambda: quantize_triton([Source(long)], E4M3, (1, 0), "exact"), long.numel(),
        (size + once,), size,
    )  # fmt: skip
    yield case("mx", (1, 32), "mx", False, once)
    yield case("mx both layouts", (1, 32), "mx", True, twice)
    yield case("128x128 transposed", (128, 128), "exact", False, once, turned=True)


def _blocks_sweep() -> Iterator[Call]:
    from eff_kernels._triton.rounding import mx_round_triton, nvfp4_round_triton

    shapes = (1, 32), (3, 32), (1, N), (17, 96), (N, N), (2**16 + 1, 2**16), (3, 2**26)
    for dtype, shape, offset in itertools.product(DTYPES, shapes, (0, 1)):
        x = empty(*shape, dtype=dtype)
        if offset:
            x = flat(x.numel(), dtype, offset).view(shape)
        for element in ("fp4_e2m1", "fp8_e4m3", "fp8_e5m2"):
            yield lambda x=x, e=element: mx_round_triton(x, e, 32)
        for scale, out in itertools.product((None, empty(1, dtype=F)), {dtype, F}):
            yield lambda x=x, s=scale, out=out: nvfp4_round_triton(x, s, out, binary=s is None)


def _blocks_measured(dtype: torch.dtype) -> Iterator[Measured]:
    from eff_kernels._triton.rounding import mx_round_triton, nvfp4_round_triton

    x, size = empty(N, N, dtype=dtype), dtype.itemsize
    for element in ("fp4_e2m1", "fp8_e4m3")[: 2 if dtype == B else 1]:
        yield Measured(f"mx {element}", lambda e=element: mx_round_triton(x, e, 32), N * N, (2 * size,), size)
    scale = empty(1, dtype=F)
    yield Measured("nvfp4", lambda: nvfp4_round_triton(x, scale, dtype), N * N, (2 * size,), size)
    if dtype == B:
        moved = size, 2 * size
        yield Measured("nvfp4 own scale", lambda: nvfp4_round_triton(x, None, dtype, binary=True), N * N, moved, size)


_FORMATS = {"bf16": (7, 127, B), "fp16": (10, 15, H), "e4m3": (3, 7, E4M3), "e5m2": (2, 15, E5M2), "e2m1": (1, 1, F)}


def _round(dtype: torch.dtype, count: int, name: str, rounding: str, noisy: bool = False, offset: int = 0) -> Call:
    from eff_kernels._triton.rounding import round_triton_

    mantissa, bias, out = _FORMATS[name]
    seed = flat(1, torch.int64) if rounding == "stochastic" else None
    noise = flat(count, torch.int64) if noisy else None
    operands = flat(count, out, offset), flat(count, dtype, offset), rounding, mantissa, bias
    return lambda: round_triton_(*operands, 1e30, 1e30, float("inf"), seed, noise)


def rounding_sweep() -> Iterator[Call]:
    yield from _blocks_sweep()
    counts = 1, 3, 16, N, 2**31 + 16, 2**31 + 17
    for dtype, count, name in itertools.product(DTYPES, counts, _FORMATS):
        for rounding in ("nearest_even", "toward_zero", "stochastic"):
            yield _round(dtype, count, name, rounding, offset=count % 2)
        yield _round(dtype, count, name, "stochastic", noisy=True)


def rounding_measured(dtype: torch.dtype) -> Iterator[Measured]:
    yield from _blocks_measured(dtype)
    chosen = [("nearest_even", "e4m3"), ("stochastic", "bf16"), ("stochastic", "e4m3")]
    if dtype == F:
        chosen += [("toward_zero", "e2m1"), ("stochastic", "e5m2"), ("nearest_even", "bf16")]
    for rounding, name in chosen[1 if dtype == B else 0 :]:
        moved = dtype.itemsize + _FORMATS[name][2].itemsize
        yield Measured(f"{rounding} {name}", _round(dtype, N * N, name, rounding), N * N, (moved,), dtype.itemsize)


def _rows(dtype: torch.dtype, rows: int, classes: int, *, divergence: str, labeled: bool, caps=(0.0, 0.0), t=2.0):
    from eff_kernels._triton.distillation import kd_rows_triton_

    labels = flat(rows, torch.int64) if labeled else None
    student, teacher = empty(rows, classes, dtype=dtype), empty(rows, classes, dtype=dtype)
    return lambda: kd_rows_triton_(student, teacher, labels, t, 0.5, 0.5, divergence, 0.5, *caps)


def distillation_sweep() -> Iterator[Call]:
    shapes = (1, 1), (3, 1), (1, 16), (17, 33), (16, 32_001), (8, 128_256), (2**16, 2**16)
    kinds = ("forward_kl", "reverse_kl", "jsd"), (True, False), ((0.0, 0.0), (30.0, 30.0), (1.0, 0.0))
    for dtype, (rows, classes), (kind, labeled, caps) in itertools.product(DTYPES, shapes, itertools.product(*kinds)):
        if dtype == B or (kind, caps) == ("jsd", (30.0, 30.0)):
            temperature = 1.0 if labeled else 2.0
            yield _rows(dtype, rows, classes, divergence=kind, labeled=labeled, caps=caps, t=temperature)


def distillation_measured(dtype: torch.dtype) -> Iterator[Measured]:
    chosen = [("forward_kl", 128_256)]
    if dtype == B:
        chosen += [("reverse_kl", 128_256), ("jsd", 128_256), ("forward_kl", 50_257)]
    for kind, classes in chosen:
        call = _rows(dtype, 1024, classes, divergence=kind, labeled=True)
        sweeps = 2 if kind == "forward_kl" else 3
        moved = (2 * sweeps + 1) * dtype.itemsize
        yield Measured(f"{kind} {classes} classes", call, 1024 * classes, (moved,), 2 * dtype.itemsize)


def loss_scaling_sweep() -> Iterator[Call]:
    from eff_kernels._triton.loss_scaling import count_exponents_triton, scan_triton_, unscale_triton_

    scalar = empty(1, dtype=F)
    for dtype in (*DTYPES, torch.float64):
        for counts in ((1,), (3, 16), (17, N), (2**31 + 16,), (2**31 + 17, 1)):
            tensors = [flat(count, dtype, count % 2) for count in counts]
            for bound in (1, 1 << 23):
                yield lambda t=tensors, b=bound: scan_triton_(t, b)
            yield lambda t=tensors: unscale_triton_(t, scalar, scalar)
            if dtype in _PATTERNS:
                _, mantissa, exponent = _PATTERNS[dtype]
                for count in counts:
                    values = flat(count, dtype, count % 2)
                    yield lambda v=values, m=mantissa, e=exponent: count_exponents_triton(v, m, e)


def loss_scaling_measured(dtype: torch.dtype) -> Iterator[Measured]:
    from eff_kernels._triton.loss_scaling import count_exponents_triton, scan_triton_, unscale_triton_

    size, scalar = dtype.itemsize, empty(1, dtype=F)
    even, odd = [flat(N * N, dtype)], [flat(N * N + 1, dtype)]
    _, mantissa, exponent = _PATTERNS[dtype]
    values = flat(N * N, dtype)
    yield Measured("exponents", lambda: count_exponents_triton(values, mantissa, exponent), N * N, (size,), size)
    if dtype != H:
        yield Measured("unscale", lambda: unscale_triton_(even, scalar, scalar), N * N, (2 * size,), size)
    if dtype == B:
        yield Measured("count", lambda: scan_triton_(even, 1 << 23), N * N, (size,), size)
        yield Measured("unscale odd", lambda: unscale_triton_(odd, scalar, scalar), N * N, (2 * size,), size, False)


def masks_sweep() -> Iterator[Call]:
    from eff_kernels._triton.masks import pack_bits_triton, rank_groups_triton, unpack_bits_triton

    counts = 1, 3, 16, 17, N, 2**27 + 1, 2**28
    groups = (1, 1), (1, 2), (2, 4), (4, 8), (5, 12), (8, 16)
    for dtype, (n, m), count in itertools.product((*DTYPES, torch.float64), groups, counts):
        for inner, magnitudes in ((1, False), (1, True), (9, False), (16, True)):
            if count * m * inner > 2**33:
                continue
            scores = flat(count * m * inner, dtype, count % 2)
            yield lambda o=(scores, n, m, inner, magnitudes): rank_groups_triton(*o)
    for count in (*counts, 2**31 + 16, 2**31 + 17):
        mask, packed = flat(count, torch.bool, count % 2), flat((count + 7) // 8, torch.uint8, count % 2)
        yield lambda mask=mask: pack_bits_triton(mask)
        yield lambda packed=packed, count=count: unpack_bits_triton(packed, (count,))


def masks_measured(dtype: torch.dtype) -> Iterator[Measured]:
    from eff_kernels._triton.masks import pack_bits_triton, rank_groups_triton, unpack_bits_triton

    scores = empty(N, N, dtype=dtype)
    for n, m in ((2, 4), (4, 8), (8, 16))[: 2 if dtype == H else 3]:
        moved = dtype.itemsize + 1
        yield Measured(f"{n}:{m}", partial(rank_groups_triton, scores, n, m, 1, True), N * N, (moved,), dtype.itemsize)
    if dtype == B:
        yield Measured("2:4 first axis", lambda: rank_groups_triton(scores, 2, 4, N), N * N, (3,), 2)
        mask, packed = empty(N, N, dtype=torch.bool), flat(N * N // 8, torch.uint8)
        odd = flat(N * N, torch.bool, 1)
        yield Measured("pack", lambda: pack_bits_triton(mask), N * N, (1.125,), 1)
        yield Measured("pack odd", lambda: pack_bits_triton(odd), N * N, (1.125,), 1, False)
        yield Measured("unpack", lambda: unpack_bits_triton(packed, (N, N)), N * N, (1.125,), 0.125, False)


def pruning_sweep() -> Iterator[Call]:
    from eff_kernels._triton.pruning import apply_mask_triton_, count_digits_triton_, mark_largest_triton_

    for dtype, counts, rank in itertools.product(DTYPES, ((1,), (3, 16), (17, N), (2**31 + 16,)), (1, 16, 2**31)):
        masks, scores = [flat(n, torch.bool, n % 2) for n in counts], [flat(n, dtype, n % 2) for n in counts]
        yield lambda m=masks, s=scores, rank=rank: mark_largest_triton_(m, s, rank)
    for bits in (torch.int16, torch.int32, torch.int64):
        for counts in ((1,), (3, 16), (17, N), (2**31 + 16,), (2**31 + 17, 1)):
            weights = [flat(count, bits, count % 2) for count in counts]
            masks = [flat(count, torch.bool, count % 2) for count in counts]
            yield lambda w=weights, m=masks: apply_mask_triton_(w, m)
    digits = (24, 8), (16, 8), (0, 16), (16, 16)
    for dtype, count, (shift, width) in itertools.product(DTYPES, (1, 3, 16, N, 2**31 + 16, 2**31 + 17), digits):
        counts, values = flat(1 << width, torch.int64), flat(count, dtype, count % 2)
        yield lambda c=counts, v=values, s=shift: count_digits_triton_(c, v, flat(1, torch.int64), s)


def pruning_measured(dtype: torch.dtype) -> Iterator[Measured]:
    from eff_kernels._triton.pruning import apply_mask_triton_, count_digits_triton_, mark_largest_triton_

    size, bits = dtype.itemsize, _PATTERNS[dtype][0]
    if dtype != H:  # to the kernel, the bits are all the same
        for name, count in (("mask", N * N), ("mask odd", N * N + 1))[: 2 if dtype == B else 1]:
            weights, masks = [flat(count, bits)], [flat(count, torch.bool)]
            call = lambda w=weights, m=masks: apply_mask_triton_(w, m)  # noqa: E731
            yield Measured(name, call, N * N, (2 * size + 1,), size + 1, count == N * N)
    values = flat(N * N, dtype)
    if dtype != H:
        masks = [flat(N * N, torch.bool)]
        moved = *[size] * 7, 1, size + 1
        yield Measured("largest", lambda: mark_largest_triton_(masks, [values], N), N * N, moved, size)
    for shift, width in ((24, 8), (0, 16))[: 2 if dtype == F else 1]:
        operands = flat(1 << width, torch.int64), values, flat(1, torch.int64), shift
        yield Measured(f"{width}-bit digits", lambda o=operands: count_digits_triton_(*o), N * N, (size,), size)


_KINDS = "fixed", "lsq", "range", "pact"


def _zero_points(scales: int, kind: str) -> Iterator[Tensor | None]:
    if kind != "range":
        yield None
    if kind == "fixed":
        yield flat(scales, torch.int32)
    if kind != "pact":
        yield flat(scales, F)


def quantization_sweep() -> Iterator[Call]:
    from eff_kernels._triton.quantization import grid_backward_triton, grid_forward_triton, rows_forward_triton

    shapes = [(shape, scales) for shape in _SHAPES for scales in sorted({1, shape[0]})]
    # one scale of all, channels along the last axis, and channels in the middle
    shapes += [((1, 2**31 + 17), 1), ((2**31 - 16, 1), 16), ((2**31 - 1, 1), 1), ((2**20, 9), 16), ((48, 33), 3)]
    for dtype, (shape, scales) in itertools.product((B, F), shapes):
        count = shape[0] * shape[1]
        x, scale, noise = flat(count, dtype, count % 2), flat(scales, F), flat(count, F)
        for zero, drawn in itertools.product(_zero_points(scales, "fixed"), (None, noise)):
            yield lambda a=(x, scale, zero, drawn, shape): grid_forward_triton(*a, -128, 127, 0.0)
        for kind, gate in itertools.product(_KINDS, (False, True)):
            for zero in _zero_points(scales, kind):
                drawn = noise if gate and kind == "fixed" else None
                operands = x, flat(count, dtype), scale, zero, drawn, shape, -8, 7, 0.0, gate, kind, 1.0
                yield lambda o=operands: grid_backward_triton(*o)
        if scales == 1 and shape[1] < 2**31:
            for symmetric, drawn in itertools.product((True, False), (None, noise)):
                yield lambda a=(x, drawn, shape[1]), s=symmetric: rows_forward_triton(*a, -7, 7, s)


def quantization_measured(dtype: torch.dtype) -> Iterator[Measured]:
    from eff_kernels._triton.quantization import grid_backward_triton, grid_forward_triton, rows_forward_triton

    n, size = N * N, dtype.itemsize
    x = flat(n, dtype)
    lone, row, last = ((1, n), 1), ((N, N), N), ((n, 1), N)

    def forward(name: str, layout: tuple[tuple[int, int], int], zeros: torch.dtype | None = None) -> Measured:
        shape, scales = layout
        zero = None if zeros is None else flat(scales, zeros)
        operands = x, flat(scales, F), zero, None, shape, -128, 127, 0.0
        return Measured(f"forward {name}", lambda: grid_forward_triton(*operands), n, (2 * size,), size)

    def backward(name: str, layout: tuple[tuple[int, int], int], kind: str, zeros: torch.dtype | None = None):
        shape, scales = layout
        zero = None if zeros is None else flat(scales, zeros)
        operands = x, x, flat(scales, F), zero, None, shape, -8, 7, 0.0, False, kind, 1.0
        return Measured(f"backward {name}", lambda: grid_backward_triton(*operands), n, (3 * size,), 2 * size)

    def rows(columns: int, symmetric: bool) -> Measured:
        name = f"rows of {columns}{'' if symmetric else ' asymmetric'}"
        return Measured(name, lambda: rows_forward_triton(x, None, columns, -7, 7, symmetric), n, (2 * size,), size)

    yield forward("channels", row)
    yield backward("channels", row, "fixed")
    yield rows(128, True)
    if dtype == H:
        return
    yield forward("one scale zero point", lone, torch.int32)
    yield backward("lsq", row, "lsq")
    yield rows(128, False)
    if dtype == F:
        return
    yield forward("last axis", last)
    yield backward("last axis", last, "fixed")
    yield backward("lsq zero point", row, "lsq", F)
    yield backward("range", lone, "range", F)
    yield backward("pact", lone, "pact")
    yield rows(4096, True)


FAMILIES = "fp8", "rounding", "distillation", "loss_scaling", "masks", "pruning", "quantization"


def sweep(family: str) -> Iterator[Call]:
    yield from globals()[f"{family}_sweep"]()


def measured(family: str, dtype: torch.dtype) -> Iterator[Measured]:
    yield from globals()[f"{family}_measured"](dtype)
