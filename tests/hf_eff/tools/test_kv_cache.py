"""Scales of an FP8 cache: of what transformers' own cache holds, in the files, and as transformers rounds with them."""

import inspect
import json

import pytest
import torch
from commands import eff
from mixtures import mixture
from qat_step import qat_result
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from shared_core.checkpoint_formats.plain import read_deployment, write_deployment
from shared_core.errors import CompatibilityError, ConfigError, MatchError, TrainingError
from shared_core.quantization import apply_ranges, calibrate_kv_cache, convert, quantize_with_report, rounding_kv_cache
from shared_core.tools.export import export_compressed_tensors, export_gguf, export_onnx, export_torchao

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "initializer_range": 0.3, "vocab_size": 32}
GRID = torch.tensor([
    sign * value
    for sign in (-1.0, 1.0)
    for value in [k * 2.0**-9 for k in range(8)]
    + [(1 + k / 8) * 2.0**e for e in range(-6, 9) for k in range(8) if e < 8 or k < 7]
], dtype=torch.float64)  # fmt: skip
TASK = """
import torch

def batches():
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(1, 32, (4, 8), generator=generator)} for _ in range(3)]
"""
needs_the_old_name = pytest.mark.skipif(
    "past_key_values" not in inspect.signature(LlamaAttention.forward).parameters,
    reason="compressed-tensors 0.20 does not find the cache of transformers 5.24",
)


def batches():
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(1, 32, (4, 8), generator=generator)} for _ in range(3)]


def cached(model, batch):
    """What transformers' cache holds: a pair for each layer."""
    with torch.no_grad():
        found = model(**batch, use_cache=True).past_key_values
    return [(layer.keys, layer.values) for layer in found.layers]


def loss_of(model):
    total = 0.0
    with torch.no_grad():
        for batch in batches():
            chances = model(**batch).logits[:, :-1].double().log_softmax(-1)
            total -= chances.gather(2, batch["input_ids"][:, 1:, None]).sum().item()
    return total / (3 * 4 * 7)


def test_scales_are_of_what_the_cache_holds_and_costs_of_what_rounding_changes(make):
    model, report = quantize_with_report(make.language_model(**SHAPE), "int8_dynamic", batches(), kv_cache="fp8")
    found = report.kv_cache
    names = [f"model.layers.{layer}.self_attn" for layer in range(2)]
    assert [*found.scales] == [*found.sqnr_db] == names
    held = [cached(model, batch) for batch in batches()]
    for layer, name in enumerate(names):
        for part, scale in enumerate(("k_scale", "v_scale")):
            largest = max(layers[layer][part].abs().max().item() for layers in held)
            assert found.scales[name][scale] == pytest.approx(largest / 448, rel=1e-6)
    assert found.loss == pytest.approx(loss_of(model), rel=1e-6)
    with rounding_kv_cache(model):
        rounded = cached(model, batches()[0])
        assert found.rounded_loss == pytest.approx(loss_of(model), rel=1e-6) != found.loss
    scale = found.scales[names[0]]["k_scale"]
    exact, keys = held[0][0][0].double().flatten(), rounded[0][0].double().flatten()
    nearest = (exact[:, None] / scale - GRID).abs().min(1).values
    assert torch.allclose((exact - keys).abs() / scale, nearest, atol=1e-4)
    assert 25 < found.sqnr_db[names[0]]["keys"] < 40
    assert torch.equal(cached(model, batches()[0])[1][1], held[0][1][1])  # outside, the cache is in float


def test_padding_does_not_count_and_unseen_values_saturate(make):
    model = make.language_model(**SHAPE)
    (batch, *_) = batches()
    plain = calibrate_kv_cache(model, [batch])
    with torch.no_grad():
        model.model.embed_tokens.weight[0] *= 100
    padded = {
        "input_ids": torch.cat([batch["input_ids"], torch.zeros(4, 3, dtype=torch.long)], 1),
        "attention_mask": torch.cat([torch.ones(4, 8), torch.zeros(4, 3)], 1).long(),
    }
    found = calibrate_kv_cache(model, [padded])
    assert found.scales["model.layers.0.self_attn"] == pytest.approx(plain.scales["model.layers.0.self_attn"], rel=1e-5)
    assert found.loss == pytest.approx(plain.loss, rel=1e-5)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight *= 2
    with rounding_kv_cache(model):
        values = cached(model, batch)[0][1]
    largest = 448 * found.scales["model.layers.0.self_attn"]["v_scale"]
    assert values.isfinite().all()
    assert values.abs().max().item() == pytest.approx(largest, rel=1e-6)


