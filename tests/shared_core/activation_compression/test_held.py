"""What a model holds anyway is known again after its memory changed in mid-run."""

import pytest
import torch
from torch import nn

from shared_core.activation_compression.saved_tensors import HeldMemory


def replaced(norm):
    norm.weight = nn.Parameter(torch.ones(4))


def moved(norm):
    norm.weight.data = norm.weight.data.clone()


def loaded(norm):
    norm.load_state_dict({name: value.clone() for name, value in norm.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [replaced, moved, loaded])
def test_a_weight_in_other_memory_is_known_once_it_was_saved(change):
    norm = nn.BatchNorm1d(4)
    held = HeldMemory(norm)
    before = norm.weight.data
    change(norm)
    held.start()
    assert norm.weight.view(2, 2) in held
    assert norm.weight.detach() in held
    assert before not in held


def test_buffers_are_looked_up_for_every_forward():
    norm = nn.BatchNorm1d(4)
    held = HeldMemory(norm)
    norm.running_mean = torch.ones(4)
    norm.register_buffer("late", torch.ones(4))
    held.start()
    assert norm.running_mean in held
    assert norm.late[1:] in held


def test_the_address_of_a_weight_that_is_gone_stands_for_no_other_tensor():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1 << 12))

    model = Wide()
    held = HeldMemory(model)
    model.weight = None
    others = [torch.ones(1 << 12) for _ in range(64)]
    assert not any(other in held for other in others)


def test_the_copies_that_autocast_makes_are_weights_and_do_not_send_it_through_the_model(monkeypatch):
    layer = nn.Linear(4, 4)
    held = HeldMemory(layer)
    monkeypatch.setattr(held, "_look", lambda: pytest.fail("looked again"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.weight.to(torch.bfloat16) in held
        assert layer(torch.ones(1, 4)) not in held
