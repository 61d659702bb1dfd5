"""Ingredients that the tests of soups share."""

from pathlib import Path

import torch
from torch import nn

from shared_core.engine.services import SavedCheckpoint, Services
from shared_core.engine.technique import Context
from shared_core.soup import ModelSoup, SoupConfig


def runs(count, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    base = {"a": torch.randn(33, 7, generator=generator), "b": torch.randn(5, generator=generator)}
    return [
        {name: (value + 0.1 * torch.randn(value.shape, generator=generator)).to(dtype) for name, value in base.items()}
        for _ in range(count)
    ]


def same_bits(one, two):
    return one.dtype == two.dtype and torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8))


class RunServices(Services):
    """Checkpoints in memory, evaluated by a function of the model."""

    def __init__(self, model, weights, metric):
        self.model, self.weights, self.metric = model, weights, metric
        self.said, self.evaluations, self.calibrations, self.logged = [], 0, 0, {}

    def checkpoints(self):
        return [SavedCheckpoint(Path(f"checkpoint-{step}"), step, self.logged.get(step)) for step in self.weights]

    def load_weights(self, path):
        return self.weights[int(path.name.rsplit("-", 1)[1])]

    def evaluate(self):
        self.evaluations += 1
        return {"eval_loss": self.metric(self.model), "eval_runtime": 1.0}

    def calibrate(self, num_batches):
        self.calibrations += 1
        self.model.train()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for _ in range(num_batches):
                self.model(torch.randn(16, 3, generator=generator))

    def say(self, text):
        self.said.append(text)


def a_run(metric=None, count=4, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    weights = {}
    for step in range(10, 10 * count + 10, 10):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        model[1].num_batches_tracked.fill_(step)
        weights[step] = {name: value.clone() for name, value in model.state_dict().items()}
    metric = metric or (lambda model: float(model[0].weight.detach().square().sum()))
    services = RunServices(model, weights, metric)
    context = Context(model=model, services=services, step=10 * count)
    return model, context, services, ModelSoup(SoupConfig(kind=options.pop("kind", "greedy"), **options))
