"""`shrink` on nets of many kinds: on inputs that were not the example, the outputs are those of the masked net."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zeroed import zero_every

from shared_core.channel_graph import find_groups
from shared_core.tools.shrink import shrink


class SqueezeExcite(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.down, self.up = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        x = F.silu(self.conv(x))
        gate = torch.sigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))
        return self.out(x * gate)


class Einsum(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.num_heads = nn.Linear(6, 36), nn.Linear(12, 5), 3

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.num_heads, 4).permute(2, 0, 3, 1, 4)
        scores = torch.einsum("bhtd,bhsd->bhts", q, k).softmax(-1)
        return self.out(torch.einsum("bhts,bhsd->bthd", scores, v).reshape(batch, length, -1))


class Shuffle(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        x = self.a(x)
        batch, channels, height, width = x.shape
        x = x.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(batch, channels, height, width)
        return self.c(F.relu(self.b(x)))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True)
        self.second, self.up = nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.ConvTranspose2d(12, 8, 2, stride=2)
        self.merge, self.slope, self.out = nn.Conv2d(16, 6, 3, padding=1), nn.PReLU(6), nn.Conv2d(6, 2, 1)

    def forward(self, x):
        side = F.leaky_relu(self.norm(self.first(x)))
        up = F.interpolate(self.up(F.relu(self.second(side))), scale_factor=1.0, mode="nearest")
        return self.out(self.slope(self.merge(torch.cat([side, up], 1))))


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Linear(5, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        x = self.embed(x)
        x = x + self.down(F.gelu(self.up(self.norm(x).transpose(1, 2)))).transpose(1, 2)
        return self.out(x.mean(1))


class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Linear(4, 8), nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2, kdim=5, vdim=5, batch_first=True)

    def forward(self, x, y):
        return self.out(self.attention(self.embed(x), y, y)[0])


@dataclasses.dataclass
class Output:
    scores: Tensor


class Typed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return Output(self.b(F.relu(self.a(x))))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.out = nn.Linear(4, 6), nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.cell(self.embed(x))[0][:, -1])


class Branching(nn.Module):
    """Control flow, a list of layers, and a sum that grows in place, as wide as the stem."""

    def __init__(self):
        super().__init__()
        self.stem, self.out = nn.Linear(4, 6), nn.Linear(6, 3)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        x = self.stem(x)
        total = torch.zeros_like(x)
        for index, layer in enumerate(self.layers):
            total += layer(x).relu_() if index % 2 else layer(x).tanh()
        return self.out(total)


def rand(*shape):
    return torch.randn(*shape, dtype=torch.double)


NETS = {
    "squeeze-excite": (SqueezeExcite, lambda: (rand(2, 3, 7, 7),), {"conv": 3, "down": 1}),
    "einsum attention": (Einsum, lambda: (rand(2, 5, 6),), {"qkv": 1}),
    "channel shuffle": (Shuffle, lambda: (rand(2, 3, 4, 4),), {"a": 1}),
    "u-net": (UNet, lambda: (rand(2, 3, 8, 8),), {"first": 3, "second": 4, "up": 3, "merge": 2}),
    "mixer": (Mixer, lambda: (rand(2, 6, 5),), {"up": 3}),
    "cross attention": (Cross, lambda: (rand(2, 3, 4), rand(2, 4, 5)), {"attention.out_proj": 3}),
    "dataclass output": (Typed, lambda: (rand(2, 4),), {"a": 2}),
    "lstm": (Recurrent, lambda: (rand(2, 3, 4),), {"embed": 2}),
    "branches": (Branching, lambda: (rand(2, 4),), {"stem": 2}),
    "compiled": (
        lambda: torch.compile(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))),
        lambda: (rand(2, 4),), {"0": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NETS)
def test_the_outputs_are_those_of_the_masked_net(name):
    torch.manual_seed(0)
    make, make_inputs, expected = NETS[name]
    model, inputs = make().double().eval(), make_inputs()
    zero_every(3, model, inputs)
    result = shrink(model, inputs, latency_repeats=0)
    assert result.removed == expected, result.kept
    for given in (inputs, make_inputs(), make_inputs()):
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            wanted, found = model(*given), result.model(*given)
        if isinstance(wanted, Output):
            wanted, found = wanted.scores, found.scores
        assert torch.allclose(wanted, found, rtol=1e-10, atol=1e-12)
    assert sum(p.numel() for p in result.model.parameters()) < sum(p.numel() for p in model.parameters())


def test_a_computed_weight_stays():
    model, inputs = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)), nn.Linear(6, 2)), rand(3, 4)
    model.double()
    assert all(group.reason_kept is not None for group in find_groups(model, inputs))
