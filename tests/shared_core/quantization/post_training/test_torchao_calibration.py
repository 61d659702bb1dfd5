"""torchao's GPTQ, AWQ and SmoothQuant: their papers' formulas in float64, and what a user's model becomes."""

import copy
import inspect
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from codes import WIDEST
from torch import nn

from shared_core.errors import CompatibilityError, ConfigError, MatchError, MissingExtraError, TrainingError
from shared_core.quantization.post_training.torchao_calibration import (
    methods_here,
    quantize_with_torchao,
    to_dense,
    to_plain_weights,
)

ON_CPU = [("awq", "int4_weight"), ("awq", "int8_weight"), ("smoothquant", "int8_dynamic")]


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)).to(dtype)


def batches(*sizes, dtype=torch.float32, seed=1):
    """Inputs with a few large channels and correlation, which is what the methods are for."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(12, 64, generator=generator) * torch.logspace(-1, 1, 64)
    noise = [0.05 * torch.randn(size, 64, generator=generator) for size in sizes]
    return [
        (torch.randn(size, 12, generator=generator) @ mix + extra).to(dtype)
        for size, extra in zip(sizes, noise, strict=True)
    ]


@pytest.fixture
def gptq_on_cpu(monkeypatch):
    """torchao's own GPTQ without its refusal of CPUs: every operation in it is one that CPUs have."""
    from torchao.prototype.gptq import api

    source = inspect.getsource(api.gptq_quantize)
    assert 'assert device.type == "cuda"' in source
    code = source.replace('assert device.type == "cuda"', 'assert device.type == "cpu"')
    code = code.replace("torch.cuda.synchronize()", "pass")
    names = dict(vars(api))
    exec(compile(code, api.__file__, "exec"), names)
    monkeypatch.setattr(api, "gptq_quantize", names["gptq_quantize"])


def test_what_runs_here_is_found_by_trying():
    found = methods_here("cpu")
    assert all(found[method][scheme] == "" for method, scheme in ON_CPU)
    assert "CUDA" in found["gptq"]["int8_weight"]
    assert methods_here("cpu", torch.float64)["smoothquant"]["int8_dynamic"] != ""


@pytest.mark.parametrize(("method", "scheme"), ON_CPU)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_copy_runs_and_the_outputs_gain(method, scheme, dtype):
    net, data = network(dtype), batches(64, 64, 17, dtype=dtype)
    quantized, report = quantize_with_torchao(net, method, data, scheme=scheme)
    assert [entry["name"] for entry in report.layers] == ["0", "2"]
    assert (report.method, report.scheme, report.batches, report.left_out) == (method, scheme, 3, {})
    first = report.layers[0]
    # AWQ tries plain rounding too, which with 8 bits may be best; in bf16 the rounding of products hides what is left
    at_least = {"int4_weight": 0.3, "int8_weight": 0.0, "int8_dynamic": 3.0}[scheme] if dtype == torch.float32 else -0.5
    assert first["output_sqnr_db"] - first["plain_output_sqnr_db"] >= at_least
    assert first["bytes"] < first["float_bytes"]
    exact, got = torch.cat([net(x) for x in data]).double(), torch.cat([quantized(x) for x in data]).double()
    error = ((got - exact).norm() / exact.norm()).item()
    assert error == pytest.approx(report.output_error["quantized"], rel=1e-3)
    assert error < (0.15 if scheme == "int4_weight" else 0.03)


def test_ratios_are_those_of_the_definition():
    net, data = network(), batches(40, 9)
    quantized, report = quantize_with_torchao(net, "awq", data)
    x = torch.cat(data)
    exact, got = net[0](x).double(), quantized[0](x).double()
    ratio = 10 * math.log10(exact.square().sum().item() / (got - exact).square().sum().item())
    assert report.layers[0]["output_sqnr_db"] == pytest.approx(ratio, abs=1e-2)
    # plain rounding to 16 values from the smallest to the largest of a group (a row of 64), in float64
    weight = net[0].weight.detach().double()
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    step = (high - low) / 15
    plain = low + ((weight - low) / step).round() * step
    expected = 10 * math.log10(weight.square().sum().item() / (plain - weight).square().sum().item())
    assert report.layers[0]["plain_sqnr_db"] == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize("alpha", [0.3, 0.5])