@needs_the_old_name
@pytest.mark.parametrize(
    ("scheme", "kind"), [("int8_weight", "llama"), ("int8_dynamic", "llama"), ("fp8", "qwen3_moe")]
)
def test_the_folder_has_them_where_vllm_and_transformers_read_them(scheme, kind, make, tmp_path):
    sizes = SHAPE | {"moe_intermediate_size": 32, "head_dim": 32}
    network = make.language_model(**SHAPE) if kind == "llama" else mixture(kind, **sizes)
    model, report = quantize_with_report(network, scheme, batches(), kv_cache="fp8")
    written = export_compressed_tensors(model, tmp_path / "out", example_inputs=batches()[0])
    names = tuple(report.kv_cache.scales)
    assert (written.kv_cache, written.cache_scales_left_out) == (names, ())
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    asked = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    assert config["kv_cache_scheme"].items() >= asked.items()
    saved = load_file(tmp_path / "out" / "model.safetensors")
    for name, scales in report.kv_cache.scales.items():
        for scale, value in scales.items():
            tensor = saved[f"{name}.{scale}"]
            assert (tensor.shape, tensor.dtype, tensor.item()) == ((1,), torch.float32, pytest.approx(value))
    if kind != "llama":
        return
    # with inputs of layers in float nothing else moves: transformers rounds the cache as `rounding_kv_cache` does
    if scheme == "int8_weight":
        assert written.relative_change <= 1e-6
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        with torch.no_grad():
            found = loaded(**batches()[1]).logits
            with rounding_kv_cache(model):
                torch.testing.assert_close(found, model(**batches()[1]).logits, rtol=1e-5, atol=1e-5)
            assert (found - model(**batches()[1]).logits).abs().max() > 1e-3


@pytest.mark.parametrize("write", [export_torchao, export_gguf, export_onnx], ids=lambda write: write.__name__)
def test_formats_without_a_place_for_them_say_so(write, make, tmp_path):
    example = [batches()[0]] if write is export_onnx else []
    for kv_cache in ("fp8", None):
        model, report = quantize_with_report(make.language_model(**SHAPE), "int8_weight", batches(), kv_cache=kv_cache)
        model.config.use_cache = False  # an ONNX file has no place for a cache itself
        written = write(model, *example, tmp_path / f"{kv_cache}", verify=False)
        assert written.cache_scales_left_out == (tuple(report.kv_cache.scales) if kv_cache else ())


