"""What no layer holds, and techniques of layers pass by, is told when a run begins."""

import pytest
import torch
from torch import nn

from shared_core import Recipe, Session
from shared_core.quantization.post_training import quantize_with_report


class Experts(nn.Module):
    def __init__(self, number, width):
        super().__init__()
        self.up = nn.Parameter(torch.ones(number, width, width))
        self.scale = nn.Parameter(torch.ones(1, 1, width))

    def forward(self, x):
        return torch.einsum("bi,eio->bo", x, self.up) * self.scale[0]


class Transposed(nn.Module):
    """As transformers' Conv1D, which GPT-2 is made of."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width))

    def forward(self, x):
        return x @ self.weight


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.read, self.body, self.last = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        return self.last(self.body(nn.functional.linear(self.first(x), self.read.weight)))


class TiedByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return nn.functional.linear(self.body(self.embed(x)), self.embed.weight)

    def penalty(self):
        return self.body.weight.square().sum()


def notes(net, recipe):
    session = Session(Recipe.from_dict(recipe))
    session.attach(net)
    session.begin([torch.optim.SGD(net.parameters())], total_steps=4)
    return [note for note in session.notes if "left as they are" in note]


@pytest.mark.parametrize(
    ("recipe", "keys"),
    [
        ({"qat": {"scheme": "int8"}, "prune": {"sparsity": 0.5}}, ["prune", "qat"]),
        ({"low_rank": {"rank": 2, "min_size": 0}}, ["low_rank"]),
        ({"qat": {"scheme": "int8", "include": ["0"]}}, []),
        ({"average": {"kind": "ema"}}, []),
    ],
)
def test_matrices_in_no_layer_are_told(recipe, keys):
    net = nn.Sequential(nn.Linear(8, 8), Experts(4, 8), Transposed(8), nn.Conv1d(8, 2, 1), nn.Linear(8, 2))
    found = notes(net, recipe)
    assert [note.partition(":")[0] for note in found] == keys
    for note in found:
        assert "weights left as they are: 2 of Experts, Transposed, " in note
        assert note.endswith("% of the parameters, which are no layers that it knows")


def test_qat_leaves_what_is_computed_with_past_its_forward_and_tells():
    net = TiedByHand()
    assert notes(net, {"qat": {"scheme": "int8"}}) == [
        "qat: layers left as they are: 1: TiedByHand computes with its weight itself, past any quantiser"
    ]
    assert type(net.embed) is nn.Embedding
    assert type(net.body) is not nn.Linear  # a penalty only looks
    _, report = quantize_with_report(TiedByHand(), "int8_weight")
    assert not report.left_out  # no training goes past it, and both uses are of the quantised weight


def test_a_quantised_model_tells_what_is_no_layer():
    net = nn.Sequential(nn.Linear(8, 8), Experts(4, 8), nn.Linear(8, 2))
    _, report = quantize_with_report(net, "int8_weight")
    (note,) = report.notes
    assert note.startswith("qat: weights left as they are: 1 of Experts, 72% of the parameters")


def test_qat_leaves_factors_whose_product_is_computed_with_past_their_forward():
    net = Reading()
    found = notes(net, {"qat": {"scheme": "int8"}, "low_rank": {"rank": 2, "min_size": 0, "include": ["read", "body"]}})
    assert found[0] == "qat: layers left as they are: 2: Reading computes with its weight itself, past any quantiser"


def test_fp8_leaves_what_is_computed_with_past_its_forward_and_tells():
    net = Reading()
    assert notes(net, {"fp8": {"recipe": "tensorwise"}}) == [
        "fp8: layers left as they are: 1: Reading computes with its weight itself, past any product in FP8"
    ]
    assert type(net.read) is nn.Linear
    assert type(net.body) is not nn.Linear
