"""What units and layers do on batches, against the papers' formulas in float64."""

import numpy as np
import pytest
import torch
from torch import nn

from shared_core.errors import TrainingError
from shared_core.tools.shrink.importance import Place, UnitActivations, block_influence, bypassed


class Residual(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = nn.Linear(6, 6, bias=False)
        nn.init.normal_(self.change.weight, std=change)

    def forward(self, hidden, scale=1.0):
        return (hidden + scale * self.change(hidden), "more")


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Residual(change) for change in (0.5, 1e-3, 0.2))
        self.norm, self.out = nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, hidden, attention_mask=None):
        for block in self.blocks:
            hidden = block(hidden=hidden)[0]
        return self.out(self.norm(hidden))


def batches():
    torch.manual_seed(1)
    masks = [torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]), None]
    return [{"hidden": torch.randn(2, 4, 6).double(), "attention_mask": mask} for mask in masks]


def run(model):
    return lambda batch: model(**batch)


def examples(model, look):
    """Return (tokens, ...) of each example, without its padding."""
    found = []
    for batch in batches():
        values = look(batch["hidden"])
        mask = batch["attention_mask"]
        found += [row if mask is None else row[mask[i].bool()] for i, row in enumerate(values)]
    return found


def hidden_after(model, count):
    def look(hidden):
        for block in list(model.blocks)[:count]:
            hidden = block(hidden)[0]
        return hidden

    return look


@torch.no_grad()
def test_scores_are_l2_over_examples_of_the_mean_over_tokens_of_a_units_norm():
    model = Blocks().double()
    pairs = np.array([[0, 3], [1, 4], [2, 5]])
    places = {
        "channels": [Place("norm", True, np.arange(6)[::-1, None].copy())],
        "heads": [Place("out", False, pairs)],
        "both": [Place("norm", True, np.arange(6)[:, None]), Place("out", False, np.arange(6)[:, None])],
    }
    seen = UnitActivations(model, places)
    seen.run(batches(), run(model))
    rows = examples(model, lambda hidden: model.norm(hidden_after(model, 3)(hidden)))
    channels = sum(row.abs().mean(0) ** 2 for row in rows).sqrt()
    torch.testing.assert_close(seen.scores("channels"), channels.flip(0))
    torch.testing.assert_close(seen.scores("both"), 2 * channels)
    heads = sum(row[:, pairs].norm(dim=-1).mean(0) ** 2 for row in rows).sqrt()
    torch.testing.assert_close(seen.scores("heads"), heads)


@torch.no_grad()
def test_block_influence_is_one_less_the_cosine_and_lowest_where_a_block_changes_least():
    model = Blocks().double()
    found = block_influence(model, model.blocks, batches(), run(model))
    for number, value in enumerate(found):
        before, after = (torch.cat(examples(model, hidden_after(model, number + end))) for end in (0, 1))
        expected = 1 - ((before * after).sum(-1) / before.norm(dim=-1) / after.norm(dim=-1)).mean()
        assert value == pytest.approx(float(expected), abs=1e-12)
    assert min(found) == found[1]


@torch.no_grad()
def test_a_bypassed_block_returns_what_it_was_called_with():
    model, batch = Blocks().double(), batches()[0]
    whole = model(**batch)
    with bypassed([model.blocks[0], model.blocks[2]]):
        found = model(**batch)
        assert model.blocks[0](batch["hidden"])[1] == "more"
    torch.testing.assert_close(found, model.out(model.norm(model.blocks[1](batch["hidden"])[0])))
    torch.testing.assert_close(model(**batch), whole)


def test_what_is_not_finite_or_not_reached_is_refused():
    model, bad = Blocks().double(), batches()
    bad[1]["hidden"][0, 0, 0] = torch.nan
    seen = UnitActivations(model, {"g": [Place("out", False, np.arange(6)[:, None])]})
    with pytest.raises(TrainingError, match="activations of out must be finite"):
        seen.run(bad, run(model))
    with pytest.raises(TrainingError, match="activations of layer 0 must be finite"):
        block_influence(model, model.blocks, bad, run(model))
    with pytest.raises(TrainingError, match="calibration must reach out"):
        UnitActivations(model, {"g": [Place("out", False, np.arange(6)[:, None])]}).scores("g")
    with pytest.raises(TrainingError, match="calibration must reach layer 0"):
        block_influence(model, model.blocks, batches(), lambda batch: None)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
