"""ONNX export of Hugging Face models: keyword inputs, named outputs, attention, an open batch."""

import numpy as np
import onnxruntime
import pytest
import torch
import transformers
from commands import eff
from qat_step import qat_step

from shared_core.checkpoint_formats.plain import write_deployment
from shared_core.errors import CompatibilityError, ConfigError
from shared_core.quantization import apply_ranges
from shared_core.tools.export import export_onnx


def quantized(model, inputs, **options):
    return qat_step(model, inputs, **{"scheme": "int8", **options})[0]


def session(path):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def make_batch(rows, length=6):
    ids = torch.randint(1, 24, (rows, length))
    mask = torch.ones_like(ids)
    mask[0, length - 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def logits_of(opened, batch):
    return opened.run(None, {name: value.numpy() for name, value in batch.items()})[0]


@torch.no_grad()
def assert_near(opened, model, batch):
    reference = model(**batch).logits.numpy()
    # rounding may move a code of a row
    assert np.abs(logits_of(opened, batch) - reference).max() <= 0.02 * np.abs(reference).max()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
def test_a_classifier_by_keywords(rows, make, tmp_path):
    model = quantized(make.classifier(hidden_dropout_prob=0.0), make_batch(4))
    report = export_onnx(model, make_batch(rows), tmp_path / "model.onnx")
    assert report.largest_difference <= 1e-5
    assert report.integer_nodes["QGemm"] >= 14  # 6 a block, pooler, classifier
    opened = session(tmp_path / "model.onnx")
    assert [entry.name for entry in opened.get_inputs()] == ["input_ids", "attention_mask"]
    assert [entry.name for entry in opened.get_outputs()] == ["logits"]
    assert_near(opened, model, make_batch(5))


@pytest.mark.slow
def test_a_language_model_by_keywords(make, tmp_path):
    inputs = {"input_ids": torch.randint(1, 24, (2, 6)), "use_cache": False}
    model = quantized(make.language_model(), inputs, scheme="int8_weight")
    report = export_onnx(model, inputs, tmp_path / "model.onnx")
    assert report.largest_difference <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic"])
def test_an_open_length(scheme, make, tmp_path):
    model = quantized(make.classifier(), make_batch(4), scheme=scheme)
    report = export_onnx(model, make_batch(3, 5), tmp_path / "model.onnx", dynamic_length=True)
    assert report.largest_difference <= (1e-5 if scheme == "int8" else 1e-2)
    assert sum(report.integer_nodes.values()) >= 14
    assert report.inputs == dict.fromkeys(("input_ids", "attention_mask"), ("batch", "length"))
    opened = session(tmp_path / "model.onnx")
    for rows, length in ((1, 3), (4, 7), (2, 12)):
        assert_near(opened, model, make_batch(rows, length))


@pytest.mark.slow
def test_encoder_and_decoder_have_lengths_of_their_own(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 24, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, use_cache=False)).eval()

    def tokens(length, decoder_length):
        names = {"input_ids": length, "decoder_input_ids": decoder_length}
        return {name: torch.randint(1, 24, (2, size)) for name, size in names.items()}

    export_onnx(model, tokens(5, 5), tmp_path / "model.onnx", dynamic_length=True)
    batch = tokens(9, 4)
    logits = logits_of(session(tmp_path / "model.onnx"), batch)
    with torch.no_grad():
        assert np.allclose(logits, model(**batch).logits, atol=1e-5)


@pytest.mark.slow
def test_the_command_exports_a_folder_in_float_or_with_the_ranges_that_lie_in_it(make, tmp_path):
    model = make.classifier().eval()
    with torch.no_grad():
        weight = model.classifier.weight
        weight.copy_((127 * weight / weight.abs().max()).round() / 127)
        weight[:, 0] = 1.0  # every row's scale is then 1/127
    model.save_pretrained(tmp_path / "run")
    arguments = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "model.onnx")]
    for options, told in ([], "must be given"), (["--length", "1"], "must be at least 2, got 1"):
        with pytest.raises(ConfigError, match=f"--length {told}"):
            eff(*arguments, "--format", "executorch", *options)
    batch = make_batch(5)
    for ranges, told in (None, "all layers in float"), ({"classifier": {"min": -1.0, "max": 1.0}}, "1 layer quantized"):
        if ranges:
            write_deployment(tmp_path / "run", {"qat": {"ranges": ranges}})
            apply_ranges(model, ranges)
        assert told in eff(*arguments, "--length", "6").output
        logits = logits_of(session(tmp_path / "model.onnx"), batch)
        with torch.no_grad():
            difference = np.abs(logits - model(**batch).logits.numpy())
        if ranges:  # a code of an input may flip: its step, 2/255, by a weight of 1 at most, in one row
            assert difference.max() <= 2.1 / 255
            assert (difference.max(1) > 1e-5).sum() <= 1
        else:
            assert difference.max() <= 1e-6
    images = transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    images.save_pretrained(tmp_path / "images")
    refused = ["export", str(tmp_path / "images"), "--out", str(tmp_path / "images.onnx"), "--length", "8"]
    with pytest.raises(ConfigError, match=r"--length .*a model that reads tokens, got ViT.*pixel_values"):
        eff(*refused)
    half = make.classifier().eval().bfloat16()
    with pytest.raises(CompatibilityError, match=r"model must be float32, got torch.bfloat16 for bert.*; call model"):
        export_onnx(half, batch, tmp_path / "half.onnx")
    half.save_pretrained(tmp_path / "half")  # float32 in the file, with the values of bfloat16
    arguments[1] = str(tmp_path / "half")
    told = "input_ids (batch, length), attention_mask (batch, length)"
    assert told in " ".join(eff(*arguments).output.split())


@pytest.mark.slow
def test_the_command_exports_a_mixture_of_experts_whose_config_asks_for_a_cache(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.MixtralConfig(**sizes, vocab_size=24, num_hidden_layers=1, num_local_experts=3)
    assert config.use_cache
    model = transformers.MixtralForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "run")
    arguments = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "model.onnx"), "--length", "6"]
    eff(*arguments)
    batch = make_batch(5)
    logits = logits_of(session(tmp_path / "model.onnx"), batch)
    with torch.no_grad():
        assert np.allclose(logits[:, :4], model(**batch).logits[:, :4], atol=1e-6)
