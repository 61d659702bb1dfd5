"""FP8 on a GPU: what multiplies, how near to the emulation, how fast beside bf16.

``pytest -m gpu -s tests/shared_core/fp8/test_gpu.py`` prints a line for each recipe.
"""

import sys

import pytest
import torch
from eff_kernels import fp8 as kernels
from torch import nn
from torch.utils.benchmark import Timer

from shared_core.fp8 import Fp8Config
from shared_core.fp8 import native as probe
from shared_core.fp8.layers import convert_layer
from shared_core.fp8.native import BLOCKS
from shared_core.fp8.scaling import AmaxBank, NonFiniteWatch

pytestmark = pytest.mark.gpu

RECIPES = list(BLOCKS)
SIZES = (4096, 4096, 4096)  # tokens, in_features, out_features
PRODUCTS = {"forward", "grad_input", "grad_weight"}


@pytest.fixture
def device():
    assert torch.cuda.is_available(), "these tests need a CUDA device"
    return torch.device("cuda", torch.cuda.current_device())


def is_expected(recipe, device):
    """What torch's ScaledBlas.cpp has kernels for: were one refused here, our call of it would be wrong."""
    capability = torch.cuda.get_device_capability(device)
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if recipe == "blockwise":
        return capability == (9, 0) and cuda >= (12, 9)
    if recipe == "mx":
        return capability[0] == 10 and cuda >= (12, 8)
    return capability >= (8, 9)


def codes_and_scales(recipe, device):
    block, weight_block, rounding = BLOCKS[recipe]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 656, generator=generator) * torch.logspace(-12, 12, 656)
    x[5] = 0.0
    for dtype in {torch.float8_e4m3fn, Fp8Config(recipe=recipe).gradient_dtype}:
        for one in (block, weight_block):
            for matrix in (x, x.bfloat16()):
                moved = matrix.to(device)
                yield kernels.cast(
                    moved, kernels.block_scale(kernels.block_amax(moved, one), dtype, rounding), dtype, one
                )


def casts_are_equal(recipe, device):
    return all(
        torch.equal(a.codes.cpu().view(torch.uint8), b.codes.view(torch.uint8)) and torch.equal(a.scale.cpu(), b.scale)
        for a, b in zip(codes_and_scales(recipe, device), codes_and_scales(recipe, "cpu"), strict=True)
    )


def layer_of(recipe, backend, device, sizes):
    torch.manual_seed(0)
    layer = nn.Linear(sizes[1], sizes[2]).to(device, torch.bfloat16)
    bank = AmaxBank(1, 16) if recipe == "delayed" else None
    if bank is not None:
        bank.move_(device)
    watch = NonFiniteWatch()
    watch.move_(device)
    watch.observing = True
    convert_layer(layer, Fp8Config(recipe=recipe, backend=backend), index=0, bank=bank, watch=watch)
    return layer


def passes(layer, x, gradient):
    x = x.detach().requires_grad_()
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), gradient)]


def milliseconds(statement, **names):
    return 1e3 * Timer(statement, globals=names).blocked_autorange(min_run_time=0.3).median


def look(recipe, device, sizes=SIZES):
    """One line for a recipe, and what the tests want of it."""
    reason = probe.why_not_native(recipe, Fp8Config(recipe=recipe).gradient_dtype, device)
    tokens, k, n = sizes
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, k, generator=generator).to(device, torch.bfloat16)
    gradient = (torch.randn(tokens, n, generator=generator) * 1e-3).to(device, torch.bfloat16)
    layer, emulated = (layer_of(recipe, backend, device, sizes) for backend in ("auto", "emulated"))
    pairs = zip(passes(layer, x, gradient), passes(emulated, x, gradient), strict=True)
    apart = [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs]
    counts = dict(layer.fp8.scaled), dict(layer.fp8.emulated)
    stock = nn.Linear(k, n).to(device, torch.bfloat16)
    times = [milliseconds("f(*given)", f=passes, given=(one, x, gradient)) for one in (layer, stock)]
    forward = [
        milliseconds("f(x)", f=layer.forward, x=x), milliseconds("f(x)", f=stock.forward, x=x)
    ]  # fmt: skip
    equal = casts_are_equal(recipe, device)
    sys.stdout.write(
        f"\n{recipe:>10}: {'NATIVE' if reason is None else f'EMULATED, as {reason}'}\n"
        f"            casts {'equal the CPU bit for bit' if equal else 'DIFFER from the CPU'}; "
        f"apart from the emulation (forward, dX, dW, db): {', '.join(f'{value:.1e}' for value in apart)}\n"
        f"            {'x'.join(map(str, sizes))} in bf16: forward {forward[0]:.3f} ms (F.linear {forward[1]:.3f}), "
        f"with backward {times[0]:.3f} ms ({times[1]:.3f})\n"
    )
    return reason, equal, apart, counts


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_multiplies_how_near_and_how_fast(recipe, device):
    reason, equal, apart, (scaled, emulated) = look(recipe, device)
    assert equal
    assert set(scaled) == (PRODUCTS if reason is None else set())
    assert set(emulated) == (set() if reason is None else PRODUCTS)
    assert max(apart) < 5e-3  # both are rounded to bfloat16, and tensor cores keep about 14 bits of a sum
    if is_expected(recipe, device):
        assert reason is None, reason


@pytest.mark.parametrize("tokens", [1, 21, 130])
@pytest.mark.parametrize("recipe", RECIPES)
def test_odd_sizes_are_the_emulations(recipe, tokens, device):
    sizes = (tokens, 160, 144)
    x = torch.randn(tokens, 160, device=device, dtype=torch.bfloat16)
    gradient = torch.randn(tokens, 144, device=device, dtype=torch.bfloat16)
    results = [passes(layer_of(recipe, backend, device, sizes), x, gradient) for backend in ("auto", "emulated")]
    for found, wanted in zip(*results, strict=True):
        assert (found.float() - wanted.float()).norm() <= 5e-3 * wanted.float().norm()
