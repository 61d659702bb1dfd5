"""N of every M, and masks as bits, in Triton: against a stable sort in float64 and numpy's packbits."""

import math

import numpy as np
import pytest
import torch
from eff_kernels.masks import n_of_m_mask, pack_bits, unpack_bits

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch and with the dev extra on Linux")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# shape, axis, n, m: a last axis, one before others, a first one, a group of one, a whole row
GROUPS = (((11, 204), 1, 2, 4), ((9, 16), 1, 1, 4), ((3, 8, 5), 1, 2, 4), ((8, 6), 0, 2, 4), ((5, 12), 1, 5, 12),
          ((4, 3), 1, 1, 1), ((0, 8), 1, 2, 4), ((5, 40), 1, 4, 8), ((7, 48), 1, 8, 16), ((3, 16), 1, 5, 16),
          )  # fmt: skip


def scores(shape, dtype):
    generator = torch.Generator().manual_seed(len(shape))
    values = torch.randint(-3, 4, shape, generator=generator).double()
    values[values == 3] = math.inf
    values[(values == 0) & (torch.rand(shape, generator=generator) < 0.5)] = -0.0
    return values.to(dtype)


def reference(values, axis, n, m):
    last = np.moveaxis(values.double().cpu().numpy(), axis, -1)
    groups = last.reshape(-1, m)
    kept = np.zeros(groups.shape, bool)
    np.put_along_axis(kept, np.argsort(-groups, 1, kind="stable")[:, :n], True, 1)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(kept.reshape(last.shape), -1, axis)))


def test_n_of_m_in_the_interpreter():
    from eff_kernels._triton.masks import rank_groups_triton

    for index, (shape, axis, n, m) in enumerate(GROUPS):
        for dtype in DTYPES if (n, m) == (8, 16) or index in (0, 2) else DTYPES[index % 4 :][:1]:
            values = scores(shape, dtype)
            mask, has_nan = rank_groups_triton(values, n, m, math.prod(shape[axis + 1 :]), block=1024)
            assert torch.equal(mask, reference(values, axis, n, m)), (shape, axis, dtype)
            assert torch.equal(mask, n_of_m_mask(values, n, m, axis))
            assert not has_nan
            found, _ = rank_groups_triton(values, n, m, math.prod(shape[axis + 1 :]), True, block=1024)
            assert torch.equal(found, reference(values.abs(), axis, n, m))
    for inner in (1, 3):
        values = torch.zeros(2, 4, inner)
        values[1, 3] = math.nan
        for magnitudes, dtype in ((False, torch.float32), *((True, dtype) for dtype in DTYPES)):
            assert rank_groups_triton(-values.to(dtype), 2, 4, inner, magnitudes, block=8)[1]
        with pytest.raises(ValueError, match="must not be NaN"):
            n_of_m_mask(values, 2, 4, 1)


@pytest.mark.parametrize("shape", [(41, 401), (8,), (67,), (), (0, 3)])
def test_bits_in_the_interpreter(shape):
    from eff_kernels._triton.masks import pack_bits_triton, unpack_bits_triton

    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
    if len(shape) == 1:  # from an odd address
        mask = torch.cat((mask, mask))[-shape[0] :]
    packed = pack_bits_triton(mask, block=256, tiles=2, warps=1)
    assert packed.tolist() == np.packbits(mask.numpy().reshape(-1)).tolist() == pack_bits(mask).tolist()
    for unpacked in (unpack_bits_triton(packed, shape, block=256), unpack_bits(packed, shape)):
        assert unpacked.dtype == torch.bool
        assert torch.equal(unpacked, mask)


@pytest.mark.gpu
def test_on_a_gpu():
    for shape, axis, n, m in (*GROUPS, ((4096, 4100), 1, 2, 4), ((64, 128, 3, 3), 1, 4, 16)):
        for dtype in DTYPES:
            values = scores(shape, dtype).cuda()
            assert torch.equal(n_of_m_mask(values, n, m, axis).cpu(), reference(values, axis, n, m))
    with pytest.raises(ValueError, match="must not be NaN"):
        n_of_m_mask(torch.full((1, 4), math.nan, device="cuda"), 2, 4, 1)
    for shape in ((4097, 1025), (0,), (9,)):
        mask = torch.rand(shape, device="cuda") < 0.5
        assert torch.equal(pack_bits(mask.view(-1)[1:]).cpu(), pack_bits(mask.view(-1)[1:].cpu()))
        assert torch.equal(pack_bits(mask).cpu(), pack_bits(mask.cpu()))
        assert torch.equal(unpack_bits(pack_bits(mask), shape), mask)
