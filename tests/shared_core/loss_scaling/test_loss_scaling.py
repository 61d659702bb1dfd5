"""What LossScaler adds to torch's: a floor, a limit, one verdict on all ranks; and the technique."""

import copy
import inspect
import math

import pytest
import torch
from torch.amp import GradScaler

from shared_core.engine.technique import Context
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, TrainingError
from shared_core.loss_scaling import LossScaleConfig, LossScaleError, LossScaler, LossScaling

INF, NAN = float("inf"), float("nan")


def net(fused=False):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)


def one_step(model, optimizer, scaler, bad=0.0):
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, 3)).pow(2).sum()).backward()
    if bad:
        model.bias.grad[0] = bad
    scaler.step(optimizer)
    scaler.update()


class TestFloor:
    def test_ours_holds_at_the_floor_and_recovers(self):
        model, optimizer = net()
        scaler = LossScaler(max_skips=1000, growth_interval=1)
        before = model.weight.detach().clone()
        for step in range(200):
            one_step(model, optimizer, scaler, NAN)
            assert scaler.get_scale() == max(2.0 ** (15 - step), 2.0**-14)
        assert torch.equal(model.weight, before)
        assert scaler.skipped_steps == 200
        one_step(model, optimizer, scaler)
        assert scaler.get_scale() == 2.0**-13
        assert torch.isfinite(model.weight).all()
        assert not torch.equal(model.weight, before)
        assert scaler.scale_range == (2.0**-14, 65536.0)

    @pytest.mark.parametrize("kind", ["dynamic", "static", "enhanced", "auto"])
    @pytest.mark.parametrize("fused", [False, True])
    @pytest.mark.parametrize("bad", [INF, NAN])
    def test_a_storm_of_200_changes_no_weight_and_training_goes_on(self, kind, fused, bad):
        model, optimizer = net(fused)
        scaler = LossScaler(kind=kind, max_skips=1000, growth_interval=10)
        for _ in range(5):
            one_step(model, optimizer, scaler)
        before, state = model.weight.detach().clone(), copy.deepcopy(optimizer.state_dict()["state"])
        for _ in range(200):
            one_step(model, optimizer, scaler, bad)
            assert 2.0**-14 <= scaler.get_scale() <= 65536.0
        assert torch.equal(model.weight, before)
        for number, kept in optimizer.state_dict()["state"].items():
            assert all(torch.equal(value, state[number][name]) for name, value in kept.items())
        for _ in range(250):
            one_step(model, optimizer, scaler)
            assert torch.isfinite(model.weight).all()
        assert scaler.get_scale() >= 2.0**10
        assert (scaler.skipped_steps, scaler.applied_steps) == (200, 255)
        assert not torch.equal(model.weight, before)

    @pytest.mark.parametrize("kind", ["dynamic", "static", "enhanced", "auto"])
    @pytest.mark.parametrize("fused", [False, True])
    def test_fifty_skips_in_a_row_raise(self, kind, fused):
        model, optimizer = net(fused)
        scaler = LossScaler(kind=kind)
        for _ in range(49):
            one_step(model, optimizer, scaler, INF)
        one_step(model, optimizer, scaler)  # a good one in between starts the count again
        for _ in range(49):
            one_step(model, optimizer, scaler, INF)
        with pytest.raises(LossScaleError, match=r"50 steps in a row .*max_skips"):
            one_step(model, optimizer, scaler, INF)
        assert isinstance(LossScaleError(""), TrainingError)
        assert torch.isfinite(model.weight).all()
        assert scaler.state_dict()["skips_in_a_row"] == [50]  # consistent: it can still be saved

    def test_each_optimizer_is_counted_by_itself(self):
        # trainers with several optimizers update after each of them
        (bad_model, bad), (good_model, good) = net(), net()
        scaler = LossScaler(max_skips=3)
        with pytest.raises(LossScaleError, match="3 steps in a row"):
            for _ in range(3):
                one_step(good_model, good, scaler)
                one_step(bad_model, bad, scaler, INF)

    def test_the_count_survives_a_resume(self):
        model, optimizer = net()
        first, second = LossScaler(max_skips=4), LossScaler(max_skips=4)
        for _ in range(3):
            one_step(model, optimizer, first, INF)
        second.load_state_dict(first.state_dict())
        second.load_state_dict(first.state_dict())
        assert second.state_dict() == first.state_dict()
        with pytest.raises(LossScaleError):
            one_step(model, optimizer, second, INF)
        assert second.skipped_steps == 4

    def test_a_dead_state_of_torch_is_lifted_to_the_floor(self):
        state = {**GradScaler("cpu").state_dict(), "scale": 0.0}
        scaler = LossScaler()
        scaler.load_state_dict(state)
        assert scaler.get_scale() == 2.0**-14

    @pytest.mark.parametrize("scale", [NAN, INF, -1.0])
    def test_a_state_that_is_no_scale_is_refused(self, scale):
        with pytest.raises(CheckpointError, match="saved scale must be a finite number"):
            LossScaler().load_state_dict({**GradScaler("cpu").state_dict(), "scale": scale})


