"""Sparse layers for inference: the same outputs and checkpoints, and only where they are measured to be faster."""

import copy
import dataclasses
import math

import pytest
import torch
from torch import nn

from shared_core.errors import CompatibilityError, ConfigError, MatchError
from shared_core.tools.sparse_inference import convert as sparse_speed
from shared_core.tools.sparse_inference.convert import SparseSpeed, measure_sparse_speed, sparse_layers
from shared_core.tools.sparse_inference.layers import SparseLinear

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


@pytest.fixture(autouse=True)
def no_kept_measurements():
    sparse_speed._measured.cache_clear()
    yield
    sparse_speed._measured.cache_clear()


def sparse_weight(num_outputs, num_inputs, density=0.1, block=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tiles = torch.rand(num_outputs // block, num_inputs // block, generator=generator) < density
    keep = tiles.repeat_interleave(block, 0).repeat_interleave(block, 1)
    return torch.randn(num_outputs, num_inputs, generator=generator) * keep


def net(density=0.05, block=1, dtype=torch.float32):
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Sequential(nn.Linear(96, 32, bias=False)), nn.Linear(32, 3))
    with torch.no_grad():
        model[0].weight.copy_(sparse_weight(96, 64, density, block))
        model[2][0].weight.copy_(sparse_weight(32, 96, density, block, seed=1))
    return model.to(dtype).eval()


LAYOUTS = [("csr", None), ("bsr", 4), ("bsr", 16)]


# one layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(48,), (1, 48), (5, 48), (2, 3, 48), (0, 48), (2, 1, 1, 48)])
@pytest.mark.parametrize(("layout", "block"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_outputs_are_those_of_the_dense_layer(dtype, layout, block, shape, bias):
    dense = nn.Linear(48, 32, bias=bias).to(dtype)
    with torch.no_grad():
        dense.weight.copy_(sparse_weight(32, 48, 0.2, block or 1))
    layer = SparseLinear(dense.weight, dense.bias, layout, block)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    exact = nn.functional.linear(x.double(), dense.weight.double(), dense.bias.double() if bias else None)
    with torch.no_grad():
        found = layer(x)
    assert found.dtype == dtype
    assert found.is_contiguous()
    # 16-bit floats are summed in float32 and rounded once
    eps = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(dtype, 0.0)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5 + eps, atol=1e-5)


@pytest.mark.parametrize(("layout", "block"), LAYOUTS)
def test_inputs_of_any_strides(layout, block):
    weight = sparse_weight(32, 48, 0.2, block or 1)
    layer = SparseLinear(weight, None, layout, block)
    for x in (torch.randn(48, 7).t(), torch.randn(3, 48, 5).transpose(1, 2), torch.randn(9, 96)[:, ::2]):
        torch.testing.assert_close(layer(x), x @ weight.t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight", [torch.zeros(8, 16), torch.ones(8, 16), -torch.eye(16)[:8]])
@pytest.mark.parametrize(("layout", "block"), [("csr", None), ("bsr", 4)])
def test_empty_full_and_single_weights(weight, layout, block):
    layer = SparseLinear(weight, nn.Parameter(torch.arange(8.0)), layout, block)
    x = torch.randn(3, 16)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, weight, torch.arange(8.0)))
    assert torch.equal(layer.weight, weight)


def test_only_what_is_not_zero_is_stored():
    weight = sparse_weight(128, 256, 0.05)
    layer = SparseLinear(weight, None, "csr")
    num_live = int(weight.count_nonzero())
    assert layer.values.numel() == num_live
    assert layer.stored_bytes == 4 * (num_live + num_live + 129)
    assert f"stored={num_live}" in repr(layer)
    assert not any(tensor.numel() == weight.numel() for tensor in [*layer.parameters(), *layer.buffers()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_gives_what_a_dense_layer_gives(dtype):
    weight = sparse_weight(32, 48, 0.2)
    layer = SparseLinear(weight, nn.Parameter(torch.randn(32)), "csr")
    dense = nn.Linear(48, 32)
    dense.weight, dense.bias = nn.Parameter(weight), layer.bias
    x = torch.randn(5, 48, dtype=dtype)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found, expected = layer(x), dense(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)


def test_layers_move_between_types_are_copied_and_compiled():
    weight = sparse_weight(32, 48, 0.2)
    layer = SparseLinear(weight, nn.Parameter(torch.randn(32)), "csr")
    x = torch.randn(4, 48)
    with torch.no_grad():
        before = layer(x)
        assert torch.equal(copy.deepcopy(layer)(x), before)
        compiled = torch.compile(nn.Sequential(copy.deepcopy(layer), nn.ReLU()), backend="eager")
        assert torch.equal(compiled(x), before.relu())
        layer.bfloat16()
        assert layer.dtype == layer.weight.dtype == layer(x.bfloat16()).dtype == torch.bfloat16
        torch.testing.assert_close(layer(x.bfloat16()).float(), before, rtol=3e-2, atol=3e-2)
        assert torch.equal(layer.weight, weight.bfloat16())
        layer.double()
        assert layer.weight.dtype == layer(x.double()).dtype == torch.float64


# checkpoints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("layout", "block"), LAYOUTS)
def test_the_state_dict_is_that_of_the_dense_model(layout, block, dtype):
    dense = net(0.1, block or 1, dtype)
    model = copy.deepcopy(dense)
    sparse_layers(model, layout=layout, max_density=0.9, block=block, skip=["last"])
    saved = model.state_dict()
    assert list(saved) == list(dense.state_dict())
    for name, tensor in dense.state_dict().items():
        assert torch.equal(saved[name], tensor), name
        assert saved[name].dtype == tensor.dtype
    fresh = net(0.3).to(dtype)
    fresh.load_state_dict(saved)
    assert torch.equal(fresh[0].weight, dense[0].weight)


def test_a_converted_model_loads_dense_weights():
    model, other = net(0.1), net(0.2)
    sparse_layers(model, layout="csr", max_density=0.9)
    x = torch.randn(5, 64)
    model.load_state_dict(other.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(x), other(x), rtol=1e-5, atol=1e-5)
    assert model[0].values.numel() == other[0].weight.count_nonzero()


def test_what_does_not_fit_is_told_as_for_a_dense_layer():
    model = net(0.1)
    sparse_layers(model, layout="csr", max_density=0.9)
    state = net(0.1).state_dict()
    del state["0.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"0\.weight"'):
        model.load_state_dict(state)
    assert model.load_state_dict(state, strict=False).missing_keys == ["0.weight"]
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        model.load_state_dict({**net(0.1).state_dict(), "0.weight": torch.zeros(3, 3)})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**net(0.1).state_dict(), "0.strange": torch.zeros(1)})


# which layers


def pretend(monkeypatch, break_even=0.1, **by_layout):
    """Let a layout have this speed at 1 % and break even at a density."""
    asked = []

    def measure(num_outputs, num_inputs, *, layout, batch, block, dtype):
        asked.append((num_outputs, num_inputs, layout, batch, block, dtype))
        limit = by_layout.get(layout, break_even)
        return SparseSpeed((limit / 2, limit * 2), (4.0, 0.25), 1e-3, 1)

    monkeypatch.setattr("shared_core.tools.sparse_inference.convert.measure_sparse_speed", measure)
    return asked


def test_only_layers_below_break_even_are_replaced(monkeypatch):
    asked = pretend(monkeypatch)
    model = net(0.05)
    with torch.no_grad():
        model[2][0].weight.copy_(sparse_weight(32, 96, 0.2))
    dense = copy.deepcopy(model)
    first, second, last = sparse_layers(model, layout="csr", batch=7)
    assert [(choice.name, choice.layout) for choice in (first, second, last)] == [
        ("0", "csr"), ("2.0", "dense"), ("3", "dense"),
    ]  # fmt: skip
    assert isinstance(model[0], SparseLinear)
    assert type(model[2][0]) is nn.Linear
    assert first.density == int(dense[0].weight.count_nonzero()) / (64 * 96)
    assert first.break_even == pytest.approx(0.1)
    assert first.speedup > 1 > second.speedup
    assert "is not below 0.1, where csr breaks even" in second.why
    assert last.why.startswith("density 1 is not below 0.1")
    assert [shape[:2] for shape in asked] == [(96, 64), (32, 96), (3, 32)]
    assert {entry[2:] for entry in asked} == {("csr", 7, None, torch.float32)}
    x = torch.randn(7, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(x), dense(x), rtol=1e-5, atol=1e-5)
    assert not model[0].training


def test_auto_takes_the_faster_layout_and_finds_blocks(monkeypatch):
    pretend(monkeypatch, csr=0.15, bsr=0.6)
    model = net(0.1, block=8)
    choices = sparse_layers(model)
    assert choices[0].layout == "bsr"
    assert model[0].block == 8
    assert choices[0].stored_density == pytest.approx(choices[0].density)
    pretend(monkeypatch, csr=0.6, bsr=0.15)
    assert sparse_layers(net(0.1, block=8))[0].layout == "csr"
    scattered = sparse_layers(net(0.1))  # zeros that fill no blocks
    assert scattered[0].layout == "csr"
    (left, *_) = sparse_layers(net(0.1), layout="bsr")
    assert left.why == "its zeros do not fill blocks of 4 to 32; take csr"


def test_zeros_in_kept_blocks_count_as_stored(monkeypatch):
    pretend(monkeypatch, bsr=0.5)
    model = net(0.1)
    choice = sparse_layers(model, layout="bsr", block=4)[0]
    assert choice.density < 0.2 < choice.stored_density
    assert choice.layout == "dense"  # its blocks are too full
    (left, *_) = sparse_layers(net(0.1), layout="bsr", block=7)
    assert left.why == "blocks of 7x7 do not divide its shape"


def test_max_density_needs_no_measurement(monkeypatch):
    asked = pretend(monkeypatch)
    choices = sparse_layers(net(0.3), layout="csr", max_density=0.5)
    assert [choice.layout for choice in choices] == ["csr", "csr", "dense"]
    assert choices[2].why == "density 1 is not below 0.5"
    assert choices[0].speedup is None
    assert not asked


def test_layers_that_must_stay_are_named(monkeypatch):
    pretend(monkeypatch)

    class Own(nn.Linear):
        pass

    embedding = nn.Embedding(8, 16)
    model = nn.ModuleDict({
        "embedding": embedding, "tied": nn.Linear(16, 8, bias=False), "own": Own(16, 8), "hooked": nn.Linear(16, 8),
        "skipped": nn.Linear(16, 8), "taken": nn.Linear(16, 8),
    })  # fmt: skip
    model["tied"].weight = embedding.weight
    model["hooked"].register_forward_hook(lambda *_: None)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    choices = {choice.name: choice for choice in sparse_layers(model, skip=["skipped"])}
    assert "skipped" not in choices
    assert "shared with another module" in choices["tied"].why
    assert choices["own"].why.startswith("Own computes its weight itself")
    assert "hooks" in choices["hooked"].why
    assert [name for name, choice in choices.items() if choice.layout != "dense"] == ["taken"]


def test_attention_of_torch_goes_on_as_it_was(monkeypatch):
    pretend(monkeypatch, 0.9)
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Linear(16, 16)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(torch.rand(parameter.shape) < 0.3)
    x = torch.randn(2, 5, 16)
    with torch.inference_mode():
        before = model(x)
        choices = {choice.name: choice for choice in sparse_layers(model)}
        torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-5)
    assert [name for name, choice in choices.items() if choice.layout != "dense"] == ["1"]
    assert "fused product" in choices["0.linear1"].why
    assert choices["0.self_attn.out_proj"].why.startswith("NonDynamicallyQuantizableLinear")


def test_a_module_used_twice_is_replaced_in_both_places(monkeypatch):
    pretend(monkeypatch)
    shared = nn.Linear(16, 16)
    nn.init.zeros_(shared.weight)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    assert len(sparse_layers(model)) == 1
    assert model[0] is model[2]
    assert isinstance(model[0], SparseLinear)


def test_a_device_without_the_product_leaves_layers_dense(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("needs MKL\nand more")

    monkeypatch.setattr("shared_core.tools.sparse_inference.convert.measure_sparse_speed", refuse)
    choices = sparse_layers(net(0.05), layout="csr")
    assert {choice.why for choice in choices} == {"torch has no csr product here: needs MKL"}


@pytest.mark.parametrize(("model", "options", "error", "what"), [
    (net(), {"layout": "coo"}, ConfigError, "layout must be one of auto, csr, bsr"),
    (net(), {"batch": 0}, ConfigError, "batch must be in"),
    (net(), {"max_density": 0.0}, ConfigError, "max_density must be in"),
    (net(), {"max_density": math.nan}, ConfigError, "max_density must be a finite"),
    (net(), {"max_density": 1.5}, ConfigError, "max_density must be in"),
    (net(), {"block": 0}, ConfigError, "block must be in"),
    (nn.Linear(4, 4), {}, ConfigError, r"wrap it in nn\.Sequential"),
    (nn.Sequential(nn.Conv2d(1, 1, 1)), {}, MatchError, "has no Linear"),
    (nn.Sequential(nn.Linear(4, 4, device="meta")), {}, CompatibilityError, "must be on the CPU, got 0 on meta"),
])  # fmt: skip
def test_bad_options_and_models_are_refused_before_anything_changes(model, options, error, what):
    with pytest.raises(error, match=what):
        sparse_layers(model, **options)
    assert not any(isinstance(layer, SparseLinear) for layer in model.modules())


# measurements


def test_break_even_is_where_the_speedup_crosses_one():
    speed = SparseSpeed((0.01, 0.1, 0.2), (8.0, 2.0, 0.5), 1e-3, 1)
    assert speed.break_even == pytest.approx(math.sqrt(0.1 * 0.2))
    assert speed.at(0.1) == pytest.approx(2.0)
    assert speed.at(speed.break_even) == pytest.approx(1.0)
    assert speed.at(0.0) == 8.0
    assert speed.at(0.9) == 0.5
    assert SparseSpeed((0.01,), (0.9,), 1e-3, 1).break_even == 0.0
    assert SparseSpeed((0.01, 0.5), (9.0, 1.5), 1e-3, 1).break_even == 0.5
    assert dataclasses.astuple(speed)[3] == 1


class Clock:
    """A clock by which a dense call takes 8 seconds, a sparse one 100 times the density."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(nn.Linear, "forward", lambda module, x: self.tick(8.0))
        monkeypatch.setattr(
            SparseLinear, "forward", lambda module, x: self.tick(100 * float(module.weight.ne(0).float().mean()))
        )
        self.calls = 0

    def tick(self, seconds):
        self.now += seconds
        self.calls += 1

    def __call__(self):
        return self.now


@pytest.mark.parametrize(("layout", "block"), [("csr", None), ("bsr", 4)])
def test_measuring_stops_where_sparse_is_slower_and_is_remembered(monkeypatch, layout, block):
    clock = Clock(monkeypatch)
    how = {"batch": 3, "layout": layout, "block": block, "clock": clock}
    speed = measure_sparse_speed(64, 128, **how)
    assert speed.densities == (0.01, 0.02, 0.05, 0.1)
    assert speed.break_even == pytest.approx(0.08, rel=0.2)
    assert speed.dense_seconds == 8.0
    assert speed.num_threads == torch.get_num_threads()
    calls = clock.calls
    assert measure_sparse_speed(64, 128, **how) is speed
    assert clock.calls == calls
    measure_sparse_speed(64, 128, **{**how, "batch": 4})
    assert clock.calls == 2 * calls


def test_measuring_leaves_the_random_state_alone_and_really_measures():
    state = torch.get_rng_state()
    speed = measure_sparse_speed(32, 32, batch=2, densities=(0.05, 0.5), dtype=torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), state)
    assert speed.dense_seconds > 0
    assert all(ratio > 0 for ratio in speed.speedups)


@pytest.mark.parametrize(("how", "what"), [
    ({"batch": 0}, "batch must be in"), ({"layout": "bsr"}, "block must divide"),
    ({"layout": "bsr", "block": 3}, "block must divide"), ({"layout": "csc"}, "layout must be"),
])  # fmt: skip
def test_measurements_refuse(how, what):
    with pytest.raises(ConfigError, match=what):
        measure_sparse_speed(8, 8, **how)
