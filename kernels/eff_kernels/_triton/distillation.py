"""`eff_kernels.distillation.kd_rows_` in Triton: one program a row, online softmax over tiles of classes."""

from __future__ import annotations

import torch
from torch import Tensor

from eff_kernels._triton.launch import cdiv, has_triton, next_power_of_2, remembering

if has_triton():
    import triton
    import triton.language as tl

_KINDS = {"forward_kl": 0, "reverse_kl": 1, "jsd": 2}
# Bytes of a tile: sixteen half classes of each side in the registers of a thread, or eight float32 ones.
_BLOCK_BYTES, _WARPS = 8192, 8
# Tiles that are on their way from memory at a time, in shared memory where there are several.
_STAGES = 3
# Classes that a thread reads at once, of which it keeps the largest and sums by itself: one reduction over a row's
# threads at the end of a sweep in place of one in each tile.
_GROUP = 8


def _power_of_two(x: tl.tensor, native: tl.constexpr) -> tl.tensor:
    """Return ``2 ** x``, where `native` by one instruction, to which results below 2^-126 are 0."""
    if native:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.exp2(x)
    return y


def _logarithm(x: tl.tensor, native: tl.constexpr) -> tl.tensor:
    """Return ``log2(x)``, of what lies below 2^-126 that of 2^-126."""
    x = tl.maximum(x, 2.0**-126, propagate_nan=tl.PropagateNan.ALL)
    if native:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.log2(x)
    return y


def _softened(
    start: tl.tensor,
    places: tl.tensor,
    inside: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    capped: tl.constexpr,
) -> tl.tensor:
    # One tile of logits, softened: z / T, or c tanh(z / c) / T; outside of the classes -inf, whose power is 0.
    x = tl.load(start + places, mask=inside, other=float("-inf")).to(tl.float32)
    if capped:
        # tanh by exp: the interpreter has no libdevice
        x = tl.where(inside, softcap * (2.0 / (1.0 + tl.exp(-2.0 * x / softcap)) - 1.0), float("-inf"))
    return x * scale


