"""The integer model: its codes, its exactness, its surroundings, its refusals."""

import copy

import pytest
import torch
import torch.nn.functional as F
from quantization_runs import Run
from torch import nn

from shared_core.errors import CompatibilityError, ConfigError, MatchError
from shared_core.quantization import apply_ranges, convert, fake_quantize
from shared_core.quantization.integer.layers import IntConv2d, IntegerLayer, IntLinear


def net(kind):
    torch.manual_seed(0)
    if kind == "linear":
        return nn.Sequential(nn.Linear(20, 33), nn.GELU(), nn.Linear(33, 7, bias=False)), (64, 20)
    if kind == "conv1d":
        return nn.Sequential(nn.Conv1d(3, 6, 5, stride=2, padding=2), nn.ReLU(), nn.Conv1d(6, 4, 3, groups=2)), (
            8,
            3,
            30,
        )
    if kind == "conv2d":
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, dilation=2, padding="same"),
            nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(4 * 81, 5),
        ), (16, 3, 9, 9)  # fmt: skip
    return nn.Sequential(nn.Conv3d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv3d(3, 2, 3)), (4, 2, 5, 6, 7)


def trained(kind, steps=4, **options):
    model, shape = net(kind)
    run = Run(model, total_steps=steps, **options)
    for _ in range(steps):
        # shifted, so that the zero point is not the middle code and wrong padding would show
        run.step(torch.randn(shape) + 0.7)
    return model.eval(), run.technique, run.context, torch.randn(shape) + 0.7


KINDS = ["linear", "conv1d", "conv2d", "conv3d"]


def layer_inputs(model, x):
    """Return the input of each quantized layer."""
    seen, hooks = {}, []
    for name, module in model.named_modules():
        if hasattr(module, "quantizer") or isinstance(module, IntegerLayer):
            hooks.append(module.register_forward_hook(lambda _, args, __, name=name: seen.update({name: args[0]})))
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_those_of_the_training_model(kind, bits):
    model, technique, _, x = trained(kind, weight_bits=bits, activation_bits=bits)
    integer = convert(model)
    qmax = 2 ** (bits - 1) - 1
    inputs, integer_inputs = layer_inputs(model, x), layer_inputs(integer, x)
    total = moved = 0
    for name, entry in technique.ranges().items():
        layer, fake = integer.get_submodule(name), model.get_submodule(name)
        weight = fake.weight.detach()
        scale = (weight.abs().flatten(1).amax(1) / qmax).reshape(-1, *[1] * (weight.dim() - 1))
        assert layer.weight_codes.dtype == torch.int8
        assert torch.equal(layer.weight_codes.float(), (weight / scale).round())
        assert torch.equal(layer.weight, fake.quantizer.weight(fake, weight))
        low, high = min(entry["min"], 0.0), max(entry["max"], 0.0)
        s = torch.tensor((high - low) / (2 * qmax + 1))
        z = round(-qmax - 1 - low / s.item())
        codes = ((inputs[name] / s).round() + z).clamp(-qmax - 1, qmax)
        mine = layer.quantize_input(integer_inputs[name])
        assert mine.dtype == torch.int8
        difference = (mine.float() - codes).abs()
        assert difference.max() <= 1
        moved, total = moved + int((difference > 0).sum()), total + difference.numel()
    assert moved < 1e-3 * total
    with torch.no_grad():
        assert torch.allclose(integer(x), model(x), atol=2e-2 if bits == 8 else 0.3)


@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_equals_its_fake_quantization_in_float64(kind):
    model, technique, _, x = trained(kind)
    integer = convert(model)
    for name, x_in in layer_inputs(integer, x).items():
        layer, fake = integer.get_submodule(name), copy.deepcopy(model.get_submodule(name))
        entry = technique.ranges()[name]
        assert entry["min"] < 0 or name != "0"
        x_hat = fake_quantize(x_in.double(), layer.input_scale, layer.input_zero_point, -128, 127)
        w_hat = layer.weight_codes.double() * layer.weight_scale.double().reshape(-1, *[1] * (fake.weight.dim() - 1))
        bias = None if fake.bias is None else fake.bias.detach().double()
        with torch.no_grad():
            if isinstance(fake, nn.Linear):
                exact = F.linear(x_hat, w_hat, bias)
            else:
                exact = fake._conv_forward(x_hat, w_hat, bias)
            # whole numbers and factored scales leave nothing to round before the end
            assert torch.equal(layer(x_in), exact.float())


