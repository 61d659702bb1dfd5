"""Every scheme of quantization-aware training on every kind of layer: what is baked, deployed, resumed and refused."""

import copy
import math
from typing import get_args

import ml_dtypes
import pytest
import torch
from observed_data import range_of
from torch import nn

from shared_core import Session
from shared_core.engine.recipe import Recipe
from shared_core.errors import ConfigError, MatchError
from shared_core.modules.weight_views import as_rows, from_rows, weights_of
from shared_core.numerics import nvfp4_round_to
from shared_core.quantization import QatConfig, apply_ranges, convert, quantize, quantize_with_report
from shared_core.quantization.post_training.quality import layer_bytes
from shared_core.quantization.schemes import INPUTS, SCHEMES, WEIGHTS, Inputs, LayerScheme, Scheme, Weights
from shared_core.quantization.selection import layer_schemes

OWN = ["int8", "int8_weight", "int8_dynamic", "int16", "int4_weight", "int8_dynamic_int4_weight", "fp16", "bf16", "fp8",
       "fp8_static", "fp8_block", "mxfp4", "nvfp4", "ternary", "binary", "xnor_net"]  # fmt: skip
# formats that no preset has, or that it has for the other half alone
PAIRS = [
    {"scheme": "int8", "symmetric": True},
    {"weights": "mxfp4", "inputs": "mxfp8"}, {"weights": "mxfp6", "inputs": "none"},
    {"weights": "fp8_tensor", "inputs": "fp8_static"},
    {"weights": "nvfp4", "inputs": "fp8_token"}, {"weights": "int8", "inputs": "fp8_group", "weight_bits": 4},
    {"weights": "ternary", "inputs": "binary"}, {"weights": "int8", "inputs": "binary"},
]  # fmt: skip


