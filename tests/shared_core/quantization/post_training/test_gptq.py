"""GPTQ: codes on the published and the pinned grid, block after block, and what is left to rounding or refused."""

import copy

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from shared_core.checkpoint_formats.plain import read_deployment, write_deployment
from shared_core.engine.technique import Context
from shared_core.errors import CheckpointError, ConfigError, TrainingError
from shared_core.quantization import QatConfig, QuantizationAwareTraining, apply_ranges, convert, quantize_with_report
from shared_core.quantization.affine import fake_quantize_groups, quantize_groups
from shared_core.quantization.post_training.gptq import GptqConfig
from shared_core.tools.export import export_compressed_tensors, export_gguf, export_onnx, export_torchao


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


@pytest.mark.parametrize("grid", ["published", "pinned"])
@pytest.mark.parametrize("actorder", [True, False])
@pytest.mark.parametrize("options", SCHEMES.values(), ids=SCHEMES)
def test_codes_cost_less_output_and_pinned_ones_lie_on_the_grid_of_rounding(options, actorder, grid):
    model, batches = llama(), texts()
    plain, _ = quantize_with_report(model, options, batches)
    made, report = quantize_with_report(model, options, batches, gptq={"actorder": actorder, "grid": grid})
    entries = {entry["name"]: entry for entry in report.layers if "output_error" in entry}
    assert len(entries) == 15
    errors, rounded = (sum(e[key] for e in entries.values()) for key in ("output_error", "rounded_output_error"))
    assert errors < rounded
    assert any(note.startswith("gptq: 15 linear layers") for note in report.notes)
    for name, entry in entries.items():
        weight, exact = made.get_submodule(name).weight.detach(), model.get_submodule(name).weight.detach()
        assert entry["sqnr_db"] < 60
        assert not torch.equal(weight, plain.get_submodule(name).weight)
        if "group_size" in options and grid == "pinned":  # the scales of plain rounding, found again in the result
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


