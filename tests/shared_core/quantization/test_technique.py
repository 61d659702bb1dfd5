"""Quantization-aware training as a technique: ranges, steps, resume, baking, swapped layers, refusals."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from quantization_runs import Run, batches, conv_net, small_net
from torch import nn

from shared_core.distributed.collectives import world_size
from shared_core.engine.services import Services
from shared_core.engine.technique import Context
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, MatchError, TrainingError
from shared_core.quantization import QatConfig, QuantizationAwareTraining, apply_ranges
from shared_core.quantization.fake_quant_layers import FAKE_QUANT, FakeQuantLinear
from shared_core.quantization.rounding import quantize_weight
from shared_core.quantization.schemes import LayerScheme


def test_ranges_are_the_moving_average_of_each_step():
    run = Run(small_net(), ema_constant=0.25)
    data = batches(7)
    expected = np.zeros(2)
    for number, batch in enumerate(data):
        run.step(batch)
        window = np.array([batch.min(), batch.max()], np.float64)
        expected += (max(0.25, 9 / (number + 10)) if number else 1) * (window - expected)
        assert run.range_of("0") == pytest.approx(tuple(expected), rel=1e-6)
    assert run.technique.figures() == {"qat/active": 1.0, "qat/layers": 2.0, "qat/range_updates": 7.0}


def test_ranges_of_a_short_run_follow_inputs_wider_than_its_first_batches():
    run = Run(small_net())
    batch = batches(1)[0]
    for number in range(60):
        run.step(batch if number >= 10 else batch / 2)
    assert run.range_of("0") == pytest.approx((batch.min().item(), batch.max().item()), rel=1e-3)


def clipped_of(run, name="0"):
    entry = next(entry for entry in run.technique.report()["per_layer"] if entry["name"] == name)
    return entry["clipped"], entry["values"]


def outside(entry, inputs):
    """Return how many values are more than half a step beyond the grid of a layer's input, and of how many."""
    bits = entry["activation_bits"]
    scale = entry.get("scale") or max((entry["max"] - entry["min"]) / (2**bits - 1), 2.0**-126)
    zero = entry.get("zero_point", round(-(2 ** (bits - 1)) - entry["min"] / scale))
    codes = np.concatenate([batch.numpy().astype(np.float64).ravel() for batch in inputs]) / scale + zero
    beyond = (codes < -(2 ** (bits - 1)) - 0.5) | (codes > 2 ** (bits - 1) - 0.5)
    return int(beyond.sum()), codes.size


@pytest.mark.parametrize("bits", [8, 3])
@pytest.mark.parametrize("range", ["ema", "minmax", "percentile", "mse", "lsq", "lsq_plus", "pact"])
def test_the_receipt_counts_the_values_clipped_in_the_last_step(range, bits):
    run = Run(small_net(), total_steps=5, range=range, activation_bits=bits, freeze_observers=3)
    *data, last = [(batch.abs() if range == "pact" else batch) for batch in batches(5, (40, 6))]
    for batch in data:
        run.step(batch)
    assert run.technique.report()["clipped"] is None
    expected = outside(run.technique.ranges()["0"], [2 * last, last])
    run.step(last * 50, skip=True)
    run.step(*(2 * last).chunk(3), last)
    assert clipped_of(run) == expected
    assert expected[0] > 0
    told, layers = run.technique.report()["clipped"], run.technique.report()["per_layer"]
    clipped, values = (sum(entry[key] for entry in layers) for key in ("clipped", "values"))
    assert (told["step"], told["share"]) == (5, clipped / values)
    assert told["largest"] == max(entry["clipped"] / entry["values"] for entry in layers)
    assert f"{100 * told['share']:.1f} %" in " ".join(run.technique.summary(run.technique.report()))
    run.model.eval()(last * 50)
    with run.technique.swapped(run.context, "evaluate"):
        run.model.train()(last * 50)
    expected = outside(run.technique.ranges()["0"], [last / 100])
    run.step(last / 100)  # one step more than planned
    assert clipped_of(run) == expected