def _tile(
    i: tl.tensor, shift: tl.tensor, classes: tl.tensor, shifted: tl.constexpr, block: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return places of a tile, and which of them are the row's; where it is shifted those in whole vectors."""
    places = i * block + tl.arange(0, block)
    inside = places < classes
    if shifted:
        # One comparison for both ends.
        inside = (places // 8 * 8 - shift).to(tl.uint32, bitcast=True) < tl.cast(classes - 7, tl.uint32)
    return places, inside


def _grouped(x: tl.tensor, group: tl.constexpr) -> tl.tensor:
    """Return a tile as ``(groups, group)``."""
    return tl.reshape(x, (x.shape[0] // group, group))


def _raised(
    power: tl.tensor, x: tl.tensor, temperature: tl.tensor, squarings: tl.constexpr, native: tl.constexpr
) -> tl.tensor:
    """Return ``2 ** (temperature x)`` of the power ``2 ** x``: by squaring where that is enough."""
    if squarings < 0:
        power = power_of_two(temperature * x, native)
    else:
        for _ in tl.static_range(squarings):
            power = power * power
    return power


def _normalizers(
    a: tl.tensor,
    b: tl.tensor,
    student_max: tl.tensor,
    teacher_max: tl.tensor,
    student_sum: tl.tensor,
    teacher_sum: tl.tensor,
    plain_sum: tl.tensor,
    temperature: tl.tensor,
    labeled: tl.constexpr,
    squarings: tl.constexpr,
    native: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the largest and the sums of powers of each group so far, with a tile ``(groups, group)`` of both sides."""
    largest = tl.maximum(student_max, tl.max(a, 1))
    apart = a - largest[:, None]
    power = power_of_two(apart, native)
    apart_before = student_max - largest
    shrink = power_of_two(apart_before, native)
    student_sum = student_sum * shrink + tl.sum(power, 1)
    if labeled:
        # The cross-entropy is at temperature 1: a T is the logit, and T (a - max) its distance from the largest.
        shrink = raised(shrink, apart_before, temperature, squarings, native)
        plain_sum = plain_sum * shrink + tl.sum(raised(power, apart, temperature, squarings, native), 1)
    student_max = largest
    largest = tl.maximum(teacher_max, tl.max(b, 1))
    shrink = power_of_two(teacher_max - largest, native)
    teacher_sum = teacher_sum * shrink + tl.sum(power_of_two(b - largest[:, None], native), 1)
    return student_max, largest, student_sum, teacher_sum, plain_sum


def _mixed(
    a: tl.tensor,
    b: tl.tensor,
    student_log: tl.tensor,
    teacher_log: tl.tensor,
    beta: tl.tensor,
    native: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return q and p of a tile, and log2 q/m and log2 p/m with their mixture m; any number where q or p is 0."""
    log_s = tl.maximum(a - student_log, -1e30, propagate_nan=tl.PropagateNan.ALL)
    log_t = tl.maximum(b - teacher_log, -1e30, propagate_nan=tl.PropagateNan.ALL)
    s, t = power_of_two(log_s, native), power_of_two(log_t, native)
    # m/q = 1 - beta + beta p/q: its logarithm is small where both sides agree, and exact there; a difference of log q
    # and log m is not. Beyond 2^126 the ratio does not matter to q, and p/m is 1 / beta.
    apart = tl.minimum(log_t - log_s, 126.0, propagate_nan=tl.PropagateNan.ALL)
    log_m = logarithm(1.0 - beta + beta * power_of_two(apart, native), native)
    return s, t, -log_m, apart - log_m


def _parts(
    a: tl.tensor,
    b: tl.tensor,
    student_log: tl.tensor,
    teacher_log: tl.tensor,
    beta: tl.tensor,
    kind: tl.constexpr,
    group: tl.constexpr,
    native: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return what groups of a tile of both sides add to the divergence, from the student and from the teacher."""
    if kind == 1:
        log_s = a - student_log
        s = power_of_two(log_s, native)
        of_student = tl.sum(grouped(tl.where(s == 0.0, 0.0, s * (log_s - (b - teacher_log))), group), 1)
        of_teacher = tl.zeros_like(of_student)
    else:
        s, t, student_ratio, teacher_ratio = mixed(a, b, student_log, teacher_log, beta, native)
        of_student = tl.sum(grouped(s * student_ratio, group), 1)
        of_teacher = tl.sum(grouped(t * teacher_ratio, group), 1)
    return of_student, of_teacher


def _gradient(
    a: tl.tensor,
    b: tl.tensor,
    places: tl.tensor,
    label: tl.tensor,
    student_log: tl.tensor,
    teacher_log: tl.tensor,
    student_max: tl.tensor,
    student_sum: tl.tensor,
    of_student: tl.tensor,
    soft_weight: tl.tensor,
    plain_weight: tl.tensor,
    weight: tl.tensor,
    temperature: tl.tensor,
    cap: tl.tensor,
    beta: tl.tensor,
    kind: tl.constexpr,
    capped: tl.constexpr,
    labeled: tl.constexpr,
    squarings: tl.constexpr,
    native: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the gradient by logits from a tile of both sides, and what it adds to the forward KL."""
    log_s, log_t = a - student_log, b - teacher_log
    s, t = power_of_two(log_s, native), power_of_two(log_t, native)
    of_tile = t
    if kind == 0:
        of_tile = tl.where(t == 0.0, 0.0, t * (log_t - log_s))
        grad = s - t
    elif kind == 1:
        grad = tl.where(s == 0.0, 0.0, s * (log_s - log_t - of_student))
    else:
        s, t, ratio, _ = mixed(a, b, student_log, teacher_log, beta, native)
        grad = s * (ratio - of_student)
    grad = soft_weight * grad
    if labeled:
        plain = raised(s * student_sum, a - student_max, temperature, squarings, native)
        grad += plain_weight * plain - tl.where(places == label, weight, 0.0)
    if capped:
        # a in these units is c tanh(z / c), so ratio is the tanh, and 1 - tanh² the derivative of the cap.
        ratio = a * cap
        grad = grad * (1.0 - ratio * ratio)
    return grad, of_tile


def _kd_rows(
    student: tl.tensor,
    teacher: tl.tensor,
    labels: tl.tensor,
    soft: tl.tensor,
    hard: tl.tensor,
    gradient: tl.tensor,
    student_stride: tl.tensor,
    teacher_stride: tl.tensor,
    gradient_stride: tl.tensor,
    classes: tl.tensor,
    temperature: tl.tensor,
    soft_weight: tl.tensor,
    hard_weight: tl.tensor,
    beta: tl.tensor,
    student_softcap: tl.tensor,
    teacher_softcap: tl.tensor,
    kind: tl.constexpr,
    student_capped: tl.constexpr,
    teacher_capped: tl.constexpr,
    labeled: tl.constexpr,
    shifted: tl.constexpr,
    native: tl.constexpr,
    tiles: tl.constexpr,
    block: tl.constexpr,
    group: tl.constexpr,
    squarings: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    shift = tl.zeros((), tl.int32)
    if shifted:
        # Rows of one stride begin anywhere in a vector: all is read from where that vector begins.
        first = row * student_stride
        shift = (first % 8).to(tl.int32)
        student += first // 8 * 8
        teacher += first // 8 * 8
        gradient += first // 8 * 8
    else:
        student += row * student_stride
        teacher += row * teacher_stride
        gradient += row * gradient_stride
    # Logarithms have base two, whose powers are one instruction.
    scale = 1.4426950408889634 / temperature
    label = tl.full((), -1, tl.int32)
    labeled_logit = tl.zeros((), tl.float32)
    if labeled:
        label = tl.load(labels + row).to(tl.int32)
        pair = tl.arange(0, 2)
        known = pair < tl.where(label >= 0, 1, 0)
        at = shift + label + pair
        labeled_logit = tl.max(softened(student, at, known, scale, student_softcap, student_capped), 0)
    if shifted:
        # What the row has of its first vector and of its last one, 16 places; a first one that begins with the row
        # is whole.
        ends = tl.arange(0, 16)
        ends = tl.where(ends < 8, ends, (shift + classes) // 8 * 8 + ends - 8)
        ended = (ends >= tl.where(shift > 0, shift, 8)) & (ends < shift + classes)

    # First sweep: both normalizers by online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867): the sum so far
    # shrinks whenever a larger maximum is found.
    # finite starts: a tile of -inf would make inf - inf
    student_max = tl.full((block // group,), -1e38, tl.float32)
    teacher_max = tl.full((block // group,), -1e38, tl.float32)
    student_sum = tl.zeros((block // group,), tl.float32)
    teacher_sum = tl.zeros((block // group,), tl.float32)
    plain_sum = tl.zeros((block // group,), tl.float32)
    for i in tl.range(0, tiles, num_stages=stages):
        places, inside = tile(i, shift, classes, shifted, block)
        a = grouped(softened(student, places, inside, scale, student_softcap, student_capped), group)
        b = grouped(softened(teacher, places, inside, scale, teacher_softcap, teacher_capped), group)
        student_max, teacher_max, student_sum, teacher_sum, plain_sum = normalizers(
            a, b, student_max, teacher_max, student_sum, teacher_sum, plain_sum, temperature, labeled, squarings,
            native,
        )  # fmt: skip
    # all groups as one
    row_max, groups = tl.max(student_max, 0), student_max
    apart = groups - row_max
    shrink = power_of_two(apart, native)
    student_sum = tl.sum(student_sum * shrink, 0)
    if labeled:
        plain_sum = tl.sum(plain_sum * raised(shrink, apart, temperature, squarings, native), 0)
    student_max, groups = row_max, teacher_max
    teacher_max = tl.max(groups, 0)
    teacher_sum = tl.sum(teacher_sum * power_of_two(groups - teacher_max, native), 0)
    if shifted:
        one = tl.zeros((1,), tl.float32)
        # Read anew in each sweep: what is kept through one takes registers of all threads.
        student_ends = softened(student, ends, ended, scale, student_softcap, student_capped)
        teacher_ends = softened(teacher, ends, ended, scale, teacher_softcap, teacher_capped)
        student_max, teacher_max, student_sum, teacher_sum, plain_sum = normalizers(
            grouped(student_ends, 16), grouped(teacher_ends, 16), one + student_max, one + teacher_max,
            one + student_sum, one + teacher_sum, one + plain_sum, temperature, labeled, squarings, native,
        )  # fmt: skip
        # of one number each
        student_max, teacher_max = tl.max(student_max, 0), tl.max(teacher_max, 0)
        student_sum, teacher_sum = tl.sum(student_sum, 0), tl.sum(teacher_sum, 0)
        if labeled:
            plain_sum = tl.sum(plain_sum, 0)
    student_log = student_max + tl.log2(student_sum)
    teacher_log = teacher_max + tl.log2(teacher_sum)

    # Second sweep, not for the forward KL: its gradient q - p needs no sum over the row; the others' do.
    of_student = tl.zeros((), tl.float32)
    divergences = tl.zeros((block // group,), tl.float32)
    divergence = tl.zeros((), tl.float32)
    if kind != 0:
        of_students = tl.zeros((block // group,), tl.float32)
        for i in tl.range(0, tiles, num_stages=stages):
            # every other sweep goes backwards, and finds in the cache what the one before read last
            places, inside = tile(tiles - 1 - i, shift, classes, shifted, block)
            # Read and softened again: 128k classes do not fit into registers.
            a = softened(student, places, inside, scale, student_softcap, student_capped)
            b = softened(teacher, places, inside, scale, teacher_softcap, teacher_capped)
            student_part, teacher_part = parts(a, b, student_log, teacher_log, beta, kind, group, native)
            of_students += student_part
            divergences += teacher_part
        of_student, divergence = tl.sum(of_students, 0), tl.sum(divergences, 0)
        if shifted:
            student_ends = softened(student, ends, ended, scale, student_softcap, student_capped)
            teacher_ends = softened(teacher, ends, ended, scale, teacher_softcap, teacher_capped)
            student_part, teacher_part = parts(
                student_ends, teacher_ends, student_log, teacher_log, beta, kind, 16, native
            )
            of_student += tl.sum(student_part, 0)
            divergence += tl.sum(teacher_part, 0)
        divergence = of_student if kind == 1 else beta * divergence + (1.0 - beta) * of_student

    # Last sweep: the gradient by a, times soft_weight T, as T² D has the gradient T ∂D/∂a by z; then the hard term.
    weight = tl.where(label >= 0, hard_weight, 0.0)
    plain_weight = weight / plain_sum if labeled else weight
    soft_weight *= temperature
    if kind != 0:
        soft_weight *= 0.6931471805599453
    if kind == 2:
        soft_weight *= 1.0 - beta
    cap = 1.0 / (scale * student_softcap) if student_capped else 1.0
    for i in tl.range(0, tiles, num_stages=stages):
        places, inside = tile(tiles - 1 - i if kind == 0 else i, shift, classes, shifted, block)
        a = softened(student, places, inside, scale, student_softcap, student_capped)
        b = softened(teacher, places, inside, scale, teacher_softcap, teacher_capped)
        grad, of_tile = gradient_of(
            a, b, places, shift + label, student_log, teacher_log, student_max, student_sum, of_student, soft_weight,
            plain_weight, weight, temperature, cap, beta, kind, student_capped, labeled, squarings, native,
        )  # fmt: skip
        if kind == 0:
            divergences += tl.sum(grouped(of_tile, group), 1)
        tl.store(gradient + places, grad.to(gradient.dtype.element_ty), mask=inside)
    if kind == 0:
        divergence = tl.sum(divergences, 0)
    if shifted:
        student_ends = softened(student, ends, ended, scale, student_softcap, student_capped)
        teacher_ends = softened(teacher, ends, ended, scale, teacher_softcap, teacher_capped)
        grad, of_tile = gradient_of(
            student_ends, teacher_ends, ends, shift + label, student_log, teacher_log, student_max, student_sum,
            of_student, soft_weight, plain_weight, weight, temperature, cap, beta, kind, student_capped, labeled,
            squarings, native,
        )  # fmt: skip
        if kind == 0:
            divergence += tl.sum(of_tile, 0)
        tl.store(gradient + ends, grad.to(gradient.dtype.element_ty), mask=ended)
    tl.store(soft + row, temperature * temperature * 0.6931471805599453 * divergence)
    if labeled:
        # logsumexp(z) - z_y, both in units of a.
        loss = 0.6931471805599453 * (tl.log2(plain_sum) + temperature * (student_max - labeled_logit))
        tl.store(hard + row, tl.where(label >= 0, loss, 0.0))


if has_triton():
    # a kernel finds what it calls among its module's globals
    power_of_two = triton.jit(_power_of_two)
    logarithm = triton.jit(_logarithm)
    softened = triton.jit(_softened)
    tile = triton.jit(_tile)
    grouped = triton.jit(_grouped)
    raised = triton.jit(_raised)
    normalizers = triton.jit(_normalizers)
    mixed = triton.jit(_mixed)
    parts = triton.jit(_parts)
    gradient_of = triton.jit(_gradient)
    kd_rows = remembering(triton.jit(_kd_rows))


def kd_rows_triton_(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None,
    temperature: float,
    soft_weight: float,
    hard_weight: float,
    divergence: str,
    beta: float,
    student_softcap: float,
    teacher_softcap: float,
    block: int | None = None,
    gradient: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what `kd_rows_` does, without scratch: two or three sweeps over a row; -inf is always understood.

    Args:
        student_logits: As in `kd_rows_`, float32, bfloat16 or float16; its classes contiguous.
        teacher_logits: As in `kd_rows_`, likewise.
        labels: As in `kd_rows_`.
        temperature: As in `kd_rows_`.
        soft_weight: As in `kd_rows_`.
        hard_weight: As in `kd_rows_`.
        divergence: As in `kd_rows_`.
        beta: As in `kd_rows_`.
        student_softcap: As in `kd_rows_`.
        teacher_softcap: As in `kd_rows_`.
        block: Classes of a tile, a power of two; None: what `_BLOCK_BYTES` hold.
        gradient: Takes the gradient in place of `student_logits`, which then stay.
    """
    rows, classes = student_logits.shape
    soft = student_logits.new_empty(rows, dtype=torch.float32)
    hard = torch.zeros_like(soft)
    if not rows:
        return soft, hard
    gradient = student_logits if gradient is None else gradient
    block = min(block or _BLOCK_BYTES // student_logits.element_size(), next_power_of_2(classes))
    sides = student_logits, teacher_logits, gradient
    # Vectors of eight classes, where not each row begins with one.
    shifted = classes > 8 and student_logits.stride(0) % 8 > 0 and len({side.stride(0) for side in sides}) == 1
    shifted = shifted and all(side.data_ptr() % 16 == 0 for side in sides)
    kd_rows[(rows,)](
        student_logits,
        teacher_logits,
        soft if labels is None else labels,
        soft,
        hard,
        gradient,
        student_logits.stride(0),
        teacher_logits.stride(0),
        gradient.stride(0),
        classes,
        float(temperature),
        float(soft_weight),
        float(hard_weight),
        float(beta),
        float(student_softcap),
        float(teacher_softcap),
        kind=_KINDS[divergence],
        student_capped=bool(student_softcap),
        teacher_capped=bool(teacher_softcap),
        labeled=labels is not None,
        shifted=shifted,
        native=not student_logits.is_cpu and torch.version.hip is None,
        tiles=cdiv(classes + 7 if shifted else classes, block),
        block=block,
        group=min(_GROUP, block),
        # 1, 2 and 4: a power of two by a few products in place of one more of the slow instructions a class
        squarings={1.0: 0, 2.0: 1, 4.0: 2}.get(float(temperature), -1),
        stages=_STAGES,
        num_warps=_WARPS,
        enable_fp_fusion=True,
    )
    return soft, hard
