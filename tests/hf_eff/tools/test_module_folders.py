"""Models of several modules, each with its own folder, as sentence-transformers (6.2) saves them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertConfig, BertModel, Trainer, TrainingArguments

from hf_eff import attach
from shared_core.checkpoint_formats import expand, open_ingredient
from shared_core.errors import CheckpointError, CompatibilityError
from shared_core.soup import save_soup, uniform_soup

BASE = "sentence_transformers.base.modules"
LISTED = [
    {"idx": 0, "name": "0", "path": "", "type": f"{BASE}.transformer.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{BASE}.pooling.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Dense", "type": f"{BASE}.dense.Dense"},
]


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        self.model = BertModel(BertConfig(vocab_size=9, **sizes))

    def forward(self, input_ids):
        return self.model(input_ids=input_ids).last_hidden_state


class Pooling(nn.Module):
    def forward(self, tokens):
        return tokens.mean(1)


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, x):
        return self.linear(x)


class Sentences(nn.Sequential):
    def __init__(self):
        super().__init__(Transformer(), Pooling(), Dense())

    def forward(self, input_ids, labels=None):
        scores = super().forward(input_ids)
        loss = None if labels is None else (scores.squeeze(1) - labels).square().mean()
        return {"loss": loss, "logits": scores}

    def save_pretrained(self, folder):
        self[0].model.save_pretrained(folder)
        for name in ("1_Pooling", "2_Dense"):
            (folder / name).mkdir(exist_ok=True)
            (folder / name / "config.json").write_text(json.dumps({"of": name}))
        save_file(self[2].state_dict(), folder / "2_Dense" / "model.safetensors")
        (folder / "modules.json").write_text(json.dumps(LISTED))


def loaded(folder):
    """The weights under the model's names, read as sentence-transformers does."""
    inner = BertModel.from_pretrained(folder).state_dict()
    dense = load_file(folder / "2_Dense" / "model.safetensors")
    return {f"0.model.{name}": value for name, value in inner.items()} | {f"2.{n}": value for n, value in dense.items()}


class OfSentences(Trainer):
    def _save(self, output_dir=None, state_dict=None):
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(folder)


class Unread(OfSentences):
    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir)
        (Path(output_dir) / "2_Dense" / "model.safetensors").unlink()


def trained(folder, recipe, kind=OfSentences):
    torch.manual_seed(0)
    rows = [{"input_ids": torch.randint(9, (4,)), "labels": torch.rand(())} for _ in range(8)]
    args = TrainingArguments(
        str(folder), max_steps=6, save_steps=2, save_strategy="steps", per_device_train_batch_size=4, use_cpu=True,
        report_to=[], learning_rate=1e-2, disable_tqdm=True,
    )  # fmt: skip
    trainer = kind(model=Sentences(), args=args, train_dataset=rows)
    session = attach(trainer, recipe)
    trainer.train()
    return trainer, session


def mean_of(folders):
    states = [loaded(folder) for folder in folders]
    return {name: torch.stack([state[name].double() for state in states]).mean(0) for name in states[0]}


def test_a_run_ends_with_the_soup_of_its_checkpoints(tmp_path):
    trainer, _ = trained(tmp_path, {"soup": {"kind": "uniform"}})
    folders = expand([tmp_path])
    expected = mean_of(folders)
    assert len(folders) == 3
    assert all(
        torch.allclose(trainer.model.state_dict()[name].double(), expected[name], atol=1e-6) for name in expected
    )


def test_checkpoints_are_counted_again_for_the_receipt(tmp_path):
    trained(tmp_path, {"prune": {"sparsity": 0.5, "begin": 0, "end": 3}})
    notes = json.loads((tmp_path / "eff_receipt.json").read_text())["notes"]
    assert not [note for note in notes if "not checked against the receipt" in note]


def test_what_no_soup_could_read_is_told_after_the_first_checkpoint(tmp_path):
    with pytest.raises(CompatibilityError, match=r"soup: checkpoints must hold the model's weights.*2\.linear\.weight"):
        trained(tmp_path, {"soup": {"kind": "uniform"}}, Unread)
    assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def folders_of_models(tmp_path):
    folders = []
    for seed in range(2):
        torch.manual_seed(seed)
        Sentences().save_pretrained(tmp_path / str(seed))
        folders.append(tmp_path / str(seed))
    return folders


def test_a_soup_of_folders_has_their_layout(tmp_path):
    folders = folders_of_models(tmp_path)
    first = open_ingredient(folders[0])
    assert {*first.specs, *first.ties} == Sentences().state_dict().keys()
    out = save_soup(uniform_soup(folders), first, tmp_path / "soup")
    expected = mean_of(folders)
    assert all(torch.allclose(value.double(), expected[name], atol=1e-6) for name, value in loaded(out).items())
    files = {file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file()}
    assert files == {file.relative_to(folders[0]).as_posix() for file in folders[0].rglob("*") if file.is_file()}


def test_modules_of_other_kinds_are_not_averaged(tmp_path):
    folders = folders_of_models(tmp_path)
    (folders[1] / "1_Pooling" / "config.json").write_text('{"of": "max"}')
    with pytest.raises(CheckpointError, match=r"config field '1_Pooling/config\.json' must be the same"):
        uniform_soup(folders)


@pytest.mark.parametrize(
    "listed",
    ["{", "7", "[7]", "[{}]", "[[]]", '[{"path": "../x", "name": "0", "type": "t"}]',
     '[{"path": "gone", "name": "0", "type": "t"}]', '[{"path": 7, "name": "0", "type": "t"}]',
     '[{"path": "", "name": NaN, "type": "t"}]', '[{"path": "/", "name": "0", "type": "t"}]',
     '[{"path": "a\\u0000", "name": "0", "type": "t"}]', f'[{{"path": "{"x" * 5000}", "name": "0", "type": "t"}}]',
     '[{"path": "", "name": "0", "type": "t"}, {"path": "", "name": "0", "type": "t"}]', "[" * 100_000],
    ids=range(14),
)  # fmt: skip
def test_a_damaged_list_of_modules_is_our_error(tmp_path, listed):
    (folder, _) = folders_of_models(tmp_path)
    (folder / "modules.json").write_text(listed)
    with pytest.raises(CheckpointError):
        open_ingredient(folder)


@pytest.mark.parametrize("structure", [None, 7, {"query": 7}, {"query": ["../x"]}, {"query": ["r"]}])
def test_a_damaged_router_is_our_error(tmp_path, structure):
    (folder, _) = folders_of_models(tmp_path)
    inner = folder / "r"
    for _ in range(12):
        inner.mkdir()
        (inner / "router_config.json").write_text(json.dumps({"types": {"r": "t"}, "structure": {"query": ["r"]}}))
        inner = inner / "r"
    (folder / "router_config.json").write_text(json.dumps({"types": {"r": "t"}, "structure": structure}))
    with pytest.raises(CheckpointError):
        open_ingredient(folder)
