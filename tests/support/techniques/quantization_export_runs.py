"""Nets, a short training and a reader of ONNX files that the tests of the export share."""

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper
from quantization_runs import Run
from torch import nn


class Tokens(nn.Module):
    """Embedding, a residual block, and a head that may share the embedding's weight."""

    def __init__(self, tied=True):
        super().__init__()
        self.embed, self.norm = nn.Embedding(50, 32), nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)
        self.head = nn.Linear(32, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.norm(x + self.down(torch.relu(self.up(x)))))


class Cells(nn.Module):
    """Recurrent cells, with a state and without."""

    def __init__(self):
        super().__init__()
        self.long, self.gated = nn.LSTMCell(24, 16), nn.GRUCell(16, 16)
        self.plain = nn.RNNCell(16, 16, nonlinearity="relu")

    def forward(self, x):
        hidden, _ = self.long(x, self.long(x))
        hidden = self.plain(hidden, self.plain(hidden))
        return self.gated(hidden, self.gated(hidden))


def mlp():
    return nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 40), nn.GELU(), nn.Linear(40, 10))


def conv2d():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, stride=2, groups=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(72, 5),
    )  # fmt: skip


def with_batch_norm():
    net = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3))
    with torch.no_grad():
        net[1].weight.copy_(torch.linspace(-1.5, 1.5, 6))  # a negative factor turns codes round
    return net


def conv1d():
    return nn.Sequential(nn.Conv1d(3, 6, 5, padding="same"), nn.ReLU(), nn.Conv1d(6, 4, 3, dilation=2))


def conv3d():
    return nn.Sequential(nn.Conv3d(2, 3, 3, padding=1, padding_mode="circular"), nn.ReLU(), nn.Conv3d(3, 2, 2))


def transposed(groups=1):
    return nn.Sequential(
        nn.ConvTranspose2d(4, 6, 3, stride=2, groups=groups), nn.ReLU(), nn.ConvTranspose2d(6, 2, 3, groups=groups)
    )


SHAPES = {conv2d: (3, 16, 16), with_batch_norm: (3, 8, 8), conv1d: (3, 12), conv3d: (2, 4, 4, 4)}
SHAPES |= {mlp: (24,), Cells: (24,)}


def examples(build, batch=8):
    if build is Tokens:
        return torch.randint(0, 50, (batch, 7))
    return torch.randn(batch, *SHAPES.get(build, (4, 5, 5))) + 0.3


def trained(build=mlp, steps=1, finish=False, shape=None, **options):
    torch.manual_seed(0)
    model = build()
    training = Run(model, total_steps=steps, lr=0.02, **options)
    for _ in range(steps):
        training.step(examples(build, 16) if shape is None else torch.randn(16, *shape))
    ranges = training.technique.ranges()
    if finish:
        training.technique.finish(training.context)
    return model.eval(), ranges


def run(path, x, optimize=False, save=None):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if save:
        options.optimized_model_filepath = str(save)
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (entry,) = session.get_inputs()
    return session.run(None, {entry.name: x.numpy()})[0]


def expected(model, x):
    with torch.no_grad():
        return model(x).numpy()


def constants(path):
    return {item.name: numpy_helper.to_array(item) for item in onnx.load(path).graph.initializer}


def kinds(path):
    return [node.op_type for node in onnx.load(path).graph.node]


def assert_close_in_steps(y, reference):
    """As an 8-bit reader of the outputs sees it: fewer than 5 % of the codes moved, none by more than one."""
    assert y.shape == reference.shape
    step = (reference.max() - reference.min()) / 255
    moved = np.abs(np.round(y / step) - np.round(reference / step))
    assert moved.max() <= 1
    assert moved.mean() < 0.05
