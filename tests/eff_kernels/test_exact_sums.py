"""Whether a kernel sums 8-bit codes exactly: measured, whatever the processor's flags say."""

import pytest
import torch
import torch.nn.functional as F
from eff_kernels.quantization import integer_linear as product
from eff_kernels.quantization.integer_linear import integer_linear, pack, pack_for_fbgemm, sums_exactly


def linear(codes, weight):
    return integer_linear(codes, 1.0, 128, pack(weight), torch.ones(len(weight)), None)


def convolution(codes, weight):
    geometry, scale = ([1, 1], [0, 0], [1, 1], 1), torch.ones(len(weight))
    packed = torch.ops.onednn.qconv_prepack(weight[..., None, None], scale, 1.0, 128, *geometry, None)
    x = codes[..., None, None].contiguous(memory_format=torch.channels_last)
    zeros = torch.zeros(len(weight), dtype=torch.int32)
    return torch.ops.onednn.qconv2d_pointwise(
        x, 1.0, 128, packed, scale, zeros, None, *geometry, 1.0, 0, torch.float32, "none", [], ""
    ).flatten(1)


def matmul(codes, weight):
    return torch._int_mm((codes.to(torch.int16) - 128).to(torch.int8), weight.t())


def fbgemm(codes, weight):
    packed = pack_for_fbgemm(weight, torch.ones(len(weight)), None)
    x = codes.float() - 128
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(x, 1.0, 128, packed)


PRODUCTS = {"fbgemm": fbgemm, "linear": linear, "convolution": convolution, "matmul": matmul}


@pytest.mark.parametrize("kernel", PRODUCTS)
def test_where_it_is_exact_all_codes_are_and_else_those_within_64(kernel):
    largest = 127 if sums_exactly(kernel) else 64
    generator = torch.Generator().manual_seed(0)
    for rows, inputs, outputs in ((1, 32, 16), (3, 64, 17), (70, 256, 64)):
        codes = torch.randint(0, 2, (rows, inputs), generator=generator) * 255  # the ends
        weight = (torch.randint(0, 2, (outputs, inputs), generator=generator) * 2 - 1) * largest
        codes[0], weight[0] = 255, largest
        exact = F.linear(codes.double() - 128, weight.double())
        found = PRODUCTS[kernel](codes.to(torch.uint8), weight.to(torch.int8))
        assert torch.equal(found.double(), exact)


@pytest.mark.parametrize("kernel", PRODUCTS)
def test_the_processors_flags_are_not_asked(kernel, monkeypatch):
    found = sums_exactly(kernel)
    for claim in (True, False):
        for name in ("vnni", "amx_tile"):
            monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda claim=claim: claim)
        sums_exactly.cache_clear()
        assert sums_exactly(kernel) == found


def test_a_kernel_that_fails_is_not_exact_and_one_that_is_missing_gets_nothing_wrong(monkeypatch):
    def fail(error):
        def probe():
            raise error

        return probe

    for error, told in ((RuntimeError("no engine"), False), (AttributeError("qlinear_prepack"), True)):
        monkeypatch.setitem(product._PROBES, "linear", fail(error))
        sums_exactly.cache_clear()
        assert sums_exactly("linear") == told
    monkeypatch.undo()
    sums_exactly.cache_clear()
