"""Trained models in the layout of their release: unchanged weights give its bytes, changed ones load as meant."""

import json
import shutil

import commands
import pytest
import torch
from peft import LoraConfig, get_peft_model
from released_models import KINDS, load_released, tensors_of, tokens, write_released
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer
from trl_trainers import rows_of, tokenizer

from hf_eff import attach
from shared_core import Recipe
from shared_core.checkpoint_formats.released import Released
from shared_core.checkpoint_formats.released_layouts import Fp8Layout, block_sums
from shared_core.checkpoint_formats.saved_rows import dequantizes
from shared_core.cli.loading import load_folder
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError
from shared_core.tools.export import export_released

# relative error of rounding to the nearest code: half a step of the largest code, or of a float's mantissa
ERROR = {"gpt_oss": 0.15, "llama_mxfp4": 0.15} | dict.fromkeys(
    ("nemotron_nvfp4", "kimi_int4", "llama_int4_asym", "llama_gptq", "llama_gptq_asym", "llama_awq"), 0.12
)
SYMMETRIC = ["gpt_oss", "qwen3_fp8", "deepseek_v3_fp8", "kimi_int4", "nemotron_nvfp4", "llama_fp8"]
EXPERTS = ["gpt_oss", "qwen3_moe_fp8", "kimi_int4"]
_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat((-_MAGNITUDES.flip(0), _MAGNITUDES[1:]))
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num().unique()


@pytest.fixture
def released(tmp_path):
    return lambda kind: write_released(kind, tmp_path / kind)


def same_files(folder, other):
    return {file.name for file in folder.iterdir()} == {file.name for file in other.iterdir()} and all(
        file.read_bytes() == (other / file.name).read_bytes() for file in folder.iterdir()
    )


