"""The rising floor of kind enhanced: published pairs, the automatic floor, storms, resume."""

import io
import itertools

import numpy as np
import pytest
import torch
from torch.amp import GradScaler

from shared_core.errors import ConfigError
from shared_core.loss_scaling import LossScaleConfig, LossScaler
from shared_core.loss_scaling.floors import AutoFloor, floor_at, parse_floor

INF, NAN = float("inf"), float("nan")
PUBLISHED = ((40_000, 8192.0), (150_000, 32768.0))


class Loop:
    """A parameter, its optimizer and a scaler: steps with chosen gradients and losses."""

    def __init__(self, fused=False, **options):
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.optimizer = torch.optim.AdamW([self.weight], lr=0.01, fused=fused)
        self.scaler = LossScaler(**{"kind": "enhanced", **options})

    def step(self, bad=False, loss=1.0):
        self.scaler.scale(torch.tensor(loss))
        self.weight.grad = torch.tensor([1.0, INF if bad else 2.0]) * self.scaler._scale
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale()


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
        with pytest.raises(ConfigError, match="floor must be auto or pairs of step and floor, both rising"):
            parse_floor(floor)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"kind": "dynamic", "floor": "auto"}, "floor must come with kind=enhanced"),
            ({"floor": "0:65537"}, r"init_scale must be at least the floor of step 0, 65537.0, got 65536.0"),
            ({"floor": "0:8,9:1e39"}, "floor must hold no scale above"),
            ({"floor": "0;8"}, "floor must be auto or pairs"),
            ({"floor_window": 0}, "floor_window must be in"),
            ({"floor_overflows": 0.0}, "floor_overflows must be in"),
            ({"floor_overflows": NAN}, "floor_overflows must be a finite number"),
        ],
    )
    def test_refused_options(self, options, message):
        for make in (LossScaleConfig, LossScaler):
            with pytest.raises(ConfigError, match=message):
                make(**{"kind": "enhanced", **options})

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
        loop = Loop(floor=pairs, growth_interval=3)
        for bad, (scale, applied) in zip(pattern, reference(pattern, pairs, 65536.0, 3), strict=True):
            assert loop.step(bad) == scale
            assert loop.scaler.applied_steps == applied

    def test_overflow_at_the_floor_skips_and_keeps_the_scale(self):
        loop = Loop(floor="0:256", init_scale=512, max_skips=100)
        before = loop.weight.detach().clone()
        assert [loop.step(bad=True) for _ in range(4)] == [256.0] * 4
        assert torch.equal(loop.weight, before)
        assert loop.scaler.skipped_steps == 4
        loop.step()
        assert not torch.equal(loop.weight, before)

    def test_skipped_steps_do_not_bring_the_next_floor_nearer(self):
        loop = Loop(floor="3:4096", init_scale=16.0, max_skips=100)
        for _ in range(10):
            assert loop.step(bad=True) < 4096
        loop.step(), loop.step()
        assert loop.scaler.get_scale() < 4096
        assert loop.step() == 4096.0

    def test_without_a_reached_floor_it_is_dynamic(self):
        pattern = np.random.default_rng(5).random(500) < 0.2
        enhanced, dynamic = Loop(floor="100000:64", growth_interval=4), Loop(kind="dynamic", growth_interval=4)
        assert [enhanced.step(bad) for bad in pattern] == [dynamic.step(bad) for bad in pattern]

    def test_a_scale_below_the_floor_is_refused_and_a_loaded_one_lifted(self):
        loop = Loop(floor="0:64")
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
        loop = Loop(init_scale=65536.0)
        for step in range(200):  # gradients have grown: they overflow above a scale of 128
            scale = loop.scaler.get_scale()
            loop.step(bad=step >= 20 and scale > 128)
        assert loop.scaler.get_scale() == 128.0
        assert loop.scaler.skipped_steps < 50

    @pytest.mark.parametrize("floor", ["auto", "0:8192"])
    def test_a_storm_leaves_the_scale_high(self, floor):
        loop = Loop(floor=floor, max_skips=1000, growth_interval=100)
        loss = itertools.count(1000, -1)
        for _ in range(150):
            loop.step(loss=float(next(loss)))
        for _ in range(200):
            scale = loop.step(bad=True, loss=NAN)
            assert 2.0**-14 <= scale < INF
        for _ in range(100):
            loop.step(loss=float(next(loss)))
        assert loop.scaler.get_scale() >= 2.0**10
        assert torch.isfinite(loop.weight).all()

    def test_it_starts_at_an_eighth_of_the_first_scale(self):
        assert LossScaler(kind="enhanced").lowest_scale == 8192.0
        assert LossScaler(kind="enhanced", init_scale=2.0**-13).lowest_scale == 2.0**-14
        assert LossScaler(kind="dynamic").lowest_scale == 2.0**-14


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("floor", [None, "10:16,40:512"])
def test_resume_at_every_step_is_exact_and_torch_reads_the_state(fused, floor):
    options = {"fused": fused, "floor": floor, "floor_window": 7, "growth_interval": 3, "init_scale": 1024.0}
    rng = np.random.default_rng(0)
    plan = [(bool(bad), float(loss)) for bad, loss in zip(rng.random(80) < 0.15, rng.random(80), strict=True)]
    whole = Loop(**options)
    expected = [whole.step(*item) for item in plan]
    assert len(set(expected)) > 3
    part = Loop(**options)
    for index, item in enumerate(plan):
        buffer = io.BytesIO()
        torch.save([part.scaler.state_dict() or {}, part.optimizer.state_dict()], buffer)
        buffer.seek(0)
        state, optimizer = torch.load(buffer, weights_only=True)
        if index:
            GradScaler("cpu").load_state_dict(state)
            weight, part = part.weight.detach().clone(), Loop(**options)
            part.weight.data.copy_(weight)
            part.optimizer.load_state_dict(optimizer)
            part.scaler.load_state_dict(state)
            part.scaler.load_state_dict(state)
            assert part.scaler.state_dict() == state
        assert part.step(*item) == expected[index], index
    assert torch.equal(part.weight, whole.weight)
    assert part.scaler.state_dict() == whole.scaler.state_dict()
