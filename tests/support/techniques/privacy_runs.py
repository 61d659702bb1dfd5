"""A session of DP-SGD over a small model, stepped by hand, and the same by a loop over examples."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shared_core import Session


class Run:
    """A session over a model and its data, stepped by hand."""

    def __init__(
        self,
        model,
        *,
        num_examples=40,
        batch_size=8,
        accumulate=1,
        steps=None,
        inputs=None,
        shard=lambda model: None,
        optimizer=torch.optim.SGD,
        **options,
    ):
        generator = torch.Generator().manual_seed(0)
        self.model, self.accumulate, self.twin = model, accumulate, copy.deepcopy(model)
        dtype = next(model.parameters()).dtype
        self.x = torch.randn(num_examples, 3, generator=generator, dtype=dtype) if inputs is None else inputs
        self.y = torch.randn(num_examples, 2, generator=generator, dtype=dtype)
        recipe = {"dp": {"seed": 1, "delta": 1e-3, **options}}
        self.session = Session(recipe)
        self.session.attach(model)
        shard(model)
        self.technique = self.session.techniques["dp"]
        data = TensorDataset(self.x, self.y)
        self.loader = self.technique.loader(DataLoader(data, batch_size=batch_size), accumulate)
        next(iter(self.loader))  # steps take the rows of the draw themselves
        self.optimizer = optimizer(model.parameters(), lr=0.1)
        self.steps = steps
        self.begin()

    def begin(self):
        self.session.begin([self.optimizer], total_steps=self.steps)

    def loss(self, x, y, model=None):
        return ((model or self.model)(x) - y).square().sum(1).mean()

    def backward(self, step, micro_batch):
        part = self.technique._batches.part(step, micro_batch) or [0]
        (self.session.loss(self.loss(self.x[part], self.y[part])) / self.accumulate).backward()

    def step(self, step):
        for micro_batch in range(self.accumulate):
            self.backward(step, micro_batch)
        self.session.before_step()

    def oracle(self, step, max_norm):
        parameters = list(self.twin.parameters())
        total = [torch.zeros_like(parameter) for parameter in parameters]
        for index in self.technique._batches.chosen(step):
            loss = self.loss(self.x[index : index + 1], self.y[index : index + 1], self.twin)
            gradients = torch.autograd.grad(loss, parameters)
            norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
            for sum_, gradient in zip(total, gradients, strict=True):
                sum_ += gradient * min(1.0, max_norm / float(norm))
        return [sum_ / self.technique._batches.expected for sum_ in total]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True), nn.LayerNorm(5), nn.Linear(5, 2)).double()


def steps_of(run, count=3):
    for step in range(count):
        run.step(step)
        run.optimizer.step()
        run.session.after_step()
        run.optimizer.zero_grad()
    return {name: value.detach() for name, value in run.model.state_dict().items()}
