"""Kind auto: the scale that the largest gradient allows, its margin after overflows, storms, resume, ranks."""

import copy
import io
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from eff_kernels.loss_scaling import unscale_with_largest_
from torch.amp import GradScaler

from shared_core.errors import ConfigError
from shared_core.loss_scaling import LossScaleConfig, LossScaler
from shared_core.loss_scaling.floors import largest_scale

INF, NAN = float("inf"), float("nan")
MAX = {"fp16": 65504, "fp8_e5m2": 57344}


def brute_force(amax, format, margin):
    """The largest power of two, in exact rationals, that keeps amax a margin of whole bits below the maximum."""
    scale = Fraction(2) ** 200
    while Fraction(amax) * scale * 2**margin > MAX[format]:
        scale /= 2
    return float(scale)


@pytest.mark.parametrize("format", ["fp16", "fp8_e5m2"])
@pytest.mark.parametrize("margin", [0, 2, 5])
def test_the_largest_scale_is_that_of_exact_arithmetic(format, margin):
    rng = np.random.default_rng(0)
    random = np.float32(rng.lognormal(0, 12, 300))
    edges = [np.float32(MAX[format] * 2.0**k) for k in (-30, -1, 0, 3)]
    around = [np.nextafter(edge, np.float32(towards)) for edge in edges for towards in (0, INF)]
    for amax in (*random, *edges, *around, 1.0, 2.0**-40):
        assert largest_scale(float(amax), format=format, margin=margin) == brute_force(float(amax), format, margin)


class Loop:
    def __init__(self, fused=False, unscale=False, **options):
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.other = torch.nn.Parameter(torch.zeros(2))
        self.unscale = unscale
        self.optimizer = torch.optim.AdamW([self.weight, self.other], lr=0.01, fused=fused)
        self.scaler = LossScaler(**{"kind": "auto", "smoothing": 0.0, **options})
        self.scaler.scale(torch.ones(()))

    def step(self, amax, bad=0.0):
        self.weight.grad = torch.tensor([amax / 3, -amax, bad]) * self.scaler._scale
        self.other.grad = torch.tensor([amax / 7, 0.0]) * self.scaler._scale
        if self.unscale:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_([self.weight, self.other], 1e-6)  # must not change what is measured
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_it_goes_down_at_once_and_up_one_doubling_a_step(fused, unscale):
    loop = Loop(fused, unscale)
    assert [loop.step(0.01) for _ in range(6)] == [2.0**k for k in (17, 18, 19, 20, 20, 20)]
    assert loop.step(1.0) == largest_scale(1.0) == 2.0**13
    assert [loop.step(0.25) for _ in range(3)] == [2.0**14, 2.0**15, 2.0**15]
    assert loop.step(0.0) == 2.0**15  # nothing can be told from zeros


def test_it_rises_again_from_a_scale_at_which_everything_is_flushed():
    loop = Loop(growth_interval=5)
    loop.step(0.25)
    for _ in range(40):  # a storm
        loop.step(0.25, bad=INF)
    assert loop.scaler.get_scale() < 1
    scales = [loop.step(0.0) for _ in range(60)]  # flushed to zero, all of them
    assert all(later <= 2 * earlier for earlier, later in itertools.pairwise(scales))
    assert scales[-1] == largest_scale(0.25)


def test_zeros_from_the_start_raise_no_scale_above_the_first():
    loop = Loop(init_scale=1024.0)
    for _ in range(3):
        loop.step(1.0, bad=INF)
    assert [loop.step(0.0) for _ in range(5)] == [256.0, 512.0, 1024.0, 1024.0, 1024.0]


def test_the_smoothed_peak_rises_at_once_and_decays_as_written():
    loop, rng = Loop(smoothing=0.8), np.random.default_rng(1)
    peak = exponent = None
    scale = 65536.0
    for log2 in rng.normal(-8, 2, 300):
        amax = float(np.float32(2.0**log2))
        now = math.log2(amax)
        peak = now if peak is None else max(now, 0.8 * peak + 0.2 * now)
        exponent = min(math.floor(math.log2(65504) - 2 - peak), round(math.log2(scale)) + 1)
        scale = loop.step(amax)
        assert scale == 2.0**exponent
        assert amax * scale * 4 <= 65504
    assert len({loop.step(float(2.0**log2)) for log2 in (-9, -7, -8)}) <= 2  # it does not follow every wiggle


def test_a_scale_that_is_no_power_of_two_becomes_one():
    loop = Loop(init_scale=1000.0)
    assert [loop.step(1e-3) for _ in range(3)] == [1024.0, 2048.0, 4096.0]


