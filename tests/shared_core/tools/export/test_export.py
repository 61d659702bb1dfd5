"""ONNX export: exact without optimization, integer kernels with it, codes as trained, refusals."""

import contextlib
import copy
import importlib
import itertools

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from packaging.version import Version
from quantization_export_runs import (
    Cells,
    Tokens,
    assert_close_in_steps,
    constants,
    conv1d,
    conv2d,
    conv3d,
    examples,
    expected,
    kinds,
    mlp,
    run,
    trained,
    transposed,
    with_batch_norm,
)
from torch import nn

from shared_core.errors import CompatibilityError, ConfigError, MatchError, MissingExtraError
from shared_core.quantization import apply_ranges, quantize
from shared_core.quantization.fake_quant_layers import is_quantized
from shared_core.tools.export import export_onnx
from shared_core.tools.export.onnx_files import session_of
from shared_core.tools.export.source import Quantized, bias_codes, grid_of, with_room_for

# the package has a function of this name too
export_module = importlib.import_module("shared_core.tools.export.onnx")

BUILDS = [conv1d, conv2d, conv3d, transposed, with_batch_norm, Tokens, Cells]


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
def test_without_optimization_the_file_is_the_fake_quantizing_model(build, tmp_path):
    model, _ = trained(build)
    path = tmp_path / "model.onnx"
    report = export_onnx(model, (examples(build),), path)
    assert report.largest_difference <= 1e-5
    assert report.moved_codes < 1e-3
    x = examples(build, 64)  # another batch than the example's
    reference = expected(model, x)
    assert_close_in_steps(run(path, x), reference)
    assert not report.float_layers


@pytest.mark.parametrize(
    ("build", "bits", "kernel", "count"),
    [
        (mlp, 8, "QGemm", 3),
        (conv2d, 8, "QLinearConv", 2),
        (conv2d, 4, "QGemm", 1),
        (with_batch_norm, 8, "QLinearConv", 1),
    ],
)  # fmt: skip
def test_optimized_it_runs_integer_kernels_within_a_step(build, bits, kernel, count, tmp_path):
    model, _ = trained(build, weight_bits=bits)
    path, optimized = tmp_path / "model.onnx", tmp_path / "optimized.onnx"
    report = export_onnx(model, examples(build), path)
    x = examples(build, 64)
    y, reference = run(path, x, optimize=True, save=optimized), expected(model, x)
    assert kinds(optimized).count(kernel) == count == report.integer_nodes[kernel]
    if kernel == "QGemm":
        assert "Gemm" not in kinds(optimized)
    assert_close_in_steps(y, reference)


def test_the_file_has_the_codes_that_were_trained_and_a_relu_folds_where_they_start_at_zero(tmp_path):
    model, ranges = trained(mlp)
    export_onnx(model, examples(mlp), tmp_path / "model.onnx", weight_codes="signed")
    assert b".py" not in (tmp_path / "model.onnx").read_bytes()  # nothing of this machine
    assert ranges["2"]["min"] == 0
    found = constants(tmp_path / "model.onnx")
    assert found["2.input_zero_point"].dtype == np.uint8
    assert found["2.input_zero_point"] == 0
    assert found["0.input_zero_point"] > 0
    run(tmp_path / "model.onnx", examples(mlp), optimize=True, save=tmp_path / "optimized.onnx")
    assert "Relu" in kinds(tmp_path / "model.onnx")
    assert "Relu" not in kinds(tmp_path / "optimized.onnx")
    for name in ("0", "2", "4"):
        weight = model.get_submodule(name).weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        assert found[f"{name}.weight_codes"].dtype == np.int8
        assert np.array_equal(found[f"{name}.weight_codes"], (weight / scale).round().numpy())
        assert np.allclose(found[f"{name}.weight_scale"], scale[:, 0].numpy(), rtol=1e-6)
        assert found[f"{name}.bias_codes"].dtype == np.int32
        step = found[f"{name}.input_scale"] * found[f"{name}.weight_scale"]
        assert np.allclose(found[f"{name}.bias_scale"], step, rtol=0.01)
    assert not any(value.dtype == np.float32 and value.ndim > 1 for value in found.values())


