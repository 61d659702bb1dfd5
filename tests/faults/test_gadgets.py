"""No file that is read can run code, wherever it is read: refused by name, and the canary folder is never made."""

import contextlib
import importlib
import io
import json
import pickle
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gadgets import gadgets, saved
from promise_drivers import run_hf, run_lightning
from promise_table import make_net, recipe_of
from torch import nn

from shared_core.cli.loading import load_folder
from shared_core.engine.recipe import Recipe
from shared_core.errors import CheckpointError, ConfigError, EffError


def test_the_gadgets_run_code_where_files_are_trusted(tmp_path):
    canary, ran = tmp_path / "canary", set()
    readers = (
        pickle.loads,
        lambda content: torch.load(io.BytesIO(content), weights_only=False),
        lambda content: np.load(io.BytesIO(content), allow_pickle=True)["x"],
    )
    for name, content in gadgets(canary).items():
        for read in readers:
            with contextlib.suppress(Exception):
                read(content)
        if canary.exists():
            ran.add(name)
            canary.rmdir()
    assert ran >= gadgets(canary).keys() - {"torch tar"}  # which the torch of today does not read at all


def model_folder(path):
    """A transformers folder without its weights."""
    path.mkdir(parents=True)
    config = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 8,
              "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 9}  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


def soup_folder(name, **beside):
    def read(path, content):
        from shared_core.soup import uniform_soup

        folder = model_folder(path / "folder")
        for other, text in beside.values():
            (folder / other).write_text(json.dumps(text))
        (folder / name).write_bytes(content)
        weights = uniform_soup([folder])
        [weights[key] for key in weights]

    return read


def soup_file(name):
    def read(path, content):
        from shared_core.soup import uniform_soup

        (path / name).write_bytes(content)
        uniform_soup([path / name])

    return read


def shard_of_dcp(path, content):
    """A distributed checkpoint whose shard, of the right place and length, is the gadget."""
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    from shared_core.soup import uniform_soup

    folder = path / "dcp"
    save({"model": {"w": torch.ones(2000)}}, storage_writer=FileSystemWriter(folder), no_dist=True)
    (shard,) = folder.glob("*.distcp")
    shard.write_bytes(content.ljust(shard.stat().st_size, b"\0"))
    uniform_soup([folder])


def index_of_dcp(path, content):
    from shared_core.soup import uniform_soup

    (path / "dcp").mkdir()
    (path / "dcp" / ".metadata").write_bytes(content)
    uniform_soup([path / "dcp"])


def index_of_a_resume(path, content):
    from shared_core.checkpoint_formats import check_indexes

    folder = path / "checkpoint-4" / "optimizer_0"
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(content)
    check_indexes(folder.parent)


def adapter(name):
    def read(path, content):
        from shared_core.soup import uniform_soup

        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["a"]}
        (path / "adapter_config.json").write_text(json.dumps(config))
        (path / name).write_bytes(content)
        uniform_soup([path])

    return read


def teacher(front_end, name):
    def read(path, content):
        folder = model_folder(path / "teacher") if name.endswith(".bin") or name.startswith("model") else path
        (folder / name).write_bytes(content)
        where = folder if folder != path else path / name
        if front_end == "hf":
            from hf_eff._adapters.distillation import load_teacher

            load_teacher(str(where), make_net())
        else:
            from promise_drivers import lightning_module

            from lightning_eff._services import LightningServices

            module = lightning_module()
            LightningServices(SimpleNamespace(lightning_module=module), "run").load_teacher(str(where), module.net)

    return read


def teacher_cache(part):
    def read(path, content):
        from shared_core.distillation.teacher_cache import TeacherCache, write_teacher_cache

        class Words(nn.Module):
            def forward(self, input_ids):
                return {"logits": torch.eye(9)[input_ids]}

        batches = [{"input_ids": torch.arange(8).view(2, 4)}]
        write_teacher_cache(Words(), batches, path / "cache", top_k=2)
        (file,) = (path / "cache").glob(part)
        file.write_bytes(content)
        TeacherCache(path / "cache").lookup(batches[0])

    return read


def lines(command):
    """The command reads the file FILE, or what lies in the folder DIR, where its content is `name`."""

    def read(path, content):
        from typer.testing import CliRunner

        from shared_core.cli import app

        name = command.rpartition("@")[2]
        (path / "dir").mkdir()
        (path / "dir" / name).write_bytes(content)
        words = command.rpartition("@")[0].split()
        outcome = CliRunner().invoke(app, [word.replace("DIR", str(path / "dir")) for word in words])
        if outcome.exception is not None:
            raise outcome.exception

    return read