def logits(model):
    with torch.no_grad():
        return model.eval()(**tokens()).logits


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, torch.float32) for kind in KINDS]
    + [(kind, torch.bfloat16) for kind in ("gpt_oss", "qwen3_fp8", "kimi_int4")],
)
def test_unchanged_weights_give_the_released_bytes(kind, dtype, released, tmp_path):
    folder = released(kind)
    model = load_released(folder, dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = export_released(model, tmp_path / "out", example_inputs=tokens())
    assert same_files(folder, tmp_path / "out")
    assert report.unchanged == report.kept_scales == report.equal_layers == len(report.quantized) > 0
    assert (report.changed_codes, report.rounding_error, report.copied) == (0, {}, ())
    assert report.largest_difference <= 1e-5
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("kind", KINDS)
def test_trained_weights_are_rounded_once_and_loaded_as_meant(kind, released, tmp_path):
    folder = released(kind)
    model = load_released(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if ".layers.1." in name or "lm_head" in name:
                value.add_(torch.randn_like(value) * 0.003)
    report = export_released(model, tmp_path / "out", example_inputs=tokens())
    assert report.largest_difference <= 1e-5
    first = [name for name in report.quantized if ".layers.0." in name]
    assert len(report.quantized) - report.unchanged == len(report.rounding_error) == len(report.quantized) - len(first)
    assert all(
        ".layers.1." in name and 0 < error < ERROR.get(kind, 0.05) for name, error in report.rounding_error.items()
    )

    old, new = tensors_of(folder), tensors_of(tmp_path / "out")
    assert {key: (value.dtype, value.shape) for key, value in new.items()} == {
        key: (value.dtype, value.shape) for key, value in old.items()
    }
    loaded = load_released(tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.to(old["lm_head.weight"].dtype).float())
    for name, value in model.named_parameters():
        error = (loaded.get_parameter(name) - value).norm() / value.norm()
        assert error < max(ERROR.get(kind, 0.05), 2**-8), name
    again = export_released(loaded, tmp_path / "again")
    assert again.unchanged == len(again.quantized)
    assert same_files(tmp_path / "out", tmp_path / "again")


@pytest.mark.parametrize("kind", SYMMETRIC)
def test_other_codes_on_the_released_grid_keep_its_scales(kind, released, tmp_path):
    folder = released(kind)
    model = load_released(folder)
    name = "model.layers.1.mlp.experts.down_proj" if kind in EXPERTS else "model.layers.0.mlp.down_proj.weight"
    weight = model.get_parameter(name)
    with torch.no_grad():
        row = weight.view(-1, weight.shape[-1])[0]
        row.copy_(torch.where(row.abs() < row.abs().max() * 0.9, -row, row))  # -8 has no opposite
    moved = int((weight != load_released(folder).get_parameter(name)).sum())
    report = export_released(model, tmp_path / "out", example_inputs=tokens())
    assert report.kept_scales == len(report.quantized)
    assert report.changed_codes == moved > 0
    assert report.rounding_error == {}
    assert torch.equal(load_released(tmp_path / "out").get_parameter(name), weight)


def test_groups_of_several_formats_keep_their_own(released, tmp_path):
    folder, model = released("llama_mixed"), load_released(released("llama_fp8"))
    report = export_released(model, tmp_path / "out", base=folder)
    written = Released(tmp_path / "out")
    assert len(report.quantized) == 14
    for name in report.quantized:
        (stored,) = written.read(name)
        weight = model.get_parameter(name)
        assert (stored.values - weight).norm() / weight.norm() < (0.05 if "self_attn" in name else 0.12)


def test_a_weight_that_outgrows_its_global_scale_shares_the_new_one_with_those_fused_to_it(released, tmp_path):
    folder = released("nemotron_nvfp4")
    model = load_released(folder)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(5)
    report = export_released(model, tmp_path / "out", example_inputs=tokens())
    old, new = tensors_of(folder), tensors_of(tmp_path / "out")
    moved = {key for key in old if key.endswith("weight_global_scale") and not torch.equal(old[key], new[key])}
    names = {f"model.layers.0.self_attn.{part}_proj.weight_global_scale" for part in "qkv"}
    assert moved == names
    assert len({new[key].item() for key in names}) == 1
    assert max(report.rounding_error.values()) < 0.1


def test_tensors_that_the_model_lacks_are_copied_and_copies_of_the_weights_are_not(released, tmp_path):
    folder = released("qwen3_fp8")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    extra = {"model.layers.2.eh_proj.weight": torch.randn(4, 4), "model.layers.2.enorm.weight": torch.randn(4)}
    save_file(extra, folder / "mtp.safetensors", metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(extra, "mtp.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "original").mkdir()
    shutil.copy(folder / "mtp.safetensors", folder / "original" / "model.safetensors")
    shutil.copy(folder / "mtp.safetensors", folder / "consolidated.safetensors")
    report = export_released(load_released(folder), tmp_path / "out")
    assert {*report.copied} == {*extra}
    assert not (tmp_path / "out" / "original").exists()
    assert not (tmp_path / "out" / "consolidated.safetensors").exists()
    assert (tmp_path / "out" / "mtp.safetensors").read_bytes() == (folder / "mtp.safetensors").read_bytes()


def test_what_does_not_fit_is_refused_and_nothing_is_written(released, tmp_path, monkeypatch):
    folder, out = released("qwen3_fp8"), tmp_path / "out"
    model = load_released(folder)
    with pytest.raises(ConfigError, match="transformers"):
        export_released(nn.Linear(2, 2), out, base=folder)
    with pytest.raises(CompatibilityError, match="must hold"):
        export_released(model, out, base=released("qwen3_moe_fp8"))
    fewer = load_released(folder)
    fewer.config.num_hidden_layers, fewer.model.layers = 1, fewer.model.layers[:1]
    with pytest.raises(CompatibilityError, match="num_hidden_layers"):
        export_released(fewer, out)
    with pytest.raises(CompatibilityError, match="intermediate_size"):
        export_released(
            load_released(write_released("qwen3_fp8", tmp_path / "b", intermediate_size=384)), out, base=folder
        )
    with pytest.raises(CheckpointError, match="quantization_config"):
        export_released(model, out, base=saved(model, tmp_path / "float"))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(CompatibilityError, match="finite"):
        export_released(model, out)
    assert not out.exists()


def test_codes_without_a_scale_are_refused(released, tmp_path):
    folder = released("qwen3_fp8")
    model = load_released(folder)
    key = "model.layers.0.mlp.up_proj.weight_scale_inv"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"].pop(key)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({k: v for k, v in load_file(file).items() if k != key}, file, metadata={"format": "pt"})
    with pytest.raises(CompatibilityError, match="must have a scale"):
        export_released(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def saved(model, folder):
    vars(model).pop("_weight_conversions", None)
    model.save_pretrained(folder)
    return folder


def test_bytes_that_decode_to_other_weights_are_refused(released, tmp_path, monkeypatch):
    model = load_released(released("qwen3_fp8"))
    write = Fp8Layout.write

    def wrong(self, stored, parts):
        found = write(self, stored, parts)
        return found | {"weight": found["weight"].view(torch.uint8).flip(1).view(torch.float8_e4m3fn)}

    monkeypatch.setattr(Fp8Layout, "write", wrong)
    with pytest.raises(CompatibilityError, match="in the file"):
        export_released(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_fp8"])
def test_folders_that_transformers_saved_under_quantized_names_are_the_trained_weights(kind, released, tmp_path):
    folder = released(kind)
    model = load_released(folder)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(2)  # on the grid with scales doubled
    model.save_pretrained(tmp_path / "stock")
    torch.testing.assert_close(logits(load_folder(tmp_path / "stock", "test").float()), logits(model))
    told = commands.told_by(
        "export", tmp_path / "stock", "--format", "released", "--base", folder, "--out", tmp_path / "out"
    )
    assert max(told["rounding_error"].values()) < 1e-6
    torch.testing.assert_close(logits(load_released(tmp_path / "out")), logits(model), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", EXPERTS)
def test_a_trainer_with_the_library_saves_what_loads(kind, released, tmp_path):
    folder = released(kind)
    model = load_released(folder)
    misnamed = dequantizes(model)  # transformers 5.24 forgets the release's names of gpt-oss itself
    rows = [{"input_ids": tokens(seed)["input_ids"][0], "labels": tokens(seed)["input_ids"][0]} for seed in range(4)]
    args = TrainingArguments(
        str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=2, learning_rate=1e-2, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=rows)
    session = attach(trainer, Recipe.from_dict({"average": {"kind": "ema", "decay": 0.5}}))
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert any("dequantized" in note for note in session.receipt().values["notes"]) == misnamed
    loaded, found = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    torch.testing.assert_close(logits(loaded.float()), logits(model))
    told = commands.told_by(
        "export", tmp_path / "saved", "--format", "released", "--base", folder, "--out", tmp_path / "out"
    )
    assert told["equal_layers"] == len(told["quantized"])
    assert load_file(next((tmp_path / "out").glob("*.safetensors"))).keys() <= tensors_of(folder).keys()


def test_the_command_asks_for_the_release(released, tmp_path):
    folder = saved(load_released(released("qwen3_fp8")), tmp_path / "float")
    with pytest.raises(CheckpointError, match="--base"):
        commands.eff("export", folder, "--format", "released", "--out", tmp_path / "out")
    result = commands.eff(
        "export", folder, "--format", "released", "--base", tmp_path / "qwen3_fp8", "--out", tmp_path / "out"
    )
    assert "14 weights" in result.output
    (tmp_path / "out" / "model.safetensors.eff.json").unlink()
    assert same_files(tmp_path / "qwen3_fp8", tmp_path / "out")


def nearest(rows, stored, codes):
    """The nearest codes on the scales of `stored` in float64, as weights, and how many values lie beyond them."""
    zero = 0 if stored.zero_point is None else stored.spread(stored.zero_point).double()
    step = stored.spread(stored.step).double()
    ratio = rows / step + zero
    found = codes[(ratio.unsqueeze(-1) - codes).abs().argmin(-1)]
    below, above = codes[0] - (codes[1] - codes[0]) / 2, codes[-1] + (codes[-1] - codes[-2]) / 2
    return (found - zero) * step, int(((ratio < below) | (ratio > above)).sum())


@pytest.mark.parametrize("kind", ["llama_mxfp4", "nemotron_nvfp4", "llama_int4_asym", "qwen3_fp8"])
def test_blocks_off_the_grid_keep_their_scale_unless_another_one_is_nearer(kind, released, tmp_path):
    folder, name = released(kind), "model.layers.1.mlp.down_proj.weight"
    model = load_released(folder)
    weight = model.get_parameter(name)
    with torch.no_grad():
        weight.add_(0.003 * weight.std() * torch.randn(weight.shape, generator=torch.manual_seed(1)))
        weight[:, : weight.shape[1] // 2] *= 0.05
    report = export_released(model, tmp_path / "out")
    (old,), (new,) = (Released(one).read(name) for one in (folder, tmp_path / "out"))
    codes = {"llama_int4_asym": torch.arange(-8.0, 8.0), "qwen3_fp8": E4M3}.get(kind, E2M1).double()
    rows = weight.detach().double()
    kept, _ = nearest(rows, old, codes)
    written, clipped = nearest(rows, new, codes)
    torch.testing.assert_close(new.values.double(), written, rtol=1e-6, atol=0)
    errors = [block_sums((values - rows).square(), new.block) for values in (written, kept)]
    assert bool((errors[0] <= errors[1] * (1 + 1e-6)).all())
    moved = int((new.step != old.step).sum())
    assert kind == "qwen3_fp8" or 0 < moved < new.step.numel() * 0.9
    assert report.changed_scales >= moved  # or a zero point alone
    assert report.clipped_codes == clipped
    assert report.rounding_error == {name: pytest.approx(float((written - rows).norm() / rows.norm()), rel=1e-4)}
    assert report.unchanged == len(report.quantized) - 1
    before, after = tensors_of(folder), tensors_of(tmp_path / "out")
    assert all(torch.equal(value, after[key]) for key, value in before.items() if not key.startswith(name[:-7]))


@pytest.mark.parametrize(
    ("kind", "save", "target"),
    [
        ("gpt_oss", "adapters", "q_proj"),
        pytest.param("gpt_oss", "merged", "layers.1.mlp.experts", marks=pytest.mark.slow),
        pytest.param("qwen3_fp8", "peft", "q_proj", marks=pytest.mark.slow),
        pytest.param("deepseek_v3_fp8", "merged", "o_proj", marks=pytest.mark.slow),
        pytest.param("kimi_int4", "merged", "layers.1.mlp.experts", marks=pytest.mark.slow),
        pytest.param("nemotron_nvfp4", "adapters", "o_proj", marks=pytest.mark.slow),
    ],
)
def test_adapters_that_a_trainer_saved_over_a_release_come_back_in_its_format(kind, save, target, released, tmp_path):
    folder = released(kind)
    arguments = SFTConfig(
        str(tmp_path / "run"), max_steps=2, learning_rate=1e-2, per_device_train_batch_size=4, report_to="none",
        use_cpu=True, disable_tqdm=True, save_strategy="no", bf16=False, gradient_checkpointing=False, max_length=None,
    )  # fmt: skip
    rows = [{"input_ids": row % 24, "labels": row % 24} for seed in range(4) for row in tokens(seed)["input_ids"]]
    trainer = SFTTrainer(
        load_released(folder, torch.bfloat16), arguments, train_dataset=rows_of(rows), processing_class=tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=[target]) if save == "peft" else None,
    )  # fmt: skip
    if save != "peft":
        attach(trainer, {"lora": {"rank": 2, "save": save, "include": [f"*{target}*"]}})
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    told = commands.told_by(
        "export", tmp_path / "saved", "--format", "released", "--base", folder, "--out", tmp_path / "out"
    )
    assert told["largest_difference"] < 1e-5
    assert told["unchanged"] + len(told["rounding_error"]) == len(told["quantized"])
    assert {*told["rounding_error"]} == {one for one in told["quantized"] if target in one}
    assert all(0 < error < ERROR.get(kind, 0.05) for error in told["rounding_error"].values())
    found = load_released(tmp_path / "out", torch.bfloat16)
    torch.testing.assert_close(logits(found), logits(trainer.model), rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("kind", "target", "rounded"), [("gpt_oss", "q_proj", 0), ("kimi_int4", "o_proj", 0), ("qwen3_fp8", "q_proj", 2)]
)
def test_adapters_on_a_release_are_merged_into_its_format(kind, target, rounded, released, tmp_path):
    folder = released(kind)
    adapted = get_peft_model(load_released(folder), LoraConfig(r=2, target_modules=[target], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    told = commands.told_by(
        "export", tmp_path / "adapter", "--format", "released", "--base", folder, "--out", tmp_path / "out"
    )
    assert told["largest_difference"] < 1e-5
    assert len(told["rounding_error"]) == len(told["quantized"]) - told["unchanged"] == rounded
    assert all(target in name and 0 < error < 0.05 for name, error in told["rounding_error"].items())
    torch.testing.assert_close(logits(load_released(tmp_path / "out")), logits(adapted), rtol=0.05, atol=0.05)


def test_a_release_itself_comes_back(released, tmp_path):
    folder = released("kimi_int4")
    commands.eff("export", folder, "--format", "released", "--out", tmp_path / "out")
    (tmp_path / "out" / "model.safetensors.eff.json").unlink()
    assert same_files(folder, tmp_path / "out")