def test_values_beyond_the_codes_of_fp8_are_counted_as_clipped():
    run = Run(small_net(), total_steps=2, scheme="fp8_static")
    run.step(torch.full((1, 6), 448.0))
    run.step(torch.tensor([[-448.0, 463.0, 465.0, -463.0, -465.0, 0.0]]))
    assert clipped_of(run) == (2, 6)


def test_a_run_of_unknown_length_counts_clipped_values_now_and_then():
    run = Run(small_net(), total_steps=None)
    for number, batch in enumerate(batches(24)):
        if number == 19:
            expected = outside(run.technique.ranges()["0"], [batch])
        run.step(batch)
    assert (run.technique.report()["clipped"]["step"], clipped_of(run)) == (20, expected)
    assert "clipped" in " ".join(run.technique.summary(run.technique.report()))
    for _ in range(10):
        run.step(batch / 10)
    assert clipped_of(run) == (0, batch.numel())
    assert "clipped" not in " ".join(run.technique.summary(run.technique.report()))


def test_first_step_has_float_activations_and_quantized_weights():
    run = Run(small_net())
    net, (batch,) = run.model, batches(1)
    plain = small_net()
    with torch.no_grad():
        for layer in (plain[0], plain[2]):
            scale = layer.weight.abs().amax(1, keepdim=True) / 127
            layer.weight.copy_((layer.weight / scale).round() * scale)
        assert torch.allclose(net(batch), plain(batch), atol=1e-6)
    weight = net[0].weight.clone()
    run.step(batch)
    with torch.no_grad():
        after = net(batch)
        net[0].quantizer.has_range = net[2].quantizer.has_range = False
        assert not torch.equal(net(batch), after)
    assert not torch.equal(net[0].weight, weight)


def test_micro_batches_count_as_one_batch():
    (batch,) = batches(1)
    whole, parts = Run(small_net()), Run(small_net())
    for _ in range(4):
        whole.step(batch)
        parts.step(*batch.chunk(4))
        batch = batch * 1.3
        assert whole.range_of("0") == parts.range_of("0")
        assert whole.range_of("2") == pytest.approx(parts.range_of("2"), rel=1e-6)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_recomputation_does_not_count_twice():
    from torch.utils.checkpoint import checkpoint

    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small_net()

        def forward(self, x):
            return checkpoint(self.net, x, use_reentrant=False)

    (batch,) = batches(1)
    plain, again = Run(small_net(), total_steps=3), Run(Recomputed(), total_steps=3)
    for factor in range(1, 4):
        plain.step(batch * factor)
        again.step(batch * factor)
    assert plain.range_of("2") == again.range_of("net.2")
    assert clipped_of(plain, "2") == clipped_of(again, "net.2")
    assert clipped_of(plain, "2")[1] == 12 * 8


def test_a_skipped_step_leaves_no_trace():
    small, big, last = batches(3)
    skipped, clean = Run(small_net()), Run(small_net())
    skipped.step(small)
    clean.step(small)
    skipped.step(big * 100, skip=True)
    skipped.step(last)
    clean.step(last)
    assert skipped.technique.ranges() == clean.technique.ranges()
    assert skipped.technique.figures() == clean.technique.figures()
    assert torch.equal(skipped.model[0].weight, clean.model[0].weight)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_window_is_counted_and_not_committed(bad):
    run = Run(small_net())
    good, broken = batches(2)
    run.step(good)
    before = run.technique.ranges()
    broken[0, 0] = bad
    run.model.train()
    with torch.no_grad():
        out = run.model(broken)
    if bad != bad:
        assert out[0].isnan().all()
    run.technique.before_step(run.context)
    run.technique.after_step(run.context, True)
    assert run.technique.ranges()["0"] == before["0"]
    assert run.technique.report()["non_finite_windows"] >= 1


def test_evaluation_never_updates():
    run = Run(small_net())
    good, other = batches(2)
    run.step(good)
    state = run.technique.state_dict()
    run.model.eval()
    run.model(other * 50)
    with run.technique.swapped(run.context, "evaluate"):
        run.model.train()  # a validation that forgets eval()
        run.model(other * 50)
    after = run.technique.state_dict()
    assert all(torch.equal(state[key], after[key]) for key in ("ranges", "window", "known"))
    run.step(good)
    assert run.technique.figures()["qat/range_updates"] == 2.0


