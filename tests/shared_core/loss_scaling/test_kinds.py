"""Kinds auto and enhanced: the scale that the largest gradient allows, rising floors, storms, resume."""

import copy
import io
import itertools
import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from eff_kernels.loss_scaling import unscale_with_largest_
from loss_scaling_runs import INF, NAN, Loop
from torch.amp import GradScaler

from shared_core.errors import ConfigError
from shared_core.loss_scaling import LossScaler
from shared_core.loss_scaling.config import floor_at, parse_floor
from shared_core.loss_scaling.floors import AutoFloor, largest_exponent

auto_loop = partial(Loop, kind="auto", smoothing=0.0)
floor_loop = partial(Loop, kind="enhanced")
MAX = {"fp16": 65504, "fp8_e5m2": 57344}


def largest_scale(amax, format="fp16", margin=2):
    return 2.0 ** largest_exponent(math.log2(amax), format, margin)


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


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_it_goes_down_at_once_and_up_one_doubling_a_step(fused, unscale):
    loop = auto_loop(fused, unscale)
    assert [loop.step(0.01) for _ in range(6)] == [2.0**k for k in (17, 18, 19, 20, 20, 20)]
    assert loop.step(1.0) == largest_scale(1.0) == 2.0**13
    assert [loop.step(0.25) for _ in range(3)] == [2.0**14, 2.0**15, 2.0**15]
    assert loop.step(0.0) == 2.0**15  # nothing can be told from zeros


def test_it_rises_again_from_a_scale_at_which_everything_is_flushed():
    loop = auto_loop(growth_interval=5)
    loop.step(0.25)
    for _ in range(40):  # a storm
        loop.step(0.25, bad=INF)
    assert loop.scaler.get_scale() < 1
    scales = [loop.step(0.0) for _ in range(60)]  # flushed to zero, all of them
    assert all(later <= 2 * earlier for earlier, later in itertools.pairwise(scales))
    assert scales[-1] == largest_scale(0.25)


def test_zeros_from_the_start_raise_no_scale_above_the_first():
    loop = auto_loop(init_scale=1024.0)
    for _ in range(3):
        loop.step(1.0, bad=INF)
    assert [loop.step(0.0) for _ in range(5)] == [256.0, 512.0, 1024.0, 1024.0, 1024.0]


def test_the_smoothed_peak_rises_at_once_and_decays_as_written():
    loop, rng = auto_loop(smoothing=0.8), np.random.default_rng(1)
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
    loop = auto_loop(init_scale=1000.0)
    assert [loop.step(1e-3) for _ in range(3)] == [1024.0, 2048.0, 4096.0]


def test_an_overflow_skips_and_lowers_and_the_margin_learns():
    # activation gradients overflow above 2**12 although the parameters' would allow 2**20
    loop = auto_loop(growth_interval=50)
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
    loop = auto_loop(max_skips=1000, growth_interval=60)
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
    loop = auto_loop()
    for _ in range(150):
        scale = loop.step(1e-30)
    assert scale == 2.0 ** math.floor(math.log2(65504 / 4 / np.float32(1e-30)))
    loop = auto_loop(init_scale=2.0**120)
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


PUBLISHED = ((40_000, 8192.0), (150_000, 32768.0))


class TestText:
    def test_the_published_pairs(self):
        assert parse_floor("40000:8192,150000:32768") == parse_floor(PUBLISHED) == PUBLISHED
        assert parse_floor(" 4e4 : 8192 , 150000 : 32768 ") == PUBLISHED
        assert parse_floor("auto") == "auto"
        steps = (0, 39_999, 40_000, 149_999, 150_000, 10**9)
        assert [floor_at(PUBLISHED, step) for step in steps] == [0, 0, 8192, 8192, 32768, 32768]

    @pytest.mark.parametrize(
        "floor",
        ["", "8192", "5:", "a:8", "1:2:3", "5:8,5:9", "9:8,5:16", "5:16,9:8", "-1:8", "0:0", "0:nan", "0:inf", "1.5:8",
         "nan:8", "inf:8", (), ((1,),), 7],
    )  # fmt: skip
    def test_refusals(self, floor):
        with pytest.raises(ConfigError, match="floor must be auto or pairs of step and floor"):
            parse_floor(floor)

    def test_python_takes_pairs(self):
        pairs = [(2, 64), (5, 128.5)]
        assert [LossScaler(kind="enhanced", floor=pairs)._floor.at(step) for step in (1, 2, 5)] == [0.0, 64.0, 128.5]


