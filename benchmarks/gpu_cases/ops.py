"""The operations that `make bench-gpu` and `speed/ops.py` measure: what quantized and pruned training does every step.

Peers are what one would write in torch, the same under torch.compile, torch's own operators, and torchao's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from eff_kernels.loss_scaling import count_magnitudes, unscale_with_largest_
from eff_kernels.masks import pack_bits, unpack_bits
from eff_kernels.pruning import apply_mask_
from eff_kernels.quantization.affine import fake_quantize, fake_quantize_symmetric
from eff_kernels.quantization.group import fake_quantize_fp8, fake_quantize_groups
from eff_kernels.quantization.learned import lsq_fake_quantize
from operations import At, Call, Case
from torch import Tensor
from torchao.quantization import PerRow
from torchao.quantization.qat import Float8FakeQuantizeConfig, Float8FakeQuantizer, IntxFakeQuantizeConfig
from torchao.quantization.qat.fake_quantizer import IntxFakeQuantizer

from shared_core.pruning import nm_mask, prune_masks

E4M3 = torch.float8_e4m3fn


def activations(at: At) -> Tensor:
    """Return what flows through a layer of a language model: tokens by features in bfloat16."""
    return at.randn(at.size(16384, 2048, 32), at.size(4096, 1024, 64))


def both(function: Callable[..., Tensor], *inputs: Tensor, grad: Tensor) -> Call:
    """Return a call of forward and backward that gives the output and the gradients of all inputs."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]

    def call() -> tuple[Tensor, ...]:
        y = function(*leaves)
        return (y, *torch.autograd.grad(y, leaves, grad))

    return call


def shape_of(tensor: Tensor) -> str:
    return f"{' x '.join(map(str, tensor.shape))} {str(tensor.dtype).removeprefix('torch.')}"


def through_rounding(codes: Tensor) -> Tensor:
    return codes + (codes.round() - codes).detach()


def per_tensor(at: At) -> Case:
    x = activations(at)
    grad, scale, zero = torch.randn_like(x), torch.tensor(0.03, device=at.device), torch.tensor(3, device=at.device)
    zero = zero.int()

    def plain(x: Tensor) -> Tensor:
        codes = through_rounding(x.float() / scale) + zero
        # at a bound, the gradient of `clamp` is 1 before torch 2.15, then 0
        codes = codes.where((codes >= -128) & (codes <= 127), codes.detach().clamp(-128, 127))
        return ((codes - zero) * scale).to(x.dtype)

    def torch_own(x: Tensor) -> Tensor:
        return torch.fake_quantize_per_tensor_affine(x, scale, zero, -128, 127)

    def ours(x: Tensor) -> Tensor:
        return fake_quantize(x, scale, zero, -128, 127)

    peers = {"eager": plain, **at.compiled("compiled", plain), "torch.fake_quantize_per_tensor_affine": torch_own}
    return Case(
        f"fake quantization int8, one scale, forward and backward, {shape_of(x)}",
        both(ours, x, grad=grad),
        {name: both(peer, x, grad=grad) for name, peer in peers.items()},
        moved=10 * x.numel(),
    )


def per_channel(at: At) -> Case:
    weight = at.randn(at.size(8192, 1024, 32), at.size(8192, 1024, 64))
    grad = torch.randn_like(weight)

    def plain(w: Tensor) -> Tensor:
        scale = w.detach().abs().amax(1, keepdim=True).float() / 127
        return (through_rounding(w.float() / scale) * scale).to(w.dtype)

    torchao = IntxFakeQuantizer(IntxFakeQuantizeConfig(torch.int8, "per_channel"))
    peers = {
        "eager": plain,
        **at.compiled("compiled", plain),
        "torchao": torchao,
        **at.compiled("torchao compiled", torchao),
    }
    return Case(
        f"fake quantization int8, a scale a channel from its maximum, forward and backward, {shape_of(weight)}",
        both(lambda w: fake_quantize_symmetric(w, 0, 127), weight, grad=grad),
        {name: both(peer, weight, grad=grad) for name, peer in peers.items()},
        moved=4 * weight.numel(),
        # torchao divides by 127.5 and has the code -128
        unlike=("torchao", "torchao compiled"),
    )


def per_group(at: At) -> Case:
    weight = at.randn(at.size(8192, 1024, 32), at.size(8192, 1024, 64))
    grad = torch.randn_like(weight)

    def plain(w: Tensor) -> Tensor:
        groups = w.float().view(w.shape[0], -1, 32)
        scale = groups.detach().abs().amax(-1, keepdim=True) / 7
        return (through_rounding(groups / scale) * scale).view_as(w).to(w.dtype)

    torchao = IntxFakeQuantizer(IntxFakeQuantizeConfig(torch.int4, group_size=32))
    peers = {
        "eager": plain,
        **at.compiled("compiled", plain),
        "torchao": torchao,
        **at.compiled("torchao compiled", torchao),
    }
    return Case(
        f"fake quantization int4 in groups of 32, forward and backward, {shape_of(weight)}",
        both(lambda w: fake_quantize_groups(w, 32, 4, symmetric=True), weight, grad=grad),
        {name: both(peer, weight, grad=grad) for name, peer in peers.items()},
        moved=4 * weight.numel(),
        # halves of a step are common in bfloat16, and where a scale is an ulp off they round the other way
        tolerance=0.03,
        # torchao divides by 7.5 and has the code -8
        unlike=("torchao", "torchao compiled"),
    )