def test_begin_and_freeze_turn_at_their_steps():
    run = Run(small_net(), begin=0.3, freeze_observers=5)
    (batch,) = batches(1)
    plain = small_net()
    for step in range(8):
        active = run.technique.figures()["qat/active"]
        assert active == float(step >= 3)
        if step == 0:
            assert torch.equal(run.model(batch), plain(batch))
        run.step(batch * (step + 1))
        if step == 4:
            frozen = run.technique.ranges()
    assert run.technique.ranges() == frozen
    assert run.technique.report()["range_updates"] == 5
    assert run.technique.report()["began_at_step"] == 3


def test_positions_that_cannot_be():
    with pytest.raises(ConfigError, match="freeze_observers must be step 1 or later"):
        Run(small_net(), freeze_observers=0)
    with pytest.raises(ConfigError, match=r"begin.* within the 10 steps"):
        Run(small_net(), begin=11)
    assert Run(small_net(), total_steps=None).technique.figures()["qat/active"] == 1.0
    with pytest.raises(ConfigError, match="must be a step number here"):
        Run(small_net(), total_steps=None, begin=0.5)


def test_resume_inside_a_window():
    a, b, c = batches(3)
    whole, first = Run(small_net(), total_steps=2), Run(small_net(), total_steps=2)
    for run in (whole, first):
        run.step(a)
    whole.step(b, c)
    (first.model(b).square().mean() / 2).backward()
    net = small_net()
    net.load_state_dict(first.model.state_dict())
    second = Run(net, total_steps=2, state=first.technique.state_dict(), step=1)
    second.step(c)
    assert second.range_of("0") == whole.range_of("0")
    assert clipped_of(second) == clipped_of(whole)
    assert 0 < clipped_of(second)[0] < clipped_of(second)[1] == 2 * b.numel()
    third = Run(small_net(), total_steps=2, state=second.technique.state_dict(), step=2)
    assert third.technique.report()["clipped"] == second.technique.report()["clipped"]


@pytest.mark.parametrize("range", ["ema", "kl"])
def test_a_resumed_run_observes_the_same_outputs(range):
    data = batches(4, (9, 2, 5, 5))
    whole, first = Run(conv_net(), range=range), Run(conv_net(), range=range)
    for batch in data:
        whole.step(batch)
    for batch in data[:2]:
        first.step(batch)
    net = conv_net()
    net.load_state_dict(first.model.state_dict())
    second = Run(net, range=range, state=first.technique.state_dict(), step=2)
    for batch in data[2:]:
        second.step(batch)
    assert second.technique.ranges() == whole.technique.ranges()
    assert [name for name, entry in whole.technique.ranges().items() if "output" in entry] == ["0", "2"]


def test_observed_outputs_are_those_of_applied_steps_and_change_no_weight():
    run, other = Run(conv_net(), range="minmax"), Run(conv_net(), range="minmax")
    for quantizer in other.technique.policy.quantizers.values():
        quantizer.output_index = None
    seen = []
    run.model[2].register_forward_hook(lambda module, args, y: seen.append(y.detach()))
    a, b, c = batches(3, (9, 2, 5, 5))
    for one in (run, other):
        one.step(a, b)
        one.step(c, skip=True)
        one.step(a)
    committed = torch.stack([seen[0], seen[1], seen[3]])
    low, high = committed.min().item(), committed.max().item()
    assert run.technique.ranges()["2"]["output"] == {"min": low, "max": high}
    (told,) = (entry for entry in run.technique.report()["per_layer"] if entry["name"] == "2")
    assert (told["output_min"], told["output_max"]) == (low, high)
    mine, theirs = run.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_state_of_other_layers_is_refused():
    state = Run(small_net(), skip=("2",)).technique.state_dict()
    with pytest.raises(CheckpointError, match="differ in 2"):
        Run(small_net(), state=state)


