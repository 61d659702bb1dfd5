"""A shallower student begins with some of its teacher's layers."""

import pytest
import torch
from torch import nn

from shared_core.distillation.layer_init import chosen_layers, copy_layers_
from shared_core.errors import ConfigError, MatchError


class Net(nn.Module):
    def __init__(self, layers, width=3, classes=2):
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(layers)
        )
        self.head = nn.Linear(width, classes)


@pytest.mark.parametrize(
    ("layers", "sizes", "wanted"),
    [
        ("even", (6, 12), [0, 2, 4, 7, 9, 11]), ("even", (1, 4), [0]), ("even", (4, 4), [0, 1, 2, 3]),
        ("first", (2, 5), [0, 1]), ("last", (2, 5), [3, 4]), ("4, 0", (2, 5), [4, 0]), ("0,0,1", (3, 2), [0, 0, 1]),
    ],
)  # fmt: skip
def test_layers_are_chosen(layers, sizes, wanted):
    assert chosen_layers(layers, *sizes) == wanted


@pytest.mark.parametrize(("layers", "sizes"), [("even", (3, 2)), ("0,1", (3, 5)), ("0,5", (2, 5)), ("0,-1", (2, 5))])
def test_layers_that_are_not_there_are_refused(layers, sizes):
    with pytest.raises(ConfigError, match="init_layers must"):
        chosen_layers(layers, *sizes)


def test_weights_and_buffers_are_copied_and_what_does_not_fit_outside_is_told():
    student, teacher = Net(2, classes=4), Net(4)
    teacher.layers[3][1].running_mean.fill_(2.0)
    pointers = {name: tensor.data_ptr() for name, tensor in student.state_dict().items()}
    told = copy_layers_(student, teacher, "last")
    assert told == {"layers": {"layers": [2, 3]}, "copied": 15, "left": ["head.weight", "head.bias"]}
    for name, tensor in student.layers[1].state_dict().items():
        assert torch.equal(tensor, teacher.layers[3].state_dict()[name])
    assert torch.equal(student.embed.weight, teacher.embed.weight)
    assert {name: tensor.data_ptr() for name, tensor in student.state_dict().items()} == pointers


def test_narrower_students_and_models_without_stacks_are_refused_before_anything_is_copied():
    student = Net(2, width=2)
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    with pytest.raises(ConfigError, match="shallower, not narrower"):
        copy_layers_(student, Net(4))
    assert all(torch.equal(tensor, before[name]) for name, tensor in student.state_dict().items())
    with pytest.raises(MatchError, match="ModuleList of the same name"):
        copy_layers_(nn.Linear(2, 2), nn.Linear(2, 2))