def per_token_fp8(at: At) -> Case:
    x = activations(at)
    grad = torch.randn_like(x)

    def plain(x: Tensor) -> Tensor:
        scale = x.detach().abs().amax(-1, keepdim=True).float() / 448
        values = x.float() / scale
        return ((values + (values.clamp(-448, 448).to(E4M3).float() - values).detach()) * scale).to(x.dtype)

    torchao = Float8FakeQuantizer(Float8FakeQuantizeConfig(E4M3, PerRow()))
    peers = {
        "eager": plain,
        **at.compiled("compiled", plain),
        "torchao": torchao,
        **at.compiled("torchao compiled", torchao),
    }
    return Case(
        f"fake quantization e4m3, a scale a token, forward and backward, {shape_of(x)}",
        both(lambda x: fake_quantize_fp8(x, E4M3, 0), x, grad=grad),
        {name: both(peer, x, grad=grad) for name, peer in peers.items()},
        moved=4 * x.numel(),
        # the gradient of the largest value of a token goes through torchao's scale too
        unlike=("torchao", "torchao compiled"),
    )


def lsq(at: At, channels: bool) -> Case:
    x = activations(at)
    grad = torch.randn_like(x)
    scale = torch.full((x.shape[0], 1) if channels else (), 0.3, device=at.device)
    strength = (x.numel() // scale.numel() * 7) ** -0.5

    def plain(x: Tensor, scale: Tensor) -> Tensor:
        scale = scale * strength + (scale - scale * strength).detach()
        return (through_rounding((x.float() / scale).clamp(-8, 7)) * scale).to(x.dtype)

    def ours(x: Tensor, scale: Tensor) -> Tensor:
        return lsq_fake_quantize(x, scale, None, -8, 7, strength)

    def learnable(x: Tensor, scale: Tensor) -> Tensor:
        zero = torch.zeros(scale.shape, device=x.device)
        return torch._fake_quantize_learnable_per_tensor_affine(x.float(), scale, zero, -8, 7, strength).to(x.dtype)

    peers: dict[str, Call] = {"eager": plain, **at.compiled("compiled", plain)}
    peers = {name: both(peer, x, scale, grad=grad) for name, peer in peers.items()}
    if not channels:
        peers["torch._fake_quantize_learnable"] = both(learnable, x, scale.view(1), grad=grad)
    return Case(
        f"LSQ int4, {'a scale a row' if channels else 'one scale'}, forward and backward, {shape_of(x)}",
        both(ours, x, scale, grad=grad),
        peers,
        moved=10 * x.numel(),
        # the gradient of a scale sums as many terms of either sign as there are elements, inductor in float32
        tolerance=0.1,
        # its gate is on the rounded code, and its gradients are so too
        unlike=("torch._fake_quantize_learnable",),
    )


def magnitudes(at: At) -> Case:
    """Return the count of gradients by power of two, of zeros and of what underflows, and the largest."""
    width, layers = at.size(4096, 1024, 16), at.size(16, 8, 3)
    grads = [at.randn(width, width, dtype=torch.float32) for _ in range(layers)]
    threshold = 2.0**-14

    def plain(grads: list[Tensor]) -> list[tuple[Tensor, ...]]:
        found = []
        for grad in grads:
            magnitude = grad.abs()
            exponent = torch.frexp(magnitude).exponent.float() + 126
            histogram = torch.histc(exponent.clamp(0, 255), 256, 0, 256)
            zeros = (magnitude == 0).sum()
            found.append((histogram, zeros, (magnitude < threshold).sum() - zeros, magnitude.amax()))
        return found

    def ours() -> list[Tensor]:
        counts = count_magnitudes(grads, threshold)
        return [counts.histogram, counts.zeros, counts.small, counts.amax]

    def columns(function: Callable[..., Any]) -> Call:
        def call() -> list[Tensor]:
            return [torch.stack(parts) for parts in zip(*function(grads), strict=True)]

        return call

    peers = {"eager": columns(plain), **{name: columns(f) for name, f in at.compiled("compiled", plain).items()}}
    return Case(
        f"telemetry of {layers} gradients, {shape_of(grads[0])}",
        ours,
        peers,
        moved=sum(grad.nbytes for grad in grads),
    )


def unscaling(at: At) -> Case:
    """Return what the scaler of kind auto asks of gradients: unscaled, whether all are finite, the largest."""
    width, layers = at.size(4096, 1024, 16), at.size(16, 8, 3)
    grads = [at.randn(width, width, dtype=torch.float32) for _ in range(layers)]
    # a factor of 1, so that repeated calls see the same numbers
    found_inf, factor = torch.zeros(1, device=at.device), torch.ones(1, device=at.device)

    def eager() -> list[Tensor]:
        largest = torch.stack(torch._foreach_norm(grads, math.inf)).max()
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, factor)
        return [largest]

    return Case(
        f"unscaling, check and largest of {layers} gradients, {shape_of(grads[0])}",
        lambda: [unscale_with_largest_(grads, found_inf, factor)],
        {"eager": eager},
        moved=2 * sum(grad.nbytes for grad in grads),
    )


