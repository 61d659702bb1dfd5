"""Masks applied and thresholds found in Triton: against torch's product of bits and a full sort."""

import pytest
import torch
from eff_kernels import masks as digits
from eff_kernels.pruning import apply_mask_, kth_smallest, kth_smallest_there, rank_below_

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch and with the dev extra on Linux")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def weights(shapes, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes for dtype in DTYPES]
    for weight in found[: len(DTYPES)]:
        weight.view(-1)[:4] = torch.tensor([float("nan"), -float("inf"), -0.0, -1.0])
    masks = [(torch.rand(weight.shape, generator=generator) < 0.5).to(device) for weight in found]
    masks[0].view(-1)[:4] = False
    return found, masks


def test_masks_in_the_interpreter():
    from eff_kernels._triton.pruning import apply_mask_triton_

    before, masks = weights([(53, 41), (16, 16), (0, 3), ()])
    expected = [weight.clone() for weight in before]
    apply_mask_(expected, masks)
    bits = [weight.view(BITS[weight.element_size()]) for weight in before]
    apply_mask_triton_(bits, masks, chunk=2048)
    for one, wanted in zip(bits, expected, strict=True):
        assert torch.equal(one, wanted.view(one.dtype))


def spread():
    generator = torch.Generator().manual_seed(1)
    ties = torch.randint(-2, 3, (41, 7), generator=generator).half()
    return [
        torch.randn(300, generator=generator),
        ties,
        -torch.zeros(5),
        torch.tensor([-float("inf"), 1e-45]).bfloat16(),
    ]


def test_thresholds_in_the_interpreter(monkeypatch):
    from eff_kernels._triton.pruning import count_digits_triton_

    scores = spread()
    ordered = torch.cat([score.float().reshape(-1) for score in scores]).sort().values
    ranks = (1, 170, len(ordered))
    cpu = torch.device("cpu")
    plain = [int(digits.kth_smallest_key(scores, rank, cpu)) for rank in ranks]

    def in_triton(counts, values, prefix, shift):
        count_digits_triton_(counts, values, prefix, shift, block=128, tiles=2)

    monkeypatch.setattr(digits, "count_digits_", in_triton)
    for rank, expected in zip(ranks, plain, strict=True):
        key = int(digits.kth_smallest_key(scores, rank, cpu))
        assert key == expected
        bits = torch.tensor(key - (1 << 31), dtype=torch.int32)
        assert (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32) == ordered[rank - 1]


@pytest.mark.parametrize("rank", [1, 170, 480, 556, 593, 594])
def test_masks_of_the_largest_in_the_interpreter(rank):
    from eff_kernels._triton.pruning import mark_largest_triton_

    scores = [*spread(), torch.zeros(0)]
    masks, expected = ([torch.empty(score.shape, dtype=torch.bool) for score in scores] for _ in range(2))
    told = mark_largest_triton_(masks, scores, rank, warps=1, each=8, tiles=1, rounds=1 + rank % 2)
    assert torch.equal(told, digits.mark_largest_(expected, scores, rank))
    assert all(map(torch.equal, masks, expected))
    order = torch.cat([score.float().reshape(-1) for score in scores]).flip(0).sort(stable=True).indices
    kept = torch.cat([mask.reshape(-1) for mask in masks])
    assert set((~kept).nonzero().view(-1).tolist()) == set((len(kept) - 1 - order[:rank]).tolist())


@pytest.mark.slow
def test_a_score_that_is_nan_is_told():
    from eff_kernels._triton.pruning import mark_largest_triton_

    for sign in (1, -1):
        scores = [torch.ones(3), torch.full((5,), sign * float("nan"))]
        masks = [torch.empty(score.shape, dtype=torch.bool) for score in scores]
        for mark in (mark_largest_triton_, digits.mark_largest_):
            assert mark(masks, scores, 2)[:, 1].tolist() == [0, 1]


@pytest.mark.gpu
def test_on_a_gpu():
    shapes = [(4097, 1025), (512, 512), (0, 3), ()]
    before, masks = weights(shapes)
    expected = [weight.clone() for weight in before]
    apply_mask_(expected, masks)
    found, held = [weight.cuda() for weight in before], [mask.cuda() for mask in masks]
    torch.cuda.set_sync_debug_mode("error")
    try:
        apply_mask_(found, held)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, wanted in zip(found, expected, strict=True):
        bits = BITS[one.element_size()]
        assert torch.equal(one.cpu().view(bits), wanted.view(bits))
    scores = [torch.randn(3_000_000).abs(), *spread()]
    there = [score.cuda() for score in scores]
    for rank in (1, 1_000_000, 2_999_999):
        assert float(kth_smallest_there(there, rank)) == kth_smallest(there, rank) == kth_smallest(scores, rank)
    for rank in (1, 1_000_000, 3_000_100, 3_000_594):
        expected = [torch.empty(score.shape, dtype=torch.bool) for score in scores]
        told = digits.mark_largest_(expected, scores, rank)
        found, told_there = digits.marked_largest(there, rank)
        assert torch.equal(told_there.cpu(), told)
        assert all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))
    keep = torch.rand(scores[0].shape) < 0.5
    assert torch.equal(rank_below_(there[0], keep.cuda()).cpu(), rank_below_(scores[0], keep))
