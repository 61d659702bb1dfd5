"""Packed attention and recurrent layers, pruned by both trainers: zeros as asked, exact resumes, plain weights."""

import promise_drivers
import pytest
import torch
from promise_drivers import run_hf, run_lightning
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
