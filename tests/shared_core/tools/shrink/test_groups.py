"""`find_groups`: which positions of which tensors go together, against what one reads off each model by hand."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shared_core.channel_graph import find_groups


def group_of(model, inputs, name):
    return next(group for group in find_groups(model, inputs) if group.name == name)


def places(group):
    return {(part.tensor, part.axis): (part.role, part.positions.tolist()) for part in group.slices}


def each(count):
    return [[index] for index in range(count)]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.inner = nn.Conv2d(4, 6, 1)
        self.outer = nn.Conv2d(6, 4, 1, bias=False)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        x += self.outer(self.inner(x).relu())
        return self.head(x.mean((2, 3)))


def test_a_residual_sum_joins_its_branches():
    groups = {group.name: group for group in find_groups(Residual(), torch.randn(2, 3, 5, 5))}
    assert places(groups["stem"]) == {
        ("stem.weight", 0): ("out", each(4)),
        ("stem.bias", 0): ("out", each(4)),
        ("norm.weight", 0): ("norm", each(4)),
        ("norm.bias", 0): ("norm", each(4)),
        ("norm.running_mean", 0): ("stat", each(4)),
        ("norm.running_var", 0): ("stat", each(4)),
        ("inner.weight", 1): ("in", each(4)),
        ("outer.weight", 0): ("out", each(4)),
        ("head.weight", 1): ("in", each(4)),
    }
    assert (groups["stem"].kind, groups["stem"].units, groups["stem"].reason_kept) == ("channel", 4, None)
    assert places(groups["inner"])[("outer.weight", 1)] == ("in", each(6))
    assert "output" in groups["head"].reason_kept


class Concat(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 2, 1), nn.Conv2d(2, 3, 1)
        self.head = nn.Linear(5 * 4, 2)

    def forward(self, x):
        x = self.first(x)
        return self.head(torch.cat([x, self.second(x)], 1).flatten(1))


def test_concatenation_and_flattening_keep_positions():
    model, inputs = Concat(), torch.randn(2, 3, 2, 2)
    assert places(group_of(model, inputs, "first"))[("head.weight", 1)] == ("in", [[0, 1, 2, 3], [4, 5, 6, 7]])
    second = places(group_of(model, inputs, "second"))
    assert second[("head.weight", 1)] == ("in", [list(range(8 + 4 * unit, 12 + 4 * unit)) for unit in range(3)])


def test_a_depthwise_convolution_passes_channels_on_and_a_grouped_one_groups_of_them():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 12, 1), nn.Conv2d(12, 6, 1, groups=3),
        nn.GroupNorm(3, 6), nn.Conv2d(6, 2, 1),
    )  # fmt: skip
    groups = {group.name: group for group in find_groups(model, torch.randn(2, 3, 5, 5))}
    assert places(groups["0"])[("1.weight", 0)] == ("out", each(8))
    assert places(groups["0"])[("2.weight", 1)] == ("in", each(8))
    assert groups["2"].units == 3
    assert places(groups["2"])[("2.weight", 0)] == ("out", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]])
    assert places(groups["2"])[("3.weight", 0)] == ("out", [[0, 1], [2, 3], [4, 5]])
    assert places(groups["2"])[("4.bias", 0)] == ("norm", [[0, 1], [2, 3], [4, 5]])
    assert places(groups["2"])[("5.weight", 1)] == ("in", [[0, 1], [2, 3], [4, 5]])


class Attention(nn.Module):
    """Four query heads of size 4 that share two key-value heads; norms over the head size; rotary-like factors."""

    def __init__(self, fused=False):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.o = nn.Linear(16, 16)
        self.q_norm = nn.RMSNorm(4)
        self.n_heads, self.n_kv_heads, self.head_dim = 4, 2, 4
        self.fused = fused
        self.register_buffer("cos", torch.randn(4), persistent=False)

    def forward(self, x):
        batch, length, _ = x.shape
        q = self.q_norm(self.q(x).view(batch, length, self.n_heads, self.head_dim)).transpose(1, 2) * self.cos
        k = self.k(x).view(batch, length, self.n_kv_heads, self.head_dim).transpose(1, 2) * self.cos
        v = self.v(x).view(batch, length, self.n_kv_heads, self.head_dim).transpose(1, 2)
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            k, v = (item.repeat_interleave(self.n_heads // self.n_kv_heads, 1) for item in (k, v))
            out = (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v
        return x + self.o(out.transpose(1, 2).reshape(batch, length, -1))


@pytest.mark.parametrize("fused", [False, True])
def test_a_key_value_head_goes_with_its_query_heads_whole(fused):
    group = group_of(nn.Sequential(nn.Linear(5, 16), Attention(fused)), torch.randn(2, 3, 5), "1.q")
    assert (group.kind, group.units, group.reason_kept) == ("head", 2, None)
    wide, narrow = [list(range(8)), list(range(8, 16))], [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert places(group) == {
        ("1.q.weight", 0): ("out", wide),
        ("1.q.bias", 0): ("out", wide),
        ("1.k.weight", 0): ("out", narrow),
        ("1.k.bias", 0): ("out", narrow),
        ("1.v.weight", 0): ("out", narrow),
        ("1.v.bias", 0): ("out", narrow),
        ("1.o.weight", 1): ("in", wide),
    }


def test_a_packed_projection_has_query_key_and_value_of_a_head():
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    group = group_of(layer, torch.randn(2, 3, 8), "self_attn")
    assert group.kind == "head"
    assert places(group)[("self_attn.in_proj_weight", 0)][1][1] == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]
    assert places(group_of(layer, torch.randn(2, 3, 8), "linear1"))[("linear2.weight", 1)] == ("in", each(12))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.down = nn.Linear(4, 10, bias=False), nn.Linear(5, 4, bias=False)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


def test_a_gate_goes_with_what_it_gates():
    group = group_of(Gated(), torch.randn(2, 4), "both")
    assert places(group)[("both.weight", 0)] == ("out", [[unit, unit + 5] for unit in range(5)])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(7, 6), nn.Parameter(torch.randn(1, 3, 6))
        self.norm, self.mlp = nn.LayerNorm(6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        return self.head(x + self.mlp(self.norm(x)))


def test_tied_weights_are_one_tensor_and_a_normalized_width_is_told():
    groups = {group.name: group for group in find_groups(Tied(), torch.randint(0, 7, (2, 3)))}
    width = next(group for group in groups.values() if ("embed.weight", 1) in places(group))
    assert (width.kind, width.reason_kept) == ("width", None)
    assert places(width)[("embed.weight", 1)] == ("out", each(6))
    assert places(width)[("position", 2)] == ("out", each(6))
    assert places(width)[("norm.bias", 0)] == ("norm", each(6))
    assert not any(part.tensor == "head.weight" for group in groups.values() for part in group.slices)
    assert groups["embed"].reason_kept is not None  # the vocabulary


class Stubborn(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.how = nn.Linear(4, 6), nn.Linear(6, 2), how
        self.register_buffer("scale", torch.randn(6), persistent=False)

    def forward(self, x):
        return self.b(getattr(self, self.how)(self.a(x)))

    def constant(self, x):
        return x * self.scale

    def softmax(self, x):
        return x.softmax(-1)

    def picked(self, x):
        return x[:, torch.tensor([5, 4, 3, 2, 1, 0])]

    def padded(self, x):
        return F.pad(x[:, :4], (1, 1))

    def unknown(self, x):
        return torch.fft.rfft(x).abs()[:, :1].repeat(1, 6)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("constant", "fixed size"), ("softmax", "needs all"), ("picked", "by number"), ("padded", "padded"),
        ("unknown", "not supported"),
    ],
)  # fmt: skip
def test_what_cannot_follow_stays_with_the_reason(how, reason):
    assert reason in group_of(Stubborn(how), torch.randn(2, 4), "a").reason_kept


def test_an_input_that_is_added_fixes_its_width_even_if_it_is_constant():
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.b(x + self.a(x))

    for inputs in (torch.randn(2, 4), torch.ones(2, 4)):
        assert group_of(Skip(), inputs, "a").reason_kept is not None


def test_writing_under_another_name_is_seen():
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x):
            buffer = torch.zeros(x.shape[0], 6)
            buffer[:, :3], buffer[:, 3:] = self.a(x).split(3, 1)
            return self.b(buffer)

    assert "written" in group_of(Written(), torch.randn(2, 4), "a").reason_kept


def test_the_model_is_left_as_it_was():
    model = Residual().train()
    model.norm.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    find_groups(model, torch.randn(2, 3, 5, 5))
    assert model.training
    assert model.stem.training
    assert not model.norm.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_function_that_runs_the_model_is_taken():
    model, inputs = Residual(), torch.randn(2, 3, 5, 5)
    direct, called = find_groups(model, inputs), find_groups(model, lambda: [model(inputs)])
    assert [(group.name, group.units) for group in direct] == [(group.name, group.units) for group in called]
    assert all(
        np.array_equal(a.positions, b.positions)
        for first, second in zip(direct, called, strict=True)
        for a, b in zip(first.slices, second.slices, strict=True)
    )