FP8 = [
    {"scheme": "fp8"}, {"weights": "fp8", "inputs": "none"}, {"scheme": "fp8_static"},
    {"weights": "fp8_tensor", "inputs": "fp8_static"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("build", "options"),
    [(mlp, {"scheme": "fp8_block"}), *itertools.product((mlp, conv1d, conv2d), FP8), (transposed, FP8[0])],
    ids=lambda value: getattr(value, "__name__", None) or "-".join(value.values()),
)
def test_fp8_is_written_as_float8_and_gives_the_models_outputs(build, options, tmp_path):
    model = quantize(build(), options, [examples(build, 32)])
    path = tmp_path / "model.onnx"
    # onnxruntime cannot load convolutions that pass on codes
    target = "tensorrt" if "fp8_static" in options.values() else None
    assert export_onnx(model, examples(build), path, target=target).largest_difference <= 1e-5
    written = {one.name: one for one in onnx.load(path).graph.initializer}
    for name, layer in model.named_modules():
        if not is_quantized(layer):
            continue
        codes, scale = (written[f"{name}.weight_{part}"] for part in ("codes", "scale"))
        assert codes.data_type == onnx.TensorProto.FLOAT8E4M3FN
        codes, scale = (onnx.numpy_helper.to_array(one).astype(np.float64) for one in (codes, scale))
        if scale.ndim == 2:
            scale = scale.repeat(codes.shape[1] // scale.shape[1], 1)
        else:
            scale = np.expand_dims(scale, [axis for axis in range(codes.ndim) if axis != (build is transposed)])
        assert np.allclose(codes * scale, layer.weight.detach().double().numpy(), rtol=1e-6, atol=0)
    x = examples(build, 64)
    reference = expected(model, x)
    assert np.allclose(run(path, x), reference, atol=2e-2 * np.abs(reference).max())


def test_a_file_that_onnxruntime_cannot_load_is_not_written(tmp_path):
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    model = quantize(convolutions, "fp8_static", [x])
    loads = Version(onnxruntime.__version__) >= Version("1.32")
    refused = pytest.raises(CompatibilityError, match=r'cannot load the file.*pass target="tensorrt"')
    with contextlib.nullcontext() if loads else refused:
        export_onnx(model, x, tmp_path / "model.onnx")
    if loads:
        assert np.allclose(run(tmp_path / "model.onnx", x), expected(model, x), atol=1e-5)
    else:
        assert not list(tmp_path.iterdir())
    report = export_onnx(model, x, tmp_path / "model.onnx", target="tensorrt")
    assert report.largest_difference <= 1e-5


@pytest.mark.parametrize(("bits", "range_"), [(2, "ema"), (3, "lsq"), (8, "lsq"), (4, "lsq_plus"), (4, "pact")])
def test_few_bits_clip_and_learned_ranges_are_kept(bits, range_, tmp_path):
    model, _ = trained(mlp, weight_bits=bits, activation_bits=bits, range=range_)
    x = 3 * examples(mlp, 32)  # far outside the ranges
    report = export_onnx(model, x, tmp_path / "model.onnx")
    assert report.largest_difference <= 1e-5 * max(1, np.abs(expected(model, x)).max())
    assert kinds(tmp_path / "model.onnx").count("Clip") == (0 if bits == 8 else 3)
    assert report.integer_nodes["QGemm"] == 3
    onnx_codes = constants(tmp_path / "model.onnx")["0.weight_codes"].astype(int)
    assert len(np.unique(onnx_codes)) <= 2**bits


def test_baked_weights_with_ranges_give_the_same_file(tmp_path):
    options = {"range": "lsq", "weight_bits": 3}
    during, _ = trained(mlp, **options)
    after, ranges = trained(mlp, finish=True, **options)
    fresh = mlp()
    fresh.load_state_dict(after.state_dict())
    apply_ranges(fresh, ranges)
    assert type(after[0]) is nn.Linear
    for name, model in (("during", during), ("after", after), ("fresh", fresh)):
        export_onnx(model, examples(mlp), tmp_path / name, verify=False)
    first = constants(tmp_path / "during")
    for name in ("after", "fresh"):
        found = constants(tmp_path / name)
        assert found.keys() == first.keys()
        for key, value in first.items():
            assert np.allclose(found[key], value, rtol=1e-5), key


@pytest.mark.parametrize(
    ("scheme", "kernels"),
    [
        ("int8_weight", {}), ("int4_weight", {}), ("ternary", {}), ("binary", {}), ("int8_dynamic_int4_weight", {}),
        ("int8_dynamic", {"MatMulIntegerToFloat": 3}),
    ],
)  # fmt: skip
def test_other_integer_schemes_are_exact(scheme, kernels, tmp_path):
    for build in (mlp, Tokens) if scheme == "int4_weight" else (conv2d, mlp) if scheme == "int8_dynamic" else (mlp,):
        model, _ = trained(build, scheme=scheme)
        report = export_onnx(model, examples(build), tmp_path / "model.onnx")
        # codes of tokens that are not in the file are not compared one by one
        seen = scheme != "int8_dynamic_int4_weight" and (scheme, build) != ("int8_dynamic", conv2d)
        assert report.largest_difference <= (1e-5 if seen else 1e-2)
        if build is mlp:
            assert report.integer_nodes == kernels
        stored = [value for name, value in constants(tmp_path / "model.onnx").items() if name.endswith("weight_codes")]
        assert all(value.dtype == np.int8 for value in stored)


def test_transposed_convolutions_with_groups(tmp_path):
    model, _ = trained(lambda: transposed(2))
    report = export_onnx(model, torch.randn(3, 4, 5, 5), tmp_path / "model.onnx")
    assert report.largest_difference <= 1e-5


def test_a_tied_weight_is_stored_once_and_embeddings_dequantize_rows(tmp_path):
    tied, _ = trained(Tokens)
    export_onnx(tied, examples(Tokens), tmp_path / "model.onnx", weight_codes="signed")
    found = constants(tmp_path / "model.onnx")
    assert [value.shape for value in found.values()].count((50, 32)) == 1
    nodes = onnx.load(tmp_path / "model.onnx").graph.node
    makers = {name: node.op_type for node in nodes for name in node.output}
    gathered = [node for node in nodes if node.op_type == "DequantizeLinear" and makers.get(node.input[0]) == "Gather"]
    assert len(gathered) == 1


def test_the_file_is_about_a_quarter(tmp_path):
    def wide():
        return nn.Sequential(nn.Linear(24, 512), nn.ReLU(), nn.Linear(512, 512))

    model, _ = trained(wide, finish=True, shape=(24,))
    report = export_onnx(model, examples(mlp), tmp_path / "model.onnx")
    size = sum(4 * value.numel() for value in model.parameters())
    assert report.bytes == (tmp_path / "model.onnx").stat().st_size
    assert 0.24 < report.bytes / size < 0.28


def test_a_layer_that_saw_no_input_and_float_layers_stay_as_they_are(tmp_path):
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused, self.skipped = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.branch = False

        def forward(self, x):
            return self.skipped(self.unused(x) if self.branch else self.used(x))

    model, _ = trained(Spare, shape=(4,), skip=("skipped",))
    model.branch = True
    report = export_onnx(model, torch.randn(5, 4), tmp_path / "model.onnx")
    assert report.largest_difference <= 1e-5
    assert report.float_layers == ("skipped",)
    assert report.quantized == ("used", "unused")


@pytest.mark.slow
def test_one_example_and_a_fixed_batch(tmp_path):
    model, _ = trained(mlp)
    export_onnx(model, examples(mlp, 1), tmp_path / "open.onnx")
    assert run(tmp_path / "open.onnx", examples(mlp, 5)).shape == (5, 10)
    export_onnx(model, examples(mlp, 2), tmp_path / "fixed.onnx", dynamic_batch=False)
    with pytest.raises(Exception, match="Got: 5 Expected: 2"):
        run(tmp_path / "fixed.onnx", examples(mlp, 5))
    assert onnx.load(tmp_path / "open.onnx").opset_import[0].version == 21


@pytest.mark.parametrize(
    ("finish", "options"), [(False, {"fold_batch_norm": False}), (True, {}), (False, {"range": "lsq"})]
)
def test_batch_norms_are_folded_into_the_scales_and_the_model_is_not_changed(finish, options, tmp_path):
    model, ranges = trained(with_batch_norm, finish=finish, **options)
    before, types = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    x = examples(with_batch_norm, 64)
    report = export_onnx(model.train(), x, tmp_path / "model.onnx")
    assert model.training
    assert [type(module) for module in model.modules()] == types
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    model.eval()
    assert report.largest_difference <= 1e-5
    # LSQ's steps are too coarse here for the small biases that folding leaves: exact, in float
    assert report.integer_nodes == ({} if "range" in options else {"QLinearConv": 1})
    assert "BatchNormalization" not in kinds(tmp_path / "model.onnx")
    reference = apply_ranges(model, ranges) if finish else model
    assert_close_in_steps(run(tmp_path / "model.onnx", x), expected(reference.eval(), x))


class Wrapped(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


class WrappedConv(nn.Conv2d):
    def forward(self, x):
        return super().forward(x)


class Activated(nn.BatchNorm2d):
    def __init__(self, channels):
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU()

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


@pytest.mark.parametrize("finish", [False, True])
def test_classes_that_compute_as_torchs_give_the_file_of_torchs(finish, tmp_path):
    def build(
        conv=nn.Conv2d, norm=lambda channels: nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU()), linear=nn.Linear
    ):
        return nn.Sequential(
            conv(3, 6, 3, bias=False), norm(6), conv(6, 4, 3, 2, bias=False), norm(4), nn.Flatten(), linear(36, 5)
        )  # fmt: skip

    files = []
    for mine in (lambda: build(WrappedConv, Activated, Wrapped), build):
        model, _ = trained(mine, shape=(3, 9, 9), steps=2, finish=finish)
        files.append(tmp_path / f"{len(files)}.onnx")
        report = export_onnx(model, torch.ones(2, 3, 9, 9), files[-1])
        assert report.integer_nodes == {"QGemm": 1, "QLinearConv": 2}
        assert report.float_layers == ()
        assert report.largest_difference <= 1e-5
    x = torch.randn(4, 3, 9, 9)
    assert (run(files[0], x) == run(files[1], x)).all()


@pytest.mark.parametrize("shift", [1e-6, 1.0])
@pytest.mark.parametrize("factor", [0.0, 1e-14])
def test_a_channel_of_nearly_no_weight_leaves_its_layer_on_integers(factor, shift, tmp_path):
    def build():
        net = with_batch_norm()
        nn.init.zeros_(net[1].bias)
        net[1].requires_grad_(False)  # stay as they are
        net[1].weight[2], net[1].bias[2] = factor, shift
        return net

    model, _ = trained(build, shape=(3, 8, 8))
    x = examples(with_batch_norm, 64)
    report = export_onnx(model, x, tmp_path / "model.onnx")
    assert report.integer_nodes == {"QLinearConv": 1}
    assert report.largest_difference <= 1e-5
    for optimize in (False, True):  # onnxruntime clips a bias that does not fit
        assert_close_in_steps(run(tmp_path / "model.onnx", x, optimize), expected(model, x))


def test_scales_grow_only_where_it_moves_the_output_by_no_more_than_the_tolerance():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (64, 9), generator=generator).to(torch.int8)
    scale = torch.logspace(-16, -2, 64)
    bias, step, tolerance = torch.full((64,), 0.1), torch.tensor(0.01), torch.full((64,), 1e-6)
    found = with_room_for(bias, Quantized(codes, scale, 0, 0), step, 255 * step, tolerance)
    before, after = (
        grid.codes.double() * grid.scale.double().unsqueeze(1) for grid in (Quantized(codes, scale, 0, 0), found)
    )
    inputs = torch.randint(0, 256, (100, 9), generator=generator).double() * 0.01
    assert (inputs @ (before - after).T).abs().max() <= 9**0.5 * 1e-6  # Cauchy and Schwarz
    changed = found.scale != scale
    assert changed[0]
    assert not changed[-1]
    assert torch.equal(found.codes[~changed], codes[~changed])
    # with so small a bias every channel fits
    assert (bias / (step * found.scale)).abs().max() < 2**30


@pytest.mark.slow
def test_a_wrong_file_is_found_and_nothing_is_written(tmp_path, monkeypatch):
    model, _ = trained(mlp)
    (tmp_path / "model.onnx").write_text("old")
    whole = export_module.to_export

    def broken(name, module, *rest):
        whole(name, module, *rest)
        if name == "2":
            module.weight_codes[0, 0] += 40

    monkeypatch.setattr(export_module, "to_export", broken)
    with pytest.raises(CompatibilityError, match="output 0"):
        export_onnx(model, examples(mlp), tmp_path / "model.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    assert (tmp_path / "model.onnx").read_text() == "old"
    assert export_onnx(model, examples(mlp), tmp_path / "model.onnx", verify=False).largest_difference is None


def test_a_file_that_is_right_at_one_length_alone_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(export_module, "dynamic_shapes", lambda *_, **__: None)
    with pytest.raises(CompatibilityError, match=r"every length, and with example_inputs .* one shorter it did"):
        export_onnx(nn.ReLU(), torch.randn(2, 5, 4), tmp_path / "model.onnx", dynamic_length=True)
    assert not (tmp_path / "model.onnx").exists()


def test_a_model_without_quantized_layers_is_written_in_float(tmp_path):
    torch.manual_seed(0)
    model, x = with_batch_norm().eval(), examples(with_batch_norm)
    report = export_onnx(model, x, tmp_path / "model.onnx")
    assert (report.quantized, report.float_layers, report.integer_nodes) == ((), ("0", "3"), {})
    assert np.allclose(run(tmp_path / "model.onnx", x), expected(model, x), atol=1e-6)


def test_refusals(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    model, _ = trained(mlp)
    with pytest.raises(MatchError, match="calibration needs quantized layers"):
        export_onnx(mlp(), examples(mlp), path, calibration=[examples(mlp)])
    with pytest.raises(ConfigError, match=r"export_onnx: opset must be in \[21, 23\], got 20"):
        export_onnx(model, examples(mlp), path, opset=20)
    with pytest.raises(ConfigError, match="example_inputs must hold a tensor, got str"):
        export_onnx(model, "x", path)
    with pytest.raises(ConfigError, match="weight_codes must be one of auto, signed, unsigned, got 'unsigend'"):
        export_onnx(model, examples(mlp), path, weight_codes="unsigend")
    for few in (torch.ones(3), torch.ones(3, 2)):
        with pytest.raises(ConfigError, match=r"\(batch, length, ...\).* 3, got \(3"):
            export_onnx(model, few, path, dynamic_length=True)
    with pytest.raises(CompatibilityError, match=r"every length, .* one shorter it did not: .*pass dynamic_length"):
        export_onnx(model, examples(mlp), path, dynamic_length=True)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    with pytest.raises(CompatibilityError, match=r"fixes the length.*or pass dynamic_length=False"):
        export_onnx(plain, torch.ones(2, 4, 3), path, dynamic_length=True)
    with pytest.raises(CompatibilityError, match=r"fixes the batch.*batch="):
        export_onnx(nn.Unflatten(0, (2, 2)), torch.ones(4, 3), path)
    for scheme in ("mxfp4", "mxfp8", "nvfp4"):
        other = apply_ranges(mlp(), {"0": {"weight": scheme, "input": scheme}})
        with pytest.raises(CompatibilityError, match=f"0 must have integer or FP8 codes, got {scheme} weights"):
            export_onnx(other, examples(mlp), path)
    lstm = apply_ranges(nn.Sequential(nn.LSTM(24, 4, proj_size=2)), {"0": {"input": "none"}})
    with pytest.raises(CompatibilityError, match="0 must have no proj_size, which ONNX lacks; skip it in qat"):
        export_onnx(lstm, torch.ones(2, 3, 24), path)
    with pytest.raises(CompatibilityError, match="0 is not quantized yet"):
        early, _ = trained(mlp)
        early[0].quantizer.bank.quantizing = False
        export_onnx(early, examples(mlp), path)
    with pytest.raises(CompatibilityError, match=r"0 must be float32, got torch\.bfloat16; call model\.float"):
        export_onnx(trained(mlp)[0].bfloat16(), examples(mlp).bfloat16(), path)
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    with pytest.raises(CompatibilityError, match="weights of 2 must be finite, got NaN"):
        export_onnx(model, examples(mlp), path)
    monkeypatch.setattr(export_module.importlib.util, "find_spec", lambda name: None if name == "onnxscript" else 1)
    with pytest.raises(MissingExtraError, match=r"needs onnxscript, .* pip install 'efftrain\[onnx\]'"):
        export_onnx(model, examples(mlp), path)
    assert not list(tmp_path.iterdir())


def test_a_model_that_torch_cannot_export_is_named(tmp_path):
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(24, 4)

        def forward(self, x):
            return self.layer(x) if float(x.sum()) > 0 else x

    model = apply_ranges(Looks(), {"layer": {"input": "none"}})
    model.layer.weight.data.fill_(0.5)
    with pytest.raises(CompatibilityError, match=r"torch\.onnx cannot export"):
        export_onnx(model, torch.ones(2, 24), tmp_path / "model.onnx")


def test_grids_are_found_whatever_the_largest_code():
    generator = torch.Generator().manual_seed(0)
    for bits in (2, 3, 4, 8):
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        codes = torch.randint(low, high + 1, (200, 40), generator=generator)
        codes[0], codes[1, 1:] = 0, 0
        scale = torch.rand(200, 1, generator=generator) * 10.0 ** torch.randint(-4, 4, (200, 1), generator=generator)
        found, step = grid_of(codes * scale, high, -low)
        assert torch.allclose(found * step.unsqueeze(1), codes * scale, rtol=1e-5, atol=0)
        assert found.max() <= high
        assert found.min() >= low
    assert grid_of(torch.randn(4, 40, generator=generator), 127, 128) is None


def test_bias_codes_are_exact_or_within_tolerance():
    generator = torch.Generator().manual_seed(0)
    for step in (1e-6, 1e-3, 0.3):
        bias, steps = torch.randn(100, generator=generator), torch.full((100,), step)
        codes, scale = bias_codes(bias, steps, torch.full((100,), 1e-5))
        assert torch.allclose(codes * scale, bias, rtol=1e-6, atol=1e-5)
        # what an integer kernel makes of the codes
        assert ((codes * step - bias).abs() <= step).all()
    assert bias_codes(torch.ones(1), torch.tensor([1e-12]), torch.ones(1)) is None


class Attends(nn.Module):
    """Attention and a layer norm behind a sum, as an encoder has them."""

    def __init__(self, **options):
        super().__init__()
        self.norm, self.options = nn.LayerNorm(16), options

    def forward(self, x, mask=None):
        q = x.unflatten(-1, (2, 8)).transpose(1, 2)
        k = q[:, :1] if "enable_gqa" in self.options else q
        y = nn.functional.scaled_dot_product_attention(q, k, k, mask, **self.options)
        return self.norm(x + y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ({}, torch.tensor([True, True, False, True])), ({"scale": 0.3}, None), ({}, torch.arange(4.0)),
        ({"is_causal": True}, None), ({"enable_gqa": True}, None),
    ],
)  # fmt: skip
def test_attention_and_norm_are_what_onnxruntime_runs_fast(options, mask, tmp_path):
    torch.manual_seed(0)
    x, optimized = torch.randn(3, 4, 16), tmp_path / "optimized.onnx"
    inputs = (x,) if mask is None else (x, mask.expand(3, 1, 4, 4).clone())
    report = export_onnx(Attends(**options).eval(), inputs, tmp_path / "model.onnx", dynamic_batch=False)
    assert report.largest_difference < 1e-5
    session_of(tmp_path / "model.onnx", optimize=True, save=optimized)
    found = kinds(optimized)
    assert "LayerNormalization" in found
    assert "SkipLayerNormalization" not in found
    if options.keys() <= {"scale"}:
        assert "FusedMatMul" in found
        assert not {"IsNaN", "Mul"} & {*found}


def test_one_tensor_as_two_inputs_is_two_inputs_of_the_file(tmp_path):
    class Difference(nn.Module):
        def forward(self, a, b):
            return a - 2 * b

    zeros = torch.zeros(2, 3)  # such as the first states of a recurrent layer
    file = export_onnx(Difference(), (zeros, zeros), tmp_path / "model.onnx").path
    (found,) = session_of(file, optimize=False).run(
        None, {"a": np.full((2, 3), 5, np.float32), "b": np.ones((2, 3), np.float32)}
    )
    assert (found == 3).all()
