"""What a profile sees of a step, against counts by hand and the peak that is measured under the plan."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shared_core.activation_checkpointing import apply_segments
from shared_core.activation_checkpointing.budget_planner import choose_segments, peak_bytes
from shared_core.activation_checkpointing.profiler import LiveBytes, StepProfile, measure_peak
from shared_core.errors import TrainingError


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, mask):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(mixed))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    def __init__(self, depth=6, width=32, tokens=50):
        super().__init__()
        self.embed, self.head = nn.Embedding(tokens, width), nn.Linear(width, tokens)
        self.layers = nn.ModuleList(Attention(width) for _ in range(depth))

    def forward(self, tokens):
        x = self.embed(tokens)
        mask = torch.zeros(tokens.shape[1], tokens.shape[1]).masked_fill(
            torch.ones(tokens.shape[1], tokens.shape[1]).triu(1) > 0, float("-inf")
        )
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x):
        return torch.relu(x + self.norm(self.conv(x)))


def transformer():
    torch.manual_seed(0)
    tokens = torch.randint(0, 50, (2, 24))
    return Transformer(), lambda net: F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten())


def convolutional():
    torch.manual_seed(0)
    images = torch.randn(4, 8, 32, 32)
    stages = [nn.Sequential(*(Residual(8) for _ in range(5))), nn.MaxPool2d(2), *(Residual(8) for _ in range(4))]
    return nn.Sequential(*stages, nn.Flatten(), nn.Linear(2048, 3)), lambda net: net(images).logsumexp(1).sum()


def blocks_of(net):
    return [name for name, module in net.named_modules() if isinstance(module, Attention | Residual)]


def step(net, loss, generator_seed=7):
    torch.manual_seed(generator_seed)
    net.zero_grad()
    loss(net).backward()


def profiled(net, loss, profile=None):
    profile = profile or StepProfile(net, blocks_of(net))
    for _ in range(2):
        profile.start()
        step(net, loss)
        profile.stop()
    return profile.cost()


def test_bytes_are_those_counted_by_hand():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, x):
            hidden = self.up(x)
            return x + self.down(hidden.tanh() * hidden.sigmoid())

    net = nn.Sequential(*(Block() for _ in range(3)))
    x, profile = torch.ones(16, 8), StepProfile(net, ["0", "1", "2"])
    profile.start()
    net(x).sum().backward()
    profile.stop()
    row = 16 * 4
    # each of tanh, sigmoid and product is saved by several operations and counts once; the batch was there before
    assert [(b.input, b.saved) for b in profile.cost().blocks] == [
        (0, 3 * 32 * row),
        (8 * row, 3 * 32 * row),
        (8 * row, 3 * 32 * row),
    ]
    assert [b.follows for b in profile.cost().blocks] == [False, True, True]
    assert all(0 < b.tail < b.seconds for b in profile.cost().blocks)


@pytest.mark.parametrize("make", [transformer, convolutional])
def test_the_predicted_peak_is_the_measured_one(make):
    net, loss = make()
    cost, names = profiled(net, loss), blocks_of(net)
    plans = [[], [[name] for name in names], [names[:3], names[3:5]], [[name] for name in names[::2]]]
    least = choose_segments(cost, None)
    plans += [choose_segments(cost, f * least.peak + (1 - f) * least.full_peak).segments for f in (1.0, 0.7, 0.3)]
    for segments in plans:
        handle = apply_segments(net, segments) if segments else None
        with measure_peak(net) as peak:
            step(net, loss)
        predicted = peak_bytes(cost, segments)
        assert peak.activations == pytest.approx(predicted, rel=0.01)  # 5 kB of random state for each segment
        if handle:
            handle.remove()


@pytest.mark.parametrize("make", [transformer, convolutional])
def test_steps_that_are_looked_at_compute_what_they_always_do(make):
    net, loss = make()
    plain = copy.deepcopy(net)
    step(plain, loss)
    step(plain, loss)
    expected_state = torch.get_rng_state()
    profiled(net, loss)
    assert torch.equal(torch.get_rng_state(), expected_state)
    for (name, mine), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), name
    for mine, theirs in zip(net.buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_what_is_kept_elsewhere_counts_all_the_same():
    class Elsewhere(StepProfile):
        """Keeps what is saved where `LiveBytes` does not see it, as with a GPU."""

        @staticmethod
        def _away(tensor):
            return torch.from_numpy(tensor.detach().numpy().copy())

    net, loss = transformer()
    cost, other = profiled(net, loss), profiled(net, loss, Elsewhere(net, blocks_of(net)))
    assert [(b.input, b.saved) for b in other.blocks] == [(b.input, b.saved) for b in cost.blocks]
    assert [b.inner for b in other.blocks] == pytest.approx([b.inner for b in cost.blocks], rel=0.02)
    assert other.head == pytest.approx(cost.head, rel=0.02)


def test_like_blocks_take_like_times_and_chains_end_where_something_comes_between():
    net, loss = convolutional()
    blocks = profiled(net, loss).blocks
    assert [b.follows for b in blocks] == [False, *[True] * 4, False, *[True] * 3]
    assert len({b.seconds for b in blocks[1:4]}) == 1


def test_a_block_that_runs_twice_or_never_is_refused():
    net, _ = transformer()
    for layers, rule in ([0, 1, 0], "once per step"), ([0, 2], "must run in a training step"):
        profile = StepProfile(net, ["layers.0", "layers.1"])
        profile.start()
        with pytest.raises(TrainingError, match=rule):
            x, mask = torch.randn(2, 8, 32), torch.zeros(8, 8)
            for number in layers:
                x = net.layers[number](x, mask)
            x.sum().backward()
            profile.stop()
        profile.cancel()


def test_a_step_without_gradients_is_refused():
    net, loss = transformer()
    profile = StepProfile(net, blocks_of(net))
    profile.start()
    with torch.no_grad():
        loss(net)
    with pytest.raises(TrainingError, match="save nothing"):
        profile.stop()


def test_what_a_step_leaves_behind_is_no_activation_and_a_step_without_backward_is_forgotten():
    net, loss = transformer()
    expected = profiled(net, loss)
    kept = []
    handle = net.register_forward_pre_hook(lambda module, args: kept.append(torch.zeros(10**6)))
    profile = StepProfile(net, blocks_of(net))
    profile.start()
    loss(net)
    profile.stop()
    assert profile.num_steps == 0
    cost = profiled(net, loss, profile)
    handle.remove()
    assert profile.num_steps == 2
    assert peak_bytes(cost, []) == peak_bytes(expected, [])


def test_live_bytes_count_storages_once_and_only_new_ones():
    weight, live = torch.ones(100), LiveBytes("cpu")
    with live:
        made = weight.t() * 2
        view = made.view(10, 10)[2:]
        weight.mul_(1)
        del made
        other = view.sum()
    assert live.held() == [0, 400, 404]
    del view
    assert live.held() == [0, 400, 404, 4]
    assert other == 160