def test_smoothquant_scales_as_its_paper(alpha):
    net, data = network(), batches(50, 14)
    quantized, _ = quantize_with_torchao(net, "smoothquant", data, alpha=alpha)
    inputs, weight = torch.cat(data).double(), net[0].weight.detach().double()
    smooth = inputs.abs().amax(0) ** alpha / weight.abs().amax(0) ** (1 - alpha)  # equation 4
    assert torch.allclose(quantized[0].weight.act_pre_scale.double(), 1 / smooth, rtol=1e-5)
    scaled = weight * smooth
    narrow = 7 in (WIDEST["matmul"], WIDEST["linear"])  # either may compute it
    step = scaled.abs().amax(1, keepdim=True) / (63 if narrow else 127)
    assert ((to_dense(quantized[0].weight).double() * smooth - scaled).abs() <= 0.51 * step).all()


def test_awq_takes_the_best_power_of_the_mean_magnitude():
    net, data = network(), batches(50, 14)
    quantized, _ = quantize_with_torchao(net, "awq", data, search_steps=10)
    inputs, weight = torch.cat(data).double(), net[0].weight.detach().double()
    errors, candidates = [], []
    for k in range(10):
        scale = inputs.abs().mean(0) ** (k / 10)
        scale = scale / (scale.max() * scale.min()).sqrt()
        scaled = weight * scale
        low, high = scaled.amin(1, keepdim=True), scaled.amax(1, keepdim=True)
        step = (high - low) / 15
        rounded = (low + ((scaled - low) / step).round() * step) / scale
        errors.append((inputs @ (rounded - weight).T).square().mean().item())
        candidates.append(scale)
    found = 1 / quantized[0].weight.act_pre_scale.double()
    nearest = min(range(10), key=lambda k: (candidates[k] - found).norm().item())
    assert torch.allclose(found, candidates[nearest], rtol=1e-3)
    assert nearest > 0
    assert errors[nearest] <= 1.05 * min(errors)


def test_gptq_rounds_column_by_column_as_its_paper(gptq_on_cpu, capsys):
    net, data = network(), batches(50, 14)
    net[0].weight.data[:, 5] *= 3
    before = copy.deepcopy(net.state_dict())
    quantized, report = quantize_with_torchao(net, "gptq", data, damping=0.02)
    assert capsys.readouterr().out == ""
    assert report.scheme == "int8_weight"
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    inputs, weight = torch.cat(data).double(), net[0].weight.detach().double()
    hessian = 2 * inputs.T @ inputs
    hessian += 0.02 * hessian.diagonal().mean() * torch.eye(64, dtype=torch.float64)
    root = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    scale = quantized[0].weight.scale.double()
    left, codes = weight.clone(), torch.zeros_like(weight)
    for k in range(64):  # algorithm 1 without its blocks
        codes[:, k] = (left[:, k] / scale[:, 0]).round().clamp(-128, 127)
        error = (left[:, k] - codes[:, k] * scale[:, 0]) / root[k, k]
        left[:, k + 1 :] -= error[:, None] * root[k, k + 1 :]
    same = (quantized[0].weight.qdata.double() == codes).double().mean()
    assert same > 0.97  # float32 sums decide ties otherwise, and a column's tie moves the columns behind it
    assert report.layers[0]["output_sqnr_db"] > report.layers[0]["plain_output_sqnr_db"] + 1
    assert report.layers[0]["sqnr_db"] < report.layers[0]["plain_sqnr_db"]


@pytest.mark.parametrize(("method", "scheme"), [*ON_CPU, ("gptq", "int8_weight")])
def test_the_split_into_batches_does_not_matter(gptq_on_cpu, method, scheme):
    whole = torch.cat(batches(6, 6, 12)).view(4, 6, 64)
    net = network()
    splits = [[whole], [whole[:3], whole[3:]], [whole[:, :4], whole[:, 4:]]]
    weights = [to_dense(quantize_with_torchao(net, method, split, scheme=scheme)[0][0].weight) for split in splits]
    for other in weights[1:]:
        # a sum in another order may move a code
        assert (weights[0] - other).norm() <= 2e-3 * weights[0].norm()


def test_inputs_that_the_model_overwrites_are_seen_as_they_were():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.in_place = nn.Linear(64, 64), True

        def forward(self, x):
            x = x.clone()
            y = self.layer(input=x)
            return x.mul_(0).add_(y) if self.in_place else y

    data = batches(40)
    net = Residual()
    found = quantize_with_torchao(net, "awq", data)[0]
    net.in_place = False
    expected = quantize_with_torchao(net, "awq", data)[0]
    assert torch.equal(to_dense(found.layer.weight), to_dense(expected.layer.weight))


