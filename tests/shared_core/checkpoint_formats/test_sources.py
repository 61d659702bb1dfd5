"""Soups of checkpoints on disk: formats in and out, damaged and unsafe files."""

import argparse
import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from shared_core.checkpoint_formats import expand, open_ingredient
from shared_core.errors import CheckpointError
from shared_core.soup import greedy_soup, save_soup, uniform_soup


def tiny_gpt2(seed, **config):
    torch.manual_seed(seed)
    shape = {"vocab_size": 61, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**shape, **config}))


@pytest.fixture
def folders(tmp_path):
    made = []
    for seed in range(3):
        folder = tmp_path / "run" / f"checkpoint-{seed * 5 + 5}"
        tiny_gpt2(seed).save_pretrained(folder)
        (folder / "vocab.txt").write_text("words")
        (folder / "optimizer.pt").write_bytes(b"not weights")
        (folder / "trainer_state.json").write_text("{}")
        made.append(folder)
    return made


def mean_of(models):
    states = [model.state_dict() for model in models]
    return {name: torch.stack([state[name].double() for state in states]).mean(0) for name in states[0]}


@pytest.mark.parametrize("layout", ["single", "sharded", "bin", "sharded_bin"])
def test_a_folder_becomes_a_folder_that_from_pretrained_loads(tmp_path, layout):
    folders = []
    for seed in range(3):
        folder = tmp_path / str(seed)
        tiny_gpt2(seed).save_pretrained(folder, max_shard_size="8KB" if "sharded" in layout else "1GB")
        if "bin" in layout:
            for file in folder.glob("*.safetensors"):
                name = file.name.replace("model", "pytorch_model", 1).replace(".safetensors", ".bin")
                torch.save(load_file(file), folder / name)
                file.unlink()
            index = folder / "model.safetensors.index.json"
            if index.exists():
                text = index.read_text().replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
                (folder / "pytorch_model.bin.index.json").write_text(text)
                index.unlink()
        folders.append(folder)
    result = greedy_soup(folders, lambda weights: 0.0)
    assert result.ingredients == [str(folder) for folder in folders]
    out = save_soup(result.state_dict, open_ingredient(folders[0]), tmp_path / "soup")
    files = {file.name for file in folders[0].iterdir()}
    assert {file.name for file in out.iterdir()} == files
    assert len([name for name in files if name.endswith((".bin", ".safetensors"))]) > 1 or "sharded" not in layout
    loaded, info = transformers.GPT2LMHeadModel.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    expected = mean_of([transformers.GPT2LMHeadModel.from_pretrained(folder) for folder in folders])
    for name, value in loaded.state_dict().items():
        assert torch.allclose(value.double(), expected[name], atol=1e-6)


def test_a_folder_keeps_tokenizer_and_config_and_drops_training_state(folders, tmp_path):
    of_one_run = {"eff_receipt.json", "eff_report.md", "eval_results.json"}
    for name in of_one_run:
        (folders[0] / name).write_text("{}")
    out = save_soup(uniform_soup(folders), open_ingredient(folders[0]), tmp_path / "soup")
    assert not of_one_run & {file.name for file in out.iterdir()}
    assert (out / "vocab.txt").read_text() == "words"
    assert (out / "config.json").exists()
    assert not (out / "optimizer.pt").exists()
    assert not (out / "trainer_state.json").exists()


def test_a_tie_is_stored_once_in_the_file_and_evaluated_once(folders):
    ingredient = open_ingredient(folders[0])
    assert not ingredient.has("lm_head.weight")
    assert ingredient.has("transformer.wte.weight")


def test_configs_of_other_networks_are_refused_and_free_fields_are_not(folders, tmp_path):
    tiny_gpt2(7, n_head=4).save_pretrained(tmp_path / "heads")
    with pytest.raises(CheckpointError, match=r"config field 'n_head' must be the same.* 2 in .* 4 in"):
        uniform_soup([*folders, tmp_path / "heads"])
    torch.save(tiny_gpt2(8).state_dict(), tmp_path / "first.pt")  # has no config; the others' are compared all the same
    with pytest.raises(CheckpointError, match="config field 'n_head'"):
        uniform_soup([tmp_path / "first.pt", folders[0], tmp_path / "heads"])
    tiny_gpt2(7, attn_pdrop=0.3).save_pretrained(tmp_path / "dropout")
    uniform_soup([*folders, tmp_path / "dropout"])


