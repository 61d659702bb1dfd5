"""Inputs that come out of a GELU are clipped: which layers that is, what their ranges are, and what is refused."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shared_core.engine.technique import Context
from shared_core.errors import ConfigError, MatchError
from shared_core.quantization import QatConfig, QuantizationAwareTraining, quantize
from shared_core.quantization.post_training.quantize import quantize_with_report


class NewGELUActivation(nn.Module):
    """A GELU written by hand, by the name that transformers has for it."""

    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


class Mlp(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between):
        super().__init__()
        self.up, self.down, self.between = nn.Linear(4, 16), nn.Linear(16, 2), between
        nn.init.constant_(self.up.bias, 8.0)  # some of what comes out lies above 10, some far below 0
        nn.init.normal_(self.up.weight, std=6.0)

    def forward(self, x):
        return self.down(self.between(self.up(x)))


def start(model, total=4, **options):
    torch.manual_seed(0)
    technique = QuantizationAwareTraining(QatConfig(**{"scheme": "int8", "clip_gelu": 10, **options}))
    context = Context(model=model, total_steps=total)
    technique.attach(context)
    technique.begin(context, None)
    return technique, context


def step(technique, context, model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    optimizer.zero_grad()
    for batch in batches:
        model(batch).square().mean().backward()
    technique.before_step(context)
    optimizer.step()
    context.step += 1
    technique.after_step(context, True)


def trained(model, steps=2, batches=1, **options):
    technique, context = start(model.train(), **options)
    for _ in range(steps):
        step(technique, context, model, [torch.randn(32, 4) for _ in range(batches)])
    return technique, context


def clipped(technique):
    return [entry["name"] for entry in technique.report()["per_layer"] if entry["clip_gelu"]]


GELUS = {
    "nn.GELU": nn.GELU(),
    "tanh": nn.GELU(approximate="tanh"),
    "by hand": NewGELUActivation(),
    "function": F.gelu,
    "module and dropout": nn.Sequential(nn.GELU(), nn.Dropout(0.1)),
    "by hand and dropout": nn.Sequential(NewGELUActivation(), nn.Dropout(0.1)),
    "function and dropout": lambda x: F.dropout(F.gelu(x), 0.1),
    "without dropout": nn.Sequential(nn.GELU(), nn.Dropout(0.0)),
    "views": lambda x: F.gelu(x.t()).reshape(16, 1, -1)[:, 0].contiguous().transpose(0, 1),
    "cast": lambda x: F.gelu(x.double()).float(),
}
OTHERS = {
    "relu": nn.ReLU(),
    "silu": nn.SiLU(),
    "sum": lambda x: x + F.gelu(x),
    "gated": lambda x: x * F.gelu(x),
    "gated module": lambda x: NewGELUActivation()(x) * x,
    "before": lambda x: torch.tanh(F.gelu(x)),
    "a view of more": lambda x: torch.cat([F.gelu(x[:, :8]), x[:, 8:]], 1),
}


@pytest.mark.parametrize("kind", GELUS)
def test_what_comes_out_of_a_gelu_is_found(kind):
    technique, _ = trained(Mlp(GELUS[kind]))
    assert clipped(technique) == ["down"]
    ranges = technique.ranges()
    assert ranges["down"]["max"] == 10.0
    assert -0.171 / 0.9 < ranges["down"]["min"] < 0
    assert ranges["up"]["max"] != 10.0


@pytest.mark.parametrize("kind", OTHERS)
def test_what_does_not_is_an_error_after_one_step(kind):
    model = Mlp(OTHERS[kind])
    technique, context = start(model)
    with pytest.raises(MatchError, match="clip_gelu found no layer"):
        step(technique, context, model, [torch.randn(32, 4)])
    assert "down" not in technique.policy.gelu_inputs.found


@pytest.mark.parametrize("kind", ["ema", "minmax", "percentile", "kl", "mse", "pact"])
def test_no_range_passes_the_clip_whatever_finds_it(kind):
    technique, _ = trained(Mlp(nn.GELU()), steps=3, range=kind)
    row = technique.policy.static.index("down")
    assert clipped(technique) == ["down"]
    assert technique.bank.ranges[row, 1] <= 10
    assert technique.bank.ranges[row, 1] > 5
    assert technique.bank.scale[row].item() == pytest.approx(
        (technique.bank.ranges[row, 1] - technique.bank.ranges[row, 0]).item() / 255
    )


def test_the_moving_average_is_that_of_the_clipped_values():
    model = Mlp(nn.GELU())
    technique, context = start(model)
    seen = []
    hook = model.between.register_forward_hook(lambda module, args, output: seen.append(output.detach().double()))
    expected = np.zeros(2)
    for number in range(3):
        seen.clear()
        inputs = [torch.randn(8, 4) * (0.3 if number else 1.0) for _ in range(2)]
        step(technique, context, model, inputs)
        values = torch.cat(seen).clamp(max=10)
        window = np.array([values.min().item(), values.max().item()])
        expected += (window - expected) * (9 / (number + 10) if number else 1)
    hook.remove()
    found = technique.ranges()["down"]
    assert [found["min"], found["max"]] == pytest.approx(list(expected), rel=1e-5)


def test_the_model_is_watched_until_its_layers_were_reached_and_no_longer():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.act, self.branch = Mlp(nn.GELU()), Mlp(nn.GELU()), nn.GELU(), 0

        def forward(self, x):
            return self.first(x) if self.branch == 0 else self.second(x)

    torch.manual_seed(0)
    model = Branches()
    technique, context = start(model)
    step(technique, context, model, [torch.randn(32, 4)])
    assert clipped(technique) == ["first.down"]
    assert model.first.between._forward_hooks
    assert model.first.down.quantizer.gelu_inputs is None
    assert model.second.down.quantizer.gelu_inputs is not None
    model.branch = 1
    step(technique, context, model, [torch.randn(32, 4)])
    assert clipped(technique) == ["first.down", "second.down"]
    assert technique.ranges()["second.down"]["max"] == 10.0
    assert not any(module._forward_hooks for module in model.modules())
    assert all(quantizer.gelu_inputs is None for quantizer in technique.policy.gelu_inputs.quantizers.values())


def test_evaluation_before_the_first_step_judges_nothing():
    model = Mlp(nn.GELU())
    technique, context = start(model)
    model.eval()
    with technique.swapped(context, "evaluate"):
        model(torch.randn(3, 4))
    assert technique.policy.gelu_inputs.found == []
    model.train()
    loss = model(torch.randn(3, 4)).sum()
    copied = copy.deepcopy(model)  # in the middle of a step
    copied(torch.randn(3, 4))
    loss.backward()
    step(technique, context, model, [torch.randn(32, 4)])
    assert clipped(technique) == ["down"]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["ema", "mse"])
def test_recomputed_activations(reentrant, kind):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.mlp = nn.Linear(4, 4), Mlp(nn.Sequential(nn.GELU(), nn.Dropout(0.1)))

        def forward(self, x):
            return checkpoint(self.mlp, self.first(x), use_reentrant=reentrant)

    torch.manual_seed(0)
    technique, _ = trained(Checkpointed(), steps=3, range=kind)
    assert clipped(technique) == ["mlp.down"]
    assert technique.ranges()["mlp.down"]["max"] <= 10.0
    assert technique.ranges()["mlp.up"]["max"] > 1


@pytest.mark.slow
def test_compiled_models():
    torch._dynamo.reset()
    model = Mlp(nn.GELU())
    technique, context = start(model)
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        step(technique, context, compiled, [torch.randn(32, 4)])
    assert clipped(technique) == ["down"]
    assert technique.ranges()["down"]["max"] == 10.0


def test_a_resumed_run_knows_the_layers_and_goes_on_bit_for_bit():
    torch.manual_seed(0)
    model = Mlp(nn.GELU())
    technique, context = start(model)
    batches = [torch.randn(16, 4) for _ in range(4)]
    for batch in batches[:2]:
        step(technique, context, model, [batch])
    state, weights = copy.deepcopy(technique.state_dict()), copy.deepcopy(model.state_dict())
    assert state["gelu_inputs"] == {"judged": ["down", "up"], "clipped": ["down"]}
    for batch in batches[2:]:
        step(technique, context, model, [batch])
    again = Mlp(nn.GELU())
    again.load_state_dict(weights)
    resumed, context = start(again)
    context.step = 2
    resumed.begin(context, state)
    assert not again.between._forward_hooks
    for batch in batches[2:]:
        step(resumed, context, again, [batch])
    assert resumed.ranges() == technique.ranges()
    assert clipped(resumed) == ["down"]
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("between", [F.gelu, NewGELUActivation(), nn.Sequential(nn.GELU(), nn.Dropout(0.5))])
@pytest.mark.parametrize("kind", ["mse", "minmax", "ema"])
def test_quantization_without_training(between, kind):
    torch.manual_seed(0)
    model = Mlp(between).requires_grad_(False)
    batches = [torch.randn(32, 4) for _ in range(3)]
    quantized, report = quantize_with_report(model, {"scheme": "int8", "range": kind, "clip_gelu": 10}, batches)
    assert [entry["clip_gelu"] for entry in report.layers] == [False, True]
    assert report.ranges["down"]["max"] <= 10
    assert not any(parameter.requires_grad for parameter in [*quantized.parameters(), *model.parameters()])
    free = quantize(model, {"scheme": "int8", "range": kind}, batches)
    assert free.down.quantizer.saved["max"] > 10
    with pytest.raises(MatchError, match="clip_gelu found no layer"):
        quantize(Mlp(nn.ReLU()), {"scheme": "int8", "clip_gelu": 10}, batches)


def test_refusals():
    for options in (
        {"scheme": "int8_weight"},
        {"scheme": "int8_dynamic"},
        {"scheme": "int8", "range": "lsq"},
        {"scheme": "int8", "range": "lsq_plus"},
    ):
        with pytest.raises(ConfigError, match=r"qat: clip_gelu .*(scheme|range=lsq)"):
            QatConfig(**options, clip_gelu=10)
    for value in (0, -1, float("nan"), "inf"):
        with pytest.raises(ConfigError, match=r"qat\.clip_gelu"):
            QatConfig(scheme="int8", clip_gelu=value)
    with pytest.raises(MatchError, match="clip_gelu found no layer"):
        start(nn.Sequential(nn.Embedding(4, 4)))
    assert QatConfig(scheme="int8").clip_gelu is None
