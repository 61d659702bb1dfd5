"""What changes a trained model stops, as training does, where it reaches less than half of it and nobody allowed it."""

import pytest
import torch
from commands import eff, told_by, user_module
from torch import nn

from shared_core.errors import MatchError
from shared_core.low_rank import factorize
from shared_core.pruning.post_training import prune
from shared_core.quantization.post_training.quantize import quantize_with_report

TASK = """
import torch
from torch import nn

class Mostly(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.pairs, self.hidden, self.head = nn.Bilinear(32, 32, 32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.head(torch.relu(self.hidden(self.pairs(x, x))))

def model():
    return Mostly()

def batches():
    return [torch.randn(4, 32)]
"""
WITHIN, TOTAL = 2 * 32 * 64, 32**3 + 2 * 32 * 64


@pytest.fixture
def task(tmp_path, monkeypatch):
    user_module(tmp_path, monkeypatch, "partial_task", TASK)
    import partial_task

    return partial_task


def low_rank(model, **options):
    return factorize(model, {"rank": 2, "min_size": 0, "skip": []}, **options).coverage


def unstructured(model, **options):
    return prune(model, {"sparsity": 0.5}, **options).coverage


def rounded(model, **options):
    return quantize_with_report(model, "int8_weight", **options)[1].coverage


@pytest.mark.parametrize("change", [low_rank, unstructured, rounded])
def test_less_than_half_is_an_error_unless_allowed(change, task):
    model = task.model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(MatchError, match=r"only 11\.1 % .*; unchanged: 88\.9 % in 1 Bilinear.*allow_partial=True"):
        change(model)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    told = change(model, allow_partial=True)
    assert (told["within"], told["total"]) == (WITHIN, TOTAL)


def test_what_include_chose_and_frozen_weights_need_no_leave(task):
    model = task.model().requires_grad_(False)
    assert quantize_with_report(model, {"scheme": "int8_weight", "include": ["head"]})[1].coverage["within"] == 32 * 64
    assert prune(model, {"sparsity": 0.5, "include": ["h*"]}).coverage["within"] == WITHIN


@pytest.mark.parametrize(
    "command", [("prune", "--sparsity", "0.5"), ("quantize", "--scheme", "int8_weight"), ("low-rank", "--rank", "4")]
)
@pytest.mark.usefixtures("task")
def test_commands_stop_and_take_a_flag(command, tmp_path):
    name, *options = command
    options += ["--min-size", "0"] if name == "low-rank" else []
    asked = [name, "partial_task:model", "--out", "out", *options]
    with pytest.raises(MatchError, match="--allow-partial"):
        eff(*asked)
    assert not (tmp_path / "out").exists()
    for flag in ("--allow-partial", "--allow_partial"):
        told = told_by(*asked[:2], "--out", flag.strip("-"), *options, flag)["coverage"]
        assert told["total"] == TOTAL
        assert told["share"] == told["within"] / TOTAL < 0.5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.narrow(torch.relu(self.wide(self.attention(x, x, x, need_weights=False)[0])))


def test_the_share_is_that_of_the_weights_that_hold_units():
    report = prune(Block(), {"sparsity": 0.5, "granularity": "neuron"}, [torch.randn(2, 3, 16)])
    masked = {name: mask.numel() for name, mask in report.masks.items() if mask.ndim > 1}
    # rows of layers that another one reads; attention's heads are none, and the last layer's are the model's outputs
    assert masked == {"attention.out_proj.weight": 16 * 16, "wide.weight": 16 * 64}
    total = 4 * 16 * 16 + 2 * 16 * 64
    assert (report.coverage["within"], report.coverage["total"]) == (sum(masked.values()), total)
    assert any("no neuron of it can be pruned" in kind for kind in report.coverage["left"])
