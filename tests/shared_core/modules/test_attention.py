"""Opened attention computes as torch's, to the bit, for every way to call it; its class comes and goes."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

from shared_core.modules.attention import OpenAttention
from shared_core.modules.like_stock import stock_kind
from shared_core.modules.own_forward import fast_paths_off, fast_paths_on

MASKS = {
    "none": lambda rows, columns, heads: {},
    "numbers": lambda rows, columns, heads: {"attn_mask": torch.randn(rows, columns)},
    "by head": lambda rows, columns, heads: {"attn_mask": torch.randn(heads, rows, columns)},
    "bool": lambda rows, columns, heads: {"attn_mask": (torch.arange(columns) > 2).expand(rows, columns)},
    "causal": lambda rows, columns, heads: {
        "attn_mask": torch.triu(torch.full((rows, columns), -torch.inf), 1), "is_causal": True
    },
}  # fmt: skip


def results(layer, inputs, **options):
    torch.manual_seed(1)
    y, weights = layer(*inputs, **options)
    loss = y.square().sum() + (0 if weights is None else weights.square().sum())
    return [y, weights, *torch.autograd.grad(loss, [inputs[0], *layer.parameters()])]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", ["self", "memory", "three", "separate"])
@pytest.mark.parametrize("batch_first", [True, False, None])
def test_it_computes_as_torch_to_the_bit(kind, mask, batch_first):
    width = 6 if kind == "separate" else 8
    for bias, more, needs, padded in itertools.product((True, False), (True, False), (True, False), (True, False)):
        torch.manual_seed(0)
        stock = nn.MultiheadAttention(
            8, 2, dropout=0.3, bias=bias, kdim=width, vdim=width, batch_first=bool(batch_first),
            add_bias_kv=more and mask != "causal", add_zero_attn=more and mask != "causal",
        )  # fmt: skip
        for name, parameter in stock.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)
        mine = copy.deepcopy(stock)
        mine.__class__ = OpenAttention

        def drawn(length, features):
            shape = {True: (2, length), False: (length, 2), None: (length,)}[batch_first]
            return torch.randn(*shape, features)

        query = drawn(3, 8).requires_grad_()
        key = query if kind == "self" else drawn(5, width)
        inputs = query, key, key if kind in ("self", "memory") else drawn(5, width)
        columns = 3 if kind == "self" else 5
        options = MASKS[mask](3, columns, 2 if batch_first is None else 4) | {"need_weights": needs}
        if padded:
            last = torch.arange(columns) == columns - 1
            last = last if mask in ("none", "bool") else torch.zeros(columns).masked_fill(last, -torch.inf)
            options["key_padding_mask"] = last if batch_first is None else last.expand(2, columns)
        for value, expected in zip(results(mine, inputs, **options), results(stock, inputs, **options), strict=True):
            assert value is expected or torch.equal(value, expected), options
            assert value is expected or value.stride() == expected.stride()


class Named(nn.MultiheadAttention):
    """A user's, which differs only in how it begins."""

    def _reset_parameters(self):
        super()._reset_parameters()


class Doubled(nn.MultiheadAttention):
    """A user's with another forward."""

    def forward(self, *args, **kwargs):
        y, weights = super().forward(*args, **kwargs)
        return 2 * y, weights


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, Named])
def test_a_layer_is_opened_where_its_projection_is_to_be_called(kind):
    torch.manual_seed(0)
    net = nn.ModuleList([kind(8, 2), nn.Linear(8, 8)])
    called = []
    x = torch.randn(3, 1, 8)
    expected = net[0](x, x, x)[0]
    assert not fast_paths_off(net, (nn.Conv1d,))
    hook = net[0].out_proj.register_forward_hook(lambda *_: called.append(1))
    undo = fast_paths_off(net, (nn.Linear,))
    assert isinstance(net[0], kind)
    assert torch.equal(net[0](x, x, x)[0], expected)
    assert called == [1]
    hook.remove()
    assert not fast_paths_off(net, (nn.Linear,))  # it is open
    copy.deepcopy(net).load_state_dict(net.state_dict())
    assert torch.equal(pickle.loads(pickle.dumps(net))[0](x, x, x)[0], expected)
    fast_paths_on(undo)
    assert type(net[0]) is kind


def test_attention_with_another_forward_is_not_taken_for_torchs():
    assert stock_kind(Doubled) is None
    assert stock_kind(Named) is stock_kind(OpenAttention) is nn.MultiheadAttention
    assert not fast_paths_off(nn.ModuleList([Doubled(8, 2)]), (nn.Linear,))