def test_sums_are_whole_and_padding_is_the_zero_point():
    model, _, _, x = trained("conv2d")
    layer = convert(model)[0]
    assert layer.input_zero_point.item() not in (0, -128)
    codes = layer.quantize_input(x).long()
    centered = F.pad(codes, (1, 1, 1, 1), value=layer.input_zero_point.item()) - layer.input_zero_point.long()
    patches = centered.unfold(2, 3, 1).unfold(3, 3, 1)
    total = torch.einsum("nchwij,ocij->nohw", patches, layer.weight_codes.long())
    scale = (layer.input_scale.double() * layer.weight_scale.double())[:, None, None]
    assert torch.equal(layer(x), (total * scale + layer.bias.double()[:, None, None]).float())


@pytest.mark.parametrize("kind", ["linear", "conv2d"])
def test_after_training_and_from_saved_ranges_it_is_the_same_model(kind):
    model, technique, context, x = trained(kind)
    during = convert(model)
    ranges = technique.ranges()
    technique.finish(context)
    after = convert(model)
    fresh, _ = net(kind)
    fresh.load_state_dict(model.state_dict())
    loaded = convert(fresh, ranges)
    for name, layer in during.named_modules():
        if isinstance(layer, IntegerLayer):
            for other in (after, loaded):
                assert torch.equal(other.get_submodule(name).weight_codes, layer.weight_codes)
                assert torch.equal(other.get_submodule(name).input_scale, layer.input_scale)
    with torch.no_grad():
        assert torch.allclose(after(x), during(x), atol=1e-5)
        assert torch.equal(after(x), loaded(x))


def test_it_is_a_new_model_and_the_old_one_is_untouched():
    model, _, _, x = trained("conv2d")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    integer = convert(model)
    assert not integer.training
    assert model.training
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert isinstance(integer[0], IntConv2d)
    assert isinstance(integer[5], IntLinear)
    assert not list(integer.parameters())
    assert sum(value.numel() for value in integer.state_dict().values() if value.dtype == torch.int8) == sum(
        model[index].weight.numel() for index in (0, 2, 3, 5)
    )
    twin = convert(model)
    twin[0].weight_codes.zero_()
    twin.load_state_dict(integer.state_dict())
    with torch.no_grad():
        assert torch.equal(twin(x), integer(x))
    assert torch.equal(copy.deepcopy(integer)(x), integer(x))


def test_casting_keeps_codes_and_scales():
    model, _, _, x = trained("linear")
    integer = convert(model)
    expected = integer(x)
    integer.to(torch.bfloat16)
    assert integer[0].weight_codes.dtype == torch.int8
    assert integer[0].weight_scale.dtype == torch.float32
    assert torch.equal(integer(x), expected)
    assert integer(x.bfloat16()).dtype == torch.bfloat16
    assert integer(x.double()).dtype == torch.float64


def test_nan_stays_nan():
    model, _, _, x = trained("linear")
    x[3, 4] = float("nan")
    y = convert(model)(x)
    assert y[3].isnan().all()
    assert y[4:].isfinite().all()


def test_a_model_that_is_one_layer_and_a_layer_under_two_names():
    single = convert(nn.Linear(3, 2), {"": {"min": -1.0, "max": 1.0}})
    assert isinstance(single, IntLinear)
    shared = nn.Linear(3, 3)
    both = convert(nn.Sequential(shared, nn.ReLU(), shared), {"0": {"min": -1.0, "max": 1.0}})
    assert both[0] is both[2]
    assert isinstance(both[2], IntLinear)


def test_a_layer_that_never_ran_stays_in_float_and_is_named():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.pooler = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.body(x)

    model = Unused()
    run = Run(model, total_steps=1)
    run.step(torch.randn(4, 3))
    assert run.technique.report()["without_range"] == ["pooler"]
    with pytest.warns(UserWarning, match="pooler stays in float"):
        integer = convert(model)
    assert type(integer.pooler) is nn.Linear
    assert isinstance(integer.body, IntLinear)