@pytest.mark.parametrize(("make", "shape"), [(small_net, (9, 6)), (conv_net, (9, 2, 5, 5))])
def test_baked_weights_and_saved_ranges_equal_the_training_model(make, shape):
    run = Run(make())
    for batch in batches(3, shape):
        run.step(batch)
    probe = batches(1, shape, seed=9)[0]
    run.model.eval()
    with torch.no_grad():
        expected = run.model(probe)
    keys = list(make().state_dict())
    baked = run.technique.bake(run.model.state_dict())
    ranges = run.technique.ranges()
    assert list(baked) == keys
    latent = run.model[0].weight.clone()
    plain = make()
    plain.load_state_dict(baked)
    assert not torch.equal(plain[0].weight, latent)
    apply_ranges(plain.eval(), ranges)
    with torch.no_grad():
        assert torch.equal(plain(probe), expected)
    run.technique.finish(run.context)
    assert [type(module) for module in run.model] == [type(module) for module in make()]
    assert all(torch.equal(value, baked[name]) for name, value in run.model.state_dict().items())
    assert run.technique.ranges() == ranges
    again = run.technique.bake(run.model.state_dict())
    assert all(torch.equal(value, baked[name]) for name, value in again.items())
    for layer in (run.model[0], run.model[2]):
        for channel in layer.weight.detach().flatten(1):
            codes = channel.double() / (channel.abs().max().double() / 127)
            assert torch.allclose(codes, codes.round(), atol=1e-3)


def test_a_run_that_ends_before_begin_stays_in_float():
    run = Run(small_net(), begin=9)
    run.step(*batches(1))
    state, before = run.model.state_dict(), run.model[0].weight.detach().clone()
    assert run.technique.bake(state) is state
    assert run.technique.plan(run.context).missing.endswith("starts at step 9")
    run.technique.finish(run.context)
    assert torch.equal(run.model[0].weight, before)
    assert type(run.model[0]) is type(small_net()[0])
    assert run.technique.report()["began_at_step"] is None
    assert run.technique.deployment() == {"ranges": {}}


def test_what_was_asked_for_is_reached_when_ranges_freeze_that_are_to_freeze():
    run = Run(small_net(), begin=1, freeze_observers=3)
    found = [run.technique.plan(run.context).missing]
    for batch in batches(3):
        run.step(batch)
        found.append(run.technique.plan(run.context).missing)
    assert found[0].endswith("starts at step 1")
    assert found[1].endswith("freeze at step 3")
    assert found[1:] == [found[1], found[1], ""]


def test_keep_leaves_the_modules():
    run = Run(small_net(), keep=True)
    run.step(*batches(1))
    latent = run.model[0].weight.clone()
    run.technique.finish(run.context)
    run.context.undo.close()
    assert type(run.model[0]) is FakeQuantLinear
    assert torch.equal(run.model[0].weight, latent)
    assert not torch.equal(run.technique.bake(run.model.state_dict())["0.weight"], latent)


def test_detach_twice_gives_stock_classes_and_untouched_weights():
    run = Run(conv_net())
    assert type(run.model[0]) is FAKE_QUANT[nn.Conv2d]
    assert list(run.model.state_dict()) == list(conv_net().state_dict())
    assert not list(run.model.buffers())
    run.context.undo.close()
    run.context.undo.close()
    fresh = conv_net()
    assert [type(module) for module in run.model] == [type(module) for module in fresh]
    assert [set(vars(module)) for module in run.model] == [set(vars(module)) for module in fresh]
    assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), fresh.parameters(), strict=True))


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch"])
def test_copies_are_whole_and_their_own(way):
    run = Run(small_net())
    first, second = batches(2)
    run.step(first)
    if way == "deepcopy":
        twin = copy.deepcopy(run.model)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(run.model))
    else:
        file = io.BytesIO()
        torch.save(run.model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert torch.equal(twin(second), run.model(second))
    assert twin[0].quantizer.bank is twin[2].quantizer.bank
    assert twin[0].quantizer.bank is not run.model[0].quantizer.bank
    twin(second * 100)
    assert twin[0].quantizer.bank.window[0, 1] == -(second * 100).max()
    assert run.model[0].quantizer.bank.window[0, 1] == -second.max()


def test_a_cast_model_keeps_float32_ranges():
    run = Run(small_net())
    (batch,) = batches(1)
    run.step(batch)
    before = run.technique.ranges()
    run.model.to(torch.bfloat16)
    out = run.model(batch.to(torch.bfloat16))
    assert out.dtype == torch.bfloat16
    assert run.technique.ranges() == before
    run.model.double()
    assert run.model(batch.double()).dtype == torch.float64


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.odd = Doubled(4, 4)
        self.lora_A = nn.Linear(4, 2)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))


