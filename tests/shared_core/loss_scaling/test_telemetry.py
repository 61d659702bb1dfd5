"""Underflow telemetry: figures against a float64 recount, when it measures, what it costs the run: nothing."""

import json
import math

import numpy as np
import pytest
import torch
from plain_loop import backward, update
from torch import nn

from shared_core.engine.session import Session
from shared_core.engine.state_file import load_state, save_state
from shared_core.errors import ConfigError
from shared_core.loss_scaling import LossScaleConfig, LossScaler, UnderflowTelemetry

NORMAL, LARGEST = 2.0**-14, {"fp16": 65504.0, "fp8_e5m2": 57344.0}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def with_gradients(model, spread=4.0):
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        size = parameter.shape
        grad = torch.randn(size, generator=generator) * torch.exp2(torch.randn(size, generator=generator) * spread - 18)
        grad[torch.rand(size, generator=generator) < 0.2] = 0
        parameter.grad = grad
    return model


def recount(grads, scale, format):
    """Shares and head-room in float64, from what the format would be asked to hold."""
    scaled = np.concatenate([np.abs(grad.double().numpy().ravel()) for grad in grads]) * scale
    return {
        "underflow": ((scaled > 0) & (scaled < NORMAL)).mean(),
        "zero": (scaled == 0).mean(),
        "headroom": math.log2(LARGEST[format] / scaled.max()),
    }


@pytest.mark.parametrize("format", ["fp16", "fp8_e5m2"])
@pytest.mark.parametrize("scale", [1.0, 1024.0, 2.0**-3, 1000.0])
def test_figures_equal_the_recount_total_and_by_layer(format, scale):
    model = with_gradients(net())
    telemetry = UnderflowTelemetry(format)
    assert telemetry.measure(model.named_parameters(), scale, step=7)
    found = telemetry.figures()
    expected = recount([parameter.grad for parameter in model.parameters()], scale, format)
    assert found == {f"loss_scale/{name}": pytest.approx(value, rel=1e-12) for name, value in expected.items()}
    assert 0 < found["loss_scale/underflow"] < 1
    report = telemetry.report()
    assert list(report["layers"]) == ["0", "2"]
    for name, layer in report["layers"].items():
        module = model[int(name)]
        assert layer == pytest.approx(recount([module.weight.grad, module.bias.grad], scale, format), rel=1e-12)
    assert (report["measured_step"], report["measured_scale"], report["format"]) == (7, scale, format)
    json.dumps(report)


def test_the_histogram_is_that_of_log2_of_the_unscaled_gradients():
    model = with_gradients(net())
    telemetry = UnderflowTelemetry()
    telemetry.measure(model.named_parameters(), 4096.0)
    values = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]).abs().double().numpy()
    powers, counts = np.unique(np.floor(np.log2(values[values > 0])).astype(int), return_counts=True)
    assert telemetry.report()["log2_histogram"] == {str(p): c for p, c in zip(powers, counts, strict=True)}
    assert telemetry.histograms.sum() == len(values)


def test_autocast_gradients_below_fp16_are_seen_before_the_scale_and_gone_after_it():
    # what the figures are for: the same loss, unscaled, flushes; scaled, it does not
    zero = {}
    for scale in (1.0, 2.0**14):
        torch.manual_seed(0)
        model, telemetry = nn.Linear(64, 64), UnderflowTelemetry()
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.randn(16, 64)).float().square().mean() * 1e-4
        (loss * scale).backward()
        for parameter in model.parameters():
            parameter.grad /= scale
        telemetry.measure(model.named_parameters(), scale)
        zero[scale] = telemetry.figures()["loss_scale/zero"], telemetry.figures()["loss_scale/underflow"]
    assert zero[1.0][0] > 0.02
    assert zero[1.0][1] > 0.9
    assert zero[2.0**14][0] == 0.0
    assert zero[2.0**14][1] < 0.1