@pytest.mark.parametrize(
    ("field", "value", "refused"), [("dtype", "float32", None), ("layers", 3, "config field 'text_config.layers'")]
)
def test_a_tower_has_free_fields_too(field, value, refused, tmp_path):
    for name, more in ("fresh", {}), ("tuned", {field: value}):  # transformers writes dtype where it loaded a model
        (tmp_path / name).mkdir()
        save_file({"w": torch.ones(2)}, tmp_path / name / "model.safetensors")
        tower = {"model_type": "text", "layers": 2, **more}
        (tmp_path / name / "config.json").write_text(json.dumps({"text_config": tower}))
    both = [tmp_path / "fresh", tmp_path / "tuned"]
    if refused is None:
        assert uniform_soup(both)["w"].tolist() == [1, 1]
        return
    with pytest.raises(CheckpointError, match=f"{refused} must be the same in all ingredients, got 2 in .* and 3 in"):
        uniform_soup(both)


def test_a_run_folder_expands_to_its_checkpoints_by_step(folders):
    run = folders[0].parent
    assert [path.name for path in expand([run])] == ["checkpoint-5", "checkpoint-10", "checkpoint-15"]
    assert expand(folders) == folders


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".bin"])
def test_plain_state_dict_files(tmp_path, suffix):
    paths = []
    for seed in range(2):
        torch.manual_seed(seed)
        state = torch.nn.Linear(4, 3).state_dict()
        path = tmp_path / f"{seed}{suffix}"
        save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
        paths.append(path)
    out = save_soup(uniform_soup(paths), open_ingredient(paths[1]), tmp_path / f"soup{suffix}")
    loaded = load_file(out) if suffix == ".safetensors" else torch.load(out, weights_only=True)
    first, second = (open_ingredient(path) for path in paths)
    torch.nn.Linear(4, 3).load_state_dict(loaded)
    for name, value in loaded.items():
        assert torch.allclose(value, (first.tensor(name) + second.tensor(name)) / 2)


def test_state_dicts_from_before_torch_1_6_are_read(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert open_ingredient(tmp_path / "old.pt").tensor("w").tolist() == [1, 1, 1]


def test_a_tied_state_dict_file_stays_tied(tmp_path):
    for seed in range(2):
        torch.save(tiny_gpt2(seed).state_dict(), tmp_path / f"{seed}.pt")
    paths = [tmp_path / "0.pt", tmp_path / "1.pt"]
    assert open_ingredient(paths[0]).ties == {"lm_head.weight": "transformer.wte.weight"}
    out = save_soup(uniform_soup(paths), open_ingredient(paths[0]), tmp_path / "soup.pt")
    loaded = torch.load(out, weights_only=True)
    assert loaded["lm_head.weight"].data_ptr() == loaded["transformer.wte.weight"].data_ptr()


# --- Lightning --------------------------------------------------------------------------------------------------------


def lightning_checkpoints(tmp_path, count=2):
    import pytorch_lightning as pl

    class Net(pl.LightningModule):
        def __init__(self, width=4):
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(3, width)
            self.norm = torch.nn.BatchNorm1d(width)

        def training_step(self, batch, index):
            return self.norm(self.layer(batch[0])).square().mean() + self.layer.weight.square().sum()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 3)), batch_size=8)
    saver = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = pl.Trainer(
        max_epochs=count, accelerator="cpu", callbacks=[saver], logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net(width=5), data)
    return Net, sorted(tmp_path.glob("*.ckpt"))


def test_lightning_checkpoints_become_one_that_lightning_loads(tmp_path):
    net, paths = lightning_checkpoints(tmp_path)
    assert len(paths) == 2
    result = greedy_soup(paths, lambda weights: -float(weights["layer.weight"].square().sum()), strict=False)
    best = open_ingredient(result.ingredients[0])
    out = save_soup(result.state_dict, best, tmp_path / "soup" / "soup.ckpt")
    content = torch.load(out, weights_only=True)
    assert "optimizer_states" not in content
    assert content["hyper_parameters"] == {"width": 5}
    assert content["global_step"] == torch.load(best.path, weights_only=True)["global_step"]
    loaded = net.load_from_checkpoint(out)
    assert all(torch.equal(value, result.state_dict[name]) for name, value in loaded.state_dict().items())
    average = uniform_soup(paths)
    states = [torch.load(path, weights_only=True)["state_dict"] for path in paths]
    for name, value in average.items():
        expected = (states[0][name].double() + states[1][name].double()) / 2
        if value.is_floating_point():
            assert torch.allclose(value.double(), expected, atol=1e-7)
        else:
            assert torch.equal(value, states[0][name])


