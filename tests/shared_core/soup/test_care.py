"""What a soup at the end of training does with equal, diverged and damaged checkpoints, counters and interruptions."""

import pytest
import torch
from soup_runs import RunServices, a_run, same_bits
from torch import nn

from shared_core.engine.technique import Context
from shared_core.errors import CheckpointError, TrainingError
from shared_core.soup import ModelSoup, SoupConfig, greedy_soup, uniform_soup


class Counting(nn.Module):
    """Has a counter, a running mean of its own, and a norm that no batch goes through."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        self.idle.running_mean.fill_(5.0)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mean", torch.tensor(0.5))

    def forward(self, x):
        self.count += 1
        self.mean = 0.9 * self.mean + x.mean()
        return self.used(x)


def test_estimating_norms_changes_nothing_else():
    model, options = Counting(), SoupConfig(kind="uniform", bn_batches=2)
    weights = {step: {name: value.clone() for name, value in model.state_dict().items()} for step in (1, 2)}
    services = RunServices(model, weights, None)
    ModelSoup(options).finish(Context(model=model, services=services))
    assert services.calibrations == 1
    assert (int(model.count), float(model.mean), float(model.idle.running_mean[0])) == (7, 0.5, 5.0)
    assert int(model.used.num_batches_tracked) == 2
    services.calibrate = lambda num_batches: None
    with pytest.raises(TrainingError, match="must give batches to estimate statistics on, got none of 2"):
        ModelSoup(options).finish(Context(model=model, services=services))
    assert int(model.used.num_batches_tracked) == 2  # that of the final weights
    assert model.used.momentum == 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["greedy", "uniform"])
def test_sixteen_equal_checkpoints_in_any_order_of_keys_are_their_own_soup(kind, dtype):
    model, context, services, _ = a_run(count=16, metric=lambda model: 1.0)
    model.to(dtype)
    with torch.no_grad():
        model[0].weight[0, 0] = -0.0
    same = {name: value.clone() for name, value in model.state_dict().items()}
    services.weights = {step: dict(reversed(same.items())) for step in services.weights}
    services.weights[20] = {name: value.float() if value.is_floating_point() else value for name, value in same.items()}
    technique = ModelSoup(SoupConfig(kind=kind))
    technique.finish(context)
    assert all(same_bits(value, same[name]) for name, value in model.state_dict().items())
    assert len(technique.report()["ingredients"]) == 16


def test_what_diverged_is_left_out_and_named():
    metrics = iter([0.3, float("nan"), 0.2, 0.2, 0.1])
    model, context, services, technique = a_run(metric=lambda model: next(metrics))
    services.weights[20]["2.bias"][0] = float("nan")
    technique.finish(context)
    reasons = {row["name"]: row["reason"] for row in technique.report()["history"]}
    assert "'2.bias' holds a NaN" in reasons["checkpoint-20"]
    assert "its metric is nan" in reasons["checkpoint-30"]
    assert technique.report()["ingredients"] == ["checkpoint-40", "checkpoint-10"]
    for weights in services.weights.values():
        weights["2.bias"][0] = float("inf")
    model.load_state_dict(services.weights[40])
    with pytest.raises(CheckpointError, match="at least one ingredient must have finite weights"):
        technique.finish(context)
    del services.weights[30]["2.bias"]
    with pytest.raises(
        CheckpointError, match=r"same tensors, got '2.bias' in .*checkpoint-10 but not in checkpoint-30"
    ):
        technique.finish(context)


def test_whatever_ends_the_search_leaves_the_final_weights():
    for end in (KeyboardInterrupt, RuntimeError):
        calls = iter(range(6))

        def metric(model, calls=calls, end=end):
            if next(calls) == 5:
                raise end
            return 1.0

        model, context, _, technique = a_run(metric=metric)
        with torch.no_grad():
            model[0].weight.add_(1)
        final = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(end):
            technique.finish(context)
        assert all(torch.equal(value, final[name]) for name, value in model.state_dict().items())


def test_one_checkpoint_is_its_own_soup():
    one = {"w": torch.tensor([0.1, -0.0, 3e38]), "half": torch.tensor([0.1]).half(), "steps": torch.tensor(7)}
    for soup in (uniform_soup([one]), greedy_soup([one], lambda weights: 0.5).state_dict):
        assert all(torch.equal(soup[name], value) and soup[name].dtype == value.dtype for name, value in one.items())
