"""MX and NVFP4 rounding in Triton against torchao and `shared_core.numerics`, bit for bit."""

import itertools

import pytest
import torch
from torch import inf, nan

from shared_core.numerics import block_formats
from shared_core.numerics.block_formats import mx_round_to, nvfp4_round_to

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch and with the dev extra on Linux")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ELEMENTS = ("fp4_e2m1", "fp8_e4m3", "fp8_e5m2")


def values(shape, dtype, low=-8, high=8):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.randint(low, high, (*shape[:-1], 1), generator=generator).exp2()
    x[..., 0, :32] = 0.0
    return x.to(dtype)


def same_bits(a, b):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    a, b = (x.cpu().contiguous() for x in (a, b))
    codes = torch.int32 if a.dtype == torch.float32 else torch.int16
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a.nan_to_num(1.0).view(codes), b.nan_to_num(1.0).view(codes))


@pytest.fixture
def in_triton(monkeypatch):
    """Calls with the CUDA branch taken, by the interpreter."""

    def call(function, *args, **options):
        with monkeypatch.context() as here:
            here.setattr(block_formats, "on_eager_cuda", lambda x: True)
            return function(*args, **options)

    return call


def test_mx(in_triton):
    for element, dtype in itertools.product(ELEMENTS, DTYPES):
        x = values((2, 9, 401), dtype)
        x[1, 1, 40], x[1, 2, 3], x[0, 3, 400] = inf, nan, -inf
        for group_size, of in ((32, x), (8, x[0, 1:4].t())):
            options = {"element": element, "group_size": group_size}
            same_bits(in_triton(mx_round_to, of, **options), mx_round_to(of, **options))
        # subnormal values and scales, and the largest there are
        x = values((30, 32), torch.float32, -149, 126)
        same_bits(in_triton(mx_round_to, x, element), mx_round_to(x, element))


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_mx_is_torchaos(dtype, in_triton):
    MXTensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor").MXTensor
    x = torch.cat([torch.linspace(-8, 8, 2048).view(-1, 64), values((20, 64), torch.float32)[1:]]).to(dtype)
    for element, kind in zip(ELEMENTS, (torch.float4_e2m1fn_x2, torch.float8_e4m3fn, torch.float8_e5m2), strict=True):
        same_bits(in_triton(mx_round_to, x, element), MXTensor.to_mx(x, kind, 32).dequantize(dtype))


def test_nvfp4(in_triton):
    for dtype in DTYPES[:2]:
        x = values((2, 9, 401), dtype)
        for scale, out in ((None, None), (None, dtype), (1 / 6, None), (1e-3, dtype)):
            options = {"per_tensor_scale": None if scale is None else torch.tensor(scale), "dtype": out}
            same_bits(in_triton(nvfp4_round_to, x, **options), nvfp4_round_to(x, **options))
        for of in (x, x * 0, torch.full((1, 16), 2688.0, dtype=dtype)):  # nothing, and a power of two already
            options = {"per_tensor_scale": None, "binary": True}
            same_bits(in_triton(nvfp4_round_to, of, **options), nvfp4_round_to(of, **options))
    x = x[0, 1:4].t()
    for scale in (1e-38, 3e38, inf):
        options = {"per_tensor_scale": torch.tensor(scale)}
        same_bits(in_triton(nvfp4_round_to, x, **options), nvfp4_round_to(x, **options))
    x[40, 1], x[400, 0] = inf, nan
    for scale, binary in ((None, False), (None, True), (torch.tensor(0.5), False)):
        options = {"per_tensor_scale": scale, "binary": binary}
        same_bits(in_triton(nvfp4_round_to, x, **options), nvfp4_round_to(x, **options))


def test_nvfp4_is_torchaos(in_triton):
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = torch.cat([torch.linspace(-8, 8, 2048).view(-1, 64), values((20, 64), torch.float32)[1:]])
    for scale in (nvfp4.per_tensor_amax_to_scale(x.abs().max()), torch.tensor(0.01)):
        theirs = nvfp4.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(torch.float32)
        same_bits(in_triton(nvfp4_round_to, x, per_tensor_scale=scale), theirs)


def test_the_operators_are_what_they_say():
    from eff_kernels.rounding import mx_round, nvfp4_round

    x = values((3, 40), torch.float32)
    torch.library.opcheck(mx_round, (x, "fp8_e4m3", 32))
    for scale in (None, torch.tensor(1.0)):
        torch.library.opcheck(nvfp4_round, (x, scale, torch.bfloat16), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
def test_on_a_gpu():
    for dtype in DTYPES:
        x = values((2049, 4100), dtype)
        for element in ELEMENTS:
            same_bits(mx_round_to(x.cuda(), element), mx_round_to(x, element))
        for scale in (None, torch.tensor(0.01)):
            ours = nvfp4_round_to(x.cuda(), per_tensor_scale=None if scale is None else scale.cuda())
            same_bits(ours, nvfp4_round_to(x, per_tensor_scale=scale))