def reference(pattern, pairs, scale, interval):
    """Dynamic scaling in float32 whose scale is lifted to the floor of the applied steps so far."""
    good = applied = 0
    for bad in pattern:
        if bad:
            scale, good = np.float32(scale) * np.float32(0.5), 0
        else:
            applied, good = applied + 1, good + 1
            if good == interval:
                scale, good = scale * 2, 0
        floor = max([2.0**-14, *(value for step, value in pairs if step <= applied)])
        scale = max(float(scale), floor)
        yield scale, applied


class TestPairs:
    @pytest.mark.parametrize("seed", range(4))
    def test_the_trace_is_the_papers(self, seed):
        pattern = np.random.default_rng(seed).random(600) < 0.3
        pairs = ((20, 64.0), (100, 1024.0), (300, 32768.0))
        loop = floor_loop(floor=pairs, growth_interval=3)
        for bad, (scale, applied) in zip(pattern, reference(pattern, pairs, 65536.0, 3), strict=True):
            assert loop.step(bad=bad) == scale
            assert loop.scaler.applied_steps == applied

    def test_overflow_at_the_floor_skips_and_keeps_the_scale(self):
        loop = floor_loop(floor="0:256", init_scale=512, max_skips=100)
        before = loop.weight.detach().clone()
        assert [loop.step(bad=True) for _ in range(4)] == [256.0] * 4
        assert torch.equal(loop.weight, before)
        assert loop.scaler.skipped_steps == 4
        loop.step()
        assert not torch.equal(loop.weight, before)

    def test_skipped_steps_do_not_bring_the_next_floor_nearer(self):
        loop = floor_loop(floor="3:4096", init_scale=16.0, max_skips=100)
        for _ in range(10):
            assert loop.step(bad=True) < 4096
        loop.step(), loop.step()
        assert loop.scaler.get_scale() < 4096
        assert loop.step() == 4096.0

    def test_without_a_reached_floor_it_is_dynamic(self):
        pattern = np.random.default_rng(5).random(500) < 0.2
        enhanced, dynamic = (
            floor_loop(floor="100000:64", growth_interval=4),
            floor_loop(kind="dynamic", growth_interval=4),
        )
        assert [enhanced.step(bad=bad) for bad in pattern] == [dynamic.step(bad=bad) for bad in pattern]

    def test_a_scale_below_the_floor_is_refused_and_a_loaded_one_lifted(self):
        loop = floor_loop(floor="0:64")
        loop.step()
        with pytest.raises(ConfigError, match=r"new_scale must be finite and at least min_scale, 64.0 now, got 32"):
            loop.scaler.update(32.0)
        loop.scaler.load_state_dict({**GradScaler("cpu").state_dict(), "scale": 2.0})
        assert loop.scaler.get_scale() == 64.0


def auto(**options):
    return AutoFloor(**{"start": 64.0, "lowest": 1.0, "window": 4, "overflows": 0.5, "patience": 3, **options})


def run_window(floor, loss, skips=0, scale=2.0**20, steps=4):
    for step in range(steps):
        floor.watch(torch.tensor(loss))
        floor.end_step(skipped=step < skips, in_a_row=step + 1 if step < skips else 0, scale=scale)
    return floor.at(0)


