"""AdamW under masks: against torch's own optimizer followed by the mask, in the interpreter and on a GPU."""

import pytest
import torch
from eff_kernels.masks import pack_bits
from eff_kernels.optimizer import masked_adamw_, masked_adamw_of

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch and with the dev extra on Linux")

SETTINGS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8}


def state(dtype, shapes, device="cpu"):
    """Weights, gradients of three steps, masks."""
    generator = torch.Generator().manual_seed(0)
    draws = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(4)]
    masks = [(torch.rand(shape, generator=generator) < 0.5).to(device) for shape in shapes]
    weights, *grads = [[draw.to(device, dtype) for draw in row] for row in draws]
    return weights, grads, masks


def reference(weights, grads, masks, skipped, maximize):
    """torch.optim.AdamW(fused=True) and then the mask, step by step."""
    params = [torch.nn.Parameter(weight.clone()) for weight in weights]
    betas = SETTINGS["beta1"], SETTINGS["beta2"]
    others = {name: SETTINGS[name] for name in ("lr", "eps", "weight_decay")}
    optimizer = torch.optim.AdamW(params, betas=betas, maximize=maximize, fused=True, **others)
    for index, row in enumerate(grads):
        for param, grad in zip(params, row, strict=True):
            param.grad = grad.clone()
        if index != skipped:
            optimizer.step()
        for param, mask in zip(params, masks, strict=True):
            param.data[~mask] = 0.0
    states = [optimizer.state[param] for param in params]
    return [[p.detach() for p in params], *([s[key] for s in states] for key in ("exp_avg", "exp_avg_sq", "step"))]


def ours(step_, weights, grads, masks, skipped, maximize, packed, scale):
    params, m, v = ([torch.clone(w) if i == 0 else torch.zeros_like(w) for w in weights] for i in range(3))
    device = weights[0].device
    steps = [torch.zeros((), device=device) for _ in weights]
    held = [pack_bits(mask) for mask in masks] if packed else masks
    for index, row in enumerate(grads):
        flag = None if skipped is None else torch.tensor(float(index == skipped), device=device)
        factor = None if scale is None else torch.tensor(scale, device=device)
        scaled = [grad * (scale or 1.0) for grad in row]
        step_(params, scaled, m, v, steps, held, maximize=maximize, grad_scale=factor, found_inf=flag, **SETTINGS)
        if index != skipped:
            assert all(torch.equal(one, other) for one, other in zip(scaled, row, strict=True))
    return params, m, v, steps


def check(step_, dtype, eps, shapes, device):
    cases = ((False, None, False, None), (True, 1, False, 8.0), (True, 0, True, None))
    for packed, skipped, maximize, scale in cases:
        weights, grads, masks = state(dtype, shapes, device)
        expected = reference(weights, grads, masks, skipped, maximize)
        found = ours(step_, weights, grads, masks, skipped, maximize, packed, scale)
        for column, wanted in zip(found, expected, strict=True):
            for one, other in zip(column, wanted, strict=True):
                # of a sum: a unit of its larger terms, which is more than one of a result near 0
                torch.testing.assert_close(one, other, rtol=eps, atol=eps)
        for weight, mask in zip(found[0], masks, strict=True):
            assert not weight[~mask].any()
            assert not weight[~mask].signbit().any()


def test_in_the_interpreter():
    from eff_kernels._triton.optimizer import masked_adamw_triton_

    def in_triton(params, grads, m, v, steps, masks, *, maximize, grad_scale, found_inf, **settings):
        columns = (params, grads, m, v, steps, masks)
        masked_adamw_triton_(*columns, grad_scale, found_inf, *settings.values(), maximize, chunk=2048)

    # the interpreter cuts bfloat16 off instead of rounding it (Triton 3.6 to 3.9)
    for dtype, eps in {torch.float32: 5e-7, torch.float16: 2**-9, torch.bfloat16: 2**-5}.items():
        check(in_triton, dtype, eps, [(53, 41), (16, 32), (0, 3), ()], "cpu")


def test_on_torch():
    check(masked_adamw_, torch.float32, 0.0, [(41, 11), (0, 3), ()], "cpu")


def test_the_operator_is_what_it_says():
    columns = [[torch.rand(3, 5)] for _ in range(4)]
    rest = ([torch.zeros(())], [torch.rand(3, 5) < 0.5], None, torch.zeros(()))
    torch.library.opcheck(masked_adamw_of, (*columns, *rest, *SETTINGS.values(), False))


def kernels():
    from eff_kernels._triton.optimizer import masked_adamw

    types = {"table": "*i64", "owners": "*i64", "like": "*fp32", "mask_like": "*u8"}
    types |= dict.fromkeys(("corrections", "grad_scale", "found_inf"), "*fp32")
    constants = dict.fromkeys(("maximize", "scaled", "skips", "packed", "aligned"), True)
    yield masked_adamw, types, {**constants, "chunk": 1 << 14, "block": 1024}, 8


@pytest.mark.gpu
def test_on_a_gpu():
    for dtype, eps in {torch.float32: 5e-7, torch.float16: 2**-9, torch.bfloat16: 2**-6}.items():
        check(masked_adamw_, dtype, eps, [(4097, 1025), (512, 512), (0, 3), ()], "cuda")