def test_fused_encoder_evaluation_does_not_walk_past_integer_layers():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).eval()
    entry = {"min": -3.0, "max": 3.0, "activation_bits": 2}
    integer = convert(layer, {"linear1": entry, "linear2": entry})
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        fused = integer(x)
        assert torch.equal(fused, integer(x))
        assert not torch.allclose(fused, layer(x), atol=1e-2)
    assert torch.allclose(fused, integer(x).detach(), atol=1e-6)


LINEAR, RANGE = nn.Sequential(nn.Linear(20, 3)), {"min": 0.0, "max": 1.0}
NAN_WEIGHT = copy.deepcopy(LINEAR)
NAN_WEIGHT[0].weight.data[0, 0] = float("nan")


@pytest.mark.parametrize(("model", "ranges", "error", "message"), [
    (LINEAR, None, MatchError, "no layer .*; train it with qat"),
    (LINEAR, {"00": RANGE}, MatchError, "'00' is not a layer"),
    (LINEAR, {}, MatchError, "at least one layer"),
    (LINEAR, {"0": {"min": 0.0}}, ConfigError, "convert: 0: max must be a finite number, got None"),
    (LINEAR, {"0": {"min": 1.0, "max": 0.0}}, ConfigError, "convert: 0: min .*max"),
    (LINEAR, {"0": {"min": 0.0, "max": float("nan")}}, ConfigError, "convert: 0: max must be a finite number"),
    (LINEAR, {"0": {**RANGE, "weight_bits": 16}}, ConfigError, r"weight_bits must be in \[1, 8\], got 16"),
    (nn.Sequential(nn.Linear(70_000, 1)), {"0": RANGE}, CompatibilityError, "overflow 32 bits"),
    (NAN_WEIGHT, {"0": RANGE}, CompatibilityError, "weights must be finite"),
])  # fmt: skip
def test_refusals(model, ranges, error, message):
    with pytest.raises(error, match=message):
        convert(model, ranges)


def learned(model, x, **options):
    run = Run(model, total_steps=4, range="lsq", **options)
    run.optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(4):
        run.step(x)
    return run.technique, run.context


def test_a_deployed_model_converts_with_the_scales_that_it_learned():
    model, shape = net("linear")
    x = torch.randn(shape) + 0.7
    technique, context = learned(model, x, weight_bits=3)
    ranges = technique.ranges()
    trained_codes = {name: module.weight_codes for name, module in convert(model).named_children() if name in ranges}
    technique.finish(context)
    deployed = apply_ranges(model, ranges)
    integer = convert(deployed)
    for name, entry in ranges.items():
        layer = integer.get_submodule(name)
        assert torch.equal(layer.weight_codes, trained_codes[name])
        assert layer.weight_scale.tolist() == entry["weight_scale"]
        assert layer.input_scale.item() == entry["scale"]
    with torch.no_grad():
        torch.testing.assert_close(integer(x), deployed(x))


def test_layers_that_share_a_weight_learn_no_scale_of_their_own_for_it():
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    model, x = nn.Sequential(first, nn.ReLU(), second), torch.randn(16, 8)
    technique, context = learned(model, x, weight_bits=4)
    ranges = technique.ranges()
    assert not any("weight_scale" in entry for entry in ranges.values())
    technique.finish(context)
    deployed = apply_ranges(model, ranges)
    with torch.no_grad():
        torch.testing.assert_close(convert(deployed)(x), deployed(x))


def test_embeddings_are_stored_as_codes_and_look_up_the_baked_vectors():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Flatten(), nn.Linear(24, 2))
    run = Run(model)
    run.step(torch.randint(0, 11, (4, 3)))
    converted = convert(model)
    tokens = torch.tensor([[0, 5, 10]])
    assert converted[0].weight_codes.dtype == torch.int8
    assert torch.equal(converted[0](tokens), model.eval()[0](tokens))
    assert torch.equal(converted[0].weight, model[0].quantizer.baked_weight(model[0], model[0].weight))
    assert converted.half()[0].weight_scale.dtype == torch.float32
    model[0].weight.data[3, 1] = float("nan")
    with pytest.raises(CompatibilityError, match="weights must be finite"):
        convert(model)
