"""Swapped layers: copies, casts, what is left out, what is baked."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from quantization_runs import Run, batches, conv_net, small_net
from torch import nn

from shared_core.distributed.collectives import world_size
from shared_core.engine.services import BareServices
from shared_core.engine.technique import Context
from shared_core.errors import CompatibilityError, ConfigError, MatchError, TrainingError
from shared_core.quantization import QatConfig, QuantizationAwareTraining
from shared_core.quantization.fake_quant_layers import FAKE_QUANT
from shared_core.quantization.schemes import LayerScheme, quantize_weight


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


def test_what_cannot_be_quantised_is_left_out_and_named():
    technique = QuantizationAwareTraining(QatConfig(scheme="int8", skip=("embed",)))
    model = Tied()
    technique.attach(Context(model=model))
    left_out = technique.report()["left_out"]
    assert set(left_out) == {"odd", "lora_A", "head", "normed"}
    assert "tied" in left_out["head"]
    assert "Doubled" in left_out["odd"]
    assert technique.report()["layers"] == 1
    assert type(model.head) is nn.Linear


def test_an_embedding_and_the_head_that_shares_its_weight_are_quantised_alike():
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
    with pytest.raises(ConfigError, match="head must be quantised like embed, with which it shares its weight"):
        technique.attach(Context(model=other))
    assert type(other.head) is nn.Linear


@pytest.mark.parametrize("pattern", ["odd", "head", "Doubled"])
def test_asking_for_what_cannot_be_is_an_error(pattern):
    technique = QuantizationAwareTraining(QatConfig(scheme="int8", include=(pattern, "body")))
    with pytest.raises(CompatibilityError, match="include must name layers that can be quantised"):
        technique.attach(Context(model=Tied()))


def test_matching_nothing_and_attaching_twice_are_errors():
    technique = QuantizationAwareTraining(QatConfig(scheme="int8"))
    with pytest.raises(MatchError, match="has no Linear"):
        technique.attach(Context(model=nn.ReLU()))
    only = nn.Sequential(Doubled(2, 2))
    with pytest.raises(MatchError, match="can be quantised; 0: Doubled"):
        technique.attach(Context(model=only))
    model = Run(small_net()).model
    with pytest.raises(CompatibilityError, match="no quantisers yet"):
        technique.attach(Context(model=model))


@pytest.mark.parametrize(("options", "message"), [
    ({"scheme": "int7"}, "scheme must be one of int8"), ({"weight_bits": 1}, r"weight_bits must be in \[2, 8\]"),
    ({"activation_bits": 9}, "activation_bits"), ({"ema_constant": 0.0}, "ema_constant"),
    ({"calibration_batches": 0}, "calibration_batches"), ({"range": "kll"}, "range must be one of"),
])  # fmt: skip
def test_config_refusals(options, message):
    with pytest.raises(ConfigError, match=message):
        QatConfig(**({"scheme": "int8"} | options))


def test_fused_encoder_evaluation_does_not_walk_past_the_quantisers():
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


class Calibrating(BareServices):
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
    with pytest.raises(TrainingError, match="calibration batches must reach"):
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
def test_compiled_training_equals_eager_without_recompiling_each_step():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    eager, compiled = Run(small_net(), begin=2), Run(small_net(), begin=2)
    counter = CompileCounterWithBackend("eager")
    compiled.model.compile(backend=counter, fullgraph=True)
    for batch in batches(7):
        eager.step(batch)
        compiled.step(batch)
    # dynamo steps into Sequential, so a graph for each of two layers, before and after begin
    assert counter.frame_count == 4
    assert eager.technique.ranges() == compiled.technique.ranges()
    for a, b in zip(eager.model.parameters(), compiled.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lsq", "lsq_plus"])
def test_learned_ranges_compile_without_graph_breaks(name):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    eager, compiled = (Run(small_net(), begin=1, range=name) for _ in range(2))
    counter = CompileCounterWithBackend("eager")
    compiled.model.compile(backend=counter, fullgraph=True)
    for batch in batches(3):
        eager.step(batch)
        compiled.step(batch)
    assert counter.frame_count <= 4
    for a, b in zip(eager.model.parameters(), compiled.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