def test_the_model_modes_and_random_state_stay():
    net = network().train()
    net[1].eval()
    kept, rng = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    from torch._inductor import config as inductor

    tuning = inductor.coordinate_descent_tuning, inductor.force_fuse_int_mm_with_mul
    seen = []
    net[0].register_forward_hook(lambda *at: seen.append("own"))
    data = batches(8, 8)
    told = []
    quantized, _ = quantize_with_torchao(net, "smoothquant", iter(data), progress=lambda *at: told.append(at))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [module.training for module in net.modules()] == [True, True, False, True]
    assert not any(module.training for module in quantized.modules())
    assert all(torch.equal(value, kept[key]) for key, value in net.state_dict().items())
    assert all(value.requires_grad for value in net.parameters())
    assert torch.equal(torch.get_rng_state(), rng)
    assert (inductor.coordinate_descent_tuning, inductor.force_fuse_int_mm_with_mul) == tuning
    assert [len(module._forward_hooks) for module in quantized] == [1, 0, 0]
    seen.clear()
    quantized(data[0])
    assert seen == ["own"]
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(("method", "scheme"), ON_CPU)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_weights_load_into_the_users_model(method, scheme, dtype):
    net, data = network(dtype), batches(32, dtype=dtype)
    quantized, report = quantize_with_torchao(net, method, data, scheme=scheme)
    plain, same = quantize_with_torchao(net, method, data, scheme=scheme, plain_weights=True)
    assert same == report
    fresh = network(dtype)
    fresh.load_state_dict(plain.state_dict(), strict=True)
    assert all(type(value) is torch.Tensor and value.dtype == dtype for value in plain.state_dict().values())
    assert all(type(value) is nn.Parameter and value.requires_grad for value in plain.parameters())
    exact, got = quantized(data[0]).double(), fresh(data[0]).double()
    # SmoothQuant's inputs are int8 in the one and float in the other
    limit = 2e-2 if method == "smoothquant" or dtype == torch.bfloat16 else 1e-5
    assert (exact - got).norm() <= limit * exact.norm()
    assert not torch.equal(fresh[0].weight, net[0].weight)


def test_a_wide_int4_weight_is_read_in_parts():
    torch.manual_seed(0)
    net, x = nn.Linear(1152, 16), torch.randn(8, 1152)
    quantized, report = quantize_with_torchao(net, "awq", [x], search_steps=2)
    assert (report.layers[0]["name"], report.layers[0]["group_size"]) == ("", 128)
    assert torch.allclose(F.linear(x, to_dense(quantized.weight), net.bias), quantized(x), atol=1e-4)


def test_fused_evaluation_of_transformer_layers_is_quantised_too():
    torch.manual_seed(0)
    net = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    x = torch.randn(2, 5, 32)
    quantized, report = quantize_with_torchao(net, "smoothquant", [x])
    assert [entry["name"] for entry in report.layers] == ["linear1", "linear2"]
    assert "class of its own" in report.left_out["self_attn.out_proj"]
    with torch.no_grad():
        found, exact = quantized(x), net(x)
        error = (found - exact).norm() / exact.norm()
        assert 1e-4 < error < 2e-2
        assert error.item() == pytest.approx(report.output_error["quantized"], rel=1e-2)
        assert torch.allclose(to_plain_weights(quantized)(x), exact, atol=5e-2)