class Mixed(nn.Module):
    """Every kind of layer that is quantized."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 64)
        self.norm = nn.LayerNorm(64)
        self.conv = nn.Conv1d(64, 32, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose1d(32, 64, 2, stride=2, groups=2)
        self.lstm = nn.LSTM(64, 32, batch_first=True)
        self.gru = nn.GRU(32, 32, batch_first=True)
        self.rnn = nn.RNN(32, 32, batch_first=True, nonlinearity="relu")
        self.lstm_cell, self.gru_cell, self.rnn_cell = nn.LSTMCell(32, 32), nn.GRUCell(32, 32), nn.RNNCell(32, 32)
        self.head = nn.Linear(32, 5)

    def forward(self, tokens):
        x = self.norm(self.embed(tokens)).transpose(1, 2)
        x = self.up(torch.relu(self.conv(x))).transpose(1, 2)
        x = self.rnn(self.gru(self.lstm(x)[0])[0])[0][:, -1]
        return self.head(self.gru_cell(x, self.rnn_cell(x, self.lstm_cell(x)[0])))


LAYERS = ("embed", "conv", "up", "lstm", "gru", "rnn", "lstm_cell", "gru_cell", "rnn_cell", "head")


def make_net():
    torch.manual_seed(0)
    return Mixed()


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 11, (4, 6), generator=generator), torch.randint(0, 5, (4,), generator=generator)


def start(model, options, state=None, decay=0.0):
    session = Session(Recipe.from_dict({"qat": options}))
    session.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=decay)
    if state is not None:
        optimizer.load_state_dict(state["optimizer"])
        session.load_state_dict(state["session"])
    session.begin([optimizer], total_steps=20)
    return session, optimizer


def train(session, optimizer, model, steps):
    model.train()
    for step in steps:
        tokens, labels = batch(step)
        session.loss(nn.functional.cross_entropy(model(tokens), labels)).backward()
        session.before_step()
        optimizer.step()
        session.after_step()
        optimizer.zero_grad()


def e4m3(values, scale):
    return (values / scale).float().to(torch.float8_e4m3fn).double() * scale


def mx(rows, largest_exponent, element):
    """MX blocks of 32 from the definition: a power of two per block, and saturating elements."""
    blocks = nn.functional.pad(rows, (0, -rows.shape[1] % 32)).reshape(len(rows), -1, 32)
    scale = 2.0 ** (blocks.abs().amax(-1, keepdim=True).clamp_min(2.0**-100).log2().floor() - largest_exponent)
    return (element(blocks / scale) * scale).reshape(len(rows), -1)[:, : rows.shape[1]]


def e2m1(values):
    values = values.clamp(-6, 6)
    step = 2.0 ** (values.abs().clamp_min(1).log2().floor() - 1)
    return (values / step).round() * step


def reference(rows, scheme):
    """What each format makes of one row for each channel, in float64 and from its definition."""
    kind, group_size = scheme.weight, scheme.group_size
    if kind == "channel":
        scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-30) / scheme.weight_qmax
        return (rows / scale).round() * scale
    if kind == "group" and scheme.affine:
        groups = rows.reshape(len(rows), -1, group_size)
        low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
        scale = (high - low) / 15
        zero = (-8 - low / scale).round().clamp(-8, 7)
        return (((groups / scale).round() + zero).clamp(-8, 7) - zero).mul(scale).reshape(rows.shape)
    if kind == "group":
        groups = rows.reshape(len(rows), -1, group_size)
        scale = groups.abs().amax(-1, keepdim=True) / scheme.weight_qmax
        return ((groups / scale).round() * scale).reshape(rows.shape)
    if kind in ("fp16", "bf16"):
        mantissa, smallest, largest = {"fp16": (10, -14, 65504.0), "bf16": (7, -126, 255 * 2.0**120)}[kind]
        exponent = rows.abs().clamp_min(2.0**-140).log2().floor().clamp_min(smallest)
        return ((rows / 2 ** (exponent - mantissa)).round() * 2 ** (exponent - mantissa)).clamp(-largest, largest)
    if kind == "fp8_block":
        width = rows.shape[1] if rows.shape[1] % group_size else group_size
        bands = [band.split(width, 1) for band in rows.split(128)]
        return torch.cat([torch.cat([e4m3(part, part.abs().max() / 448) for part in band], 1) for band in bands])
    if kind in ("fp8", "fp8_tensor"):
        peaks = rows.abs().amax(1, keepdim=True)
        return e4m3(rows, (peaks if kind == "fp8" else peaks.max()) / 448)
    if kind == "mxfp6":
        return mx(rows, 2, lambda x: torch.from_numpy(x.numpy().astype(ml_dtypes.float6_e2m3fn).astype("float64")))
    if kind in ("mxfp4", "mxfp8"):
        return mx(rows, 2, e2m1) if kind == "mxfp4" else mx(rows, 8, lambda x: e4m3(x.clamp(-448, 448), 1.0))
    if kind == "nvfp4":
        # the power of two at or above the tensor scale of the format's paper
        scale = 2.0 ** math.ceil(math.log2(float(rows.abs().max()) / (6 * 448)))
        return nvfp4_round_to(rows.float(), per_tensor_scale=torch.tensor(scale)).double()
    if kind == "ternary":
        mean = rows.abs().mean(1, keepdim=True)
        kept = rows.abs() > 0.7 * mean
        scale = (rows.abs() * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True)
        return rows.sign() * kept * scale
    return torch.where(rows < 0, -1.0, 1.0).double() * rows.abs().mean(1, keepdim=True)


@pytest.mark.parametrize("options", [*({"scheme": scheme} for scheme in [*OWN, "W3A16", "MXFP8"]), *PAIRS], ids=str)
def test_every_layer_is_baked_to_the_values_of_its_scheme_and_deploys_bit_for_bit(options):
    model = make_net()
    keys = list(model.state_dict())
    session, optimizer = start(model, options)
    train(session, optimizer, model, range(4))
    assert list(model.state_dict()) == keys
    latent = {name: value.detach().clone() for name, value in model.named_parameters()}
    tokens, _ = batch(99)
    model.eval()
    with session.swapped("evaluate"), torch.no_grad():
        trained = model(tokens)
    baked = session.files.bake(model.state_dict())
    session.finish()
    assert all(type(module).__module__.startswith("torch.nn") for name, module in model.named_modules() if name)
    schemes = session.techniques["qat"].schemes
    for name in LAYERS:
        layer = model.get_submodule(name)
        for weight, value in weights_of(layer).items():
            before = latent[f"{name}.{weight}"]
            expected = from_rows(layer, reference(as_rows(layer, before.double()), schemes[name]), before)
            # which weights come out depends on the CPU; one may lie between two codes to the last bit of float32
            assert (~torch.isclose(value.double(), expected, rtol=1e-5, atol=1e-7)).sum() <= 1, (name, weight)
            assert not torch.equal(value, before)
            assert torch.equal(baked[f"{name}.{weight}"], value)
    report = session.receipt()["techniques"]["qat"]
    assert [entry["name"] for entry in report["per_layer"]] == list(LAYERS)
    assert all(entry["sqnr_db"] > 1 for entry in report["per_layer"])
    assert sum(report["formats"].values()) == len(LAYERS)
    plain = make_net().eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(apply_ranges(plain, session.files.deployment()["qat"]["ranges"])(tokens), trained)
        converted = convert(model)(tokens)
    assert torch.allclose(converted, trained, atol=2e-2)


RANGES = ["ema", "minmax", "percentile", "kl", "mse", "lsq", "lsq_plus", "pact"]


@pytest.mark.parametrize("options", [*({"scheme": scheme} for scheme in OWN), *PAIRS[:3],
                                     *({"scheme": "int8", "range": name, "begin": 2} for name in RANGES[1:]),
                                     {"scheme": "int8", "rounding": "stochastic"},
                                     {"scheme": "int8", "symmetric": True, "range": "mse"},
                                     {"scheme": "int8", "symmetric": True, "range": "lsq"},
                                     {"scheme": "int8", "begin": 2, "freeze_observers": 4},
                                     {"scheme": "binary", "activation_bits": 2, "range": "lsq"}],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_resume_is_exact(options, stop):
    whole = make_net()
    session, optimizer = start(whole, options, decay=0.1)
    train(session, optimizer, whole, range(6))
    first = make_net()
    session, optimizer = start(first, options, decay=0.1)
    train(session, optimizer, first, range(stop))
    state = copy.deepcopy({"session": session.state_dict(), "optimizer": optimizer.state_dict()})
    second = make_net()
    second.load_state_dict(first.state_dict())
    session, optimizer = start(second, options, state, decay=0.1)
    train(session, optimizer, second, range(stop, 6))
    for (name, one), (_, other) in zip(whole.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_observed_ranges_are_those_of_their_estimator():
    torch.manual_seed(0)
    inputs = [torch.randn(64, 8) * (1 + 4 * (torch.rand(64, 8) > 0.99)) for _ in range(5)]
    found = {}
    for name in RANGES[:5]:
        model = nn.Sequential(nn.Linear(8, 4))
        own = {"percentile": 99.0} if name == "percentile" else {}
        session, _ = start(model, {"scheme": "int8", "activation_bits": 4, "range": name, **own})
        for x in inputs:
            model(x).sum().backward()
            session.before_step()
            session.after_step()
        session.finish()
        entry = session.files.deployment()["qat"]["ranges"]["0"]
        expected = range_of(name, inputs, bits=4, **own)
        assert [entry["min"], entry["max"]] == pytest.approx(expected, rel=1e-6), name
        found[name] = entry["max"]
    assert found["percentile"] < found["mse"] < found["minmax"]
    assert len(set(found.values())) == 5


@pytest.mark.parametrize("name", ["lsq", "lsq_plus", "pact"])
def test_learned_ranges_move_and_deploy_bit_for_bit(name):
    model = make_net()
    session, optimizer = start(model, {"scheme": "int8", "range": name})
    scales = lambda: {  # noqa: E731
        key: value.detach().clone()
        for key, value in model.named_parameters()
        if key.split(".")[-1].startswith(("input_", "weight_magnitude"))
    }
    train(session, optimizer, model, range(2))
    before = scales()
    # PACT learns where inputs are not negative: behind the ReLU alone
    assert ("head.input_magnitude" in before) is (name != "pact")
    train(session, optimizer, model, range(2, 6))
    moved = {key for key, value in scales().items() if not torch.equal(value, before[key])}
    assert "up.input_clip" in moved if name == "pact" else {"head.input_magnitude", "conv.weight_magnitude"} <= moved
    tokens, _ = batch(99)
    model.eval()
    with session.swapped("evaluate"), torch.no_grad():
        trained = model(tokens)
    session.finish()
    assert not [key for key, _ in model.named_parameters() if {"magnitude", "offset", "clip"} & {*key.split("_")}]
    plain = make_net().eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(apply_ranges(plain, session.files.deployment()["qat"]["ranges"])(tokens), trained)
        integer = convert(model)
        assert torch.allclose(integer(tokens), trained, atol=1e-4)


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5),
    lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5, fused=True),
    lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.5), lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.5),
])  # fmt: skip
def test_learned_scales_take_no_weight_decay(make):
    ends = []
    for decay in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 4))
        session = Session(Recipe.from_dict({"qat": {"scheme": "int8", "range": "lsq"}}))
        session.attach(model)
        optimizer = make(model.parameters())
        if not decay:
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.0
        session.begin([optimizer], total_steps=9)
        for step in range(5):
            for parameter in model.parameters():  # the same gradients in both runs
                parameter.grad = torch.full_like(parameter, 0.01 * (step + 1))
            session.before_step()
            optimizer.step()
            session.after_step()
        ends.append({key: value.detach().clone() for key, value in model.named_parameters()})
    assert torch.allclose(ends[0]["0.weight_magnitude"], ends[1]["0.weight_magnitude"], rtol=1e-5)
    assert not torch.allclose(ends[0]["0.weight"], ends[1]["0.weight"], rtol=1e-3)


def test_stochastic_rounding_is_the_same_in_a_recomputed_forward_and_other_at_the_next_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    session, optimizer = start(model, {"scheme": "int8_weight", "rounding": "stochastic"})
    x = torch.eye(8)
    seen = [model[0].quantizer.weight(model[0], model[0].weight).detach() for _ in range(2)]
    assert torch.equal(*seen)
    model(x).sum().backward()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    session.after_step()
    assert not torch.equal(model[0].quantizer.weight(model[0], model[0].weight), seen[0])
    model.eval()
    nearest = model[0].quantizer.baked_weight(model[0], model[0].weight)
    assert torch.equal(model[0].quantizer.weight(model[0], model[0].weight), nearest)


def test_overrides_reach_their_layers_alone():
    options = {"scheme": "int8", "overrides": {"head": {"weight_bits": 4}, "l*": {"scheme": "int8_weight"}}}
    model = make_net()
    session, _ = start(model, options)
    schemes = session.techniques["qat"].schemes
    assert schemes["head"] == LayerScheme(weight_bits=4)
    assert schemes["lstm"] == LayerScheme(input="none", activation_bits=0)
    assert schemes["gru"] == LayerScheme()
    again = Recipe.from_yaml(session.recipe.to_yaml())
    assert again == session.recipe


def test_names_are_those_of_the_types_and_a_preset_has_any_case():
    names = ({*SCHEMES, "released"}, set(WEIGHTS), {"auto", *INPUTS})
    assert names == tuple(map(set, map(get_args, (Scheme, Weights, Inputs))))
    assert QatConfig(scheme="mxfp4a16") == QatConfig(scheme="MXFP4A16")
    assert QatConfig(scheme="MXFP4").layer_scheme == QatConfig(weights="mxfp4", inputs="mxfp4").layer_scheme
    assert QatConfig(weights="MXFP4", inputs="MXFP8") == QatConfig(weights="mxfp4", inputs="mxfp8")
    assert QatConfig(scheme="int8", inputs="none").layer_scheme == QatConfig(scheme="int8_weight").layer_scheme


def test_a_group_size_holds_for_formats_of_overrides_that_have_groups():
    overrides = {"a": {"weights": "INT4_asym"}, "b": {"weights": "mxfp4"}, "c": {"scheme": "W4A8"}}
    config = QatConfig(weights="int4", group_size=64, overrides=overrides)
    schemes = layer_schemes(config, {name: nn.Linear(256, 8) for name in "abcd"})
    assert {name: scheme.group_size for name, scheme in schemes.items()} == {"a": 64, "b": 0, "c": 64, "d": 64}
    assert schemes["a"].affine


def test_layers_have_pairs_of_their_own():
    options = {"scheme": "MXFP4A16", "overrides": {
        "head": {"weights": "fp8"}, "lstm": {"scheme": "W4A8"}, "gru": {"inputs": "mxfp8"},
        "conv": {"weights": "int8", "inputs": "int8_static", "weight_bits": 5},
    }}  # fmt: skip
    session, _ = start(make_net(), options)
    schemes = session.techniques["qat"].schemes
    assert schemes["head"] == LayerScheme(*WEIGHTS["fp8"], *INPUTS["none"])
    assert schemes["lstm"] == LayerScheme("group", 4, 32, False, *INPUTS["int8_token"])
    assert schemes["gru"] == LayerScheme(*WEIGHTS["mxfp4"], *INPUTS["mxfp8"])
    assert schemes["conv"] == LayerScheme("channel", 5)
    assert schemes["up"] == SCHEMES["MXFP4A16"]


@pytest.mark.parametrize(("head", "ranged"), [
    ({"weights": "ternary"}, False), ({"weights": "ternary", "activation_bits": 4}, True),
    ({"inputs": "fp8_static"}, True), ({"scheme": "int8"}, True), ({"scheme": "mxfp4a16"}, False),
])  # fmt: skip
def test_averages_need_batches_where_an_override_gives_a_layer_a_range(head, ranged):
    config = QatConfig(weights="fp8", overrides={"head": head})
    assert config.observes_activations == ranged
    session, _ = start(make_net(), config.to_dict())
    assert session.techniques["qat"].schemes["head"].has_range == ranged


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"scheme": "int8_weight", "range": "kl"}, ConfigError, "range needs inputs of int8_static or fp8_static"),
    ({"scheme": "fp8", "weight_bits": 4}, ConfigError, "weight_bits needs weights of int8, int4 or int4_asym"),
    ({"scheme": "int8_weight", "activation_bits": 8}, ConfigError, "activation_bits needs inputs of int8_static"),
    ({"inputs": "mxfp8"}, ConfigError, "scheme or weights or init must be given"),
    ({"scheme": "FP8"}, ConfigError, "FP8 means in compressed-tensors one scale per tensor"),
    ({"scheme": "W4A17"}, ConfigError, "did you mean 'W4A16'"),
    ({"weights": "nvfp4", "inputs": "mxfp8"}, ConfigError, "mxfp8 inputs have a power of two .* nvfp4 weights lack"),
    ({"scheme": "W4A16", "inputs": "nvfp4"}, ConfigError, "nvfp4 inputs have an fp8 scale .* int4 weights lack"),
    ({"scheme": "MXFP8", "inputs": "int8_token"}, ConfigError, "integer inputs need .* which mxfp8 lacks"),
    ({"scheme": "int8_dynamic", "symmetric": True}, ConfigError, "symmetric needs inputs of int8_static"),
    ({"scheme": "int8", "symmetric": True, "range": "pact"}, ConfigError, "symmetric cannot be combined with range"),
    ({"weights": "bf16", "inputs": "fp8_token"}, ConfigError, "bf16 weights multiply only float inputs"),
    ({"scheme": "int8", "inputs": "fp8_token"}, ConfigError, "fp8 inputs need weights that fp8 represents, .* 8 bits"),
    ({"scheme": "W4A16", "overrides": {"head": {"inputs": "mxfp4"}}}, ConfigError, "head: .*mxfp4 inputs have .* int4"),
    ({"scheme": "W4A16", "overrides": {"head": {"weights": "none"}}}, ConfigError, "give head a format.*use skip"),
    ({"scheme": "W4A16", "overrides": {"head": {"weights": None}}}, ConfigError, "give head a format.*use skip"),
    ({"scheme": "W4A16", "overrides": {"head": {"weights": "mxfp3"}}}, ConfigError, "did you mean 'mxfp8'"),
    ({"scheme": "int8", "range": "kl", "overrides": {"head": {"scheme": "fp8_static"}}}, ConfigError, "range=kl needs"),
    ({"scheme": "int8", "group_size": 32}, ConfigError, "group_size"),
    ({"scheme": "int8", "rounding": "stochastic", "range": "lsq"}, ConfigError, "cannot be combined with range=lsq"),
    ({"scheme": "int8", "overrides": ["head"]}, ConfigError, "overrides must be PATTERN:OPTION=VALUE"),
    ({"scheme": "int8", "overrides": {"head": {"begin": 3}}}, ConfigError, "overrides must be PATTERN:OPTION=VALUE"),
    ({"scheme": "int8", "overrides": {"head": {"weight_bits": 9}}}, ConfigError, r"weight_bits must be in \[2, 8\]"),
    ({"scheme": "int8", "overrides": {"hed": {"weight_bits": 4}}}, MatchError, "did you mean 'head'"),
    ({"scheme": "int4_weight", "group_size": 24}, ConfigError, "group_size must divide the"),
])  # fmt: skip
def test_refusals(options, error, message):
    with pytest.raises(error, match=message):
        start(make_net(), options)


def test_group_sizes_are_the_largest_that_divides():
    layers = {"a": nn.Linear(256, 2), "b": nn.Linear(96, 2), "c": nn.Linear(50, 2)}
    sizes = layer_schemes(QatConfig(scheme="int4_weight"), layers)
    assert [sizes[name].group_size for name in layers] == [128, 32, 50]


def test_saved_entries_that_nothing_saved_are_refused():
    for entry in ({"min": 0.0, "max": 1.0, "weight": "gold"}, {"min": 0.0, "max": 1.0, "activation_bits": 99}, 3):
        with pytest.raises(ConfigError, match="apply_ranges: head"):
            apply_ranges(make_net(), {"head": entry})


def test_stochastic_rounding_takes_any_seed():
    session = Session(Recipe.from_dict({"qat": {"scheme": "int8_weight", "rounding": "stochastic"}}), seed=2**63 - 1)
    model = nn.Linear(8, 8)
    session.attach(model)
    session.begin([torch.optim.SGD(model.parameters(), lr=0.1)], total_steps=3)
    assert not torch.equal(model(torch.eye(8)), model.eval()(torch.eye(8)))


def test_rows_that_no_group_divides_are_one_group_of_a_recurrent_layer():
    torch.manual_seed(0)
    lstm = nn.LSTM(40, 256)
    before = {name: weight.clone() for name, weight in lstm.named_parameters()}
    quantized = quantize(nn.Sequential(lstm), "int4_weight")
    # 40 inputs are no multiple of a usual group; 256 hidden units are two of 128
    for name, size in {"weight_ih_l0": 40, "weight_hh_l0": 128}.items():
        rows = before[name].double().reshape(-1, size)
        low, high = rows.amin(1).clamp(max=0), rows.amax(1).clamp(min=0)
        step = ((high - low) / 15).unsqueeze(1)  # an end may be off by a half of it for the zero point too
        found = quantized[0].get_parameter(name).double().reshape(-1, size)
        assert ((found - rows).abs() <= 1.001 * step).all()
        assert max(len(row.unique()) for row in found) <= 16
    weights, scales = 4 * 256 * (40 + 256), 4 * 256 * (1 + 2)
    assert layer_bytes(quantized)["0"] == (4 * weights, weights // 2 + 5 * scales)


@pytest.mark.parametrize("shape", [(256, 256), (200, 256), (130, 96)])
def test_blocks_of_fp8_share_a_scale_by_128_rows_and_inputs_by_128_features(shape):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False))
    weight = model[0].weight.detach().clone()
    quantized = quantize(model, "fp8_block")
    expected = reference(weight.double(), SCHEMES["fp8_block"])
    assert (~torch.isclose(quantized[0].weight.double(), expected, rtol=1e-5, atol=1e-9)).sum() <= 1
    width = 128 if shape[1] % 128 == 0 else shape[1]
    x = torch.randn(3, shape[1]) * torch.logspace(-3, 3, shape[1])
    groups = x.view(-1, width)
    seen = e4m3(groups.double(), groups.double().abs().amax(1, keepdim=True) / 448).view(x.shape)
    assert torch.allclose(quantized(x).double(), seen @ quantized[0].weight.double().T, rtol=1e-4, atol=1e-3)


def test_a_range_of_fp8_saturates_and_stops_gradients_outside():
    x = torch.tensor([[4.0, -2.0, 0.3, 1.0]])
    quantized = quantize(nn.Sequential(nn.Linear(4, 2, bias=False)), "fp8_static", [x])
    layer = quantized[0]
    scale, zero_point = layer.quantizer.qparams(layer)
    assert (scale.item(), zero_point.item()) == (pytest.approx(4 / 448), 0)
    wide = torch.tensor([[9.0, -2.0, 0.3, 1.0]], requires_grad=True)
    seen = layer.quantizer.input(layer, wide)
    assert torch.allclose(seen.double(), e4m3(x.double(), 4 / 448), atol=1e-6)
    seen.sum().backward()
    assert wide.grad.tolist() == [[0.0, 1.0, 1.0, 1.0]]
    again = apply_ranges(nn.Sequential(nn.Linear(4, 2, bias=False)), {"0": layer.quantizer.entry(layer)})
    assert torch.equal(again[0].quantizer.input(again[0], wide), seen)
    with pytest.raises(ConfigError, match=r"range=kl needs inputs other than fp8_static"):
        QatConfig(scheme="fp8_static", range="kl")


def test_a_cast_to_16_bits_counts_what_its_range_cannot_hold():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight[0] = torch.tensor([1e6, -7e4, 1e-9, 0.0])
    quantized, report = quantize_with_report(model, "fp16")
    assert quantized[0].weight[0].tolist() == [65504.0, -65504.0, 0.0, 0.0]
    assert [(entry["weights_clipped"], entry["weights_flushed"]) for entry in report.layers] == [(2, 1), (0, 0)]
    assert layer_bytes(quantized) == {"0": (32, 16), "2": (16, 8)}
    quantized, report = quantize_with_report(model, "bf16")
    assert torch.equal(quantized[0].weight, model[0].weight.bfloat16().float())
    assert report.layers[0]["weights_clipped"] == report.layers[0]["weights_flushed"] == 0
    with pytest.raises(ConfigError, match="weights of 0, 2 are bf16 already"):
        quantize(model.bfloat16(), "bf16")


def test_weights_beyond_the_range_of_16_bits_get_no_gradient():
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    start(model, {"scheme": "fp16"})
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1e5, 0.1]]))
    model(torch.ones(1, 2)).sum().backward()
    assert model[0].weight.grad.tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("name", [*RANGES[:6]])
@pytest.mark.parametrize("shift", [0.0, 3.0])  # inputs of both signs, and only positive ones
def test_symmetric_inputs_have_signed_codes_without_a_zero_point(name, shift):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4))
    session, optimizer = start(model, {"scheme": "int8", "symmetric": True, "range": name})
    x = torch.randn(64, 8).abs() + shift if shift else torch.randn(64, 8)
    model.train()
    for _ in range(2):
        model(x).sum().backward()
        session.before_step()
        session.after_step()
    scale, zero_point = model[0].quantizer.qparams(model[0])
    assert zero_point == 0
    if name in ("ema", "minmax", "percentile"):
        largest = x.double().abs().quantile(0.9999) if name == "percentile" else x.double().abs().max()
        assert float(scale) == pytest.approx(float(largest) / 127, rel=1e-2 if name == "percentile" else 1e-6)
    assert float(scale) <= float(x.abs().max()) / 127 * (1 + 1e-6) or name == "lsq"
    model.eval()
    found = model[0].quantizer.input(model[0], x).double()
    codes = x.double() / scale.double()
    tied = (codes - codes.floor() - 0.5).abs() < 1e-5  # float32 may round these to either side
    near = torch.isclose(found, codes.round().clamp(-128, 127) * scale.double(), atol=1e-6)
    assert (near | tied).all()
    assert near.float().mean() > 0.99
    optimizer.zero_grad()
    session.finish()
    restored = apply_ranges(nn.Sequential(nn.Linear(8, 4)), session.files.deployment()["qat"]["ranges"])
    assert torch.equal(restored[0].quantizer.input(restored[0], x).double(), found)