def masking(at: At) -> Case:
    width, layers = at.size(4096, 1024, 16), at.size(16, 8, 3)
    weights = [at.randn(width, width, dtype=torch.float32) for _ in range(layers)]
    masks = [weight > 0 for weight in weights]
    floats = [mask.float() for mask in masks]
    copies = [weight.clone() for weight in weights]

    def ours() -> list[Tensor]:
        apply_mask_(weights, masks)
        return weights

    def foreach() -> list[Tensor]:
        torch._foreach_mul_(copies, floats)
        return copies

    def fill() -> list[Tensor]:
        return [copy.masked_fill_(~mask, 0.0) for copy, mask in zip(copies, masks, strict=True)]

    return Case(
        f"masking {layers} weights in place, {shape_of(weights[0])}",
        ours,
        {"_foreach_mul_ by float masks": foreach, "masked_fill_": fill},
        moved=9 * sum(weight.numel() for weight in weights),
        tolerance=0.0,
    )


def two_four(at: At) -> Case:
    weight = at.randn(at.size(8192, 2048, 32), at.size(8192, 2048, 64))

    def by_topk(w: Tensor) -> Tensor:
        best = w.abs().view(-1, 4).topk(2, 1).indices
        return torch.zeros(w.numel() // 4, 4, dtype=torch.bool, device=w.device).scatter_(1, best, True).view_as(w)

    def by_ranks(w: Tensor) -> Tensor:
        a, b, c, d = w.abs().view(-1, 4).unbind(1)
        ab, ac, ad, bc, bd, cd = (x.to(torch.int8) for x in (a >= b, a >= c, a >= d, b >= c, b >= d, c >= d))
        kept = ab + ac + ad >= 2, 1 - ab + bc + bd >= 2, 2 - ac - bc + cd >= 2, 3 - ad - bd - cd >= 2
        return torch.stack(kept, 1).view_as(w)

    peers = {"topk and scatter": by_topk, "ranks": by_ranks, **at.compiled("ranks compiled", by_ranks)}
    return Case(
        f"2:4 mask, {shape_of(weight)}",
        lambda: nm_mask(weight, 2, 4),
        {name: partial(peer, weight) for name, peer in peers.items()},
        moved=3 * weight.numel(),
        unlike=("topk and scatter",),  # among equal magnitudes it may keep another one
        tolerance=0.0,
    )


def threshold(at: At) -> Case:
    width, layers = at.size(2000, 1024, 20), at.size(25, 10, 5)
    scores = [at.randn(width, width, dtype=torch.float32).abs() for _ in range(layers)]
    numel = layers * width * width

    def joined(find: Callable[[Tensor, int], Tensor]) -> list[Tensor]:
        bound = find(torch.cat([score.view(-1) for score in scores]), numel // 2)
        return [score > bound for score in scores]

    def by_topk(values: Tensor, k: int) -> Tensor:
        return values.topk(k, largest=False).values.amax()

    def by_kthvalue(values: Tensor, k: int) -> Tensor:
        return values.kthvalue(k).values

    peers = {"torch.topk": by_topk, "torch.kthvalue": by_kthvalue}
    return Case(
        f"exact masks of {numel / 1e6:.1f} M scores in {layers} tensors under one threshold",
        lambda: prune_masks(scores, 0.5),
        {name: partial(joined, find) for name, find in peers.items()},
        moved=9 * numel,
    )


def packing(at: At) -> Case:
    mask = at.randn(at.size(8192, 2048, 32), at.size(8192, 2048, 64)) > 0
    powers = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=at.device)

    def plain(mask: Tensor) -> tuple[Tensor, Tensor]:
        packed = (mask.view(-1, 8).to(torch.uint8) * powers).sum(1, dtype=torch.uint8)
        return packed, ((packed.unsqueeze(1) & powers) != 0).view_as(mask)

    def ours() -> tuple[Tensor, Tensor]:
        packed = pack_bits(mask)
        return packed, unpack_bits(packed, mask.shape)

    peers = {"eager": plain, **at.compiled("compiled", plain)}
    return Case(
        f"a mask packed eight weights to a byte, and back, {shape_of(mask)}",
        ours,
        {name: partial(peer, mask) for name, peer in peers.items()},
        moved=mask.numel() * 9 // 4,
        tolerance=0.0,
    )


OPERATIONS: tuple[Callable[[At], Case], ...] = (
    per_tensor,
    per_channel,
    per_group,
    per_token_fp8,
    partial(lsq, channels=False),
    partial(lsq, channels=True),
    magnitudes,
    unscaling,
    masking,
    two_four,
    threshold,
    packing,
)
