"""ONNX export of Hugging Face models: keyword inputs, named outputs, attention, an open batch."""

import numpy as np
import onnxruntime
import pytest
import torch
from typer.testing import CliRunner

from shared_core.cli import app
from shared_core.errors import ConfigError
from shared_core.plain_checkpoint import write_deployment
from shared_core.quantization import QatConfig, QuantizationAwareTraining, apply_ranges, export_onnx
from shared_core.technique import Context


def quantized(model, inputs, **options):
    technique = QuantizationAwareTraining(QatConfig(**{"scheme": "int8", **options}))
    context = Context(model=model, total_steps=1)
    technique.attach(model, context)
    technique.begin(context)
    model.train()
    model(**inputs).logits.square().mean().backward()
    technique.before_optimizer_step(context)
    context.step += 1
    technique.after_optimizer_step(context)
    return model.eval()


def session(path):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def make_batch(rows):
    ids = torch.randint(1, 24, (rows, 6))
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("rows", [1, 3])
def test_a_classifier_by_keywords(rows, make, tmp_path):
    model = quantized(make.classifier(hidden_dropout_prob=0.0), make_batch(4))
    report = export_onnx(model, make_batch(rows), tmp_path / "model.onnx")
    assert report.largest_difference <= 1e-5
    assert report.integer_nodes["QGemm"] >= 14  # 6 a block, pooler, classifier
    opened = session(tmp_path / "model.onnx")
    assert [entry.name for entry in opened.get_inputs()] == ["input_ids", "attention_mask"]
    assert [entry.name for entry in opened.get_outputs()] == ["logits"]
    batch = make_batch(5)
    (logits,) = opened.run(None, {name: value.numpy() for name, value in batch.items()})
    with torch.no_grad():
        reference = model(**batch).logits.numpy()
    # rounding may move a code of a row
    assert np.abs(logits - reference).max() <= 0.02 * np.abs(reference).max()


def test_a_language_model_by_keywords(make, tmp_path):
    inputs = {"input_ids": torch.randint(1, 24, (2, 6)), "use_cache": False}
    model = quantized(make.language_model(), inputs, scheme="int8_weight")
    report = export_onnx(model, inputs, tmp_path / "model.onnx")
    assert report.largest_difference <= 1e-5


def test_the_command_exports_a_folder_in_float_or_with_the_ranges_that_lie_in_it(make, tmp_path):
    model = make.classifier().eval()
    with torch.no_grad():
        weight = model.classifier.weight
        weight.copy_((127 * weight / weight.abs().max()).round() / 127)
        weight[:, 0] = 1.0  # every row's scale is then 1/127
    model.save_pretrained(tmp_path / "run")
    arguments = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "model.onnx")]
    with pytest.raises(ConfigError, match="--length must be at least 2 for a model that reads tokens, got None"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    batch = make_batch(5)
    for ranges, told in (None, "all of it in float"), ({"classifier": {"min": -1.0, "max": 1.0}}, "1 layers quantised"):
        if ranges:
            write_deployment(tmp_path / "run", {"qat": {"ranges": ranges}})
            apply_ranges(model, ranges)
        assert told in CliRunner().invoke(app, [*arguments, "--length", "6"], catch_exceptions=False).output
        (logits,) = session(tmp_path / "model.onnx").run(None, {name: value.numpy() for name, value in batch.items()})
        with torch.no_grad():
            assert np.allclose(logits, model(**batch).logits, atol=2e-3 if ranges else 1e-6)