def test_latent_weights_are_averaged_where_a_checkpoint_holds_rounded_ones(tmp_path):
    for i in range(2):
        content = {"state_dict": {"w": torch.ones(2), "b": torch.tensor([float(i)])},
                   "eff_raw_state_dict": {"w": torch.tensor([1.2, 1.0]) + i}}  # fmt: skip
        torch.save(content, tmp_path / f"{i}.ckpt")
    soup = uniform_soup([tmp_path / "0.ckpt", tmp_path / "1.ckpt"])
    assert torch.allclose(soup["w"], torch.tensor([1.7, 1.5]))
    assert soup["b"] == 0.5


# --- damaged and unsafe -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 7, 100, 0.5, 0.99])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "x.ckpt", "x.pt", "x.safetensors"])
def test_truncated_and_empty_files_are_refused_with_the_reason(tmp_path, name, size):
    file = tmp_path / "folder" / name
    file.parent.mkdir()
    state = {"w": torch.randn(64, 64), "b": torch.randn(3)}
    save_file(state, file) if file.suffix == ".safetensors" else torch.save({"state_dict": state}, file)
    content = file.read_bytes()
    file.write_bytes(content[: size if isinstance(size, int) else int(size * len(content))])
    path = file if name.startswith("x") else file.parent
    with pytest.raises(CheckpointError, match=f"{file}.*" + ("empty" if size == 0 else "(cannot read|be whole)")):
        open_ingredient(path)


def test_what_is_not_a_model_is_refused_by_name(folders, tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        open_ingredient(tmp_path / "none.pt")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match="holds none of model"):
        open_ingredient(empty)
    (empty / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="peft_type must be LORA, got None"):
        open_ingredient(empty)
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="state dict, got list"):
        open_ingredient(tmp_path / "list.pt")
    torch.save({"ema": {"w": torch.ones(2)}}, tmp_path / "nested.pt")
    with pytest.raises(CheckpointError, match="'ema' must be a tensor"):
        open_ingredient(tmp_path / "nested.pt")
    (folders[0] / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="must be JSON"):
        open_ingredient(folders[0])


def network(seed):
    torch.manual_seed(seed)
    norm = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), norm, nn.Linear(4, 2)).state_dict()


def called(old, new):
    return lambda state: {name.replace(old, new, 1): value for name, value in state.items()}


WRITTEN = {
    "DDP": called("", "module."),
    "compiled": called("", "_orig_mod."),
    "a compiled layer": called("0.", "0._orig_mod."),
    "a compiled layer of a Lightning module": lambda state: {
        f"net.{name}".replace(".0.", ".0._orig_mod."): value for name, value in state.items()
    },
    "FSDP and recomputation": called("2.", "2._fsdp_wrapped_module._checkpoint_wrapped_module."),
    "norms of old versions": lambda state: {
        name.replace("1.weight", "1.gamma").replace("1.bias", "1.beta"): value for name, value in state.items()
    },
    "weight norms of old versions": lambda state: {
        name.replace("parametrizations.weight.original0", "weight_g").replace(
            "parametrizations.weight.original1", "weight_v"
        ): value
        for name, value in state.items()
    },
    "torch before 0.4.1": lambda state: {name: state[name] for name in state if "num_batches" not in name},
    "buffers of old versions": lambda state: {
        **state, "rotary_emb.inv_freq": torch.ones(4), "embeddings.position_ids": torch.arange(5)[None],
        "attn.bias": torch.ones(1, 1, 5, 5), "attn.masked_bias": torch.tensor(-1e4),
    },
}  # fmt: skip


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("how", WRITTEN)
def test_files_of_other_versions_and_wrappers_are_averaged_under_the_names_of_the_first(tmp_path, how, first):
    states = [network(seed) for seed in range(3)]
    written = [WRITTEN[how](state) if first == (number == 0) else state for number, state in enumerate(states)]
    files = [tmp_path / f"{number}.pt" for number in range(3)]
    for file, state in zip(files, written, strict=True):
        torch.save(state, file)
    was = {name: name for name in states[0]}
    was = {new: old for new, old in (WRITTEN[how](was) if first else was).items() if isinstance(old, str)}
    for soup in (uniform_soup(files), greedy_soup(files, lambda weights: 0.0).state_dict):
        assert soup.keys() == written[0].keys()
        for name in soup.keys() & was.keys():
            own = [state[was[name]] for state in states]
            if own[0].is_floating_point():
                expected = torch.stack([value.double() for value in own]).mean(0)
                torch.testing.assert_close(soup[name].double(), expected, rtol=0, atol=1e-6)
    out = save_soup(uniform_soup(files), open_ingredient(files[0]), tmp_path / "soup.pt")
    assert torch.load(out, weights_only=True).keys() == written[0].keys()