class TestAutomatic:
    def test_it_rises_with_good_windows_and_falls_with_others(self):
        floor = auto()
        seen = [run_window(floor, loss) for loss in (5.0, 4.0, 3.0, 3.0, 3.5, 3.4)]
        assert seen == [64.0, 128.0, 256.0, 128.0, 64.0, 128.0]

    def test_a_share_of_overflows_makes_a_window_bad_however_good_its_loss(self):
        floor = auto()
        assert [run_window(floor, loss, skips) for loss, skips in ((5, 0), (4, 1), (3, 2), (2, 1))] == [
            64.0, 128.0, 64.0, 128.0,
        ]  # fmt: skip
        assert run_window(auto(), 5.0, skips=2) == 32.0  # the first window too

    def test_it_never_passes_the_scale_and_never_the_lowest(self):
        floor = auto(lowest=16.0)
        assert [run_window(floor, loss, scale=200.0) for loss in (9, 8, 7, 6)] == [64.0, 128.0, 200.0, 200.0]
        assert [run_window(floor, loss, scale=4096.0) for loss in (9, 9, 9, 9, 9)][-1] == 16.0

    def test_losses_are_averaged_over_the_window_and_bad_ones_left_out(self):
        floor = auto(window=2)
        for losses, expected in (((1.0, 3.0), 64.0), ((3.9, NAN), 32.0), ((INF, 3.8), 64.0), ((0.0, 3.7), 128.0)):
            for loss in losses:
                floor.watch(torch.tensor([loss]))
                floor.end_step(skipped=False, in_a_row=0, scale=1e6)
            assert floor.at(0) == expected
        floor.watch([torch.ones(())])  # not one loss
        floor.watch(torch.ones(2))
        assert floor.state_dict()["sums"] is None

    def test_a_floor_that_no_longer_fits_falls_before_the_run_ends(self):
        loop = floor_loop(init_scale=65536.0)
        for step in range(200):  # gradients have grown: they overflow above a scale of 128
            scale = loop.scaler.get_scale()
            loop.step(bad=step >= 20 and scale > 128)
        assert loop.scaler.get_scale() == 128.0
        assert loop.scaler.skipped_steps < 50

    def test_it_starts_at_an_eighth_of_the_first_scale(self):
        assert LossScaler(kind="enhanced").lowest_scale == 8192.0
        assert LossScaler(kind="enhanced", init_scale=2.0**-13).lowest_scale == 2.0**-14
        assert LossScaler(kind="dynamic").lowest_scale == 2.0**-14


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"kind": "auto", "smoothing": 0.7, "growth_interval": 5},
        {"kind": "enhanced", "floor_window": 7, "growth_interval": 3, "init_scale": 1024.0},
        {"kind": "enhanced", "floor": "10:16,40:512", "growth_interval": 3, "init_scale": 1024.0},
    ],
)
def test_resume_at_every_step_is_exact_and_torch_reads_the_state(fused, options):
    rng = np.random.default_rng(0)
    plan = [(2.0 ** rng.normal(-8, 3), rng.random() < 0.15, float(rng.random())) for _ in range(80)]
    whole, part = Loop(fused, **options), Loop(fused, **options)
    expected = [whole.step(*item) for item in plan]
    assert len(set(expected)) > 3
    assert part.step(*plan[0]) == expected[0]
    for item, scale in zip(plan[1:], expected[1:], strict=True):
        buffer = io.BytesIO()
        torch.save([part.scaler.state_dict(), part.optimizer.state_dict()], buffer)
        buffer.seek(0)
        state, optimizer = torch.load(buffer, weights_only=True)
        GradScaler("cpu").load_state_dict(state)
        weights, part = [w.detach().clone() for w in (part.weight, part.other)], Loop(fused, **options)
        part.weight.data, part.other.data = weights
        part.optimizer.load_state_dict(optimizer)
        part.scaler.load_state_dict(state)
        part.scaler.load_state_dict(state)
        assert part.scaler.state_dict() == state
        assert part.step(*item) == scale
    assert torch.equal(part.weight, whole.weight)
    assert copy.deepcopy(part.scaler).state_dict() == whole.scaler.state_dict()


def test_an_automatic_scaler_goes_on_from_torchs_state():
    fresh = LossScaler(kind="auto")
    fresh.load_state_dict({**GradScaler("cpu").state_dict(), "scale": 32.0})
    assert fresh.get_scale() == 32.0