def test_an_overflow_skips_and_lowers_and_the_margin_learns():
    # activation gradients overflow above 2**12 although the parameters' would allow 2**20
    loop = Loop(growth_interval=50)
    skips, scales = [], []
    for _ in range(400):
        bad = INF if loop.scaler.get_scale() > 2**12 else 0.0
        skips.append(bool(bad))
        scales.append(loop.step(0.01, bad))
    assert scales[-1] in (2.0**12, 2.0**11)
    assert sum(skips) <= 5 + 400 // 50 + 1  # five to come down, then one an interval at most
    assert min(scales[10:]) >= 2.0**11


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_storm_is_survived_and_the_scale_comes_back(bad):
    loop = Loop(max_skips=1000, growth_interval=60)
    for _ in range(20):
        loop.step(0.01)
    before = loop.weight.detach().clone()
    for _ in range(200):
        assert 2.0**-14 <= loop.step(0.01, bad) < INF
    assert loop.scaler.get_scale() == 2.0**-14
    assert torch.equal(loop.weight, before)
    scales = [loop.step(0.01) for _ in range(40)]
    assert scales[:3] == [2.0**-13, 2.0**-12, 2.0**-11]
    assert scales[-1] == 2.0**19  # one bit below 2**20 until growth_interval steps were good
    assert [loop.step(0.01) for _ in range(25)][-1] == 2.0**20
    assert torch.isfinite(loop.weight).all()


def test_the_scale_never_leaves_float32():
    loop = Loop()
    for _ in range(150):
        scale = loop.step(1e-30)
    assert scale == 2.0 ** math.floor(math.log2(65504 / 4 / np.float32(1e-30)))
    loop = Loop(init_scale=2.0**120)
    tiny = 2.0**-140  # the scaled gradient is a float32, the unscaled one a subnormal
    assert max(loop.step(tiny) for _ in range(30)) == 2.0**127


def test_several_optimizers_the_largest_gradient_counts_also_of_one_that_did_not_step():
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    scaler = LossScaler(kind="auto", smoothing=0.0)
    scaler.scale(torch.ones(()))
    for second_steps in (True, False):
        for weight, amax in zip(weights, (1e-4, 1.0), strict=True):
            weight.grad = torch.full((1,), amax) * scaler._scale
        scaler.step(optimizers[0])
        scaler.step(optimizers[1]) if second_steps else scaler.unscale_(optimizers[1])
        scaler.update()
        assert scaler.get_scale() == 2.0**13
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()


def test_sparse_and_missing_and_empty_gradients():
    table, unused = torch.nn.Embedding(5, 2, sparse=True), torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([table.weight, unused, torch.nn.Parameter(torch.zeros(0))], lr=0.1)
    scaler = LossScaler(kind="auto")
    scaler.scale(table(torch.tensor([1, 1, 3])).sum()).backward()
    optimizer.param_groups[0]["params"][2].grad = torch.zeros(0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**13
    for grad in (torch.tensor([1.0, NAN]), torch.zeros(0)):
        assert unscale_with_largest_([grad], torch.zeros(1), torch.ones(1)).item() == 0.0


@pytest.mark.parametrize("fused", [False, True])
def test_resume_at_every_step_is_exact_and_torch_reads_the_state(fused):
    rng = np.random.default_rng(0)
    options = {"smoothing": 0.7, "growth_interval": 5, "fused": fused}
    plan = [(float(2.0 ** rng.normal(-8, 3)), INF if rng.random() < 0.15 else 0.0) for _ in range(60)]
    whole = Loop(**options)
    expected = [whole.step(*item) for item in plan]
    part = Loop(**options)
    for index, item in enumerate(plan):
        buffer = io.BytesIO()
        torch.save([part.scaler.state_dict(), part.weight.detach(), part.optimizer.state_dict()], buffer)
        buffer.seek(0)
        state, weight, optimizer = torch.load(buffer, weights_only=True)
        GradScaler("cpu").load_state_dict(state)
        part = Loop(**options)
        part.weight.data.copy_(weight)
        part.optimizer.load_state_dict(optimizer)
        part.scaler.load_state_dict(state)
        assert part.scaler.state_dict() == state
        assert part.step(*item) == expected[index]
    assert torch.equal(part.weight, whole.weight)
    fresh = LossScaler(kind="auto")
    fresh.load_state_dict({**GradScaler("cpu").state_dict(), "scale": 32.0})
    assert fresh.get_scale() == 32.0
    assert copy.deepcopy(whole.scaler).state_dict() == whole.scaler.state_dict()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"margin": -1}, "margin must be in"),
        ({"margin": 15}, "margin must be in"),
        ({"smoothing": 1.0}, "smoothing must be in"),
        ({"smoothing": NAN}, "smoothing must be a finite number"),
        ({"format": "bf16"}, "format must be one of fp16, fp8_e5m2"),
        ({"floor": "auto"}, "floor must come with kind=enhanced"),
    ],
)
def test_refusals(options, message):
    for make in (LossScaleConfig, LossScaler):
        with pytest.raises(ConfigError, match=message):
            make(**{"kind": "auto", **options})