def test_static_scale_never_moves_but_overflow_still_skips():
    model, optimizer = net()
    scaler = LossScaler(kind="static", init_scale=8.0, growth_interval=1)
    seen = []
    for bad in (0, INF, 0, NAN, 0):
        before = model.weight.detach().clone()
        one_step(model, optimizer, scaler, bad)
        seen.append(torch.equal(before, model.weight))
        assert scaler.get_scale() == 8.0
    assert seen == [False, True, False, True, False]
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()


@pytest.mark.parametrize("new_scale", [NAN, INF, 0.0, -2.0, 2.0**-15, torch.tensor(NAN)])
def test_new_scale_is_checked(new_scale):
    scaler = LossScaler()
    scaler.scale(torch.ones(()))
    with pytest.raises(ConfigError, match="new_scale must be finite and at least min_scale"):
        scaler.update(new_scale)
    assert scaler.get_scale() == 65536.0
    scaler.update(4)
    assert scaler.get_scale() == 4.0
    scaler.update(torch.tensor(8.0))
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("kind", ["dynamic", "static", "enhanced", "auto"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [0.0, INF])
def test_one_host_read_a_step(kind, fused, bad, monkeypatch):
    model, optimizer = net(fused)
    scaler = LossScaler(kind=kind)
    one_step(model, optimizer, scaler)
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    if bad:
        model.bias.grad[0] = bad
    reads = []
    optimizer.step = lambda: None  # AdamW on CPU reads its own step counters
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy", "cpu"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *a, _n=name, _o=original, **k: reads.append(_n) or _o(self, *a, **k)
        )
    scaler.step(optimizer)
    scaler.update()
    monkeypatch.undo()
    assert reads == ["tolist"]


def test_a_positional_closure_is_refused_and_a_positional_none_is_not():
    model, optimizer = net()
    scaler = LossScaler()
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    with pytest.raises(RuntimeError, match="Closure use"):
        scaler.step(optimizer, lambda: 1.0)
    scaler.step(optimizer, None)


def test_a_kernel_that_wants_the_whole_scaler_gets_unscaled_gradients():
    class Old(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, grad_scaler=None):
            assert grad_scaler is None
            super().step(closure)

    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer, scaler = Old([weight], lr=1.0), LossScaler()
    scaler.scale(weight * 3).backward()
    scaler.step(optimizer)
    assert weight.item() == -3.0


