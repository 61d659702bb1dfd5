"""`eff quantize` on folders that transformers wrote: they load with what was measured, and `eff export` takes them."""

import itertools
import json

import pytest
import torch
import transformers
from commands import eff
from safetensors.torch import load_file

from shared_core.checkpoint_formats.plain import read_deployment
from shared_core.errors import ConfigError
from shared_core.quantization import BitPlan, apply_ranges, quantize, quantize_with_report

TASK = """
import torch

def batches():
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(1, 24, (4, 8), generator=generator)} for _ in range(3)]

def images():
    return [{"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))}]

def quality(model):
    with torch.no_grad():
        return sum(model(**batch).logits.double().sum().item() for batch in batches())

def image_quality(model):
    with torch.no_grad():
        return model(**images()[0]).logits.double().sum().item()
"""
STATIC = ["--calibration", "folder_task:batches"]


@pytest.fixture
def run(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "folder_task.py").write_text(TASK)
    make.classifier(num_hidden_layers=1).save_pretrained(tmp_path / "bert")
    for name in ("tokenizer.json", "eff_receipt.json", "trainer_state.json"):
        (tmp_path / "bert" / name).write_text("{}")

    def invoke(*args, evaluate="quality"):
        asked = ["quantize", *args, "--out", "out", "--json", "--eval", f"folder_task:{evaluate}"]
        return json.loads(eff(*asked).stdout)

    return invoke


def loaded(auto=transformers.AutoModelForSequenceClassification):
    model, info = auto.from_pretrained("out", output_loading_info=True)
    assert not any(info.values())
    return apply_ranges(model, read_deployment("out")["qat"]["ranges"]).eval()


@pytest.mark.slow
@pytest.mark.parametrize(("options", "config"), [
    (STATIC, {"scheme": "int8"}),
    (["--scheme", "int8_weight"], {"scheme": "int8_weight"}),
    (["--scheme", "int4_weight", "--group-size", "16"], {"scheme": "int4_weight", "group_size": 16}),
])  # fmt: skip
def test_the_folder_loads_with_what_was_measured_and_is_exported(run, make, tmp_path, options, config):
    told = run("bert", *options)
    from folder_task import batches, quality

    expected = quantize(make.classifier(num_hidden_layers=1).eval(), config, batches())
    assert told["quality"]["quantized"] == quality(loaded()) == quality(expected) != told["quality"]["float"]
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "eff_deployment.json", "eff_quantization.json",
    }  # fmt: skip
    if options is not STATIC:
        return  # the codes in the file are those of tests/hf_eff/tools/test_export.py
    exported = eff("export", "out", "--out", "model.onnx", "--length", "6")
    assert f"{len(told['ranges'])} layers quantized" in exported.output


@pytest.mark.slow
def test_tables_of_positions_and_token_types_stay_in_float_unless_included(run, make):
    told = run("bert", *STATIC)
    tables = {f"bert.embeddings.{name}_embeddings" for name in ("position", "token_type")}
    assert {*told["left_out"]} == tables
    assert not tables & {*told["ranges"]}
    assert "bert.embeddings.word_embeddings" in told["ranges"]
    from folder_task import batches

    decibels = {"": 0.0, "*": 0.0}
    for seed, include in itertools.product(range(3), decibels):
        model = make.classifier(seed, hidden_size=128, intermediate_size=128)
        embeddings = model.bert.embeddings
        for table in (embeddings.position_embeddings, embeddings.token_type_embeddings):
            table.weight.data[:, 5] = 1.0  # trained tables have such a channel, which makes a row's step coarse
        config = {"scheme": "int8", "include": include}
        report = quantize_with_report(model, config, batches(), measure_outputs=True)[1]
        assert (tables <= {*report.ranges}) == (include == "*")
        decibels[include] += report.output_sqnr_db / 3
    assert decibels[""] > decibels["*"] + 1