def test_what_cannot_be_quantized_is_left_out_and_named():
    technique = QuantizationAwareTraining(QatConfig(scheme="int8", skip=("embed",)))
    model = Tied()
    technique.attach(Context(model=model))
    left_out = technique.report()["left_out"]
    assert set(left_out) == {"odd", "lora_A", "head", "normed"}
    assert "tied" in left_out["head"]
    assert "Doubled" in left_out["odd"]
    assert technique.report()["layers"] == 1
    assert type(model.head) is nn.Linear


def test_an_embedding_and_the_head_that_shares_its_weight_are_quantized_alike():
    model = Tied()
    run = Run(model.eval(), include=("embed", "head"))
    run.context.step = 1
    run.technique.after_step(run.context, True)
    indices = torch.tensor([[2, 5]])
    assert not torch.equal(model.embed(indices), model.embed.weight[indices])
    expected = quantize_weight(model.head, model.head.weight, LayerScheme()).detach()
    assert torch.equal(model.embed(indices), expected[indices])
    run.technique.finish(run.context)
    assert torch.equal(model.embed.weight, expected)
    assert model.head.weight is model.embed.weight
    technique = QuantizationAwareTraining(
        QatConfig(scheme="int8", include=("embed", "head"), overrides={"head": {"weight_bits": 4}})
    )
    other = Tied()
    with pytest.raises(ConfigError, match="head shares its weight with embed"):
        technique.attach(Context(model=other))
    assert type(other.head) is nn.Linear


@pytest.mark.parametrize("pattern", ["odd", "head", "Doubled"])
def test_asking_for_what_cannot_be_is_an_error(pattern):
    technique = QuantizationAwareTraining(QatConfig(scheme="int8", include=(pattern, "body")))
    with pytest.raises(CompatibilityError, match=r"include must name .* can be quantized"):
        technique.attach(Context(model=Tied()))


def test_matching_nothing_and_attaching_twice_are_errors():
    technique = QuantizationAwareTraining(QatConfig(scheme="int8"))
    with pytest.raises(MatchError, match="has no Linear"):
        technique.attach(Context(model=nn.ReLU()))
    only = nn.Sequential(Doubled(2, 2))
    with pytest.raises(MatchError, match="can be quantized; 0: Doubled"):
        technique.attach(Context(model=only))
    model = Run(small_net()).model
    with pytest.raises(CompatibilityError, match="already has quantizers"):
        technique.attach(Context(model=model))


@pytest.mark.parametrize(("options", "message"), [
    ({"scheme": "int7"}, "scheme must be one of int8"), ({"weight_bits": 1}, r"weight_bits must be in \[2, 8\]"),
    ({"activation_bits": 9}, "activation_bits"), ({"ema_constant": 0.0}, "ema_constant"),
    ({"calibration_batches": 0}, "calibration_batches"), ({"range": "kll"}, "range must be one of"),
])  # fmt: skip
def test_config_refusals(options, message):
    with pytest.raises(ConfigError, match=message):
        QatConfig(**({"scheme": "int8"} | options))


def test_fused_encoder_evaluation_does_not_walk_past_the_quantizers():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 5, 8)
    run = Run(model, weight_bits=2)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    model.eval()
    with torch.no_grad():
        fused = model(x, src_key_padding_mask=padding)
    slow = model(x, src_key_padding_mask=padding).detach()
    assert torch.allclose(fused[0], slow[0], atol=1e-6)
    run.context.undo.close()
    with torch.no_grad():
        assert not torch.allclose(model(x)[0], slow[0], atol=1e-2)
    assert layer.activation_relu_or_gelu == model.layers[0].activation_relu_or_gelu


