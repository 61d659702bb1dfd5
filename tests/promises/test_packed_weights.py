"""Packed attention and recurrent layers in all loops: zeros and grids as asked, exact resumes, plain weights."""

import promise_drivers
import pytest
import torch
from promise_drivers import difference, run_bare, run_hf, run_lightning
from torch import nn

RECIPE = {"prune": {"sparsity": 0.6, "begin": 1, "end": 6, "every": 2, "scope": "local"}}


class Rows(nn.Module):
    """Reads a digit row by row: an LSTM, attention over its outputs, a linear layer."""

    def __init__(self):
        super().__init__()
        self.read = nn.LSTM(8, 8, 2, batch_first=True, dropout=0.2)
        self.look = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, x, labels=None):
        y = self.read(x.squeeze(1))[0]
        logits = self.head(self.look(y, y, y)[0].mean(1))
        return {"logits": logits} if labels is None else {
            "loss": nn.functional.cross_entropy(logits, labels), "logits": logits
        }  # fmt: skip


def make_rows(*_, **__):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Rows()


@pytest.mark.parametrize("run", [run_hf, run_lightning])
def test_a_run_prunes_them_and_resumes_exactly(run, tmp_path, monkeypatch):
    monkeypatch.setattr(promise_drivers, "make_net", make_rows)
    whole = run(RECIPE, tmp_path / "whole", save_every=3)
    assert whole.receipt["coverage"]["prune"]["share"] == 1
    pruned = whole.receipt["techniques"]["prune"]["tensors"]
    assert {"read.weight_hh_l1", "look.in_proj_weight", "look.out_proj.weight"} <= {
        entry["name"].removeprefix("net.") for entry in pruned
    }
    plain = make_rows()
    plain.load_state_dict({name.removeprefix("net."): value for name, value in whole.weights.items()})
    for entry in pruned:
        zeros = int((plain.get_parameter(entry["name"].removeprefix("net.")) == 0).sum())
        assert zeros == entry["pruned"] == round(0.6 * entry["numel"]), entry["name"]
    again = run(RECIPE, tmp_path / "again", resume=whole.checkpoints[3])
    assert all(torch.equal(value, again.weights[name]) for name, value in whole.weights.items())


class Columns(nn.Module):
    """Reads a digit by two recurrent layers, a cell, torch's encoder and attention to a memory of another width."""

    def __init__(self):
        super().__init__()
        self.wide, self.read = nn.Linear(8, 16), nn.RNN(16, 16, batch_first=True, nonlinearity="relu")
        self.encode = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.look = nn.MultiheadAttention(16, 2, kdim=8, vdim=8, batch_first=True)
        self.cell, self.head = nn.RNNCell(16, 16), nn.Linear(16, 10)

    def forward(self, x, labels=None):
        rows = x.squeeze(1)
        y = self.encode(self.read(self.wide(rows))[0])
        logits = self.head(self.cell(self.look(y, rows, rows)[0].mean(1)))
        return {"logits": logits} if labels is None else {
            "loss": nn.functional.cross_entropy(logits, labels), "logits": logits
        }  # fmt: skip


def make_columns(*_, **__):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Columns()


PACKED = ("read.weight_hh_l0", "cell.weight_ih", "encode.self_attn.in_proj_weight", "look.k_proj_weight")
RECIPES = {
    "qat": {"qat": {"scheme": "int8", "begin": 2}},
    "cluster": {"cluster": {"bits": 3, "begin": 2, "min_size": 0}},
    "fp8": {"fp8": {"recipe": "delayed", "include": ["*encode.*"]}},
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_all_loops_end_with_the_same_weights_and_resume_exactly(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(promise_drivers, "make_net", make_columns)
    bare = run_bare(recipe)
    for name, run in {"hf": run_hf, "lightning": run_lightning}.items():
        whole = run(recipe, tmp_path / name, save_every=3)
        plain = {key.removeprefix("net."): value for key, value in whole.weights.items()}
        assert difference(bare.weights, plain) is None, name
        again = run(recipe, tmp_path / f"{name} again", resume=whole.checkpoints[3])
        assert all(torch.equal(value, again.weights[key]) for key, value in whole.weights.items()), name
    make_columns().load_state_dict(plain)
    if "qat" in recipe:
        assert whole.receipt["coverage"]["qat"]["share"] == 1
        assert all(len(row.unique()) <= 255 for key in PACKED for row in plain[key])
    if "cluster" in recipe:
        assert all(len(plain[key].unique()) == 8 for key in PACKED)
    if "fp8" in recipe:
        layers = {entry["name"].removeprefix("net.") for entry in whole.receipt["techniques"]["fp8"]["per_layer"]}
        assert {"encode.self_attn", "encode.self_attn.out_proj"} <= layers