def test_weights_of_16_bits_become_float32_where_their_values_on_the_grid_need_it(run, make, tmp_path):
    make.language_model(tie_word_embeddings=True).bfloat16().save_pretrained(tmp_path / "llama")
    told = run("llama", "--scheme", "int8_weight")
    model = loaded(transformers.AutoModelForCausalLM)
    from folder_task import quality

    assert quality(model) == told["quality"]["quantized"]
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    weight = model.lm_head.weight.detach()
    codes = weight / (weight.abs().amax(1, keepdim=True) / 127)
    assert torch.allclose(codes, codes.round(), atol=1e-4)
    assert "became float32, because bfloat16 cannot hold" in told["notes"][0]
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert {value.dtype for name, value in saved.items() if "norm" in name} == {torch.bfloat16}
    assert told["bytes"]["float"] == 2 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(("came", "scheme", "weights", "loads"), [
    (torch.float32, "bf16", torch.bfloat16, torch.float32), (torch.float32, "fp16", torch.float16, torch.float32),
    (torch.bfloat16, "fp16", torch.float16, torch.float32),
    (torch.bfloat16, "MXFP4A16", torch.bfloat16, torch.bfloat16),
])  # fmt: skip
def test_a_folder_is_not_widened_where_16_bits_hold_the_values(run, make, tmp_path, came, scheme, weights, loads):
    make.language_model().to(came).save_pretrained(tmp_path / "llama")
    told = run("llama", "--scheme", scheme)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    coded = {f"{name}.weight" for name in told["ranges"]}
    assert {value.dtype for name, value in saved.items() if name in coded} == {weights}
    assert {value.dtype for name, value in saved.items() if name not in coded} == {came}
    model = loaded(transformers.AutoModelForCausalLM)
    assert model.dtype == loads
    from folder_task import quality

    assert quality(model.float()) == told["quality"]["quantized"]
    if scheme != "MXFP4A16":
        assert told["bytes"]["quantized"] == sum(value.nbytes for value in saved.values())
        original = transformers.AutoModelForCausalLM.from_pretrained("llama").state_dict()
        assert all(
            torch.equal(value.to(came), original[name].to(value.dtype).to(came)) for name, value in saved.items()
        )
        assert "Weights clipped" in eff("quantize", "llama", "--scheme", scheme, "--out", "again").stdout
        exported = eff("export", "out", "--out", "model.onnx", "--length", "6").output
        assert "all layers in float" in exported


def test_batch_norms_of_a_folder_stay_batch_norms(run, tmp_path):
    torch.manual_seed(0)
    sizes = {"embedding_size": 8, "hidden_sizes": [8], "depths": [1], "layer_type": "basic", "num_labels": 3}
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes)).train()
    model(torch.randn(4, 3, 16, 16))  # running statistics of its own
    model.save_pretrained(tmp_path / "resnet")
    asked = ["resnet", "--calibration", "folder_task:images"]
    for flag in ("--equalize", "--correct-bias"):
        with pytest.raises(ConfigError, match=f"{flag} must be left out for a folder whose model has batch norms"):
            run(*asked, flag)
    told = run(*asked, evaluate="image_quality")
    from folder_task import image_quality

    assert image_quality(loaded(transformers.AutoModelForImageClassification)) == told["quality"]["quantized"]


@pytest.mark.slow
def test_a_soup_of_quantized_folders_is_quantized_anew(run, make, tmp_path):
    for seed in (1, 2):
        make.classifier(seed, num_hidden_layers=1).save_pretrained(f"dense-{seed}")
        run(f"dense-{seed}", *STATIC)
        (tmp_path / "out").rename(f"int8-{seed}")
    eff("soup", "int8-1", "int8-2", "--kind", "uniform", "--out", "soup")
    assert not (tmp_path / "soup" / "eff_deployment.json").exists()
    told = run("soup", *STATIC)
    from folder_task import batches, quality

    soup = transformers.AutoModelForSequenceClassification.from_pretrained("soup").eval()
    assert quality(loaded()) == told["quality"]["quantized"] == quality(quantize(soup, "int8", batches()))


def test_a_plan_is_taken(run):
    BitPlan({"classifier": 4}, {"classifier": 64}).to_yaml("plan.yaml", scheme="int8_weight")
    assert [entry["weight_bits"] for entry in run("bert", "--plan", "plan.yaml")["layers"][-1:]] == [4]
    weight = loaded().classifier.weight.detach()
    codes = weight / (weight.abs().amax(1, keepdim=True) / 7)
    assert torch.allclose(codes, codes.round(), atol=1e-4)


def test_a_plan_of_a_folder_by_quality(run, tmp_path):
    told = run("bert", "--scheme", "int8_weight", *STATIC, "--largest-loss", "0.01", "--latency")
    assert told["plan"]["kept"]
    assert (tmp_path / "out" / "plan.yaml").exists()
    assert told["milliseconds"]["float32"] > 0
    from folder_task import quality

    assert quality(loaded()) == told["quality"]["quantized"] >= told["quality"]["float"] - 0.01


@pytest.mark.parametrize(("options", "message"), [
    ([], "--calibration must be given with int8.*--scheme int8_weight or int8_dynamic"),
    (["--scheme", "int8_weight", "--correct-bias"], "--correct-bias .*--calibration"),
    (["--method", "gptq"], "--method .*--calibration"),
    (["--weights", "bert"], "--weights must be left out for a folder"),
])  # fmt: skip
def test_what_is_refused_names_its_option(run, tmp_path, monkeypatch, options, message):
    import folder_task

    monkeypatch.setattr(folder_task, "quality", lambda model: pytest.fail("refused too late"))
    with pytest.raises(ConfigError, match=f"^eff quantize: {message}"):
        run("bert", *options)
    assert not (tmp_path / "out").exists()
