"""Casts to eight, four and sixteen bits that `make bench-gpu` and `speed/ops.py` measure, and rows of distillation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from eff_kernels.distillation import kd_rows_
from eff_kernels.fp8 import Block, quantize
from gpu_cases.ops import E4M3, activations, shape_of
from operations import At, Call, Case
from torch import Tensor
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig
from torchao.optim.quant_utils import _fp32_to_bf16_sr
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

from shared_core.numerics.block_formats import mx_round_to, nvfp4_round_to, nvfp4_tensor_scale
from shared_core.numerics.rounding import stochastic_round_

NAMES = {(0, 0): "one scale", (1, 0): "a scale a row", (1, 128): "a scale a 1x128", (128, 128): "a scale a 128x128"}


def fp8_cast(at: At, block: Block, both: bool = False) -> Case:
    x, name = activations(at), NAMES[block]
    if at.small == 2:
        block = tuple(min(size, 16) for size in block)  # type: ignore[assignment]

    def one(x: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = (size or length for size, length in zip(block, x.shape, strict=True))
        blocks = x.view(x.shape[0] // rows, rows, -1, columns).float()
        scale = blocks.abs().amax((1, 3), keepdim=True) / 448
        return (blocks / scale).clamp(-448, 448).to(E4M3).view_as(x).float(), scale[:, 0, :, 0]

    def plain(x: Tensor) -> tuple[Tensor, ...]:
        return (*one(x), *one(x.t().contiguous())) if both else one(x)

    def ours() -> tuple[Tensor, ...]:
        made = quantize(x, E4M3, block, "exact", both=both)
        matrices = (made.matrix, made.transposed) if both else (made.matrix,)
        return tuple(part for matrix in matrices for part in (matrix.codes, matrix.scale))

    def torchao(x: Tensor) -> tuple[Tensor, Tensor]:
        axis = {"scaling_granularity": ScalingGranularity.AXISWISE, "axiswise_dim": -1} if block[0] else {}
        made = hp_tensor_to_float8_dynamic(x, E4M3, LinearMMConfig(), **axis)
        return made._data, made._scale.reciprocal().view(-1, 1)

    peers: dict[str, Callable[..., Any]] = {"eager": plain, **at.compiled("compiled", plain)}
    if not block[1] and not both:
        peers |= {"torchao": torchao, **at.compiled("torchao compiled", torchao)}
    whole = block == (0, 0)
    return Case(
        f"cast to e4m3, {name}{', and its transpose' if both else ''}, {shape_of(x)}",
        ours,
        {name: partial(peer, x) for name, peer in peers.items()},
        # one scale for all needs a second pass
        moved=((5 if whole else 3) + both) * x.numel(),
    )


def microscaling(at: At, element: str) -> Case:
    x = activations(at)
    dtype = {"fp8_e4m3": E4M3, "fp4_e2m1": torch.float4_e2m1fn_x2}[element]

    def torchao(x: Tensor) -> Tensor:
        return MXTensor.to_mx(x, dtype).dequantize(torch.bfloat16)

    peers = {"torchao": torchao, **at.compiled("torchao compiled", torchao)}
    return Case(
        f"values rounded to MX {element}, 1x32, {shape_of(x)}",
        lambda: mx_round_to(x, element),  # type: ignore[arg-type]
        {name: partial(peer, x) for name, peer in peers.items()},
        moved=4 * x.numel(),
        tolerance=0.0,
    )


def nvfp4(at: At) -> Case:
    x = activations(at)

    def torchao(x: Tensor) -> Tensor:
        scale = nvfp4_tensor_scale(x.abs().amax())
        return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(torch.float32)

    peers = {"torchao": torchao, **at.compiled("torchao compiled", torchao)}
    return Case(
        f"values rounded to NVFP4, 1x16, {shape_of(x)}",
        lambda: nvfp4_round_to(x, per_tensor_scale=None),
        {name: partial(peer, x) for name, peer in peers.items()},
        # the scale of the tensor needs a pass of its own
        moved=8 * x.numel(),
        # on a GPU torchao multiplies by reciprocals of scales, and some halves of a step round the other way
        tolerance=1e-4 if at.device.type == "cpu" else 0.03,
    )


def stochastic(at: At) -> Case:
    source = activations(at).float() * 1.001
    target = torch.empty_like(source, dtype=torch.bfloat16)
    peers = {"torchao": _fp32_to_bf16_sr, **at.compiled("torchao compiled", _fp32_to_bf16_sr)}
    return Case(
        f"stochastic rounding to bfloat16, {shape_of(source)}",
        lambda: stochastic_round_(target, source),
        {name: partial(peer, source) for name, peer in peers.items()},
        moved=6 * source.numel(),
    )


def distillation_rows(at: At) -> Case:
    rows, classes, temperature = at.size(2048, 256, 8), at.size(128_256, 32_000, 64), 2.0
    student, teacher = at.randn(rows, classes), at.randn(rows, classes)
    labels = torch.randint(classes, (rows,), device=at.device)
    logits = student.clone()

    def plain(student: Tensor) -> Tensor:
        student = student.float()
        soft = F.kl_div(
            F.log_softmax(student / temperature, -1), F.softmax(teacher.float() / temperature, -1), reduction="sum"
        )
        return 0.5 * temperature**2 * soft + 0.5 * F.cross_entropy(student, labels, reduction="sum")

    def ours() -> tuple[Tensor, Tensor]:
        soft, hard = kd_rows_(logits, teacher, labels, temperature, 0.5, 0.5)
        return 0.5 * (soft.sum() + hard.sum()), logits

    def gradient(loss: Callable[[Tensor], Tensor]) -> Call:
        leaf = student.clone().requires_grad_()

        def call() -> tuple[Tensor, Tensor]:
            value = loss(leaf)
            return value, *torch.autograd.grad(value, leaf)

        return call

    peers = {"eager": plain, **at.compiled("compiled", plain)}
    return Case(
        f"distillation loss and gradient of logits in place, {shape_of(student)}",
        ours,
        {name: gradient(peer) for name, peer in peers.items()},
        # a row of 128 k logits fits no multiprocessor's cache: both read for the sums and again, one written
        moved=10 * student.numel(),
    )


CASTS: tuple[Callable[[At], Case], ...] = (
    *(partial(fp8_cast, block=block, both=both) for block in NAMES for both in (False, True)),
    partial(microscaling, element="fp8_e4m3"),
    partial(microscaling, element="fp4_e2m1"),
    nvfp4,
    stochastic,
    distillation_rows,
)