@pytest.mark.parametrize("key", ["model", "model_state_dict", "module"])
def test_weights_under_a_key_are_read_and_written_under_it(tmp_path, key):
    states = [network(seed) for seed in range(2)]
    for number, state in enumerate(states):
        beside = {"epoch": 3, "optimizer": {"state": {}, "param_groups": []}, "args": argparse.Namespace(lr=0.1)}
        torch.save({key: state, **beside}, tmp_path / f"{number}.pth")
    paths = [tmp_path / "0.pth", tmp_path / "1.pth"]
    soup = uniform_soup([*paths, states[0]])
    torch.testing.assert_close(soup["0.weight"], (2 * states[0]["0.weight"] + states[1]["0.weight"]) / 3)
    saved = torch.load(save_soup(soup, open_ingredient(paths[0]), tmp_path / "soup.pth"), weights_only=True)
    assert saved.keys() == {key}
    assert torch.equal(saved[key]["0.weight"], soup["0.weight"])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda state: state.pop("1.running_mean"), r"got '1\.running_mean' in .*0\.pt but not"),
        (lambda state: state.update({"1.gamma": state["1.weight"].clone()}), r"got '1\.gamma' in .*1\.pt but not"),
        (lambda state: state.update({"2.alpha": state.pop("2.bias")}), "got '2.bias' in"),
        (lambda state: state.update({"3.gamma": state.pop("3.weight")[:1]}), "must have the same shape"),
        (lambda state: state.update({"5.attn.bias": torch.ones(4)}), r"got '5\.attn\.bias' in"),
    ],
)
def test_tensors_that_a_model_does_not_make_by_itself_must_be_in_all(tmp_path, change, match):
    states = [network(seed) for seed in range(2)]
    change(states[1])
    for number, state in enumerate(states):
        torch.save(state, tmp_path / f"{number}.pt")
    with pytest.raises(CheckpointError, match=match):
        uniform_soup([tmp_path / "0.pt", tmp_path / "1.pt"])


@pytest.mark.parametrize(
    ("index", "match"),
    [("{", "JSON"), ("[]", "JSON object"), ('{"weight_map": {}}', "weight_map"),
     ('{"weight_map": {"w": "../out.safetensors"}}', "file names? in the same folder"),
     ('{"weight_map": {"w": "gone.safetensors"}}', "gone.safetensors: the file does not exist"),
     ('{"weight_map": {"w": "a.safetensors", "v": "a.safetensors"}}', "only one of them has 'v'"),
     ('{"weight_map": {"b": "a.safetensors"}}', "only one of them")],
)  # fmt: skip
def test_a_damaged_index_is_refused(tmp_path, index, match):
    save_file({"w": torch.ones(1)}, tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=match):
        open_ingredient(tmp_path)


def test_nothing_half_written_and_nothing_overwritten(folders, tmp_path, monkeypatch):
    soup, like = uniform_soup(folders), open_ingredient(folders[0])
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious").write_text("kept")
    with pytest.raises(CheckpointError, match="must not exist yet"):
        save_soup(soup, like, full)
    with pytest.raises(CheckpointError, match="cannot write to"):
        save_soup(soup, like, full / "precious" / "soup")
    assert [file.name for file in full.iterdir()] == ["precious"]

    def disk_full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", disk_full)
    with pytest.raises(CheckpointError, match="No space left"):
        save_soup(soup, like, tmp_path / "soup")
    assert not (tmp_path / "soup").exists()
    assert not list(tmp_path.glob(".eff-tmp-*"))


@pytest.mark.slow
def test_memory_is_one_model_whatever_the_number_of_ingredients(tmp_path):
    """RssAnon of a fresh process: pages mapped from checkpoints do not count, copies do."""
    import subprocess
    import sys

    size = 8_000_000
    paths = []
    for i in range(6):
        save_file({f"w{j}": torch.full((size // 8,), float(i + j)) for j in range(8)}, tmp_path / f"{i}.safetensors")
        paths.append(str(tmp_path / f"{i}.safetensors"))
    code = """
import json, sys, re, torch
from shared_core.soup import greedy_soup
anonymous = lambda: int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) * 1024
greedy_soup(sys.argv[1:2], lambda weights: 0.0)
before, most = anonymous(), 0
def evaluate(weights):
    global most
    most = max(most, anonymous() - before)
    return 0.0
assert len(greedy_soup(sys.argv[1:], evaluate).ingredients) == 6
print(json.dumps(most))
"""
    done = subprocess.run([sys.executable, "-P", "-c", code, *paths], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) <= 1.3 * size * 4