@needs_the_old_name
def test_commands_measure_keep_and_write_them(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "cache_task.py").write_text(TASK)
    make.language_model(**SHAPE).save_pretrained("float")
    calibration = ["--calibration", "cache_task:batches"]
    page = ["--report", "small/page.html"]
    told = eff(
        "quantize", "float", "--scheme", "int8_weight", "--kv-cache", "fp8", *calibration, "--out", "small", *page
    )
    assert "Cache in FP8" in told.stdout
    text = (tmp_path / "small" / "page.md").read_text()
    assert "| attention layer | scale of keys |" in text.partition("## Cache of keys and values")[2]
    values = json.loads((tmp_path / "small" / "eff_quantization.json").read_text())
    ranges = read_deployment("small")["qat"]["ranges"]
    scales = values["kv_cache"]["scales"]
    assert {name: ranges[name] for name in scales} == scales
    assert values["kv_cache"]["rounded_loss"] != values["kv_cache"]["loss"]
    export = ["--format", "compressed-tensors", "--out"]
    told = eff("export", "small", *export, "served").stdout
    assert "2 attention layers with cache scales" in told
    assert "model.layers.1.self_attn.v_scale" in load_file("served/model.safetensors")
    told = eff("export", "small", "--format", "torchao", "--out", "ao").stdout
    assert "Left out the cache scales" in told
    network = AutoModelForCausalLM.from_pretrained("small")
    assert convert(network, ranges)(**batches()[0]).logits.isfinite().all()
    # what qat saved has none
    model, ranges = qat_result(make.language_model(**SHAPE), batches()[0], scheme="int8_weight")
    model.save_pretrained("run")
    write_deployment("run", {"qat": {"ranges": ranges}})
    assert "k_scale" not in eff("export", "run", *export, "plain").stdout
    report = json.loads(eff("export", "run", "--kv-cache", "fp8", *calibration, "--json", *export, "other").stdout)
    assert len(report["kv_cache"]) == len(report["calibrated_kv_cache"]["scales"]) == 2
    for arguments, rule in (
        (["export", "run", "--kv-cache", "fp8", *export, "x"], "--kv-cache .*--calibration"),
        (["export", "run", *calibration, *export, "x"], "calibration .*NVFP4"),
        (["export", "run", "--kv-cache", "fp8", "--format", "gguf", "--out", "x.gguf"], "--format com"),
        (["quantize", "float", "--kv-cache", "fp8", "--scheme", "int8_weight", "--out", "x"], "--calib"),
        (
            ["quantize", "float", "--kv-cache", "int8", *calibration, "--out", "x"],
            "-kv-cache must be one of fp8, got 'int8'",
        ),
    ):
        with pytest.raises(ConfigError, match=rule):
            eff(*arguments)


def test_refusals(make, tmp_path):
    model = make.language_model(**SHAPE)
    with pytest.raises(ConfigError, match="at least one batch"):
        calibrate_kv_cache(model, [])
    encoder = BertForSequenceClassification(
        BertConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    )
    both = T5ForConditionalGeneration(T5Config(d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16, vocab_size=32))
    for other in (encoder, both):
        with pytest.raises(CompatibilityError, match="a decoder that generates text, got"):
            quantize_with_report(other, "int8_weight", batches(), kv_cache="fp8")
    with pytest.raises(CompatibilityError, match="attention layers that fill a cache"):
        calibrate_kv_cache(torch.nn.Sequential(torch.nn.Linear(2, 2)), [torch.ones(1, 2)])
    scales = calibrate_kv_cache(model, batches()).scales
    for name, entry, error, rule in (
        ("model.layers.0.mlp", scales["model.layers.0.self_attn"], MatchError, "attention layer of the"),
        ("model.layers.0.self_attn", {"k_scale": 0.0, "v_scale": 1.0}, ConfigError, "keys must not all be 0"),
        ("model.layers.0.self_attn", {"k_scale": 1.0}, ConfigError, "values must be finite, got a scale of None"),
    ):
        with pytest.raises(error, match=rule):
            apply_ranges(make.language_model(**SHAPE), {name: entry})
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        attention.v_proj.weight.zero_()
    with pytest.raises(TrainingError, match=r"layers\.1\.self_attn: values must not all be 0"):
        calibrate_kv_cache(model, batches())
    with torch.no_grad():
        attention.k_proj.weight[0, 0] = torch.nan
    with pytest.raises(TrainingError, match=r"layers\.1\.self_attn: keys must be finite, got a scale of nan"):
        calibrate_kv_cache(model, batches())
    # its attention keeps whole keys and values in transformers, and what they are made of in vLLM
    deepseek = DeepseekV3ForCausalLM(DeepseekV3Config(
        **SHAPE, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=8, kv_lora_rank=16,
        qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, first_k_dense_replace=1,
    ))  # fmt: skip
    options = {"scheme": "int8_weight", "include": ("*o_proj",)}
    latent, _ = quantize_with_report(deepseek, options, batches(), kv_cache="fp8")
    with pytest.raises(CompatibilityError, match="self_attn must have a cache of its keys and values"):
        export_compressed_tensors(latent, tmp_path / "out")