def published(weight, hessian, bits, size, symmetric, *, actorder, damping=0.01):
    """Return GPTQ's result and its scales in float64, one column at a time (arXiv:2210.17323, algorithm 1).

    Groups follow section 4: their scales come from the weights as updated so far; with act-order from the weights.
    """
    weight, hessian = weight.double().numpy().copy(), hessian.double().numpy().copy()
    columns = np.argsort(-hessian.diagonal(), kind="stable") if actorder else np.arange(len(hessian))
    hessian = hessian + damping * hessian.diagonal().mean() * np.eye(len(hessian))
    inverse = np.linalg.inv(hessian[np.ix_(columns, columns)])
    factor = np.linalg.cholesky(inverse).T
    top = 2**bits - 1
    scale, zero = np.zeros((len(weight), weight.shape[1] // size)), np.zeros((len(weight), weight.shape[1] // size))

    def set_group(group):
        values = weight[:, group * size : (group + 1) * size]
        low, high = np.minimum(values.min(1), 0), np.maximum(values.max(1), 0)
        if symmetric:
            high = np.maximum(-low, high)
            low = -high
        scale[:, group] = (high - low) / top
        zero[:, group] = 2 ** (bits - 1) if symmetric else np.round(-low / scale[:, group])

    for group in range(scale.shape[1]) if actorder else ():
        set_group(group)
    for place, column in enumerate(columns):
        if not actorder and column % size == 0:
            set_group(column // size)
        s, z = scale[:, column // size], zero[:, column // size]
        old = weight[:, column].copy()
        weight[:, column] = (np.clip(np.round(old / s) + z, 0, top) - z) * s
        error = (old - weight[:, column]) / factor[place, place]
        weight[:, columns[place + 1 :]] -= np.outer(error, factor[place, place + 1 :])
    return torch.from_numpy(weight), torch.from_numpy(scale)


GRIDS = {
    "int4_weight": ({"scheme": "int4_weight", "group_size": 32}, 4, 32, False),
    "three_bits": ({"scheme": "int4_weight", "group_size": 32, "weight_bits": 3}, 3, 32, False),
    "W4A16": ({"scheme": "W4A16", "group_size": 32}, 4, 32, True),
    "int8_weight": ({"scheme": "int8_weight"}, 8, 160, True),
}


@pytest.mark.parametrize("actorder", [True, False])
@pytest.mark.parametrize("name", GRIDS)
def test_the_published_grid_is_that_of_the_paper_and_is_saved(name, actorder, tmp_path):
    options, bits, size, symmetric = GRIDS[name]
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(160, 24), nn.ReLU(), nn.Linear(24, 32)).double()
    x = torch.randn(600, 160, generator=generator).double() @ torch.randn(160, 160, generator=generator).double()
    config = {**options, "include": ["0"]}
    made, report = quantize_with_report(model, config, [x], gptq={"actorder": actorder}, allow_partial=True)
    exact, hessian = model[0].weight.detach(), x.T @ x
    expected, scale = published(exact, hessian, bits, size, symmetric, actorder=actorder)

    def objective(weight):
        return torch.trace((weight - exact) @ hessian @ (weight - exact).T).item()

    found = made[0].weight.detach()
    # a tie in float rounding may move a code, and those after it
    assert (found - expected).abs().gt(1e-9).double().mean() < 0.02
    assert objective(found) == pytest.approx(objective(expected), rel=0.01)
    write_deployment(tmp_path, {"qat": {"ranges": report.ranges}})
    entry = read_deployment(tmp_path)["qat"]["ranges"]["0"]
    grids = entry.get("weight_grids", {}).get("weight", {})
    saved = grids["scale"] if grids else torch.tensor(entry["weight_scale"], dtype=torch.float64)[:, None]
    assert (saved / scale - 1).abs().gt(1e-6).double().mean() < 0.02
    zero = grids.get("zero_point", torch.zeros(saved.shape))
    # the codes, recounted from what is saved, are whole and within their range
    codes = found / saved.repeat_interleave(size, 1) + zero.repeat_interleave(size, 1)
    assert (codes - codes.round()).abs().max() < 1e-9
    assert -(2 ** (bits - 1)) <= codes.min()
    assert codes.max() < 2 ** (bits - 1)


def test_the_published_grid_loses_less_than_the_pinned_one_in_groups():
    for name in ("int4_weight", "int8_dynamic_int4_weight"):
        errors = {}
        for grid in ("published", "pinned"):
            _, report = quantize_with_report(llama(), SCHEMES[name], texts(), gptq={"grid": grid})
            errors[grid] = sum(entry["output_error"] ** 2 for entry in report.layers if "output_error" in entry)
        assert errors["published"] < errors["pinned"]


@pytest.mark.parametrize("scheme", ["W4A16", "int4_weight"])
def test_training_starts_and_ends_on_the_published_grid(scheme, tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(200, 64)
    made, report = quantize_with_report(model, {"scheme": scheme, "group_size": 32}, [x], gptq={})
    save_file(made.state_dict(), tmp_path / "model.safetensors")
    write_deployment(tmp_path, {"qat": {"ranges": report.ranges}})
    technique = QuantizationAwareTraining(QatConfig(init=str(tmp_path)))
    context = Context(model=model, total_steps=1)
    technique.attach(context)
    technique.begin(context, None)
    for key, value in technique.bake(model.state_dict()).items():
        assert torch.equal(value, made.state_dict()[key])
    with torch.no_grad():  # a training step
        for layer in technique.layers.values():
            layer.weight.mul_(0.9)
    technique.finish(context)
    for name, entry in technique.ranges().items():
        for part, value in report.ranges[name]["weight_grids"]["weight"].items():
            assert torch.equal(entry["weight_grids"]["weight"][part].to(value.dtype), value)


def test_scales_that_were_lost_are_missed(tmp_path):
    _, report = quantize_with_report(nn.Linear(64, 64), "int4_weight", [torch.randn(90, 64)], gptq={})
    write_deployment(tmp_path, {"qat": {"ranges": report.ranges}})
    (tmp_path / "eff_deployment.tensors").unlink()
    with pytest.raises(CheckpointError, match=r"eff_deployment.tensors must lie beside it .* copy the whole folder"):
        read_deployment(tmp_path)
    write_deployment(tmp_path, {"qat": {"ranges": report.ranges}})
    write_deployment(tmp_path, {"qat": {"ranges": {}}})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["eff_deployment.json"]


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


@pytest.mark.parametrize("scheme", ["W4A16", "int4_weight"])
def test_every_export_has_the_weights_of_the_published_grid(scheme, tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
             "num_attention_heads": 2, "initializer_range": 0.2}  # fmt: skip
    model, batches = LlamaForCausalLM(LlamaConfig(**sizes)).eval(), texts()
    options = {"scheme": scheme, "group_size": 32, "skip": ["Embedding", "lm_head"]}
    made, _ = quantize_with_report(model, options, batches, gptq={})
    # each compares the weights of what it wrote with the model's
    assert export_compressed_tensors(made, tmp_path / "served", example_inputs=batches[0]).equal_layers == 7
    assert export_torchao(made, tmp_path / "ao", example_inputs=batches[0]).equal_layers == 7
    assert export_gguf(made, tmp_path / "model.gguf", example_inputs=batches[0]).scale_error < 1e-3  # float16
    with torch.no_grad():
        torch.testing.assert_close(convert(made)(**batches[0]).logits, made(**batches[0]).logits)

    net, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval(), torch.randn(90, 64)
    rounded, _ = quantize_with_report(net, {"scheme": scheme, "group_size": 32}, [x], gptq={})
    export_onnx(rounded, x, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), rounded(x), rtol=1e-4, atol=1e-5)