class Calibrating(Services):
    def __init__(self, data):
        self.data = data
        self.asked = []
        self.model = None

    def calibrate(self, num_batches):
        self.asked.append(num_batches)
        self.model.train()
        with torch.no_grad():
            for batch in self.data:
                self.model(batch)


def test_replaced_weights_get_ranges_of_their_own():
    data = batches(3)
    services = Calibrating(data)
    services.model = small_net()
    run = Run(services.model, services=services, calibration_batches=3, freeze_observers=1)
    run.step(data[0] * 5)
    run.technique.weights_replaced(run.context)
    joined = torch.cat(data)
    assert services.asked == [3]
    assert run.range_of("0") == (joined.min().item(), joined.max().item())
    services.data = [data[0] * float("nan")]
    with pytest.raises(TrainingError, match="calibration batches"):
        run.technique.weights_replaced(run.context)
    assert run.range_of("0") == (joined.min().item(), joined.max().item())


def test_looking_at_batches_moves_no_batch_norm_folded_or_not_and_no_window_outlives_the_run():
    data = batches(3)
    services = Calibrating(data)
    width = data[0].shape[1]
    norms = nn.BatchNorm1d(width), nn.BatchNorm1d(width)
    services.model = model = nn.Sequential(nn.Linear(width, width), norms[0], nn.ReLU(), norms[1], nn.Linear(width, 4))
    run = Run(model, services=services, calibration_batches=3)
    run.step(data[0])
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    run.technique.weights_replaced(run.context)
    assert services.asked == [3]
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    model(data[1])  # of no step
    assert run.technique.bank.window.isfinite().any()
    run.technique.finish(run.context)
    assert not run.technique.state_dict()["window"].isfinite().any()


def test_a_bare_loop_cannot_calibrate_and_keeps_its_ranges():
    run = Run(small_net())
    run.technique.weights_replaced(run.context)  # nothing to estimate yet
    run.step(*batches(1))
    before = run.technique.ranges()
    with pytest.raises(CompatibilityError, match="calibration needs a trainer"):
        run.technique.weights_replaced(run.context)
    assert run.technique.ranges() == before


def test_report_recounts_the_weights():
    run = Run(small_net(), weight_bits=4)
    run.step(*batches(1))
    report = run.technique.report()
    weight = run.model[0].weight.detach().double().numpy()
    scale = np.abs(weight).max(1, keepdims=True) / 7
    error = weight - np.rint(weight / scale) * scale
    entry = report["per_layer"][0]
    assert entry["sqnr_db"] == pytest.approx(10 * np.log10((weight**2).sum() / (error**2).sum()), rel=1e-4)
    assert entry["largest_relative_error"] == pytest.approx(np.abs(error).max() / np.abs(weight).max(), rel=1e-4)
    assert (entry["name"], entry["weights"]) == ("0", 48)
    assert report["without_range"] == []
    assert world_size() == 1


def test_a_module_under_two_names_is_baked_under_both():
    shared = nn.Linear(4, 4)
    run = Run(nn.Sequential(shared, nn.ReLU(), shared))
    baked = run.technique.bake(run.model.state_dict())
    assert torch.equal(baked["0.weight"], baked["2.weight"])
    assert not torch.equal(baked["0.weight"], shared.weight)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "begin"), [("ema", 2), ("lsq", 1), ("lsq_plus", 1)])
def test_compiled_training_equals_eager_without_recompiling_each_step(name, begin):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    eager, compiled = (Run(small_net(), total_steps=7, begin=begin, range=name) for _ in range(2))
    counter = CompileCounterWithBackend("eager")
    compiled.model.compile(backend=counter, fullgraph=True)
    for batch in batches(7):
        eager.step(batch)
        compiled.step(batch)
    # dynamo steps into Sequential, so a graph for each of two layers, before and after begin
    assert counter.frame_count <= 4
    assert name != "ema" or eager.technique.ranges() == compiled.technique.ranges()
    assert name != "ema" or clipped_of(eager) == clipped_of(compiled)
    for a, b in zip(eager.model.parameters(), compiled.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, **({"rtol": 0, "atol": 0} if name == "ema" else {}))