class TestConfig:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"kind": "autom"}, "kind must be one of dynamic, static, enhanced, auto"),
            ({"init_scale": 0}, "init_scale must be in"),
            ({"init_scale": NAN}, "init_scale must be a finite number"),
            ({"init_scale": 1e39}, "init_scale must be in"),
            ({"init_scale": 2.0**-15}, "init_scale must be at least min_scale"),
            ({"growth_factor": 1.0}, "growth_factor must be in"),
            ({"backoff_factor": 1.0}, "backoff_factor must be in"),
            ({"backoff_factor": 0.0}, "backoff_factor must be in"),
            ({"growth_interval": 0}, "growth_interval must be in"),
            ({"growth_interval": 1.5}, "growth_interval must be a whole number"),
            ({"min_scale": 0.0}, "min_scale must be in"),
            ({"max_skips": 0}, "max_skips must be in"),
            ({"kind": "auto", "margin": -1}, "margin must be in"),
            ({"kind": "auto", "margin": 15}, "margin must be in"),
            ({"kind": "auto", "smoothing": 1.0}, "smoothing must be in"),
            ({"kind": "auto", "smoothing": NAN}, "smoothing must be a finite number"),
            ({"kind": "auto", "format": "bf16"}, "format must be one of fp16, fp8_e5m2"),
            ({"kind": "auto", "floor": "auto"}, "floor .*kind=enhanced"),
            ({"floor": "auto"}, "floor .*kind=enhanced"),
            ({"kind": "enhanced", "floor": "0:65537"}, "init_scale must be at least the floor of step 0, 65537.0, got"),
            ({"kind": "enhanced", "floor": "0:8,9:1e39"}, "floor must be auto or pairs .* no floor above"),
            ({"kind": "enhanced", "floor": "0;8"}, "floor must be auto or pairs"),
            ({"kind": "enhanced", "floor_window": 0}, "floor_window must be in"),
            ({"kind": "enhanced", "floor_overflows": 0.0}, "floor_overflows must be in"),
            ({"kind": "enhanced", "floor_overflows": NAN}, "floor_overflows must be a finite number"),
        ],
    )
    def test_refusals(self, options, message):
        for make in (LossScaleConfig, LossScaler):
            with pytest.raises(ConfigError, match=message):
                make(**{"kind": "dynamic", **options})

    @pytest.mark.parametrize("name", ["telemetry_every", "histogram_every"])
    @pytest.mark.parametrize("every", [-1, 0.5, NAN])
    def test_steps_between_measurements_are_whole_numbers(self, name, every):
        with pytest.raises(ConfigError, match=f"{name} must be"):
            LossScaleConfig(**{"kind": "static", name: every})

    def test_from_and_to_dict(self):
        config = LossScaleConfig.from_dict({"kind": "static", "init_scale": "8", "growth_interval": "1e2"})
        assert (config.init_scale, config.growth_interval) == (8.0, 100)
        assert LossScaleConfig.from_dict(config.to_dict()) == config
        with pytest.raises(ConfigError, match=r"loss_scale\.kind must be given"):
            LossScaleConfig.from_dict({})

    def test_the_config_and_the_scaler_have_the_same_defaults(self):
        parameters = inspect.signature(LossScaler).parameters
        ours = {name: p.default for name, p in parameters.items() if name not in ("device", "enabled")}
        assert ours == LossScaleConfig(kind="dynamic").scaler_options()
        assert LossScaler().state_dict()["scale"] == 65536.0


class TestTechnique:
    def run(self, technique, bads, model, optimizer, context):
        for bad in bads:
            one_step(model, optimizer, technique.scaler, bad)
            if not technique.scaler.was_skipped(optimizer):
                context.step += 1
                technique.after_step(context, True)

    def test_a_bare_loop(self):
        results = {}
        for fused in (False, True):
            model, optimizer = net(fused)
            technique = LossScaling(LossScaleConfig(kind="dynamic", init_scale=1024, growth_interval=2))
            context = Context(model)
            technique.attach(context)
            technique.begin(context, None)
            self.run(technique, (0, INF, 0, 0, 0, NAN), model, optimizer, context)
            assert context.step == 4
            assert technique.figures() == {"loss_scale/scale": 512.0, "loss_scale/skipped": 2.0}
            report = technique.report()
            assert report == {
                "kind": "dynamic", "steps": 6, "skipped_steps": 2, "scale": 512.0,
                "lowest_scale": 512.0, "highest_scale": 1024.0,
            }  # fmt: skip
            results[fused] = model.weight.detach().clone()
        torch.testing.assert_close(results[False], results[True])

    def test_a_loop_that_steps_past_the_scaler_is_an_error(self):
        model, optimizer = net()
        technique = LossScaling(LossScaleConfig(kind="dynamic"))
        context = Context(model)
        technique.begin(context, None)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        context.step = 1
        with pytest.raises(TrainingError, match="stepped without the scaler"):
            technique.after_step(context, True)

    @pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled")
    def test_a_missing_device_is_an_error_and_not_training_without_scaling(self, monkeypatch):
        monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: True)
        technique = LossScaling(LossScaleConfig(kind="dynamic"))
        with pytest.raises(CompatibilityError, match="device 'cuda'"):
            technique.make_scaler("cuda")
        assert technique.make_scaler("cpu") is technique.scaler
        assert math.isclose(technique.scaler.get_scale(), 65536.0)
