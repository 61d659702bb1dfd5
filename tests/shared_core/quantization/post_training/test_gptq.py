"""GPTQ: codes on the library's own grids, block after block, and what is left to rounding or refused."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from shared_core.errors import ConfigError, TrainingError
from shared_core.quantization import apply_ranges, quantize_with_report
from shared_core.quantization.affine import fake_quantize_groups, quantize_groups
from shared_core.quantization.post_training.gptq import GptqConfig


def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2}  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


def texts():
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(32, (8, 9 + i), generator=generator)} for i in range(3)]


SCHEMES = {
    "int4_weight": {"scheme": "int4_weight", "group_size": 32},
    "int8_weight": {"scheme": "int8_weight"},
    "three_bits": {"scheme": "int8", "weight_bits": 3},
    "int8": {"scheme": "int8"},
    "int8_dynamic_int4_weight": {"scheme": "int8_dynamic_int4_weight", "group_size": 32},
}


@pytest.mark.parametrize("actorder", [True, False])
@pytest.mark.parametrize("options", SCHEMES.values(), ids=SCHEMES)
def test_codes_lie_on_the_schemes_own_grid_and_cost_less_output(options, actorder):
    model, batches = llama(), texts()
    plain, _ = quantize_with_report(model, options, batches)
    made, report = quantize_with_report(model, options, batches, gptq={"actorder": actorder})
    entries = {entry["name"]: entry for entry in report.layers if "output_error" in entry}
    assert len(entries) == 15
    errors, rounded = (sum(e[key] for e in entries.values()) for key in ("output_error", "rounded_output_error"))
    assert errors < rounded
    assert any(note.startswith("gptq: 15 linear layers") for note in report.notes)
    for name, entry in entries.items():
        weight, exact = made.get_submodule(name).weight.detach(), model.get_submodule(name).weight.detach()
        assert entry["sqnr_db"] < 60
        assert not torch.equal(weight, plain.get_submodule(name).weight)
        if "group_size" in options:  # the scales of plain rounding, found again in the result
            symmetric = options["scheme"] != "int4_weight"
            torch.testing.assert_close(fake_quantize_groups(weight, 32, symmetric=symmetric), weight)
            scales = quantize_groups(weight, 32, symmetric=symmetric)[1]
            torch.testing.assert_close(scales, quantize_groups(exact, 32, symmetric=symmetric)[1])
    # the weights alone and what is saved beside them give the same model again
    again = copy.deepcopy(model)
    again.load_state_dict({name: value for name, value in made.state_dict().items() if name in model.state_dict()})
    apply_ranges(again, report.ranges)
    with torch.no_grad():
        assert torch.equal(again(**batches[0]).logits, made(**batches[0]).logits)


def test_pruned_weights_stay_zero_and_shared_or_other_layers_are_rounded():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.first, self.second, self.last = (
                nn.Conv1d(4, 4, 1), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8),
            )  # fmt: skip
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.last(self.second(self.first(self.conv(x).flatten(1)).relu()))

    torch.manual_seed(0)
    model, batches = Tied().eval(), [torch.randn(50, 4, 4)]
    with torch.no_grad():
        model.last.weight[:, ::2] = 0
        model.last.weight[0] = 0
    made, report = quantize_with_report(model, "int4_weight", batches, gptq={})
    plain, _ = quantize_with_report(model, "int4_weight", batches)
    assert [entry["name"] for entry in report.layers if "output_error" in entry] == ["last"]
    assert not made.last.weight[model.last.weight == 0].any()
    assert torch.equal(made.first.weight, plain.first.weight)
    assert torch.equal(made.conv.weight, plain.conv.weight)


def test_what_cannot_be_solved_is_refused():
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with pytest.raises(ConfigError, match="calibration must be given for gptq"):
        quantize_with_report(net, "int4_weight", gptq=GptqConfig())
    with pytest.raises(ConfigError, match=r"gptq\.actordr is not an option"):
        quantize_with_report(net, "int4_weight", [torch.ones(2, 32)], gptq={"actordr": True})
    with pytest.raises(ConfigError, match=r"scheme must .* integer codes"):
        quantize_with_report(net, "fp8", [torch.ones(2, 32)], gptq=GptqConfig())
    with pytest.raises(TrainingError, match="inputs of 0 must be finite, got NaN"):
        quantize_with_report(net, "int4_weight", [torch.full((2, 32), torch.nan)], gptq=GptqConfig())
    net.append(nn.Identity())
    net[2].extra = nn.Linear(32, 32)
    with pytest.raises(TrainingError, match=r"calibration must reach 2\.extra, got no input"):
        quantize_with_report(net, "int4_weight", [torch.ones(2, 32)], gptq=GptqConfig())