def recipe(suffix):
    def read(path, content):
        from shared_core.engine.recipe import Recipe

        (path / f"r.{suffix}").write_bytes(content)
        (Recipe.from_yaml if suffix == "yaml" else Recipe.from_json)(path / f"r.{suffix}")

    return read


def one_file(name, module, function, *before):
    """`module.function(*before, FILE)`, or of its folder where the name is fixed."""

    def read(path, content):
        (path / name).write_bytes(content)
        found = importlib.import_module(module)
        for part in function.split("."):
            found = getattr(found, part)
        in_folder = function in ("load_state", "Receipt.read", "read_deployment", "Journal")
        found(*(part() if callable(part) else part for part in before), path if in_folder else path / name)

    return read


def data_set(name):
    def read(path, content):
        (path / name).write_bytes(content)
        if name.endswith(".npz"):
            from hf_eff.evaluation_data import _read_arrays

            _read_arrays(path / name)
        else:
            from hf_eff.evaluation_data import open_table

            open_table(path / name)

    return read


def weights_of_a_command(path, content):
    from shared_core.cli.loading import load_weights

    (path / "x.ckpt").write_bytes(content)
    load_weights(make_net(), path / "x.ckpt", "eff prune")


def journal(path, content):
    from shared_core.files.journal import Journal

    (path / "lottery.json").write_bytes(content)
    Journal(path / "lottery.json", "lottery", "search", {"rate": 0.2}, own="round-*").read()


INDEX = {"index": ("model.safetensors.index.json", {"weight_map": {"w": "model-1.safetensors"}})}
PATHS = {
    "soup: .pt": soup_file("x.pt"),
    "soup: .ckpt": soup_file("x.ckpt"),
    "soup: .safetensors": soup_file("x.safetensors"),
    "soup: folder": soup_folder("model.safetensors"),
    "soup: folder, .bin": soup_folder("pytorch_model.bin"),
    "soup: shard": soup_folder("model-1.safetensors", **INDEX),
    "soup: index": soup_folder("model.safetensors.index.json"),
    "soup: distributed index": index_of_dcp,
    "soup: distributed shard": shard_of_dcp,
    "soup: adapter": adapter("adapter_model.safetensors"),
    "soup: adapter, .bin": adapter("adapter_model.bin"),
    "resume: distributed index": index_of_a_resume,
    "teacher: folder": teacher("hf", "model.safetensors"),
    "teacher: folder, .bin": teacher("hf", "pytorch_model.bin"),
    "teacher: .safetensors": teacher("hf", "x.safetensors"),
    "teacher: Lightning": teacher("lightning", "x.ckpt"),
    "teacher: Lightning, .safetensors": teacher("lightning", "x.safetensors"),
    "cache: manifest": teacher_cache("*.json"),
    "cache: shard": teacher_cache("shard-*"),
    "cache: index": teacher_cache("index-*"),
    "state": one_file("eff_state.safetensors", "shared_core.engine.saving.state_file", "load_state"),
    "ticket": one_file("t.safetensors", "shared_core.lottery_ticket", "read_ticket"),
    "lottery": journal,
    "receipt": one_file("eff_receipt.json", "shared_core.files.journal", "read_object"),
    "deployment": one_file("x.ckpt", "shared_core.checkpoint_formats.plain", "read_deployment"),
    "deployment: folder": one_file("eff_deployment.json", "shared_core.checkpoint_formats.plain", "read_deployment"),
    "weights of a command": weights_of_a_command,
    "low rank": one_file("x.safetensors", "shared_core.low_rank", "load", make_net),
    "low rank: .ckpt": one_file("x.ckpt", "shared_core.low_rank", "load", make_net),
    "low rank: report": one_file("x.json", "shared_core.low_rank.config", "read_report"),
    "recipe: YAML": recipe("yaml"),
    "recipe: JSON": recipe("json"),
    "bit plan": one_file("x.yaml", "shared_core.quantization.post_training.bit_allocation", "BitPlan.from_yaml"),
    "eff decompress": lines("decompress DIR/x.eff --out DIR/out @x.eff"),
    "eff compress": lines("compress DIR --bits 4 --out DIR/out @model.safetensors"),
    "eff report": lines("report DIR @eff_receipt.json"),
    "eff plan": lines("plan --model DIR @config.json"),
    "eff soup": lines("soup DIR/x.pt --kind uniform --out DIR/out @x.pt"),
    "examples: arrays": data_set("x.npz"),
    "examples: table": data_set("x.parquet"),
    "examples: lines": data_set("x.jsonl"),
}


@pytest.mark.parametrize("name", PATHS)
def test_a_load_path_runs_none_of_them(name, tmp_path):
    canary = tmp_path / "canary"
    for gadget, content in gadgets(canary).items():
        folder = tmp_path / gadget
        folder.mkdir()
        with pytest.raises(EffError) as caught:
            PATHS[name](folder, content)
        assert str(caught.value)
        assert not canary.exists(), gadget