def test_what_stays_in_float_is_named():
    class Odd(nn.Linear):
        pass

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(16, 64)
            self.odd, self.wide, self.few = Odd(64, 64), nn.Linear(64, 48), nn.Linear(48, 64)
            self.ten, self.lora_A = nn.Linear(64, 10), nn.Linear(64, 64)
            self.good, self.head = nn.Linear(64, 64), nn.Linear(64, 16, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            x = self.few(self.wide(self.odd(self.embed(ids))))
            return self.head(self.lora_A(self.good(x))) + self.ten(x).sum()

    net = Net()
    quantized, report = quantize_with_torchao(net, "awq", [torch.arange(16)[None]], skip=["wide"], allow_partial=True)
    assert [entry["name"] for entry in report.layers] == ["good"]
    assert {name: reason.split(",")[0] for name, reason in report.left_out.items()} == {
        "odd": "Odd is a class of its own",
        "few": "48 inputs do not divide into groups of 32",
        "ten": "the int4 kernel takes outputs in sixteens",
        "lora_A": "a LoRA adapter; merge it first",
        "head": "its weight is tied to another module",
    }
    assert quantized.head.weight is quantized.embed.weight
    with pytest.raises(MatchError, match="can be quantised; ten: the int4 kernel takes outputs in sixteens, got 10"):
        quantize_with_torchao(net, "awq", [torch.arange(16)[None]], include=["ten"])
    with pytest.raises(MatchError, match="include pattern 'goood' matches no module; did you mean 'good'"):
        quantize_with_torchao(net, "awq", [torch.arange(16)[None]], include=["goood"])
    again, report = quantize_with_torchao(net, "awq", [torch.arange(16)[None]], include=["good"])
    with pytest.raises(MatchError, match="good: its weight is Int4OpaqueTensor"):
        quantize_with_torchao(again, "awq", [torch.arange(16)[None]], include=["good"])


@pytest.mark.parametrize(("method", "options", "error", "message"), [
    ("gptq", {}, CompatibilityError, r"on cpu in torch.float32, got gptq with int8_weight.*CUDA.*what runs here: "
     r"awq \(int4_weight, int8_weight\), smoothquant \(int8_dynamic\)"),
    ("gtpq", {}, ConfigError, "method must be one of gptq, awq, smoothquant, got 'gtpq'; did you mean 'gptq'"),
    ("smoothquant", {"scheme": "int4_weight"}, ConfigError, "scheme must be int8_dynamic with smoothquant"),
    ("awq", {"alpha": 0.5}, ConfigError, "alpha must be left out with awq: it is an option of smoothquant"),
    ("smoothquant", {"alpha": float("nan")}, ConfigError, "alpha must be a finite number"),
    ("smoothquant", {"alpha": 1.5}, ConfigError, r"alpha must be in \[0, 1\]"),
    ("smoothquant", {"group_size": 32}, ConfigError, "group_size must be 32, 64 or 128, and come with int4_weight"),
    ("awq", {"group_size": 48}, ConfigError, "group_size must be 32, 64 or 128"),
    ("awq", {"search_steps": 0}, ConfigError, "search_steps must be in"),
    ("awq", {"serch_steps": 3}, ConfigError, "did you mean 'search_steps'"),
    ("awq", {"num_batches": 0}, ConfigError, "num_batches must be a whole number of at least 1, got 0"),
])  # fmt: skip
def test_refusals(method, options, error, message):
    def never():
        raise AssertionError("nothing may be loaded")
        yield

    with pytest.raises(error, match=message):
        quantize_with_torchao(network(), method, never(), **options)


def test_bad_calibration_is_told():
    net = network()
    with pytest.raises(ConfigError, match="calibration must hold batches, got none"):
        quantize_with_torchao(net, "awq", [])
    with pytest.raises(ConfigError, match=r"got tuple .*; give them without labels"):
        quantize_with_torchao(net, "awq", [(torch.ones(2, 64), torch.ones(2))])
    with pytest.raises(TrainingError, match="finite inputs, but 0, 2 saw NaN or infinity"):
        quantize_with_torchao(net, "awq", [torch.ones(2, 64), torch.full((2, 64), torch.nan)])
    net.unused = nn.Linear(64, 16)
    net.forward = lambda x: net[2](net[1](net[0](x)))
    for data in ([torch.ones(2, 64)], [torch.ones(0, 64)]):
        with pytest.raises(TrainingError, match="unused saw none; skip them"):
            quantize_with_torchao(net, "awq", data)
    net[0].weight.data[3, 3] = torch.inf
    with pytest.raises(CompatibilityError, match="weights of 0 must be finite"):
        quantize_with_torchao(net, "awq", [torch.ones(2, 64)])
    with pytest.raises(MatchError, match="must have weights of torchao's, found none"):
        to_plain_weights(net)


def test_a_missing_torchao_and_a_moved_name_are_told(monkeypatch):
    import torchao

    with monkeypatch.context() as patch:
        patch.delattr("torchao.prototype.awq.AWQConfig")
        with pytest.raises(
            CompatibilityError, match=rf"AWQConfig, which {torchao.__version__} has not.*efftrain\[torchao"
        ):
            quantize_with_torchao(network(), "awq", batches(8))
        assert "AWQConfig" in methods_here("cpu")["awq"]["int8_weight"]
        assert quantize_with_torchao(network(), "smoothquant", batches(8))[1].layers
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(
        MissingExtraError, match=r"needs torchao, which is not installed; pip install 'efftrain\[torchao"
    ):
        quantize_with_torchao(network(), "awq", batches(8))
