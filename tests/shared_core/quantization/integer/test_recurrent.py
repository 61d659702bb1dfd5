"""Converted LSTM and GRU layers on torch's int8 kernel: the same codes, every way to call them, and their report."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from shared_core.quantization import conversion_report, convert, quantize
from shared_core.quantization.integer.layers import PackedRecurrent

pytestmark = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="this torch was built without FBGEMM"
)


class Subclass(nn.LSTM):
    """An LSTM of a user, which differs only in how it begins."""

    def reset_parameters(self):
        for weight in self.parameters():
            nn.init.uniform_(weight, -0.3, 0.3)


def converted(layer, scheme="int8_dynamic"):
    torch.manual_seed(0)
    layer.reset_parameters()
    quantized = quantize(nn.ModuleDict({"layer": layer}).eval(), scheme)
    return quantized["layer"], convert(quantized, backend="auto")


def call(layer, x, hx=None):
    with torch.no_grad():
        y, last = layer(x, hx)
    return [y.data if isinstance(y, PackedSequence) else y, *(last if isinstance(last, tuple) else (last,))]


def relative(value, exact):
    return ((value - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, Subclass])
@pytest.mark.parametrize("options", [*itertools.product((1, 2), *[(True, False)] * 3)])
def test_it_answers_every_call_of_the_layer(kind, options):
    num_layers, bias, batch_first, bidirectional = options
    layer = kind(12, 16, num_layers, bias=bias, batch_first=batch_first, bidirectional=bidirectional)
    exact, net = converted(layer)
    fast, depth = net["layer"], num_layers * (1 + bidirectional)
    assert isinstance(fast, PackedRecurrent)
    packed = pack_sequence([torch.randn(3, 12), torch.randn(6, 12)], enforce_sorted=False)
    for x, batch in ((torch.randn(7, 3, 12), (7 if batch_first else 3,)), (torch.randn(5, 12), ()), (packed, (2,))):
        states = [torch.randn(depth, *batch, 16) for _ in range(2)]
        for hx in (None, states[0] if kind is nn.GRU else tuple(states)):
            for value, expected in zip(call(fast, x, hx), call(exact, x, hx), strict=True):
                assert value.shape == expected.shape
                assert relative(value, expected) < 0.05


def test_one_step_equals_its_formula_in_float64():
    exact, net = converted(nn.GRU(32, 24, bias=False))
    fast, x = net["layer"], torch.rand(1, 1, 32)
    # one step from zeros reads the input alone: one range, whose zero and largest value are codes
    step = {name: x.max().double() / (2**bits - 1) for name, bits in (("fine", 8), ("coarse", 7))}
    gates = {
        name: (x.double() / size).round() * size @ exact.weight_ih_l0.detach().double().T for name, size in step.items()
    }
    expected = []
    for value in gates.values():
        _, update, candidate = value.chunk(3, -1)
        expected.append(((1 - update.sigmoid()) * candidate.tanh()).float())
    assert min(relative(call(fast, x)[0], one) for one in expected) < 1e-5


def test_saved_codes_are_the_weights_and_load_again():
    exact, net = converted(nn.LSTM(12, 16))
    state = net.state_dict()
    for name in ("weight_ih_l0", "weight_hh_l0"):
        codes, scale = state[f"layer.{name}_codes"], state[f"layer.{name}_scale"]
        assert codes.dtype == torch.int8
        torch.testing.assert_close(codes * scale[:, None], getattr(exact, name).detach())
    other, x = converted(nn.LSTM(12, 16))[1], torch.randn(4, 2, 12)
    other["layer"].weight_ih_l0_codes.zero_()
    other.load_state_dict(state)
    for same in (other, copy.deepcopy(net)):
        assert torch.equal(call(same["layer"], x)[0], call(net["layer"], x)[0])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_own_example(value):
    fast, x = converted(nn.LSTM(12, 16))[1]["layer"], torch.randn(4, 2, 12)
    x[2, 1, 3] = value
    y = call(fast, x)[0]
    assert bool(y[:, 0].isfinite().all())
    assert bool(y[:2].isfinite().all())
    if value != value:
        assert bool(y[2:, 1].isnan().all())


def test_a_bfloat16_model_answers_in_bfloat16():
    net = convert(quantize(nn.ModuleDict({"layer": nn.LSTM(12, 16).bfloat16()}).eval(), "int8_dynamic"), backend="auto")
    assert isinstance(net["layer"], PackedRecurrent)
    assert {value.dtype for value in call(net["layer"], torch.randn(4, 2, 12).bfloat16())} == {torch.bfloat16}


def test_the_engine_of_other_models_stays():
    before = torch.backends.quantized.engine
    converted(nn.LSTM(12, 16))
    assert torch.backends.quantized.engine == before


@pytest.mark.parametrize(
    ("scheme", "layer"),
    [
        ("int8_weight", nn.LSTM(12, 16)),
        ("int4_weight", nn.LSTM(32, 32)),
        ({"scheme": "int8_dynamic", "activation_bits": 6}, nn.GRU(12, 16)),
        ("int8_dynamic", nn.LSTM(12, 16, proj_size=8)),
        ("int8_dynamic", nn.GRU(12, 16).double()),
        ("int8_dynamic", nn.RNN(12, 16)),
    ],
)
def test_what_the_kernel_cannot_do_stays_on_the_reference_with_a_reason(scheme, layer):
    exact, net = converted(layer, scheme)
    told = conversion_report(net)["layer"]
    assert told["kernel"].startswith("reference")
    assert told["why"]
    x = torch.randn(4, 2, layer.input_size, dtype=layer.weight_ih_l0.dtype)
    assert torch.equal(call(exact, x)[0], call(net["layer"], x)[0])
