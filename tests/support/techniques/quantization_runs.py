"""Small nets and a training run that the tests of quantization share."""

import torch
from torch import nn

from shared_core.engine.services import Services
from shared_core.engine.technique import Context
from shared_core.quantization import QatConfig, QuantizationAwareTraining


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def conv_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2, padding=1, padding_mode="reflect"),
        nn.Flatten(), nn.Linear(4 * 5 * 5, 3),
    )  # fmt: skip


class Run:
    """A bare loop around the technique."""

    def __init__(self, model, total_steps=10, state=None, step=0, services=None, lr=0.05, **options):
        self.model = model
        self.technique = QuantizationAwareTraining(QatConfig(**{"scheme": "int8", **options}))
        self.context = Context(model=model, services=services or Services(), step=step)
        self.context.total_steps = total_steps
        self.technique.attach(self.context)
        self.technique.begin(self.context, state)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def step(self, *batches, skip=False):
        self.model.train()
        self.optimizer.zero_grad()
        for batch in batches:
            (self.model(batch).square().mean() / len(batches)).backward()
        self.technique.before_step(self.context)
        if skip:
            return
        self.optimizer.step()
        self.context.step += 1
        self.technique.after_step(self.context, True)

    def range_of(self, name):
        entry = self.technique.ranges()[name]
        return entry["min"], entry["max"]


def batches(count, shape=(12, 6), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * (1 + k) for k in range(count)]