def test_degenerate_gradients():
    telemetry, model = UnderflowTelemetry(), net()
    assert not telemetry.measure(model.named_parameters(), 1.0)
    assert telemetry.figures() == telemetry.report() == {}
    model[0].weight.grad = torch.zeros(8, 6)
    assert telemetry.measure(model.named_parameters(), 1.0)
    assert telemetry.figures() == {"loss_scale/underflow": 0.0, "loss_scale/zero": 1.0}
    assert telemetry.report()["layers"] == {"0": {"underflow": 0.0, "zero": 1.0, "headroom": None}}
    model[2].bias.grad = torch.tensor([1.0, float("nan"), 0.0])
    assert not telemetry.measure(model.named_parameters(), 1.0, step=9)
    assert telemetry.step == 0  # the latest good one stays
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1, 2])).sum().backward()
    telemetry.measure(table.named_parameters(), 1.0)
    assert telemetry.total.elements == 4  # two rows, added up
    assert telemetry.total.amax == 2.0
    lone = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    lone.grad = torch.full((1,), 2.0**-20, dtype=torch.bfloat16)
    for scale in (1.0, 2.0**120, 2.0**-130):
        assert telemetry.measure([("scale", lone)], scale)
        assert list(telemetry.layers) == ["scale"]


class Loop:
    def __init__(self, state=None, model=None, **options):
        self.model = model or net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.session = Session({"loss_scale": {"kind": "dynamic", "growth_interval": 2, **options}})
        self.session.attach(self.model)
        if state is not None:
            self.session.load_state_dict(state)
        self.session.begin([self.optimizer], total_steps=20)
        self.technique = self.session.techniques["loss_scale"]

    def step(self, index, bad=False):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(index))
        backward(self.session, self.session.loss(self.model(x).square().mean()))
        if bad:
            self.model[0].bias.grad[0] = float("inf")
        update(self.session, self.optimizer)


def test_it_measures_every_kth_applied_step_and_waits_for_a_good_one():
    loop, measured = Loop(telemetry_every=3), []
    for index in range(10):
        loop.step(index, bad=index in (3, 4))
        measured.append(loop.technique.telemetry.step)
    assert measured == [0, 0, 0, 0, 0, 3, 3, 3, 6, 6]
    assert loop.technique.figures().keys() == {
        f"loss_scale/{name}" for name in ("scale", "skipped", "underflow", "zero", "headroom")
    }
    scale = loop.technique.report()["measured_scale"]
    assert loop.technique.figures()["loss_scale/headroom"] < 16
    assert scale == 2.0**16  # that of the measured step: up once, down twice, up once


def test_it_can_be_switched_off_and_changes_no_bit_of_training(tmp_path):
    loops = [Loop(telemetry_every=every) for every in (0, 1)]
    for index in range(6):
        for loop in loops:
            loop.step(index)
    for one, other in zip(*(loop.model.parameters() for loop in loops), strict=True):
        assert torch.equal(one, other)
    off, on = (loop.technique for loop in loops)
    assert off.telemetry.step is None
    assert on.report()["layers"].keys() == {"0", "2"}
    assert off.report().items() <= on.report().items()
    assert "underflow" in loops[1].session.receipt().text(width=300)


def test_it_survives_a_resume(tmp_path):
    whole = Loop(telemetry_every=4)
    for index in range(6):
        whole.step(index)
    save_state(tmp_path, whole.session.state_dict())
    told, histograms = whole.technique.report(), whole.technique.telemetry.histograms.clone()
    whole.session.detach()
    resumed = Loop(load_state(tmp_path), whole.model, telemetry_every=4)
    assert resumed.technique.report() == told
    assert torch.equal(resumed.technique.telemetry.histograms, histograms)
    resumed.step(6)
    assert resumed.technique.telemetry.step == 4
    resumed.technique.begin(resumed.session.context, {"scaler": LossScaler().state_dict()})  # saved without telemetry
    assert resumed.technique.telemetry.step == 4


def test_the_floor_is_reported():
    loop = Loop(kind="enhanced", floor="0:64")
    loop.step(0)
    assert loop.technique.report()["floor"] == 64.0
    assert loop.session.state_dict()["recipe"]["loss_scale"]["floor"] == "0:64"


@pytest.mark.parametrize("every", [-1, 0.5, float("nan")])
def test_refusals(every):
    with pytest.raises(ConfigError, match="telemetry_every must be"):
        LossScaleConfig(kind="static", telemetry_every=every)
