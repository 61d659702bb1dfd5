"""What no layer holds, and techniques of layers pass by, is told when a run begins."""

import pytest
import torch
from torch import nn

from shared_core import Recipe, Session


class Experts(nn.Module):
    def __init__(self, number, width):
        super().__init__()
        self.up = nn.Parameter(torch.ones(number, width, width))
        self.scale = nn.Parameter(torch.ones(1, 1, width))

    def forward(self, x):
        return torch.einsum("bi,eio->bo", x, self.up) * self.scale[0]


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        ({"qat": {"scheme": "int8"}, "prune": {"sparsity": 0.5}}, "prune, qat: "),
        ({"low_rank": {"rank": 2, "min_size": 0}}, "low_rank: "),
        ({"qat": {"scheme": "int8", "include": ["0"]}}, None),
        ({"average": {"kind": "ema"}}, None),
    ],
)
def test_stacks_of_matrices_that_techniques_of_layers_pass_by_are_told(recipe, told):
    net = nn.Sequential(nn.Linear(8, 8), Experts(4, 8), nn.Conv1d(8, 2, 1), nn.Linear(8, 2))
    session = Session(Recipe.from_dict(recipe))
    session.attach(net)
    session.begin([torch.optim.SGD(net.parameters())], total_steps=4)
    notes = [note for note in session.notes if "Experts" in note]
    assert len(notes) == (told is not None)
    if told:
        assert notes[0].startswith(f"{told}1 weights of Experts, ")
        assert notes[0].endswith("stay as they are: stacks of matrices in no layer that is known")
