"""Counts and unscaling in Triton: equal to the torch path bit for bit, in the interpreter and on a GPU."""

import pytest
import torch
from eff_kernels import loss_scaling as plain
from eff_kernels.loss_scaling import unscale_and_scan_, unscale_with_largest_

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch and with the dev extra on Linux")

INF, NAN = float("inf"), float("nan")
LAYOUTS = {torch.float16: (10, 5), torch.bfloat16: (7, 8), torch.float32: (23, 8)}  # bits of mantissa and exponent


def tensors(count, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(count, generator=generator) * torch.exp2(torch.randn(count, generator=generator) * 20)
    wide[::7] = 0
    special = torch.tensor([0.0, -0.0, 2.0**-14, 2.0**-24, 65504.0, 1e-45, -1e-40, 3.4e38, INF, -INF, NAN, 1.5])
    ragged = [special, wide[: count // 2 * 2].view(2, -1), torch.zeros(0, 3), torch.tensor(-0.3)]
    return [tensor.to(device, dtype) for tensor in ragged for dtype in (*LAYOUTS, torch.float64)]


def same(found, expected):
    return all(torch.equal(ours.cpu(), theirs.cpu()) for ours, theirs in zip(found, expected, strict=True))


def test_counts_in_the_interpreter():
    from eff_kernels._triton.loss_scaling import count_exponents_triton, scan_triton_

    mixed = tensors(361)
    for bound in map(plain.bits_of_threshold, (2.0**-14, 7.7e-12)):
        assert same(scan_triton_(mixed, bound, warps=1, tiles=2, rounds=1), plain.count_magnitudes_of(mixed, bound))
    for tensor in mixed:
        if tensor.dtype in LAYOUTS:
            found = count_exponents_triton(tensor, *LAYOUTS[tensor.dtype], block=128, tiles=2)
            assert torch.equal(found, plain.count_exponents(tensor).counts)


@pytest.mark.parametrize("finite", [True, False])
def test_unscaling_in_the_interpreter(finite):
    from eff_kernels._triton.loss_scaling import unscale_triton_

    factor = torch.tensor([2.0**-3])  # no product is rounded: the interpreter cuts bfloat16 off
    for dtype in LAYOUTS:
        grads = [t.nan_to_num(0, 1, -1) if finite else t for t in tensors(101) if t.dtype == dtype]
        ours, theirs = ([grad.clone() for grad in grads] for _ in range(2))
        flag, expected_flag = torch.zeros(1), torch.zeros(1)
        found = unscale_triton_(ours, flag, factor, block=128, tiles=2)
        assert torch.equal(found, unscale_and_scan_(theirs, expected_flag, factor))
        assert flag.item() == expected_flag.item() == (not finite)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_unscaling_is_torchs_and_tells_of_what_came():
    grads = [torch.tensor([0.0, -12.0, 4e-6]), torch.zeros(0)]
    assert unscale_with_largest_(grads, torch.zeros(1), torch.tensor([0.25])).item() == 12.0
    assert grads[0].tolist() == torch.tensor([0.0, -3.0, 1e-6]).tolist()


@pytest.mark.gpu
def test_on_a_gpu():
    mixed, there = tensors(1_000_001), tensors(1_000_001, "cuda")
    for threshold in (2.0**-14, 7.7e-12):
        assert same(plain.count_magnitudes(there, threshold), plain.count_magnitudes(mixed, threshold))
    for ours, theirs in zip(there, mixed, strict=True):
        assert torch.equal(plain.count_exponents(ours).counts.cpu(), plain.count_exponents(theirs).counts)
    for dtype in LAYOUTS:
        ours, theirs = ([t for t in each if t.dtype == dtype] for each in (there, mixed))
        flag = torch.zeros(1)
        expected = unscale_with_largest_(theirs, flag, torch.tensor([1 / 3]))
        flag_there = torch.zeros(1, device="cuda")
        with torch.cuda.device(0):
            torch.cuda.set_sync_debug_mode("error")
            try:
                found = unscale_with_largest_(ours, flag_there, torch.full((1,), 1 / 3, device="cuda"))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(found.cpu(), expected)
        assert flag.item() == flag_there.item() == 1.0
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0, equal_nan=True)