HF_FILES = [
    "model.safetensors", "eff_state.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json",
]  # fmt: skip


def test_resume_in_the_hugging_face_trainer_runs_none_of_them(tmp_path):
    whole = run_hf(recipe_of("prune"), tmp_path / "whole", save_every=4).checkpoints[4]
    canary = tmp_path / "canary"
    everything = gadgets(canary)
    for number, name in enumerate(HF_FILES):
        for gadget in list(everything)[number % 6 :: 6]:
            folder = tmp_path / "spoiled" / "checkpoint-4"
            shutil.copytree(whole, folder)
            (folder / name).write_bytes(everything[gadget])
            with pytest.raises(CheckpointError, match=name):
                run_hf(recipe_of("prune"), tmp_path / "again", resume=folder)
            assert not canary.exists(), (name, gadget)
            shutil.rmtree(folder)


def test_resume_in_lightning_runs_none_of_them(tmp_path):
    canary = tmp_path / "canary"
    for content in [gadgets(canary)[name] for name in ("getattr", "torch", "torch legacy", "storage", "rebuild")]:
        (tmp_path / "x.ckpt").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"x\.ckpt"):
            run_lightning(recipe_of("prune"), tmp_path / "again", resume=tmp_path / "x.ckpt")
        assert not canary.exists()
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded" / ".metadata").write_bytes(gadgets(canary)["reduce"])
    with pytest.raises(CheckpointError, match="no code was run"):
        run_lightning(recipe_of("prune"), tmp_path / "again", resume=tmp_path / "sharded")
    assert not canary.exists()


def test_a_checkpoint_cannot_name_what_builds_its_model(tmp_path, monkeypatch):
    (tmp_path / "its_code.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'canary')!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    content = {"state_dict": {}, "pytorch-lightning_version": "2.5.0"}
    content |= {"hyper_parameters": {"_instantiator": "its_code.build"}, "hparams_name": "kwargs"}
    with pytest.raises(CheckpointError, match=r"must be built by Lightning, got 'its_code\.build'"):
        teacher("lightning", "x.ckpt")(tmp_path, saved(content))
    assert not (tmp_path / "canary").exists()


ITS_CODE = """
import os
from transformers import BertConfig, BertForSequenceClassification

os.makedirs({canary!r}, exist_ok=True)


class Config(BertConfig):
    model_type = "its"


class Its(BertForSequenceClassification):
    config_class = Config
"""


@pytest.mark.parametrize("model_type", ["its", "bert"])
@pytest.mark.parametrize("front_end", ["hf", "lightning", "command"])
def test_a_folder_brings_the_code_of_its_model_only_where_it_is_trusted(tmp_path, monkeypatch, model_type, front_end):
    from transformers import BertConfig, BertForSequenceClassification

    from hf_eff.front_end import HuggingFace
    from lightning_eff._services import LightningServices

    monkeypatch.setattr("builtins.input", lambda *asked: pytest.fail(f"asked {asked}"))
    monkeypatch.setattr("sys.path", [*sys.path])  # transformers adds the folder that it copies the code to
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, canary = tmp_path / f"teacher_{model_type}_{front_end}", tmp_path / "canary"
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertForSequenceClassification(BertConfig(vocab_size=8, **sizes)).save_pretrained(folder)
    (folder / "its_code.py").write_text(ITS_CODE.format(canary=str(canary)))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": model_type, "architectures": ["Its"]}
    config["auto_map"] = {"AutoConfig": "its_code.Config", "AutoModelForSequenceClassification": "its_code.Its"}
    (folder / "config.json").write_text(json.dumps(config))

    def load(**options):
        if front_end == "command":
            return load_folder(folder, "eff cache-teacher", **options)
        if front_end == "hf":
            return HuggingFace().load_teacher(str(folder), make_net(), **options)
        return LightningServices(SimpleNamespace(), "run").load_teacher(str(folder), make_net(), **options)

    with pytest.raises(CheckpointError, match=r"was not run.* set distill\.trust_remote_code: true"):
        load()
    assert not canary.exists()
    assert type(load(trust_remote_code=True)).__name__ == "Its"
    assert canary.is_dir()


def test_a_recipe_cannot_name_code(tmp_path):
    for tag in ("object/apply:os.mkdir [{}]", "object/new:os.mkdir [{}]", "name:os.mkdir {}", "module:os {}"):
        with pytest.raises(ConfigError, match="could not determine a constructor"):
            Recipe.from_yaml(f"prune: !!python/{tag.format(tmp_path / 'canary')}")
    assert not (tmp_path / "canary").exists()
