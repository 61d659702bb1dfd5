"""Blocks that a model repeats are traced once, and the file is that of the whole model."""

import numpy as np
import pytest
import torch
from quantization_export_runs import constants, kinds
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from shared_core.quantization import quantize
from shared_core.tools.export import export_onnx
from shared_core.tools.export import onnx_blocks as blocks_module
from shared_core.tools.export.onnx_blocks import repeated_blocks
from shared_core.tools.export.onnx_files import feeds, session_of


class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        self.layer_idx = number

    def forward(self, x, mask=None, scale=1.0):
        y = self.second(nn.functional.gelu(self.first(x)))
        return (self.norm(x + scale * y * mask),)


class Deep(nn.Module):
    kind, depth = Layer, 4

    def __init__(self):
        super().__init__()
        self.start = nn.Linear(6, 8)
        self.layers = nn.ModuleList(self.kind(number) for number in range(self.depth))
        self.end = nn.Linear(8, 3)

    def forward(self, x, mask):
        y = self.start(x)
        for layer in self.layers:
            y = layer(y, mask=mask[:, :, None], scale=0.5)[0]
        return self.end(y)


class ByPlace(Layer):
    """A layer whose forward reads where it stands."""

    def forward(self, x, mask=None, scale=1.0):
        return super().forward(x, mask, scale * (1 + self.layer_idx))


class ByPlaces(Deep):
    kind = ByPlace


def inputs(batch=2, length=5):
    generator = torch.Generator().manual_seed(batch + length)
    return torch.randn(batch, length, 6, generator=generator), torch.ones(batch, length)


def deep(kind=Deep, scheme="int8"):
    torch.manual_seed(0)
    model = kind().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms too: no two blocks have one alike
            parameter.add_(0.1 * torch.randn_like(parameter))
    return quantize(model, scheme, [inputs()]) if scheme else model


def traced(monkeypatch):
    """Return the numbers of the layers that torch.export sees, from now on."""
    found = []
    forward = Layer.forward

    def seen(layer, *args, **options):
        if torch.compiler.is_exporting():
            found.append(layer.layer_idx)
        return forward(layer, *args, **options)

    monkeypatch.setattr(Layer, "forward", seen)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [None, "int8", "int8_weight", "int8_dynamic"])
def test_a_block_is_traced_once_and_the_file_is_that_of_the_whole(scheme, tmp_path, monkeypatch):
    model = deep(scheme=scheme)
    seen = traced(monkeypatch)
    report = export_onnx(model, inputs(), tmp_path / "blocks.onnx", dynamic_length=True)
    assert seen == [0]
    # Without a check after it nothing is traced for others.
    export_onnx(model, inputs(), tmp_path / "whole.onnx", dynamic_length=True, verify=False)
    assert seen[1:] == [0, 1, 2, 3]
    mine, theirs = (constants(tmp_path / name) for name in ("blocks.onnx", "whole.onnx"))
    for name, value in theirs.items():
        if name.startswith("layers.") and name in mine:
            assert np.array_equal(mine[name], value), name
    for name in ("MatMul", "Gemm", "MatMulInteger", "QuantizeLinear", "Gelu", "LayerNormalization"):
        assert kinds(tmp_path / "blocks.onnx").count(name) == kinds(tmp_path / "whole.onnx").count(name)
    assert report.largest_difference < 1e-5
    for given in (inputs(), inputs(3, 9), inputs(1, 1)):
        sessions = [session_of(tmp_path / name, optimize=False) for name in ("blocks.onnx", "whole.onnx")]
        assert np.allclose(*(session.run(None, feeds(session, given)) for session in sessions), atol=1e-6)


@pytest.mark.slow
def test_a_wrong_graph_is_found_and_all_blocks_are_traced(tmp_path, monkeypatch):
    model = deep()
    model.layers[1].norm.eps = 0.5
    monkeypatch.setattr(blocks_module, "_signature", lambda block: type(block).__name__)
    seen = traced(monkeypatch)
    report = export_onnx(model, inputs(), tmp_path / "model.onnx")
    assert seen == [0, 0, 1, 2, 3]
    assert report.largest_difference < 1e-5


def test_only_blocks_that_are_alike_are_one_graph():
    model = deep(scheme=None)
    names = [f"layers.{number}" for number in range(4)]
    assert [list(group) for group in repeated_blocks(model, inputs())] == [names]
    model.layers[1].norm.eps = 1e-3
    assert [list(group) for group in repeated_blocks(model, inputs())] == [["layers.0", "layers.2", "layers.3"]]
    model.layers[2].first, model.layers[2].second = nn.Linear(8, 24), nn.Linear(24, 8)
    assert repeated_blocks(model, inputs()) == []
    shared = nn.Sequential(*[nn.Linear(4, 4)] * 3)  # one layer, thrice
    assert repeated_blocks(shared, torch.ones(2, 4)) == []
    narrowing = nn.Sequential(*(nn.Sequential(nn.MaxPool1d(2)) for _ in range(3)))
    assert repeated_blocks(narrowing, torch.ones(2, 3, 16)) == []


def test_one_block_runs_to_find_them_and_one_with_a_forward_of_its_own_is_left_alone(monkeypatch):
    model, forward, runs = deep(scheme=None), Layer.forward, []
    monkeypatch.setattr(
        Layer, "forward", lambda layer, *args, **options: runs.append(layer) or forward(layer, *args, **options)
    )
    model.layers[2].forward = own = model.layers[2].forward
    assert [list(group) for group in repeated_blocks(model, inputs())] == [["layers.0", "layers.1", "layers.3"]]
    assert runs == [model.layers[0], model.layers[2]]
    assert model.layers[2].forward is own
    both = nn.ModuleDict({"one": nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))})
    both["other"] = nn.Sequential(*both["one"])  # each in two places
    assert repeated_blocks(nn.Sequential(*both.values()), torch.ones(2, 4)) == []


def test_a_block_that_reads_its_place_is_not_like_the_others():
    model = deep(ByPlaces, scheme=None)
    assert repeated_blocks(model, inputs()) == []
    assert [layer.layer_idx for layer in model.layers] == [0, 1, 2, 3]


def test_nothing_is_left_on_the_model(tmp_path):
    model = deep(scheme=None)
    export_onnx(model, inputs(), tmp_path / "model.onnx")
    assert all("forward" not in vars(module) and not module._forward_hooks for module in model.modules())


@pytest.mark.slow
def test_codes_of_tokens_are_compared_one_by_one_in_a_deep_encoder(tmp_path):
    # each moved code moves others in the layers behind it: the outputs alone differ by a hundredth
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4}
    model = BertForSequenceClassification(BertConfig(vocab_size=200, **sizes)).eval()
    ids = torch.randint(0, 200, (2, 32))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    report = export_onnx(quantize(model, "int8_dynamic", [given]), given, tmp_path / "model.onnx")
    assert report.integer_nodes == {"MatMulIntegerToFloat": 74}
    assert report.largest_difference < 1e-6
    assert report.moved_codes < 1e-3
