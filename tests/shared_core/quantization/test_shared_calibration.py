"""Calibration that several processes share: ranges, weights and biases of one process, bit for bit."""

import pytest
import torch
from together import together
from torch import nn

from shared_core.errors import CompatibilityError, TrainingError
from shared_core.quantization import QatConfig, quantize_with_report
from shared_core.tools.quantize import QuantizationStudy


def network(seed=0):
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return net


def batches(seed=1, count=7):
    generator = torch.Generator().manual_seed(seed)
    # each larger than the one before, so that averages and grids depend on which come when
    return [torch.randn(5, 6, generator=generator) * 1.7**number for number in range(count)]


def shared(options, size, **more):
    return together(lambda job: quantize_with_report(network(), options, batches(), job=job, **more), size)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["mse", "percentile", "kl", "minmax", "ema"])
def test_every_process_has_the_model_of_one(kind, size):
    options, more = {"scheme": "int8", "range": kind, "skip": []}, {"correct_bias": True, "measure_outputs": True}
    ((alone, report),) = shared(options, 1, **more)
    for model, told in shared(options, size, **more):
        assert told == report
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in alone.state_dict().items())
    assert report.ranges


def test_more_processes_than_batches():
    made = together(lambda job: quantize_with_report(network(), "int8", batches(count=2), job=job)[1], 4)
    assert made == [quantize_with_report(network(), "int8", batches(count=2))[1]] * 4


@pytest.mark.parametrize("other", ["model", "batches", "count"])
def test_another_model_or_other_batches_in_another_process_are_refused(other):
    def work(job):
        model = network(job.rank if other == "model" else 0)
        data = batches(1 + job.rank if other == "batches" else 1, 7 + job.rank if other == "count" else 7)
        return quantize_with_report(model, "int8", data, job=job)

    errors = together(work)
    assert any(isinstance(error, TrainingError) for error in errors)
    assert all("between processes" in str(one) for one in errors)


def test_a_layer_that_sees_infinity_in_one_process_is_told_in_all():
    def work(job):
        data = batches()
        data[3][0, 0] = torch.inf
        return quantize_with_report(network(), "int8", data, job=job)[1].notes

    (alone,) = together(work, 1)
    assert any("NaN or infinity" in note for note in alone)
    assert together(work) == [alone, alone]


@pytest.mark.parametrize("options", [{"scheme": "int8_weight"}, {"scheme": "int8", "clip_gelu": 10.0}])
def test_what_observes_no_ranges_of_its_own_needs_one_process(options):
    def work(job):
        QuantizationStudy(network=network(), config=QatConfig.from_dict(options), data=batches(), job=job).check()

    assert together(work, 1) == [None]
    for error in together(work):
        assert isinstance(error, CompatibilityError)
        assert "must run in one process where no ranges are observed" in str(error)
